"""Records of domain snapshots, read from ZFS and the bundle store each time.

A run marks its ZFS snapshots with properties. Guests that share a dataset also share its snapshots,
and only one run can mark these. The other runs find them by the GUIDs in their manifests.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from snaporch.bundle.manifest import Manifest
from snaporch.bundle.store import MARKER, BundleError, BundleStore
from snaporch.catalog.renamed_datasets import as_named_now, by_guid, renamed
from snaporch.catalog.torn import is_torn
from snaporch.errors import RefusedError
from snaporch.hypervisor import Hypervisor
from snaporch.model import (
    BundleState,
    Level,
    PoolSnapshot,
    SnapshotRecord,
    VerificationResult,
    moment_of,
)
from snaporch.zfs import Pool

COPY = "copy"
"""Set on a copy, with the replica's name: it shows later that a snapshot came back from there."""
VERIFIED_HERE = "verified-here"
"""Set on a copy by the machine that has it: its own test restore. No host can send this mark."""

ENDED = "ended"
"""Set on the last snapshot of a guest before a failover ended it, and on its copies."""
ENDED_HERE, NOT_ENDED = "yes", "no"
"""Its values. A failover sets the second one first, on the copies of an earlier snapshot: it proves
that the replica accepts the property, and nothing else."""


def all_records(
    store: BundleStore, snapshots: Iterable[PoolSnapshot], *, renamed_too: bool = False
) -> list[SnapshotRecord]:
    """One record per run and snapshot name, oldest first.

    Args:
        store: has the manifests.
        snapshots: all ZFS snapshots that exist.
        renamed_too: also snapshots of datasets that were renamed since.
    """
    everything = list(snapshots)
    guids = {snapshot.guid for snapshot in everything}
    records = marked_records(store, everything, guids, renamed_too=renamed_too)
    known = {f"{record.uuid}/{record.run}" for record in records}
    with_guid = by_guid(everything)
    for reference in store.references():
        if reference not in known:
            state, manifest = store.state(reference)
            if manifest is not None and reference == f"{manifest.uuid}/{manifest.run}":
                state = _with_pages(state, manifest, guids)
                candidates = _candidates(manifest, with_guid)
                manifest = as_named_now(manifest, candidates) if renamed_too else manifest
                members = run_members(manifest, manifest.run, candidates)
                records += _records(store, manifest.run, members, state, manifest)
    return _oldest_first(records)


def marked_records(
    store: BundleStore,
    snapshots: Iterable[PoolSnapshot],
    guids: Collection[int],
    *,
    renamed_too: bool = False,
) -> list[SnapshotRecord]:
    """The records of the runs whose marks are on ``snapshots``, oldest first.

    Args:
        store: has the manifests.
        snapshots: the ZFS snapshots to make records of.
        guids: the GUIDs of all ZFS snapshots that exist, for the pages of RAM.
        renamed_too: see :func:`all_records`.
    """
    everything = list(snapshots)
    runs: dict[tuple[str, str], list[PoolSnapshot]] = {}  # marks that came from a replica may lie
    for snapshot in everything:
        run, uuid = (snapshot.properties.get(key, "") for key in ("run", "uuid"))
        if run and "domain" in snapshot.properties:
            runs.setdefault((run, uuid), []).append(snapshot)
    with_guid = by_guid(everything)
    records: list[SnapshotRecord] = []
    for (run, _), marked in runs.items():
        state, manifest = _state(store, marked)
        state = _with_pages(state, manifest, guids)
        candidates = marked
        moved: tuple[str, ...] = ()
        if manifest is not None:
            named = {each.full_name: each for each in (*marked, *_candidates(manifest, with_guid))}
            candidates = list(named.values())
            moved = tuple(sorted(renamed(manifest, candidates))) if renamed_too else ()
            manifest = as_named_now(manifest, candidates) if moved else manifest
        members = run_members(manifest, run, candidates)
        found = _records(store, run, members, state, manifest)
        records += [replace(each, renamed=moved) for each in found]
    return _oldest_first(records)


def _with_pages(
    state: BundleState, manifest: Manifest | None, guids: Collection[int]
) -> BundleState:
    """The bundle's state, given whether its pages of RAM exist."""
    gone = manifest is not None and manifest.pages and manifest.pages.guid not in guids
    return BundleState.INCOMPLETE if gone else state


