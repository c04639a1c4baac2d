"""Snapshots of whole domains, read from ZFS and the bundle store: nothing is remembered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from snaporch.bundle.manifest import Manifest
from snaporch.bundle.store import BundleError, BundleStore
from snaporch.model import BundleState, Level, PoolSnapshot, SnapshotRecord


def all_records(store: BundleStore, snapshots: Iterable[PoolSnapshot]) -> list[SnapshotRecord]:
    """One record per run, oldest first."""
    runs: dict[str, list[PoolSnapshot]] = {}
    for snapshot in snapshots:
        run = snapshot.properties.get("run")
        if run and "domain" in snapshot.properties:
            runs.setdefault(run, []).append(snapshot)
    own = {run: own_members(store, members) for run, members in runs.items()}
    records = [_record(store, run, members) for run, members in own.items() if members]
    return sorted(records, key=lambda record: (record.created, record.run))


def record_of(store: BundleStore, snapshots: Iterable[PoolSnapshot], run: str) -> SnapshotRecord:
    """The record of one run, whose snapshots are known to be there."""
    return _record(store, run, [s for s in snapshots if s.properties.get("run") == run])


def own_members(store: BundleStore, members: Sequence[PoolSnapshot]) -> list[PoolSnapshot]:
    """Those of a run's snapshots that lie where the run took them.

    A replica (``zfs send -p | zfs receive``) has the same properties and even the same GUID, but is
    a backup, which nobody may roll back. The manifest knows which dataset is the guest's.
    """
    reference = members[0].properties.get("bundle") if members else None
    _, manifest = store.state(reference) if reference else (BundleState.MISSING, None)
    if manifest is None:
        return list(members)
    taken = {entry.dataset for entry in manifest.snapshots}
    return [member for member in members if member.dataset in taken]


def _record(store: BundleStore, run: str, members: Sequence[PoolSnapshot]) -> SnapshotRecord:
    first = members[0]
    reference = first.properties.get("bundle")
    state, manifest = store.state(reference) if reference else (BundleState.MISSING, None)
    if manifest is not None and state is BundleState.COMPLETE and not _all_there(manifest, members):
        state = BundleState.INCOMPLETE
    path = _path(store, reference) if state is not BundleState.MISSING else None
    return SnapshotRecord(
        domain=first.properties["domain"],
        uuid=first.properties.get("uuid", ""),
        snapshot=first.name,
        run=run,
        level=_level(first, state),
        datasets=tuple(sorted(member.dataset for member in members)),
        created=manifest.created if manifest else first.created,
        ram_bytes=manifest.ram_bytes if manifest else None,
        stored_bytes=manifest.stored_bytes if manifest else 0,
        pause_ms=manifest.pause_ms if manifest else None,
        bundle=str(path) if path else None,
        state=state,
    )


def _path(store: BundleStore, reference: str | None) -> Path | None:
    try:
        return store.path(reference) if reference else None
    except BundleError:  # a property that names no bundle
        return None


def _all_there(manifest: Manifest, members: Sequence[PoolSnapshot]) -> bool:
    """Every snapshot of the manifest still exists, by GUID."""
    present = {(member.dataset, member.guid) for member in members}
    return all((entry.dataset, entry.guid) in present for entry in manifest.snapshots)


def _level(snapshot: PoolSnapshot, state: BundleState) -> Level:
    """What can still be had from it: without its RAM it is as if the plug had been pulled."""
    try:
        level = Level(snapshot.properties.get("level", ""))
    except ValueError:
        return Level.CRASH
    return Level.CRASH if level is Level.RAM and state is not BundleState.COMPLETE else level
