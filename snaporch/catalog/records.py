"""Snapshots of whole domains, read from ZFS and the bundle store: nothing is remembered.

A run marks its ZFS snapshots with properties. Guests that share a dataset share its snapshots, too,
which can be marked by one run only; those of the others are found by the GUIDs in their manifests.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from snaporch.bundle.manifest import BackingFileEntry, DiskEntry, Manifest, SnapshotEntry
from snaporch.bundle.store import MARKER, BundleError, BundleStore
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


def all_records(
    store: BundleStore, snapshots: Iterable[PoolSnapshot], *, renamed_too: bool = False
) -> list[SnapshotRecord]:
    """One record per run and snapshot name, oldest first.

    Args:
        store: where the manifests are.
        snapshots: every one that exists.
        renamed_too: those of datasets that were renamed, too.
    """
    everything = list(snapshots)
    guids = {snapshot.guid for snapshot in everything}
    records = marked_records(store, everything, guids, renamed_too=renamed_too)
    known = {f"{record.uuid}/{record.run}" for record in records}
    places = _by_guid(everything)
    for reference in store.references():
        if reference not in known:
            state, manifest = store.state(reference)
            if manifest is not None and reference == f"{manifest.uuid}/{manifest.run}":
                state = _with_pages(state, manifest, guids)
                near = _near(manifest, places)
                manifest = as_named_now(manifest, near) if renamed_too else manifest
                members = run_members(manifest, manifest.run, near)
                records += _records(store, manifest.run, members, state, manifest)
    return _oldest_first(records)


def marked_records(
    store: BundleStore,
    snapshots: Iterable[PoolSnapshot],
    guids: Collection[int],
    *,
    renamed_too: bool = False,
) -> list[SnapshotRecord]:
    """Those of the runs whose marks ``snapshots`` carry, oldest first.

    Args:
        store: where the manifests are.
        snapshots: those to make records of.
        guids: of all snapshots that exist; pages of RAM may be in any.
        renamed_too: as :func:`all_records` says.
    """
    everything = list(snapshots)
    runs: dict[str, list[PoolSnapshot]] = {}
    for snapshot in everything:
        run = snapshot.properties.get("run")
        if run and "domain" in snapshot.properties:
            runs.setdefault(run, []).append(snapshot)
    places = _by_guid(everything)
    records: list[SnapshotRecord] = []
    for run, marked in runs.items():
        state, manifest = _state(store, marked)
        state = _with_pages(state, manifest, guids)
        near = marked
        moved: tuple[str, ...] = ()
        if manifest is not None:
            named = {each.full_name: each for each in (*marked, *_near(manifest, places))}
            near = list(named.values())
            moved = tuple(sorted(renamed(manifest, near))) if renamed_too else ()
            manifest = as_named_now(manifest, near) if moved else manifest
        members = run_members(manifest, run, near)
        found = _records(store, run, members, state, manifest)
        records += [replace(each, renamed=moved) for each in found]
    return _oldest_first(records)


def _with_pages(
    state: BundleState, manifest: Manifest | None, guids: Collection[int]
) -> BundleState:
    """A bundle whose pages of RAM are gone is not complete."""
    gone = manifest is not None and manifest.pages and manifest.pages.guid not in guids
    return BundleState.INCOMPLETE if gone else state


def by_dataset(snapshots: Iterable[PoolSnapshot]) -> Mapping[str, list[PoolSnapshot]]:
    """The snapshots of each dataset; none of one that has none."""
    places: dict[str, list[PoolSnapshot]] = defaultdict(list)
    for snapshot in snapshots:
        places[snapshot.dataset].append(snapshot)
    return places


def _by_guid(snapshots: Iterable[PoolSnapshot]) -> Mapping[int, list[PoolSnapshot]]:
    places: dict[int, list[PoolSnapshot]] = defaultdict(list)
    for snapshot in snapshots:
        places[snapshot.guid].append(snapshot)
    return places


def _near(manifest: Manifest, places: Mapping[int, Sequence[PoolSnapshot]]) -> list[PoolSnapshot]:
    """What may be a snapshot of the run: its own, received copies, and what was renamed."""
    guids = {entry.guid for entry in manifest.snapshots}
    return [each for guid in guids for each in places.get(guid, ())]


def renamed(manifest: Manifest, snapshots: Iterable[PoolSnapshot]) -> dict[str, str]:
    """What datasets of the run are called now that had another name then.

    A rename, of the pool too, keeps a snapshot's GUID and its txg; a received copy has a txg of
    its own. One that is where the run took it was not renamed.
    """
    places = _by_guid(snapshots)
    there: set[str] = set()
    found: dict[str, set[str]] = defaultdict(set)
    for entry in manifest.snapshots:
        same = places.get(entry.guid, ())
        if entry.dataset in {each.dataset for each in same}:
            there.add(entry.dataset)
        found[entry.dataset] |= {s.dataset for s in same if s.createtxg == entry.createtxg}
    return {
        dataset: next(iter(names))
        for dataset, names in found.items()
        if dataset not in there and len(names) == 1 and names.isdisjoint(found)
    }


def as_named_now(manifest: Manifest, snapshots: Iterable[PoolSnapshot]) -> Manifest:
    """The manifest, with the names that its datasets have now, to look at; see :func:`renamed`."""
    names = renamed(manifest, snapshots)
    if not names:
        return manifest
    disks = [
        disk.model_copy(update={"beneath": disk.beneath and _named(disk.beneath, names)})
        for disk in manifest.disks
    ]
    update = {"snapshots": _named(manifest.snapshots, names), "disks": _named(disks, names)}
    return manifest.model_copy(update=update)


def _named(
    entries: Iterable[SnapshotEntry | DiskEntry | BackingFileEntry], names: Mapping[str, str]
) -> tuple[SnapshotEntry | DiskEntry | BackingFileEntry, ...]:
    return tuple(
        each.model_copy(update={"dataset": names.get(each.dataset or "", each.dataset)})
        for each in entries
    )


def check_store(store: BundleStore, pool: Pool, guests: Hypervisor | None = None) -> None:
    """Refuse to begin a store anew where another one may be mounted.

    Args:
        guests: those whose snapshots count: what other hosts replicated here has its bundles
            elsewhere. All count when ``None``.

    Raises:
        RefusedError: it is none, and there are snapshots with bundles.
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


