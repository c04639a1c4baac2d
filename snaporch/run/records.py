"""Snapshots of whole domains, read from ZFS and the bundle store: nothing is remembered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from snaporch.bundle.manifest import Manifest
from snaporch.bundle.store import BundleError, BundleStore
from snaporch.model import BundleState, Level, PoolSnapshot, SnapshotRecord, Verdict


def all_records(store: BundleStore, snapshots: Iterable[PoolSnapshot]) -> list[SnapshotRecord]:
    """One record per run and snapshot name, oldest first."""
    runs: dict[str, list[PoolSnapshot]] = {}
    for snapshot in snapshots:
        run = snapshot.properties.get("run")
        if run and "domain" in snapshot.properties:
            runs.setdefault(run, []).append(snapshot)
    records: list[SnapshotRecord] = []
    for run, members in runs.items():
        state, manifest = _state(store, members)
        own = _own(manifest, members)
        names = sorted({member.name for member in own})
        records += [_record(store, run, name, own, state, manifest) for name in names]
    return sorted(records, key=lambda record: (record.created, record.run, record.snapshot))


def record_of(
    store: BundleStore, snapshots: Iterable[PoolSnapshot], run: str, name: str
) -> SnapshotRecord:
    """The record of one run and name, whose snapshots are known to be there."""
    members = [snapshot for snapshot in snapshots if snapshot.properties.get("run") == run]
    return _record(store, run, name, members, *_state(store, members))


def own_members(store: BundleStore, members: Sequence[PoolSnapshot]) -> list[PoolSnapshot]:
    """Those of a run's snapshots that lie where the run took them.

    A replica (``zfs send -p | zfs receive``) has the same properties and even the same GUID, but is
    a backup, which nobody may roll back. The manifest knows which dataset is the guest's.
    """
    _, manifest = _state(store, members)
    return _own(manifest, members)


def _state(
    store: BundleStore, members: Sequence[PoolSnapshot]
) -> tuple[BundleState, Manifest | None]:
    """What there is of the bundle of a run."""
    reference = members[0].properties.get("bundle") if members else None
    return store.state(reference) if reference else (BundleState.MISSING, None)


def _own(manifest: Manifest | None, members: Sequence[PoolSnapshot]) -> list[PoolSnapshot]:
    if manifest is None:
        return list(members)
    taken = {entry.dataset for entry in manifest.snapshots}
    return [member for member in members if member.dataset in taken]


def one_of_each(
    manifest: Manifest | None,
    members: Iterable[PoolSnapshot],
    name: str,
    *,
    newest: bool = False,
) -> list[PoolSnapshot]:
    """One snapshot of each dataset, by dataset: that of the name, or another of the same instant.

    The disks stood still for all the snapshots of a run, so they hold the same: ``daily`` of a
    round can stand in for its ``hourly``. Not if the guest was not held still.

    Args:
        newest: the latest of them, whatever its name: a rollback to it spares the others.
    """
    chosen: dict[str, PoolSnapshot] = {}
    same = manifest is not None and manifest.level is not Level.CRASH
    known = {(e.dataset, e.guid) for e in manifest.snapshots} if manifest else set()
    for member in sorted(members, key=lambda m: (not newest and m.name == name, m.createtxg)):
        if member.name == name or (same and (member.dataset, member.guid) in known):
            chosen[member.dataset] = member
    return [chosen[dataset] for dataset in sorted(chosen)]


def missing_of(manifest: Manifest, members: Iterable[PoolSnapshot]) -> list[str]:
    """Datasets of the run's disks of which ``members`` holds none of the run's snapshots."""
    known = {(entry.dataset, entry.guid) for entry in manifest.snapshots}
    wanted = {dataset for dataset, _ in known}
    wanted |= {disk.dataset for disk in manifest.disks if disk.dataset is not None}
    return sorted(wanted - {m.dataset for m in members if (m.dataset, m.guid) in known})


def _record(
    store: BundleStore,
    run: str,
    name: str,
    members: Sequence[PoolSnapshot],
    state: BundleState,
    manifest: Manifest | None,
) -> SnapshotRecord:
    reference = members[0].properties.get("bundle")
    members = one_of_each(manifest, members, name)
    first = next(member for member in members if member.name == name)
    if manifest is not None and state is BundleState.COMPLETE and missing_of(manifest, members):
        state = BundleState.INCOMPLETE
    path = _path(store, reference) if state is not BundleState.MISSING else None
    return SnapshotRecord(
        domain=first.properties["domain"],
        uuid=first.properties.get("uuid", ""),
        snapshot=name,
        run=run,
        level=_level(first, state),
        datasets=tuple(member.dataset for member in members),
        created=manifest.created if manifest else first.created,
        ram_bytes=manifest.ram_bytes if manifest else None,
        stored_bytes=manifest.stored_bytes if manifest else 0,
        pause_ms=manifest.pause_ms if manifest else None,
        bundle=str(path) if path else None,
        state=state,
        verified=_verdict(members),
        policy=_policy(members),
    )


def _verdict(members: Sequence[PoolSnapshot]) -> Verdict | None:
    """The same on all of them, unless its writing was cut short: then there is none."""
    texts = {member.properties.get("verified") for member in members}
    return Verdict.parse(texts.pop()) if len(texts) == 1 else None


def _policy(members: Sequence[PoolSnapshot]) -> str | None:
    """The policy that took it: all its snapshots carry the mark."""
    policy = members[0].properties.get("retention")
    marked = policy is not None and all(is_marked(member, policy) for member in members)
    return policy if marked else None


def is_marked(snapshot: PoolSnapshot, policy: str) -> bool:
    """Whether the policy took it: ``snaporch:retention`` says so, and its name does.

    Neither is enough: a property may be inherited from a dataset, a name may be anybody's.
    """
    named = snapshot.name.startswith("snaporch_") and snapshot.name.endswith(f"_{policy}")
    return named and snapshot.properties.get("retention") == policy


def _path(store: BundleStore, reference: str | None) -> Path | None:
    try:
        return store.path(reference) if reference else None
    except BundleError:  # a property that names no bundle
        return None


def _level(snapshot: PoolSnapshot, state: BundleState) -> Level:
    """What can still be had from it: without its RAM it is as if the plug had been pulled."""
    try:
        level = Level(snapshot.properties.get("level", ""))
    except ValueError:
        return Level.CRASH
    return Level.CRASH if level is Level.RAM and state is not BundleState.COMPLETE else level