def by_dataset(snapshots: Iterable[PoolSnapshot]) -> Mapping[str, list[PoolSnapshot]]:
    """The snapshots of each dataset; an empty list for a dataset without snapshots."""
    found: dict[str, list[PoolSnapshot]] = defaultdict(list)
    for snapshot in snapshots:
        found[snapshot.dataset].append(snapshot)
    return found


def _candidates(
    manifest: Manifest, with_guid: Mapping[int, Sequence[PoolSnapshot]]
) -> list[PoolSnapshot]:
    """All snapshots with the GUIDs of the run: its own, received copies, and renamed ones."""
    guids = {entry.guid for entry in manifest.snapshots}
    return [each for guid in guids for each in with_guid.get(guid, ())]


def check_store(store: BundleStore, pool: Pool, guests: Hypervisor | None = None) -> None:
    """Refuse to begin a new store where the file system of the old one may not be mounted.

    Args:
        guests: only these guests' snapshots count; the bundles of snapshots that other hosts
            replicated here are elsewhere. All count when ``None``.

    Raises:
        RefusedError: the directory is no store, and there are snapshots with bundles.
    """
    if store.is_known():
        return
    own = {each.uuid for each in guests.domains()} if guests is not None else None
    bundles = {
        snapshot.properties.get("bundle")
        for snapshot in pool.snapshots()
        if own is None or snapshot.properties.get("uuid") in own
    } - {None}
    if bundles:
        place, marker = (shlex.quote(str(each)) for each in (store.root, store.root / MARKER))
        raise RefusedError(
            str(store.root),
            f"is no bundle store, and snapshots have their bundles in one ({len(bundles)})",
            "is its file system mounted? if a new store is to be made: "
            f"install -d -m 700 {place} && touch {marker}",
        )


def record_of(
    store: BundleStore, snapshots: Iterable[PoolSnapshot], run: str, name: str
) -> SnapshotRecord:
    """The record of one run and snapshot name; ``snapshots`` must contain its ZFS snapshots."""
    members = [snapshot for snapshot in snapshots if marked_by(snapshot, run)]
    return _record(store, run, name, members, *_state(store, members))


def run_members(
    manifest: Manifest | None, run: str, snapshots: Iterable[PoolSnapshot]
) -> list[PoolSnapshot]:
    """The snapshots of a run: those with its mark, and those with a GUID in its manifest.

    Only in the datasets where the run took them. A replica (``zfs send -p | zfs receive``) has the
    same properties and even the same GUID, but it is a backup, which must not be rolled back. The
    manifest names the guest's datasets. Without a manifest, those that snaporch copied to a pool of
    this host are left out where the original exists: a guest that came back has such snapshots.
    """
    snapshots = genuine(snapshots)
    if manifest is None:
        marked = [each for each in snapshots if marked_by(each, run)]
        originals = {each.guid for each in marked if COPY not in each.properties}
        return [e for e in marked if COPY not in e.properties or e.guid not in originals]
    known = {(entry.dataset, entry.guid) for entry in manifest.snapshots}
    taken = {entry.dataset for entry in manifest.snapshots}
    return [
        each
        for each in snapshots
        if (each.dataset, each.guid) in known or (marked_by(each, run) and each.dataset in taken)
    ]


def genuine(snapshots: Iterable[PoolSnapshot]) -> list[PoolSnapshot]:
    """Of several snapshots of a dataset with one GUID, only the oldest.

    ZFS gives no GUID twice, but receives a stream with a forged one. The true one was there first.
    """
    found: dict[tuple[str, int], PoolSnapshot] = {}
    for each in snapshots:
        first = found.setdefault((each.dataset, each.guid), each)
        if each.createtxg < first.createtxg:
            found[each.dataset, each.guid] = each
    return list(found.values())


