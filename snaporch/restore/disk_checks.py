"""Whether the disks of a snapshot can be rolled back: paths, datasets, volumes, backing files.

Disks over which RAM must not be resumed: :mod:`snaporch.restore.ram_checks`.

Whether something else would be rolled back with them is in
:mod:`snaporch.restore.shared_dataset_checks`.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from snaporch.bundle.manifest import DiskEntry, Manifest
from snaporch.catalog.records import missing_datasets
from snaporch.catalog.renamed_datasets import as_named_now, check_names, renamed
from snaporch.context import Context
from snaporch.disks.backing_chain import FileState, is_same
from snaporch.errors import RefusedError
from snaporch.hypervisor import domain_xml
from snaporch.model import DatasetKind, Domain, PoolSnapshot, SnapshotRecord
from snaporch.restore.plan_model import RestorePlan
from snaporch.snapshot.locate_disks import locate_disks
from snaporch.zfs import volume_use_by_host
from snaporch.zfs.resolver import HOST, NotOnZfsError, Resolver

_SEE_ZVOL = "see `ls -l /dev/zvol`"
_DISKS_ONLY = "use --disks-only"
_DESPITE = "use --despite-other-disks if its content is the same"
_EXTRACT = "copy the image that lies on it with `snaporch extract`"


def check_all_disks(
    record: SnapshotRecord,
    manifest: Manifest | None,
    members: tuple[PoolSnapshot, ...],
    domain: Domain | None,
    resolver: Resolver,
) -> None:
    """Refuse a snapshot that lacks the ZFS snapshot of a disk.

    Args:
        members: the ZFS snapshots that exist.
        resolver: finds the datasets of the domain's disks.

    Raises:
        RefusedError: a ZFS snapshot is missing, or the guest has no disk on the dataset of one.
    """
    thing = record.full_name
    if manifest is not None:
        if missing := missing_datasets(manifest, members):
            names = ", ".join(f"{dataset}@{record.snapshot}" for dataset in missing)
            raise RefusedError(thing, f"some of its snapshots are missing: {names}")
    elif domain is not None:
        planned, _ = locate_disks(resolver, domain)
        bare = {disk.dataset.name for disk in planned} - {member.dataset for member in members}
        if bare:
            raise RefusedError(thing, f"has no snapshot of {', '.join(sorted(bare))}")
        left = {member.dataset for member in members} - {disk.dataset.name for disk in planned}
        if left:
            reason = f"has snapshots of {', '.join(sorted(left))}, where the guest has no disk now"
            raise RefusedError(thing, reason, "define it as it was")


def check_datasets(context: Context, thing: str, manifest: Manifest) -> None:
    """Refuse a guest that could not open its disks: the rollback would work, the start would fail.

    Raises:
        RefusedError: a file system is not mounted, a volume has no device node, or one of them is
            read-only.
    """
    existing = {dataset.name: dataset.kind for dataset in context.pool.datasets()}
    for disk in manifest.disks:
        kind = existing.get(disk.dataset or "")
        place, word = Path(disk.source or ""), shlex.quote(disk.dataset or "")
        if kind is DatasetKind.FILESYSTEM:
            try:
                place = context.resolver.mount_point_of(disk.dataset or "")
            except NotOnZfsError as error:
                reason = f"{disk.dataset} is not mounted"
                raise RefusedError(thing, reason, f"zfs mount -l {word}") from error
        if kind is DatasetKind.VOLUME and disk.source and not Path(disk.source).exists():
            raise RefusedError(
                thing,
                f"the volume {disk.dataset} is not at {disk.source}",
                f"is its key loaded? see `zfs get keystatus {word}`",
            )
        if kind is not None and is_read_only(place, context.resolver):
            raise RefusedError(
                thing,
                f"{disk.dataset} is read-only, so that the guest could not be started on it",
                f"zfs set readonly=off {word}, or use --disks-only",
            )


def is_read_only(path: Path, resolver: Resolver = HOST) -> bool:
    """Whether a device, or the file system of a path, is read-only.

    Raises:
        OSError: the path cannot be examined.
    """
    status = resolver.stat(path)
    if stat.S_ISBLK(status.st_mode):
        return (resolver.sysfs_of(status.st_rdev) / "ro").read_text().strip() == "1"
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def check_places(context: Context, thing: str, manifest: Manifest) -> None:
    """Refuse to roll back a dataset to which the path of its disk no longer leads.

    The rollback would discard data that the guest does not use, and the guest would run on a disk
    that was not rolled back.

    Raises:
        RefusedError: a disk's path leads to another dataset, file or partition than it did.
    """
    for disk in [*manifest.disks, *beneath_inside(manifest)]:
        if disk.dataset is None or disk.left_out or disk.source is None:
            continue
        found, expected = _leads_to(context.resolver, disk), disk.dataset
        if disk.inside is not None:
            expected += f" {disk.inside}"
        if found is not None and found not in (expected, disk.dataset):
            raise RefusedError(
                thing,
                f"{disk.target} ({disk.source}) was {expected}, and leads to {found} now",
                "put path and dataset back as they were, or use `snaporch extract`",
            )


def _leads_to(resolver: Resolver, disk: DiskEntry) -> str | None:
    """Return the dataset, and the file in it if both are known.

    ``None`` if the path does not exist and its dataset is not mounted.
    """
    assert disk.dataset is not None
    assert disk.source is not None
    real = disk.source
    try:
        real = resolver.real_path(disk.source)
        found = resolver.resolve(real)
        if found.name != disk.dataset:
            return f"{found.name} {resolver.inside(real, found) or ''}".strip()
        number = resolver.partition_number(real)
        if number != disk.partition and disk.partition is not None:
            return f"{found.name}, partition {number}"
        return _with(disk, resolver.inside(real, found))
    except FileNotFoundError:  # deleted since the snapshot; the rollback brings it back
        try:
            root = resolver.mount_point_of(disk.dataset)
        except NotOnZfsError:
            return None
        inside = os.path.relpath(real, root)
        return real if inside.startswith("..") else _with(disk, inside)
    except NotOnZfsError:
        return f"{real}, which is not on ZFS,"
    except OSError as error:
        return f"{real}, which cannot be read ({error.strerror}),"


def _with(disk: DiskEntry, inside: str | None) -> str:
    """Return the dataset, with the file in it if the manifest recorded the file."""
    return f"{disk.dataset} {inside}" if inside and disk.inside is not None else f"{disk.dataset}"


def check_named(thing: str, manifest: Manifest, domain: Domain) -> None:
    """Refuse to roll back for a guest whose definition stays as it is and names other disks.

    Raises:
        RefusedError: the definition does not name a disk of the snapshot.
    """
    boots = domain.inactive_xml if domain.active else None  # its live definition may differ
    disks = domain.disks if boots is None else domain_xml.disks(domain_xml.parse(boots))
    named = {disk.source for disk in disks}
    for disk in manifest.disks:
        if disk.dataset is not None and not disk.left_out and disk.source not in named:
            raise RefusedError(
                thing,
                f"the definition that is kept does not name {disk.source}",
                "define it as it was",
            )


def as_named_here(
    context: Context, thing: str, manifest: Manifest, snapshots: Iterable[PoolSnapshot]
) -> Manifest:
    """Return the manifest with the present names of its datasets, and report renamed datasets.

    Raises:
        RefusedError: a disk's path does not lead to the renamed dataset, or another dataset has
            the old name. The error has the ``zfs rename`` that restores the name.
    """
    everything = list(snapshots)
    names = renamed(manifest, everything)
    if not names:
        return manifest
    now = as_named_now(manifest, everything)
    gone = {dataset.name for dataset in context.pool.datasets()}.isdisjoint(names)
    moved = [disk for disk in now.disks if disk.dataset in names.values() and not disk.left_out]
    if not gone or not all(_is_there(context.resolver, disk) for disk in moved):
        check_names(context.pool, thing, manifest, everything)
    for old, new in names.items():
        context.progress.note(thing, f"{old} was renamed, and is {new} now")
    return now


def _is_there(resolver: Resolver, disk: DiskEntry) -> bool:
    """Whether the disk's path leads to the file or volume that the manifest names."""
    try:
        found = resolver.resolve(disk.source or "")
        inside = resolver.inside(disk.source or "", found)
        same = resolver.partition_number(disk.source or "") == disk.partition
    except (OSError, NotOnZfsError):
        return False
    return same and (found.name, inside) == (disk.dataset, disk.inside)


