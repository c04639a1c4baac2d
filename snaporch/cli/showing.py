"""Printing a snapshot, behind ``snaporch show``."""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator

from snaporch.bundle.compression_tuning import RamSaveTimes
from snaporch.context import Context
from snaporch.errors import one_line
from snaporch.model import SnapshotRecord
from snaporch.output.format import pause, size
from snaporch.output.terminal import print_result
from snaporch.restore.source import records_called
from snaporch.show import Description, custody, describe

BY_HAND = "by hand"
_NO_WAY = (
    "its bundle or its snapshots are not whole, or its verification failed; "
    "see `snaporch restore --cold`"
)


def show_one(context: Context, text: str, *, json: bool) -> int:
    """Show one snapshot."""
    shown = describe(context, records_called(context, text)[-1])
    if json:
        print_result(json_format.dumps(shown.as_json(), indent=2, ensure_ascii=False))
    else:
        print_result("\n".join(_lines(shown)))
    return 0


def _lines(shown: Description) -> Iterator[str]:
    record = shown.record
    yield one_line(record.full_name)
    yield from _pairs([("level", record.level.value), ("state", record.state.value)])
    yield from _pairs([("paused", _paused(record)), ("uuid", record.uuid)])
    yield from _pairs(custody(record, shown.manifest))
    yield from _heading("snapshots")
    for dataset in shown.datasets:
        told = f"{size(dataset.used)} its own, {size(dataset.referenced)} in all"
        gone = dataset.guid is None
        yield f"  {dataset.name}  {'GONE' if gone else f'guid {dataset.guid}  {told}'}"
    if shown.clones:
        yield from _heading("clones, which keep it from being destroyed")
        yield from (f"  {name}" for name in shown.clones)
    if shown.manifest is not None:
        yield from _contents(shown)
    pages = shown.manifest is not None and shown.manifest.pages is not None
    means = "its RAM is in pages, which virsh cannot read" if pages else "with zfs and virsh alone"
    yield from _heading(f"{BY_HAND}, {means}")
    yield from shown.by_hand or [f"  {_NO_WAY}"]


def _paused(record: SnapshotRecord) -> str:
    parts = record.pause_parts.as_json() if record.pause_parts else {}
    named = [(key.removesuffix("_ms"), value) for key, value in parts.items()]
    told = [f"{name} {value:.0f}" for name, value in named if isinstance(value, float)]
    return pause(record.pause_ms) + (f" ({', '.join(told)})" if told else "")


def _contents(shown: Description) -> Iterator[str]:
    assert shown.manifest is not None
    yield from _heading("disks")
    for disk in shown.manifest.disks:
        place = disk.dataset or f"not in the snapshot: {disk.left_out_reason}"
        if disk.is_apart:
            what = "RAM is" if shown.record.ram_bytes else "the others are"
            place += f"; {what} of another instant"
        yield one_line(f"  {disk.target}  {disk.source or '-'} ({disk.format})  {place}")
        for file in disk.beneath or ():
            place = file.dataset or "not in the snapshot: must be as it was"
            place += ", which nobody can tell" if file.is_unknown else ""
            yield one_line(f"  {disk.target}  over {file.path}  {place}")
    yield from _heading(f"bundle {shown.record.bundle or '(gone)'}")
    for part in shown.manifest.parts:
        payload = f", {size(part.payload_bytes)} before {part.compression}"
        yield f"  {part.name}  {size(part.bytes)}{payload if part.payload_bytes else ''}"
        if part.pace is not None:
            yield f"  saved in {_paced(part.pace)}"
        if part.pages is not None:
            place = f"{part.pages.dataset}@{part.pages.name}"
            yield f"  its pages  {size(part.pages.stored_bytes)} that had changed, in {place}"


def _paced(pace: RamSaveTimes) -> str:
    """Who held it up, as shares of the time."""
    names = {"QEMU": pace.waited_for_ram, "the store": pace.waited_for_store}
    held = [f"{name} {waited / pace.seconds:.0%}" for name, waited in names.items() if pace.seconds]
    return f"{pace.seconds:.1f} s at level {pace.level}; held up by {', '.join(held) or 'nobody'}"


def _heading(text: str) -> list[str]:
    return ["", f"{text}:"]


def _pairs(pairs: list[tuple[str, str]]) -> Iterator[str]:
    for label, text in pairs:
        yield f"  {label:9} {one_line(text)}"
