"""The description of one snapshot, as ``snaporch show`` prints it.

The description, and the commands to restore by hand, are made by :mod:`snaporch.show`.
"""

from __future__ import annotations

from collections.abc import Iterator

from snaporch.bundle.compression_tuning import RamSaveTimes
from snaporch.bundle.manifest import Manifest, Part
from snaporch.errors import one_line
from snaporch.model import BundleState, SnapshotRecord, VerifyStep
from snaporch.output.format import pause, size
from snaporch.output.terminal import print_result
from snaporch.show import Description, ShownDataset, provenance

_COLD = "see `snaporch restore --cold`"
_STATES = {
    BundleState.DAMAGED: "a part of its bundle has a wrong checksum, or a ZFS snapshot is another; "
    + _COLD,
    BundleState.INCOMPLETE: "a part of its bundle or a ZFS snapshot is missing, or a part has the "
    "wrong size; " + _COLD,
    BundleState.MISSING: "its bundle is missing; with another copy of it: "
    "`snaporch restore --bundle DIR`",
    BundleState.NONE: "it has no bundle, only the ZFS snapshots above",
}
_STEPS = {
    VerifyStep.CHECKSUMS: f"a backing file has changed; {_COLD}",
    VerifyStep.DISKS: "data of its disks could not be read; a restore brings back what is there",
    VerifyStep.CLONE: f"a clone of it could not run; {_COLD}",
    VerifyStep.COMMAND: "its command did not pass; `snaporch restore` restores it as it is",
    VerifyStep.SCRIPT: "its test script failed in a clone; `snaporch restore` restores it as it is",
}
"""What each failed step means for a snapshot whose parts are complete."""


def print_description(shown: Description) -> None:
    """Print a snapshot: facts, ZFS snapshots, disks, bundle, commands to restore it by hand."""
    print_result("\n".join(_lines(shown)))


def _lines(shown: Description) -> Iterator[str]:
    record, manifest = shown.record, shown.manifest
    yield one_line(record.full_name)
    yield from _pairs([("level", record.level.value), ("state", record.state.value)])
    yield from _pairs([("paused", _paused(record)), ("uuid", record.uuid)])
    yield from _pairs(provenance(record, manifest))
    yield from _heading("snapshots")
    yield from map(_dataset, shown.datasets)
    if shown.clones:
        yield from _heading("clones, which keep it from being destroyed")
        yield from (f"  {name}" for name in shown.clones)
    if manifest is not None:
        yield from _disks(manifest, has_ram=bool(record.ram_bytes))
        yield from _heading(f"bundle {record.bundle or '(missing)'}")
        for part in manifest.parts:
            yield from _part(part)
    in_pages = manifest is not None and manifest.pages is not None
    how = "its RAM is in pages, which virsh cannot read" if in_pages else "with zfs and virsh alone"
    yield from _heading(f"by hand, {how}")
    yield from shown.by_hand or [f"  {_why_not_by_hand(record)}"]


def _why_not_by_hand(record: SnapshotRecord) -> str:
    """The reason why no commands are printed: the first that applies, and the next step."""
    if record.state is not BundleState.COMPLETE:
        return _STATES[record.state]
    failed = record.verified.failed_steps if record.verified else ()
    return _STEPS[failed[0]] if failed else f"its verification failed; {_COLD}"


def _paused(record: SnapshotRecord) -> str:
    parts = record.pause_parts.as_json() if record.pause_parts else {}
    named = [(key.removesuffix("_ms"), value) for key, value in parts.items()]
    texts = [f"{name} {value:.0f}" for name, value in named if isinstance(value, float)]
    return pause(record.pause_ms) + (f" ({', '.join(texts)})" if texts else "")


def _dataset(dataset: ShownDataset) -> str:
    if dataset.guid is None:
        return f"  {dataset.name}  MISSING"
    sizes = f"{size(dataset.used)} its own, {size(dataset.referenced)} in all"
    return f"  {dataset.name}  guid {dataset.guid}  {sizes}"


def _disks(manifest: Manifest, *, has_ram: bool) -> Iterator[str]:
    yield from _heading("disks")
    for disk in manifest.disks:
        place = disk.dataset or f"not in the snapshot: {disk.left_out_reason}"
        if disk.is_apart:
            place += f"; {'RAM is' if has_ram else 'the others are'} of another instant"
        yield one_line(f"  {disk.target}  {disk.source or '-'} ({disk.format})  {place}")
        for file in disk.beneath or ():
            place = file.dataset or "not in the snapshot: must be unchanged"
            place += ", which cannot be checked" if file.is_unknown else ""
            yield one_line(f"  {disk.target}  over {file.path}  {place}")


def _part(part: Part) -> Iterator[str]:
    payload = f", {size(part.payload_bytes)} before {part.compression}"
    yield f"  {part.name}  {size(part.bytes)}{payload if part.payload_bytes else ''}"
    if part.pace is not None:
        yield f"  saved in {_save_times(part.pace)}"
    if part.pages is not None:
        place = f"{part.pages.dataset}@{part.pages.name}"
        yield f"  its pages  {size(part.pages.stored_bytes)} that had changed, in {place}"


def _save_times(times: RamSaveTimes) -> str:
    """How long saving RAM took, and the share of the time for which each side waited."""
    waits = {"QEMU": times.waited_for_ram, "the store": times.waited_for_store}
    shares = [f"{name} {wait / times.seconds:.0%}" for name, wait in waits.items() if times.seconds]
    held_up = ", ".join(shares) or "nothing"
    return f"{times.seconds:.1f} s at level {times.level}; held up by {held_up}"


def _heading(text: str) -> list[str]:
    return ["", f"{text}:"]


def _pairs(pairs: list[tuple[str, str]]) -> Iterator[str]:
    for label, text in pairs:
        yield f"  {label:9} {one_line(text)}"
