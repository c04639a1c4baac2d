"""Tables of snapshots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from snaporch.errors import one_line
from snaporch.model import BundleState, SnapshotRecord
from snaporch.output.format import age, compact, pause, size
from snaporch.output.terminal import print_result

_WIDE = 100
_PIPED_WIDTH = 100_000
"""Wide enough that a reader such as grep or awk sees whole lines."""


def print_records(records: Sequence[SnapshotRecord]) -> None:
    """``snaporch list`` on standard output."""
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, emoji=False, width=_PIPED_WIDTH)
    narrow = console.width < _WIDE
    with console.capture() as captured:  # rich ends the process when its reader left early
        console.print(_table(records, piped=not console.is_terminal, narrow=narrow))
    print_result(captured.get().rstrip("\n"))


def print_outcomes(rows: Sequence[tuple[str, int, Mapping[str, Any] | None]]) -> None:
    """What became of each domain: its name, the exit code, and the JSON object of its snapshot."""
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


def _table(records: Sequence[SnapshotRecord], *, piped: bool, narrow: bool) -> Table:
    box = None if piped or narrow else SIMPLE_HEAD
    padding = (0, 1, 0, 0) if narrow else (0, 2, 0, 0)
    table = Table(box=box, padding=padding, pad_edge=False, show_edge=False)
    for name in ("DOMAIN", "SNAPSHOT"):
        table.add_column(name, overflow="fold")
    for name in ("AGE", "LEVEL", "RAM", "STORED", "PAUSE", "STATE"):
        words = name in ("LEVEL", "STATE")
        table.add_column(name, justify="left" if words else "right", no_wrap=True)
    verified = any(record.verified for record in records)
    if verified:
        table.add_column("VERIFIED", no_wrap=True)
    grouped = any(record.group for record in records)
    if grouped:
        table.add_column("GROUP", no_wrap=True)
    apart = any(record.apart for record in records)
    if apart:
        table.add_column("WITHOUT", overflow="fold")
    now = datetime.now(UTC)
    for record in records:
        cells: list[str | Text] = [
            Text(one_line(record.domain)),
            Text(record.snapshot),
            age(record.created, now),
            record.level.value,
            compact(size(record.ram_bytes)),
            compact(size(record.stored_bytes)),
            compact(pause(record.pause_ms)),
            Text(record.state.value, style=_style(record.state)),
        ]
        more = [_verdict(record, now)] if verified else []
        more += [Text(record.group or "-")] if grouped else []
        more += [Text(one_line(",".join(record.apart) or "-"))] if apart else []
        table.add_row(*cells, *more)
    return table


def _verdict(record: SnapshotRecord, now: datetime) -> Text:
    """How long ago it passed; that it failed counts more than when."""
    if record.verified is None:
        return Text("-")
    if not record.verified.passed:
        return Text("failed", style="red")
    return Text(age(record.verified.at, now), style="green")


_BAD = (BundleState.DAMAGED, BundleState.MISSING)


def _style(state: BundleState) -> str:
    return "green" if state is BundleState.COMPLETE else "red" if state in _BAD else "yellow"