def used_bytes(
    pool: Pool, snapshots: Iterable[PoolSnapshot], records: Iterable[SnapshotRecord]
) -> dict[SnapshotRecord, int]:
    """The bytes in the pools that only the ZFS snapshots of each record hold.

    What several snapshots share counts for none of them.

    Raises:
        PoolError: the sizes cannot be listed.
    """
    existing = {snapshot.full_name for snapshot in snapshots}
    names = {
        record: [
            name for each in record.datasets if (name := f"{each}@{record.snapshot}") in existing
        ]
        for record in records
    }
    sizes = pool.sizes([name for own in names.values() for name in own])
    return {
        record: sum(sizes[name][0] for name in own if name in sizes)
        for record, own in names.items()
    }


def snapshots_of_record(
    store: BundleStore, snapshots: Iterable[PoolSnapshot], record: SnapshotRecord
) -> list[PoolSnapshot]:
    """The ZFS snapshots that have the record's name; its run may have others of that instant.

    Args:
        store: has the manifests.
        snapshots: all ZFS snapshots that exist.
        record: of a snapshot.
    """
    everything = list(snapshots)
    _, manifest = store.state(f"{record.uuid}/{record.run}")
    if manifest is not None:
        manifest = as_named_now(manifest, everything)
    return [
        member
        for member in run_members(manifest, record.run, everything)
        if member.name == record.snapshot and member.dataset in record.datasets
    ]


def marked_by(snapshot: PoolSnapshot, run: str) -> bool:
    """Whether the snapshot carries the run's mark."""
    return snapshot.properties.get("run") == run


def _oldest_first(records: list[SnapshotRecord]) -> list[SnapshotRecord]:
    return sorted(records, key=lambda record: (record.created, record.run, record.snapshot))


def _records(
    store: BundleStore,
    run: str,
    members: Sequence[PoolSnapshot],
    state: BundleState,
    manifest: Manifest | None,
) -> list[SnapshotRecord]:
    names = sorted({member.name for member in members})
    return [_record(store, run, name, members, state, manifest) for name in names]


def _state(
    store: BundleStore, members: Sequence[PoolSnapshot]
) -> tuple[BundleState, Manifest | None]:
    """The state and the manifest of a run's bundle."""
    reference = next(filter(None, map(_reference, members)), None)
    return store.state(reference) if reference else (BundleState.MISSING, None)


def _reference(member: PoolSnapshot) -> str | None:
    """The bundle that a snapshot names, if it is that of its own run."""
    reference = member.properties.get("bundle")
    own = "/".join(member.properties.get(key, "") for key in ("uuid", "run"))
    return reference if reference == own else None


def one_per_dataset(
    manifest: Manifest | None,
    members: Iterable[PoolSnapshot],
    name: str,
    *,
    newest: bool = False,
) -> list[PoolSnapshot]:
    """One snapshot of each dataset, sorted by dataset: with this name, or of the same instant.

    The guest was frozen for all snapshots of a run, so their contents are equal: sanoid's ``daily``
    can replace the ``hourly`` of the same call. Not at level ``crash`` or ``torn``.

    Args:
        manifest: the run's manifest, if there is one.
        members: the snapshots of the run.
        name: the name to prefer.
        newest: prefer the newest snapshot to the name: a rollback to it keeps the others.
    """
    chosen: dict[str, PoolSnapshot] = {}
    same = manifest is not None and is_one_instant(manifest)
    known = {(e.dataset, e.guid) for e in manifest.snapshots} if manifest else set()
    for member in sorted(members, key=lambda m: (not newest and m.name == name, m.createtxg)):
        if member.name == name or (same and (member.dataset, member.guid) in known):
            chosen[member.dataset] = member
    return [chosen[dataset] for dataset in sorted(chosen)]


def is_one_instant(manifest: Manifest) -> bool:
    """Whether the guest was frozen for all ZFS snapshots of a run, so that they are equal."""
    return manifest.level not in (Level.CRASH, Level.TORN)