def check_volumes_unused(context: Context, thing: str, datasets: Iterable[str]) -> None:
    """Refuse to roll back a dataset that the host itself uses.

    For a volume: a mount, swap, device mapper, RAID, a pool or a loop device. For a file system:
    only a loop device over one of its files.

    Raises:
        RefusedError: names what uses the dataset.
    """
    kinds = {dataset.name: dataset.kind for dataset in context.pool.datasets()}
    over = {dataset: loop for loop, dataset in volume_use_by_host.loop_devices(context.resolver)}
    for name in datasets:
        try:
            volume = kinds.get(name) is DatasetKind.VOLUME
            user = volume_use_by_host.volume_user(name, context.resolver) if volume else ""
        except OSError as error:
            raise RefusedError(
                thing, f"the device of {name} cannot be opened ({error.strerror})", _SEE_ZVOL
            ) from error
        if holder := user or over.get(name):
            raise RefusedError(
                thing,
                f"{name} would be rolled back, and this host uses it: {holder}",
                "unmount it, and see `lsblk`, `losetup`, `dmsetup ls --tree` and `vgchange -an`",
            )


def check_partitions(context: Context, thing: str, manifest: Manifest) -> None:
    """Refuse to roll back a volume that has other partitions than the guest's.

    Raises:
        RefusedError: with the numbers of the other partitions.
    """
    own: dict[str, set[int]] = defaultdict(set)
    for disk in manifest.disks:
        if disk.dataset is not None and disk.partition is not None and not disk.left_out:
            own[disk.dataset].add(disk.partition)
    for name, numbers in own.items():
        if others := sorted(volume_use_by_host.partition_numbers(name, context.resolver) - numbers):
            raise RefusedError(
                thing,
                f"{name} would be rolled back with partition {', '.join(map(str, others))} of it, "
                "which is not the guest's",
                "give the guest a volume of its own, or use --also-roll-back",
            )


