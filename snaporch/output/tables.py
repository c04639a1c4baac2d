"""Tables of snapshots, and of the results of runs: their columns, widths and colours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from snaporch.errors import one_line
from snaporch.model import BundleState, SnapshotRecord, VerifyDepth
from snaporch.output.format import age, compact, pause, size
from snaporch.output.terminal import print_result

_PIPED_WIDTH = 100_000
"""Wide enough that a reader such as grep or awk sees whole lines."""
_INDENT = "  "
_LEAST_NOTE = 12
"""Columns that a note needs at least; a longer one is cut on a narrow terminal."""


@dataclass(frozen=True, slots=True)
class ListedRecord:
    """A snapshot, and what ``list --wide`` adds to it."""

    record: SnapshotRecord
    used_bytes: int | None = None
    """The bytes in the pools that only its ZFS snapshots hold."""


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    cell: Callable[[ListedRecord, datetime], str]
    needed: Callable[[ListedRecord], bool] = lambda _listed: True
    """Whether the column has something to show for a snapshot; it is shown if so for any."""
    right: bool = False
    style: Callable[[ListedRecord], str] = lambda _listed: ""


_COLUMNS = (
    _Column("DOMAIN", lambda each, _: one_line(each.record.domain)),
    _Column("SNAPSHOT", lambda each, _: each.record.snapshot),
    _Column("AGE", lambda each, now: age(each.record.created, now), right=True),
    _Column("LEVEL", lambda each, _: each.record.level.value),
    _Column("RAM", lambda each, _: compact(size(each.record.ram_bytes)), right=True),
    _Column("STORED", lambda each, _: compact(size(each.record.stored_bytes)), right=True),
    _Column("PAUSE", lambda each, _: compact(pause(each.record.pause_ms)), right=True),
    _Column(
        "STATE",
        lambda each, _: each.record.state.value,
        style=lambda each: _style(each.record.state),
    ),
    _Column(
        "VERIFIED",
        lambda each, now: _verified(each.record, now),
        lambda each: each.record.verified is not None,
        style=lambda each: "red" if each.record.has_failed else "green",
    ),
    _Column(
        "KEPT",
        lambda each, now: age(each.record.kept, now) if each.record.kept else "-",
        lambda each: each.record.kept is not None,
    ),
    _Column(
        "GROUP",
        lambda each, _: one_line(each.record.group or "-"),
        lambda each: bool(each.record.group),
    ),
    _Column(
        "WITHOUT",
        lambda each, _: one_line(",".join(each.record.apart) or "-"),
        lambda each: bool(each.record.apart),
    ),
)
_WIDE = (
    _Column("USED", lambda each, _: compact(size(each.used_bytes)), right=True),
    _Column("POLICY", lambda each, _: one_line(each.record.policy or "-")),
    _Column("REPLICAS", lambda each, _: one_line(",".join(each.record.replicated) or "-")),
)
_NOTE = _Column(
    "NOTE", lambda each, _: one_line(each.record.note or "-"), lambda each: bool(each.record.note)
)
_NAMES = ("DOMAIN", "SNAPSHOT")
_IN_A_LINE_OF_ITS_OWN = (*_NAMES, "GROUP", "WITHOUT", "NOTE")
_LEFT_OUT_FIRST = ("PAUSE", "RAM", "GROUP", "NOTE", "STORED", "VERIFIED")
"""Columns that a narrow terminal has no room for, in the order in which they are left out."""


def print_records(listed: Sequence[ListedRecord], *, wide: bool = False) -> None:
    """``snaporch list`` on standard output.

    Piped output has one line for each snapshot, with all columns. A terminal has the columns for
    which it is wide enough. Without room for names, ages, levels and states, each snapshot has two
    lines: the name, which can be copied, and the details.

    Args:
        listed: the snapshots, in the order of their lines.
        wide: print all columns and those that are usually left out, whatever the width.
    """
    console = Console(highlight=False, emoji=False)
    extra = _WIDE if wide else ()
    columns = [column for column in (*_COLUMNS, *extra, _NOTE) if any(map(column.needed, listed))]
    if wide or not console.is_terminal:
        lines = _rendered(_cells(columns, listed), columns, space=2)
    else:
        lines = _fitted(columns, listed, console.width)
        lines = lines or list(_two_lines_each(columns, listed, console.width))
    print_result("\n".join(line.rstrip() for line in lines))


def _fitted(columns: Sequence[_Column], listed: Sequence[ListedRecord], width: int) -> list[str]:
    """The lines of the table with as many columns as there is room for; empty without room."""
    for chosen in _choices(columns, listed):
        cells = _cells(chosen, listed)
        for space in (2, 1):
            room = width - _least_width(cells, chosen, space)
            if room >= 0:
                return _rendered(_with_short_notes(cells, chosen, room), chosen, space=space)
    return []


def _choices(columns: Sequence[_Column], listed: Sequence[ListedRecord]) -> Iterator[list[_Column]]:
    """The columns, and then always one less."""
    chosen = list(columns)
    yield chosen
    failed = any(each.record.has_failed for each in listed)
    for title in _LEFT_OUT_FIRST:
        if title == "VERIFIED" and failed:
            continue
        chosen = [column for column in chosen if column.title != title]
        yield chosen


def _cells(columns: Sequence[_Column], listed: Sequence[ListedRecord]) -> list[list[Text]]:
    now = datetime.now(UTC)
    return [
        [Text(column.cell(each, now), style=column.style(each)) for column in columns]
        for each in listed
    ]


def _least_width(cells: Sequence[Sequence[Text]], columns: Sequence[_Column], space: int) -> int:
    widths = []
    for place, column in enumerate(columns):
        longest = max(row[place].cell_len for row in cells)
        longest = min(longest, _LEAST_NOTE) if column is _NOTE else longest
        widths.append(max(longest, cell_len(column.title)))
    return sum(widths) + space * (len(widths) - 1)


def _with_short_notes(
    cells: Sequence[Sequence[Text]], columns: Sequence[_Column], room: int
) -> Sequence[Sequence[Text]]:
    """The cells with notes that are cut to their least width and ``room`` more."""
    if _NOTE in columns:
        for row in cells:
            row[columns.index(_NOTE)].truncate(_LEAST_NOTE + room, overflow="ellipsis")
    return cells


def _rendered(
    cells: Sequence[Sequence[Text]], columns: Sequence[_Column], *, space: int
) -> list[str]:
    table = Table(box=None, padding=(0, space, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=True,
        )
    for row in cells:
        table.add_row(*row)
    console = Console(highlight=False, emoji=False, width=_PIPED_WIDTH)
    with console.capture() as captured:  # rich ends the process when its reader left early
        console.print(table)
    return captured.get().rstrip("\n").split("\n")


def _two_lines_each(
    columns: Sequence[_Column], listed: Sequence[ListedRecord], width: int
) -> Iterator[str]:
    details = [column for column in columns if column.title not in _IN_A_LINE_OF_ITS_OWN]
    *_, least = _choices(details, listed)
    header, *rows = _fitted(details, listed, width - len(_INDENT)) or _rendered(
        _cells(least, listed), least, space=1
    )
    yield "DOMAIN@SNAPSHOT"
    yield _INDENT + header
    for each, row in zip(listed, rows, strict=True):
        record = each.record
        yield from _wrapped(one_line(record.full_name), width)
        yield _INDENT + row
        more = [f"group {one_line(record.group)}"] if record.group else []
        more += [f"without {one_line(', '.join(record.apart))}"] if record.apart else []
        more += [f"note: {one_line(record.note)}"] if record.note else []
        if more:
            yield from (_INDENT + line for line in _wrapped("; ".join(more), width - len(_INDENT)))


def _wrapped(text: str, width: int) -> Iterator[str]:
    """Lines of at most ``width`` cells; a character of some scripts takes two."""
    for line in Text(text).wrap(Console(width=width), width, overflow="fold"):
        yield line.plain.rstrip()


def print_results(rows: Sequence[tuple[str, int, Mapping[str, Any] | None]]) -> None:
    """Print the result of each domain.

    Args:
        rows: a domain's name, its exit code, and the JSON object of its snapshot, if there is one.
    """
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, emoji=False, width=_PIPED_WIDTH)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    for name in ("DOMAIN", "SNAPSHOT"):
        table.add_column(name, overflow="fold")
    for name in ("LEVEL", "PAUSE", "STORED", "RESULT"):
        table.add_column(name, no_wrap=True, justify="left" if name != "PAUSE" else "right")
    for domain, status, taken in rows:
        cells = ["-", "-", "-", "-"]
        if taken is not None:
            cells = [
                str(taken["snapshot"]),
                str(taken["level"]),
                compact(pause(taken["pause_ms"])),
                compact(size(taken["stored_bytes"])),
            ]
        good = taken is not None and taken["state"] == BundleState.COMPLETE
        word = str(taken["state"]) if taken is not None else f"failed ({status})"
        if taken is not None and taken.get("unchanged"):
            word += ", unchanged: no other was taken"
        if taken is not None and taken.get("apart"):
            word += f", without {one_line(', '.join(taken['apart']))}"
        table.add_row(
            Text(one_line(domain)), *map(Text, cells), Text(word, style="green" if good else "red")
        )
    with console.capture() as captured:
        console.print(table)
    print_result("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")))


def _verified(record: SnapshotRecord, now: datetime) -> str:
    """How long ago the depth was reached that was proved, or that the last verification failed.

    A later verification by checksums alone does not make the proof by a clone younger.
    """
    result = record.verified
    if result is None:
        return "-"
    if not result.passed:
        return "failed"
    since = age(result.reached_at, now)
    return f"{since} checked" if result.reached is VerifyDepth.CHECKED else since


_BAD = (BundleState.DAMAGED, BundleState.MISSING)


def _style(state: BundleState) -> str:
    return "green" if state is BundleState.COMPLETE else "red" if state in _BAD else "yellow"