def check_names(
    pool: Pool, thing: str, manifest: Manifest, snapshots: Iterable[PoolSnapshot]
) -> None:
    """Refuse to work with datasets that have another name now: the guest's disks have it, too.

    Raises:
        RefusedError: one was renamed; it says how it gets its name back.
    """
    for dataset, name in renamed(manifest, snapshots).items():
        above, old = (each.split("/", 1)[0] for each in (name, dataset))
        step = f"zfs rename {name} {dataset}, and try again"
        if above != old:
            step = f"zpool export {above}, zpool import {above} {old}, and try again"
        elif dataset in {known.name for known in pool.datasets()}:
            promoted = pool.origins([dataset]).get(dataset, "").startswith(f"{name}@")
            step = f"zfs promote {dataset}, and try again" if promoted else f"move {dataset} away"
        raise RefusedError(thing, f"its snapshot of {dataset} is one of {name} now", step)


def record_of(
    store: BundleStore, snapshots: Iterable[PoolSnapshot], run: str, name: str
) -> SnapshotRecord:
    """The record of one run and name, whose snapshots are known to be there."""
    members = [snapshot for snapshot in snapshots if marked_by(snapshot, run)]
    return _record(store, run, name, members, *_state(store, members))


def run_members(
    manifest: Manifest | None, run: str, snapshots: Iterable[PoolSnapshot]
) -> list[PoolSnapshot]:
    """The snapshots of a run: those marked by it, and those its manifest knows by their GUIDs.

    Only where the run took them: a replica (``zfs send -p | zfs receive``) has the same properties
    and even the same GUID, but is a backup, which nobody may roll back. The manifest knows which
    dataset is the guest's.
    """
    if manifest is None:
        return [each for each in snapshots if marked_by(each, run)]
    known = {(entry.dataset, entry.guid) for entry in manifest.snapshots}
    taken = {entry.dataset for entry in manifest.snapshots}
    return [
        each
        for each in snapshots
        if (each.dataset, each.guid) in known or (marked_by(each, run) and each.dataset in taken)
    ]


def marked_by(snapshot: PoolSnapshot, run: str) -> bool:
    """Whether the properties it carries are those of the run."""
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
    """What there is of the bundle of a run."""
    reference = members[0].properties.get("bundle") if members else None
    return store.state(reference) if reference else (BundleState.MISSING, None)


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
    same = manifest is not None and manifest.level not in (Level.CRASH, Level.TORN)
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
    marks = next((m.properties for m in members if marked_by(m, run)), {})
    reference = marks.get("bundle") or (f"{manifest.uuid}/{run}" if manifest else None)
    members = one_of_each(manifest, members, name)
    if manifest is not None and state is BundleState.COMPLETE and missing_of(manifest, members):
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
        replicated=_replicated(marked),
        apart=tuple(disk.target for disk in manifest.disks if disk.is_apart) if manifest else (),
        unchanged=_unchanged(marked),
    )


def _verdict(marked: Sequence[PoolSnapshot]) -> VerificationResult | None:
    """The same on all of them, unless its writing was cut short: then there is none."""
    texts = {member.properties.get("verified") for member in marked}
    return VerificationResult.parse(texts.pop()) if len(texts) == 1 else None


def _unchanged(marked: Sequence[PoolSnapshot]) -> datetime | None:
    """The same on all of them, unless its writing was cut short: then it is not said."""
    texts = {member.properties.get("unchanged") for member in marked}
    return moment_of(texts.pop()) if len(texts) == 1 else None


def _replicated(marked: Sequence[PoolSnapshot]) -> tuple[str, ...]:
    """What got each of its snapshots: the property is written when all of it has arrived."""
    said = [set(member.properties.get("replicated", "").split(",")) for member in marked]
    return tuple(sorted(set[str]().union(*said[:1]).intersection(*said) - {""}))


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


def _level(said: str, state: BundleState) -> Level:
    """What can still be had from it: without good RAM it is as if the plug had been pulled."""
    try:
        level = Level(said)
    except ValueError:
        return Level.CRASH
    return Level.CRASH if level is Level.RAM and state is not BundleState.COMPLETE else level