def beneath_inside(manifest: Manifest) -> Iterator[DiskEntry]:
    """Yield the backing files that were snapshotted with the disks, in the form of disk entries."""
    for disk in manifest.disks:
        for file in disk.beneath or ():
            yield DiskEntry(
                target=disk.target,
                source=file.path,
                format=disk.format,
                dataset=file.dataset,
                inside=file.inside,
            )


def check_files_beneath(plan: RestorePlan, manifest: Manifest) -> None:
    """Refuse disks over a backing file that has changed, unless the plan allows it.

    In an undo, a backing file whose former state was not recorded is refused only for its RAM.

    Raises:
        RefusedError: a backing file has changed.
    """
    if not plan.despite_other_disks:
        step = _DISKS_ONLY if plan.undoes else _DESPITE
        needs_all = plan.ram is not None or not plan.undoes
        check_beneath(plan.thing, manifest, step, unknown_too=needs_all)


def check_beneath(
    thing: str, manifest: Manifest, step: str = _EXTRACT, *, unknown_too: bool = True
) -> None:
    """Refuse disks over a backing file that is in no snapshot and has changed.

    Args:
        step: an alternative to putting the file back, for the error.
        unknown_too: also refuse a backing file whose former state was not recorded.

    Raises:
        RefusedError: a backing file was written to or replaced, or is missing.
    """
    for disk in manifest.disks:
        for file in disk.beneath or ():
            if file.dataset is not None or (file.is_unknown and not unknown_too):
                continue
            changed, cause = "was changed since", None
            try:
                if file.is_unknown:
                    changed = "may have been changed since: its former state is unknown"
                elif is_same(file, FileState.of(file.path)):
                    continue
            except OSError as error:
                changed, cause = f"cannot be read ({error.strerror})", error
            raise RefusedError(
                thing,
                f"{file.path}, which lies beneath {disk.target} and is not in the snapshot, "
                f"{changed}",
                f"put it back as it was, or {step}",
            ) from cause
