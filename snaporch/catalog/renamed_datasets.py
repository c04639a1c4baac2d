"""Datasets that were renamed since a snapshot was taken: its manifest has their old names."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping

from snaporch.bundle.manifest import BackingFileEntry, DiskEntry, Manifest, SnapshotEntry
from snaporch.errors import RefusedError
from snaporch.model import PoolSnapshot
from snaporch.zfs import Pool


def by_guid(snapshots: Iterable[PoolSnapshot]) -> Mapping[int, list[PoolSnapshot]]:
    """The snapshots with each GUID; an empty list for a GUID without snapshots."""
    found: dict[int, list[PoolSnapshot]] = defaultdict(list)
    for snapshot in snapshots:
        found[snapshot.guid].append(snapshot)
    return found


def renamed(manifest: Manifest, snapshots: Iterable[PoolSnapshot]) -> dict[str, str]:
    """The new names of the run's datasets that were renamed, by their old names.

    A rename, also of the pool, keeps a snapshot's GUID and its txg. A received copy has another
    txg. If the snapshot exists under the old name, the dataset was not renamed.
    """
    with_guid = by_guid(snapshots)
    there: set[str] = set()
    found: dict[str, set[str]] = defaultdict(set)
    for entry in manifest.snapshots:
        same = with_guid.get(entry.guid, ())
        if entry.dataset in {each.dataset for each in same}:
            there.add(entry.dataset)
        found[entry.dataset] |= {s.dataset for s in same if s.createtxg == entry.createtxg}
    return {
        dataset: next(iter(names))
        for dataset, names in found.items()
        if dataset not in there and len(names) == 1 and names.isdisjoint(found)
    }


def as_named_now(manifest: Manifest, snapshots: Iterable[PoolSnapshot]) -> Manifest:
    """The manifest with the current names of its datasets; see :func:`renamed`."""
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


def check_names(
    pool: Pool, thing: str, manifest: Manifest, snapshots: Iterable[PoolSnapshot]
) -> None:
    """Refuse a snapshot whose datasets were renamed: the paths in the manifest are the old ones.

    Raises:
        RefusedError: a dataset was renamed; the error has the command that names it back.
    """
    for dataset, name in renamed(manifest, snapshots).items():
        above, old = (each.split("/", 1)[0] for each in (name, dataset))
        step = f"{shlex.join(['zfs', 'rename', name, dataset])}; then try again"
        if above != old:
            begin = shlex.join(["zpool", "export", above])
            step = f"{begin}; {shlex.join(['zpool', 'import', above, old])}; then try again"
        elif dataset in {known.name for known in pool.datasets()}:
            promoted = pool.origins([dataset]).get(dataset, "").startswith(f"{name}@")
            step = (
                f"zfs promote {shlex.quote(dataset)}; then try again"
                if promoted
                else f"move {dataset} away"
            )
        raise RefusedError(thing, f"its snapshot of {dataset} is one of {name} now", step)
