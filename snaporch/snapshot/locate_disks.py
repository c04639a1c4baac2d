"""Which disks of a domain can be snapshotted, and on which datasets they are."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from snaporch.errors import RefusedError, UnavailableError
from snaporch.model import Dataset, Disk, Domain, LeftOutCode
from snaporch.zfs.resolver import NotOnZfsError, Resolver


@dataclass(frozen=True, slots=True)
class PlannedDisk:
    """A disk that will be snapshotted, with the path of its data and the dataset of that path."""

    disk: Disk
    path: str
    dataset: Dataset


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A disk that will not be snapshotted, with the reason."""

    disk: Disk
    code: LeftOutCode
    detail: str | None = None
    """What the code does not say: see :meth:`LeftOutCode.describe`."""

    @property
    def reason(self) -> str:
        """The reason as text for a message."""
        return self.code.describe(self.detail)

    def describe(self) -> str:
        """Return the disk, its path and the reason as text for a message."""
        place = f" ({self.disk.source})" if self.disk.source else ""
        return f"{self.disk.target}{place}: {self.reason}"

    @property
    def matters(self) -> bool:
        """Whether the guest can write to the disk.

        After a restore the guest's RAM and such a disk are of different times.
        """
        return self.disk.device in ("disk", "lun") and not self.disk.readonly


def locate_disks(
    resolver: Resolver, domain: Domain, exclude: tuple[str, ...] = ()
) -> tuple[list[PlannedDisk], list[LeftOut]]:
    """Find the dataset of every disk of the domain.

    Args:
        resolver: finds the datasets of paths.
        domain: the domain as libvirt describes it.
        exclude: target names of disks to leave out (``exclude_disks``).

    Returns:
        The disks on ZFS, and the disks that are left out.

    Raises:
        RefusedError: the image of a disk is missing or cannot be read.
        UnavailableError: this process may not read it.
    """
    planned: list[PlannedDisk] = []
    left_out: list[LeftOut] = []
    for disk in domain.disks:
        if (out := _left_out_by_kind(disk, exclude)) is not None:
            left_out.append(out)
            continue
        assert disk.source is not None
        try:
            planned.append(PlannedDisk(disk, disk.source, resolver.resolve(disk.source)))
        except NotOnZfsError as error:
            left_out.append(LeftOut(disk, LeftOutCode.NOT_ON_ZFS, error.reason))
        except OSError as error:
            raise _unreadable(domain, disk, error) from error
    return planned, left_out


def datasets_of(resolver: Resolver, domain: Domain) -> set[str]:
    """Return the datasets of a domain's disks; a missing image counts where it would be."""
    found: set[str] = set()
    mounts = resolver.mounts()
    for disk in domain.disks:
        if disk.source is None or not disk.source.startswith("/"):
            continue
        with suppress(NotOnZfsError, OSError):
            found.add(resolver.resolve_nearest(disk.source, mounts).name)
    return found


def _left_out_by_kind(disk: Disk, exclude: tuple[str, ...]) -> LeftOut | None:
    if disk.target in exclude:
        return LeftOut(disk, LeftOutCode.EXCLUDED)
    if disk.device in ("cdrom", "floppy"):
        return LeftOut(disk, LeftOutCode.REMOVABLE, disk.device)
    if disk.readonly:
        return LeftOut(disk, LeftOutCode.READ_ONLY)
    if disk.source is None:
        return LeftOut(disk, LeftOutCode.NOT_LOCAL, disk.kind)
    return None


def _unreadable(domain: Domain, disk: Disk, error: OSError) -> RefusedError | UnavailableError:
    thing = f"{domain.name}: {disk.target} ({disk.source})"
    if isinstance(error, PermissionError):
        return UnavailableError(thing, "permission denied", "run snaporch as root")
    return RefusedError(thing, error.strerror or "cannot be read", "see `virsh domblklist`")
