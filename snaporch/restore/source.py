"""A snapshot as the source of a clone, an extract or a verification: manifest, members, disks."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from snaporch import default_paths
from snaporch.bundle.manifest import DiskEntry, Manifest, Part, Role
from snaporch.catalog.records import (
    missing_datasets,
    one_per_dataset,
    run_members,
)
from snaporch.catalog.renamed_datasets import as_named_now
from snaporch.command_log import set_fields
from snaporch.context import Context
from snaporch.errors import RefusedError, SnaporchError
from snaporch.locks import readers_lock
from snaporch.model import DatasetKind, Level, PoolSnapshot, SnapshotRecord
from snaporch.restore.disk_checks import as_named_here
from snaporch.restore.foreign_definition import came_from_elsewhere
from snaporch.restore.select import records_of, split_name
from snaporch.zfs.resolver import NotOnZfsError, Resolver

PUT_BACK = "put what is damaged or missing back from a replica: see docs/how-to/verify.md"
"""The next step where a part of a bundle is not as it was stored."""


class IncompleteError(SnaporchError):
    """A part of a snapshot is missing or was changed."""

    exit_code = RefusedError.exit_code


@dataclass(frozen=True, slots=True)
class Source:
    """A snapshot of which every part exists."""

    record: SnapshotRecord
    manifest: Manifest
    members: tuple[PoolSnapshot, ...]
    directory: Path
    """The directory of the bundle."""

    @property
    def thing(self) -> str:
        """``DOMAIN@SNAPSHOT``."""
        return self.record.full_name

    @property
    def disks(self) -> tuple[DiskEntry, ...]:
        """The disks that are in the snapshot."""
        return tuple(disk for disk in self.manifest.disks if disk.dataset and not disk.left_out)

    @property
    def has_ram(self) -> bool:
        """Whether the snapshot was taken with RAM."""
        return self.manifest.level is Level.RAM

    def part(self, role: Role) -> Part | None:
        """Return the part of the bundle with this role, if it has one."""
        return self.manifest.part(role)

    def text(self, role: Role) -> str | None:
        """Return the content of an XML part, if the bundle has it."""
        part = self.part(role)
        return (self.directory / part.name).read_text("utf-8") if part else None

    def member(self, dataset: str) -> PoolSnapshot:
        """Return the ZFS snapshot of one of the datasets."""
        return next(member for member in self.members if member.dataset == dataset)


def find_records(context: Context, text: str) -> list[SnapshotRecord]:
    """Return the records of ``DOMAIN@SNAPSHOT`` or ``DOMAIN@RUN``, all of one instant.

    Raises:
        NotFoundError: the domain has no such snapshot.
        RefusedError: the name stands for several instants.
    """
    return records_of(context, context.pool.snapshots(), *split_name(text))


@contextmanager
def reading_lock(context: Context, record: SnapshotRecord) -> Iterator[None]:
    """Keep the domain's datasets from being rolled back while a snapshot is read.

    Raises:
        BusyError: a restore is rolling them back.
    """
    with readers_lock(
        default_paths.LOCKS, record.domain, record.uuid, alone=False, interrupt=context.interrupt
    ):
        set_fields(SNAPSHOT=record.snapshot, RUN=record.run)
        yield


def snapshots_of(context: Context, record: SnapshotRecord) -> tuple[PoolSnapshot, ...]:
    """Return the existing ZFS snapshots of a record, one for each of the guest's own datasets."""
    manifest, own = manifest_and_snapshots(context, record)
    return tuple(one_per_dataset(manifest, own, record.snapshot))


def manifest_and_snapshots(
    context: Context, record: SnapshotRecord
) -> tuple[Manifest | None, list[PoolSnapshot]]:
    """Return the manifest with the present names of datasets, and the ZFS snapshots of the run.

    The snapshots are those on the guest's own datasets; one run may have several names there.
    """
    everything = context.pool.snapshots()
    _, manifest = context.store.state(f"{record.uuid}/{record.run}")
    if manifest is not None:
        manifest = as_named_now(manifest, everything)
    return manifest, run_members(manifest, record.run, everything)


def complete_source(
    context: Context, record: SnapshotRecord, roles: Collection[Role] = tuple(Role)
) -> Source:
    """Return the source of a record after a check that every part and ZFS snapshot exists.

    Presence, sizes and GUIDs are checked here; checksums by :meth:`BundleStore.damage`.

    Args:
        roles: the parts of the bundle that have to exist.

    Raises:
        IncompleteError: a part or a ZFS snapshot is missing.
    """
    thing = record.full_name
    if record.level is Level.TORN:
        raise IncompleteError(
            thing, "was taken while overlays were committed: its disks are not of one instant"
        )
    reference = f"{record.uuid}/{record.run}"
    everything = context.pool.snapshots()
    state, manifest = context.store.state(reference)
    if manifest is None:
        raise IncompleteError(
            thing, f"its bundle is {state}, so it is unknown which files belong to it", PUT_BACK
        )
    manifest = as_named_here(context, thing, manifest, everything)
    own = run_members(manifest, record.run, everything)
    members = tuple(one_per_dataset(manifest, own, record.snapshot))
    _check_members(record, manifest, members)
    directory = context.store.path(reference)
    torn = [
        part.name
        for part in manifest.parts
        if part.role in roles and not _is_there(directory, part)
    ]
    if torn:
        reason = f"{', '.join(torn)} of its bundle is missing, or of the wrong size"
        raise IncompleteError(thing, reason, PUT_BACK)
    if Role.RAM in roles:
        check_pages_exist(context, thing, manifest, members)
    return Source(record, manifest, members, directory)