def missing_datasets(manifest: Manifest, members: Iterable[PoolSnapshot]) -> list[str]:
    """The datasets of the run for which ``members`` has none of its snapshots."""
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
    marked = [member for member in members if marked_by(member, run)]
    marks = marked[0].properties if marked else {}
    own = f"{manifest.uuid}/{run}" if manifest else None
    reference = next(filter(None, map(_reference, marked)), own)
    members = one_per_dataset(manifest, members, name)
    if (
        manifest is not None
        and state is BundleState.COMPLETE
        and missing_datasets(manifest, members)
    ):
        state = BundleState.INCOMPLETE
    path = _path(store, reference) if state is not BundleState.MISSING else None
    first = next(member for member in members if member.name == name)
    marked = [member for member in members if marked_by(member, run)]
    verdict = _verdict(marked)
    if state is BundleState.COMPLETE and verdict is not None and verdict.is_damage:
        state = BundleState.DAMAGED
    level = first.properties.get("level", "") if first in marked or not manifest else manifest.level
    if any(is_torn(member) for member in members):
        level = Level.TORN
        state = BundleState.INCOMPLETE if state.is_there else state
    if state is BundleState.MISSING and level == Level.CRASH:  # as before the bundle is sealed
        state = BundleState.NONE
    group, _, group_run = first.properties.get("group", "").partition("/")
    return SnapshotRecord(
        domain=marks.get("domain") or (manifest.domain if manifest else ""),
        uuid=marks.get("uuid", "") or (manifest.uuid if manifest else ""),
        snapshot=name,
        run=run,
        level=_level(level, state),
        datasets=tuple(member.dataset for member in members),
        created=manifest.created if manifest else first.created,
        ram_bytes=manifest.ram_bytes if manifest else None,
        stored_bytes=manifest.stored_bytes if manifest else 0,
        pause_ms=manifest.pause_ms if manifest else None,
        pause_parts=manifest.pause if manifest else None,
        bundle=str(path) if path else None,
        state=state,
        verified=verdict,
        policy=_policy(members),
        group=group or None,
        group_run=group_run or None,
        replicated=_replicas(marked, "replicated"),
        dropped=_replicas(marked, "dropped"),
        apart=tuple(disk.target for disk in manifest.disks if disk.is_apart) if manifest else (),
        unchanged=_unchanged(marked),
        kept=min((at for m in members if (at := _kept(m)) is not None), default=None),
        note=first.properties.get("note", ""),
    )


def _verdict(marked: Sequence[PoolSnapshot]) -> VerificationResult | None:
    """The verification result; None if the snapshots differ, since writing it was interrupted."""
    texts = {member.properties.get("verified") for member in marked}
    return VerificationResult.parse(texts.pop()) if len(texts) == 1 else None


def _kept(member: PoolSnapshot) -> datetime | None:
    """Since when a ZFS snapshot is kept; its own time if the mark has no valid one."""
    text = member.properties.get("kept")
    return None if text is None else moment_of(text) or member.created


def _unchanged(marked: Sequence[PoolSnapshot]) -> datetime | None:
    """The time of ``unchanged``; None if the snapshots differ, since writing was interrupted."""
    texts = {member.properties.get("unchanged") for member in marked}
    return moment_of(texts.pop()) if len(texts) == 1 else None


def _replicas(marked: Sequence[PoolSnapshot], key: str) -> tuple[str, ...]:
    """The replicas that a property of all snapshots of the run names."""
    names = [set(member.properties.get(key, "").split(",")) for member in marked]
    return tuple(sorted(set[str]().union(*names[:1]).intersection(*names) - {""}))


def _policy(members: Sequence[PoolSnapshot]) -> str | None:
    """The policy that took the snapshot; None unless all its ZFS snapshots carry the mark."""
    policy = members[0].properties.get("retention")
    marked = policy is not None and all(is_marked(member, policy) for member in members)
    return policy if marked else None


def is_marked(snapshot: PoolSnapshot, policy: str) -> bool:
    """Whether the policy took the snapshot: by its property and its name.

    Both must match: a property may be inherited from a dataset, and any program may use the name.
    """
    named = snapshot.name.startswith("snaporch_") and snapshot.name.endswith(f"_{policy}")
    return named and snapshot.properties.get("retention") == policy


def _path(store: BundleStore, reference: str | None) -> Path | None:
    try:
        return store.path(reference) if reference else None
    except BundleError:  # a property that names no bundle
        return None


def _level(text: str, state: BundleState) -> Level:
    """The level that a restore can reach: without a complete bundle, ``ram`` becomes ``crash``."""
    try:
        level = Level(text)
    except ValueError:
        return Level.CRASH
    return Level.CRASH if level is Level.RAM and state is not BundleState.COMPLETE else level
