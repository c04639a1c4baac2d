"""Tables of snapshots."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.box import SIMPLE_HEAD, Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from snaporch.errors import one_line
from snaporch.model import BundleState, SnapshotRecord
from snaporch.output.format import age, compact, pause, size
from snaporch.output.terminal import print_result

_PIPED_WIDTH = 100_000
"""Wide enough that a reader such as grep or awk sees whole lines."""
_DETAILS = ("AGE", "LEVEL", "RAM", "STORED", "PAUSE", "STATE")
_INDENT = "  "


def print_records(records: Sequence[SnapshotRecord]) -> None:
    """``snaporch list`` on standard output.

    Piped output has one line for each snapshot. A terminal that is too narrow for that has two: the
    name, which can be copied, and the details.
    """
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        lines = _rendered(_table(records, box=None), _PIPED_WIDTH)
    else:
        for box, space in ((SIMPLE_HEAD, 2), (None, 1)):
            lines = _rendered(_table(records, box=box, space=space), _PIPED_WIDTH)
            if max(Text.from_ansi(line.rstrip()).cell_len for line in lines) <= console.width:
                break
        else:
            lines = list(_two_lines_each(records, console.width))
    print_result("\n".join(line.rstrip() for line in lines))


def _rendered(table: Table, width: int) -> list[str]:
    console = Console(highlight=False, emoji=False, width=width)
    with console.capture() as captured:  # rich ends the process when its reader left early
        console.print(table)
    return captured.get().rstrip("\n").split("\n")


def _two_lines_each(records: Sequence[SnapshotRecord], width: int) -> Iterator[str]:
    now = datetime.now(UTC)
    table = _empty_table(box=None, space=2)
    verified = any(record.verified for record in records)
    _add_details(table, verified=verified)
    for record in records:
        table.add_row(*_details(record, now, verified=verified))
    header, *rows = _rendered(table, width - len(_INDENT))
    yield "DOMAIN@SNAPSHOT"
    yield _INDENT + header
    for record, row in zip(records, rows, strict=True):
        yield from textwrap.wrap(one_line(record.full_name), width, break_on_hyphens=False)
        yield _INDENT + row
        more = [f"group {record.group}"] if record.group else []
        more += [f"without {one_line(', '.join(record.apart))}"] if record.apart else []
        if more:
            yield from textwrap.wrap("; ".join(more), width - len(_INDENT), initial_indent=_INDENT)


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


def _empty_table(*, box: Box | None, space: int) -> Table:
    return Table(box=box, padding=(0, space, 0, 0), pad_edge=False, show_edge=False)


def _table(records: Sequence[SnapshotRecord], *, box: Box | None, space: int = 2) -> Table:
    now = datetime.now(UTC)
    table = _empty_table(box=box, space=space)
    for name in ("DOMAIN", "SNAPSHOT"):
        table.add_column(name, overflow="fold")
    verified = any(record.verified for record in records)
    _add_details(table, verified=verified)
    grouped = any(record.group for record in records)
    if grouped:
        table.add_column("GROUP", no_wrap=True)
    apart = any(record.apart for record in records)
    if apart:
        table.add_column("WITHOUT", overflow="fold")
    for record in records:
        more = [Text(record.group or "-")] if grouped else []
        more += [Text(one_line(",".join(record.apart) or "-"))] if apart else []
        names = [Text(one_line(record.domain)), Text(record.snapshot)]
        table.add_row(*names, *_details(record, now, verified=verified), *more)
    return table


def _add_details(table: Table, *, verified: bool) -> None:
    for name in _DETAILS:
        is_word = name in ("LEVEL", "STATE")
        table.add_column(name, justify="left" if is_word else "right", no_wrap=True)
    if verified:
        table.add_column("VERIFIED", no_wrap=True)


def _details(record: SnapshotRecord, now: datetime, *, verified: bool) -> list[Text]:
    cells = [
        Text(age(record.created, now)),
        Text(record.level.value),
        Text(compact(size(record.ram_bytes))),
        Text(compact(size(record.stored_bytes))),
        Text(compact(pause(record.pause_ms))),
        Text(record.state.value, style=_style(record.state)),
    ]
    return [*cells, *([_verified(record, now)] if verified else [])]


def _verified(record: SnapshotRecord, now: datetime) -> Text:
    """How long ago the last verification passed, or that it failed."""
    if record.verified is None:
        return Text("-")
    if not record.verified.passed:
        return Text("failed", style="red")
    return Text(age(record.verified.at, now), style="green")


_BAD = (BundleState.DAMAGED, BundleState.MISSING)


def _style(state: BundleState) -> str:
    return "green" if state is BundleState.COMPLETE else "red" if state in _BAD else "yellow"