def check_pages_exist(
    context: Context, thing: str, manifest: Manifest, members: Iterable[PoolSnapshot]
) -> None:
    """Check that a dataset has the pages of a snapshot's RAM.

    A manifest that came from another host may be forged: its pages are those of its guest only.

    Args:
        context: of the host.
        thing: the subject of the error.
        manifest: of the snapshot.
        members: its ZFS snapshots.

    Raises:
        IncompleteError: no dataset has them.
    """
    entry = manifest.pages
    if entry is None:
        return
    names = context.pool.snapshot_listing().snapshots.get(entry.guid, ())
    if not context.foreign and came_from_elsewhere(members):
        names = tuple(n for n in names if PurePosixPath(n).name.startswith(f"{manifest.uuid}@"))
    if not names:
        full = f"{entry.dataset}@{entry.name}"
        raise IncompleteError(
            thing, f"the pages of its RAM are missing: {full} (GUID {entry.guid})"
        )


def _check_members(
    record: SnapshotRecord, manifest: Manifest, members: tuple[PoolSnapshot, ...]
) -> None:
    there = {member.dataset: member for member in members}
    for dataset in missing_datasets(manifest, members):
        thing, full = record.full_name, f"{dataset}@{record.snapshot}"
        if dataset not in there:
            raise IncompleteError(thing, f"its ZFS snapshot {full} is missing")
        raise IncompleteError(
            thing, f"{full} is another snapshot of that name (GUID {there[dataset].guid})"
        )


def _is_there(directory: Path, part: Part) -> bool:
    try:
        return (directory / part.name).stat().st_size == part.bytes
    except OSError:
        return False


def dataset_kinds(context: Context) -> dict[str, DatasetKind]:
    """Return for every dataset whether it is a file system or a volume."""
    return {dataset.name: dataset.kind for dataset in context.pool.datasets()}


def mounted_at(resolver: Resolver, dataset: str) -> Path:
    """Return the mount point of a file system.

    Raises:
        RefusedError: it is not mounted, possibly because its key is not loaded.
    """
    try:
        return resolver.mount_point_of(dataset)
    except NotOnZfsError as error:
        raise RefusedError(error.thing, error.reason, error.step) from error


def image_path_in_dataset(resolver: Resolver, disk: DiskEntry) -> Path:
    """Return the path of an image relative to the mount point of its dataset.

    If the manifest does not have the path, it is derived from the present mount point.

    Raises:
        RefusedError: the dataset is not mounted, or is mounted elsewhere than it was.
    """
    assert disk.dataset is not None
    assert disk.source is not None
    root = mounted_at(resolver, disk.dataset)
    if disk.inside is not None:
        return Path(disk.inside)
    for path in (Path(disk.source), Path(os.path.realpath(disk.source))):
        if path.is_relative_to(root):
            return path.relative_to(root)
    raise RefusedError(
        f"{disk.target} ({disk.source})",
        f"is not below {root}, where {disk.dataset} is mounted now",
        "mount the dataset where it was",
    )


def partition_of(resolver: Resolver, disk: DiskEntry) -> int | None:
    """Return the partition that a disk is: the recorded number or, without one, the present."""
    if disk.inside is not None or disk.source is None:
        return None
    with suppress(OSError):
        return disk.partition or resolver.partition_number(disk.source)
    return disk.partition


def underlying_devices(resolver: Resolver, disk: DiskEntry) -> list[str]:
    """Return the devices beneath a disk's device, for a disk on device mapper.

    Manifests of earlier versions may name the volume although the disk is such a device.
    """
    if disk.inside is None and disk.source is not None:
        with suppress(OSError):
            status = os.stat(disk.source)
            return resolver.devices_below(status.st_rdev) if stat.S_ISBLK(status.st_mode) else []
    return []


def check_whole_disks(resolver: Resolver, thing: str, disks: Iterable[DiskEntry]) -> None:
    """Refuse disks that are only a part of a volume: a clone of the volume has no such device.

    Raises:
        RefusedError: a disk is a partition, or a device over the volume.
    """
    for disk in disks:
        if below := underlying_devices(resolver, disk):
            raise RefusedError(
                thing,
                f"its disk {disk.target} is a device over {', '.join(below)}, and not all of "
                f"{disk.dataset}",
                f"zfs clone the snapshot of {disk.dataset}, and make such a device of that",
            )
        if (number := partition_of(resolver, disk)) is not None:
            raise RefusedError(
                thing,
                f"its disk {disk.target} is partition {number} of {disk.dataset}, not all of it",
                f"zfs clone the snapshot of {disk.dataset}, and use the partition of that",
            )
