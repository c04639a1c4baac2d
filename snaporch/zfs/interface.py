"""The operations of ZFS that snaporch uses.

:class:`Pool` has three implementations: libzfs_core, the ``zfs`` command, and the fake of the unit
tests. One contract test checks that all three behave alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from snaporch.errors import ExitCode, SnaporchError
from snaporch.model import Dataset, PolicyView, PoolSnapshot, SnapshotListing
from snaporch.zfs.mount_users import BlockingMount
from snaporch.zfs.parity import ParityGroup

PREFIX = "snaporch:"
"""Of the names of snaporch's user properties."""


POLICY_PROPERTY = f"{PREFIX}policy"
"""On a dataset: the policies of the guests that use it."""
REBUILD_PROPERTY = f"{PREFIX}rebuild"
"""On the datasets of a guest whose rebuild is not complete: what has yet to be done."""
RAM_PROPERTY = f"{PREFIX}ram"
"""On a page dataset the domain's UUID; on a snapshot of it the bundle: ``UUID/RUN``."""
RAM_POOLS_PROPERTY = f"{PREFIX}ram-pools"
"""On a snapshot of a page dataset: the pools that contain the guest's snapshots."""


class PoolError(SnaporchError):
    """ZFS refused or failed an operation."""

    exit_code = ExitCode.FAILED


class MountedError(PoolError):
    """The snapshot or dataset is mounted where ZFS cannot unmount it. It can be destroyed later."""


class InUseError(PoolError):
    """A snapshot is held, cloned or being sent. It can be destroyed when that has ended."""


class Bookmark(NamedTuple):
    """The snapshot that a bookmark is of, which may be destroyed by now."""

    guid: int
    createtxg: int


@dataclass(frozen=True, slots=True)
class DatasetListing:
    """The snapshots and bookmarks of some datasets, from one listing."""

    snapshots: tuple[PoolSnapshot, ...]
    """Oldest first."""
    bookmarks: Mapping[str, Bookmark]
    """By their full names ``dataset#name``."""
    clones: Mapping[str, tuple[str, ...]]
    """Of each snapshot that has any."""

    def newer(self, snapshot: str) -> list[str]:
        """Snapshots and bookmarks of the dataset of ``snapshot`` that are newer than it.

        Raises:
            PoolError: it is not listed.
        """
        dataset, since = snapshot.partition("@")[0], self._birth(snapshot)
        own = [each for each in self.snapshots if each.dataset == dataset]
        marks = [name for name in self.bookmarks if name.partition("#")[0] == dataset]
        later = [each.full_name for each in own if each.createtxg > since]
        return later + [name for name in marks if self.bookmarks[name].createtxg > since]

    def _birth(self, snapshot: str) -> int:
        for each in self.snapshots:
            if each.full_name == snapshot:
                return each.createtxg
        raise PoolError(snapshot, "no such snapshot")


class Pool(Protocol):
    """Operations on datasets and snapshots; names are ``dataset`` or ``dataset@snapshot``."""

    def datasets(self) -> list[Dataset]:
        """All file systems and volumes of all imported pools."""

    def encrypted(self) -> frozenset[str]:
        """The datasets that are encrypted on disk."""

    def snapshots(self, datasets: Sequence[str] | None = None) -> list[PoolSnapshot]:
        """Snapshots of exactly these datasets (of all if ``None``), oldest first.

        Datasets that do not exist have no snapshots. ``properties`` contains the ``snaporch:…``
        properties set on each snapshot.

        Raises:
            PoolError: the listing failed; an empty list is never returned for that.
        """

    def sync(self, datasets: Collection[str]) -> None:
        """Wait until all changes begun in the pools of these datasets are on disk and listed.

        A snapshot has the content of its transaction group, and is listed only when that has been
        written (OpenZFS: ``dsl_sync_task``, ``zpool-sync(8)``).

        A sync cannot be interrupted: one that takes too long goes on in the kernel, without a
        limit.

        Raises:
            PoolError: the sync failed, or takes more than a minute.
        """

    def snapshot_listing(self) -> SnapshotListing:
        """The imported pools and all their snapshots, from one listing.

        Raises:
            PoolError: the listing failed or was empty; an empty listing is never returned.
        """

    def policy_view(self) -> PolicyView:
        """Everything that policies need to know, from one listing.

        Raises:
            PoolError: the listing failed; an empty view is never returned for that.
        """

    def snapshot(self, names: Sequence[str], properties: Mapping[str, str]) -> None:
        """Take all snapshots ``names`` (of one pool) atomically, with user properties.

        Raises:
            PoolError: no snapshot was taken.
        """

    def destroy_snapshots(self, names: Sequence[str]) -> None:
        """Destroy snapshots of one pool, all or none. Absent snapshots are not an error.

        Raises:
            MountedError: one is mounted, by the program that the error names; none was destroyed.
            InUseError: one is held, has clones or is being sent; none was destroyed. The ``zfs``
                command does not say that one is being sent: that is a PoolError there.
            PoolError: another failure.
        """

    def reclaimable(self, names: Sequence[str]) -> int:
        """The bytes that destroying these snapshots together would free.

        More than the sum of what each of them frees alone: neighbours share blocks.

        Raises:
            PoolError: a snapshot does not exist, or ZFS gives no number.
        """

    def blocking_mounts(self, names: Collection[str] | None = None) -> list[BlockingMount]:
        """Mounts that prevent these snapshots (all if ``None``) from being destroyed."""

    def clear_properties(self, names: Sequence[str], keys: Sequence[str]) -> None:
        """Remove user properties from datasets or snapshots; one that is not set is no error."""

    def set_properties(self, names: Sequence[str], properties: Mapping[str, str]) -> None:
        """Set user properties on datasets or snapshots."""

    def hold(self, names: Sequence[str], tag: str) -> None:
        """Put the user hold ``tag`` on snapshots of one pool, on all or none."""

    def release(self, names: Sequence[str], tag: str) -> None:
        """Release the user hold ``tag``. A missing hold is not an error."""

    def holds_of(self, names: Sequence[str]) -> dict[str, list[str]]:
        """The tags of the user holds on each of these snapshots.

        Raises:
            PoolError: one does not exist.
        """

    def clone(self, origin: str, dataset: str, properties: Mapping[str, str] | None = None) -> None:
        """Create ``dataset`` as a clone of the snapshot ``origin``, and mount it.

        Args:
            properties: user properties and ZFS's own, set in the same transaction.

        Raises:
            PoolError: it was not created, or could not be mounted.
        """

    def local_properties(
        self, names: Sequence[str], datasets: Sequence[str] = ()
    ) -> dict[str, dict[str, str]]:
        """The locally set values of these properties, by dataset. Datasets without any are omitted.

        Inherited and received values do not count.

        Args:
            names: the properties; of numbers, the exact values are returned.
            datasets: only of these, which must exist; of all if empty.
        """

    def native_properties(
        self, names: Sequence[str], datasets: Sequence[str]
    ) -> dict[str, dict[str, str]]:
        """The values of ZFS's own properties, inherited or not, by dataset; numbers are exact.

        A property that a dataset does not have is left out.

        Raises:
            PoolError: a dataset does not exist.
        """

    def sector_bytes(self, pool: str) -> int:
        """The sector size (``ashift``) of the pool's devices, the largest; 0 if it is not known.

        OpenZFS before 2.2 does not report it.
        """

    def parity_groups(self, pool: str) -> tuple[ParityGroup, ...]:
        """The pool's vdevs of type raidz or draid; none if that is not known.

        OpenZFS before 2.2 does not report them.
        """

    def policies(self, datasets: Sequence[str]) -> dict[str, str]:
        """The ``snaporch:policy`` of each of these datasets that has or inherits one."""

    def mountpoints(self) -> dict[str, str]:
        """The directories of the file systems that ZFS mounts when the host boots, by dataset."""

    def encryption_roots(self, datasets: Sequence[str]) -> dict[str, str]:
        """The encryption root of each of these datasets that is encrypted."""

    def origins(self, datasets: Sequence[str]) -> dict[str, str]:
        """The origin of each of these datasets that is a clone."""

    def sizes(self, snapshots: Sequence[str]) -> dict[str, tuple[int, int]]:
        """The ``used`` and ``referenced`` bytes of each snapshot."""

    def create_filesystem(self, dataset: str, properties: Mapping[str, str]) -> None:
        """Create a file system, with its missing parents, and mount it.

        Args:
            properties: user properties and ZFS's own, set on it in the same transaction.

        Raises:
            PoolError: it exists, or was not created, or could not be mounted.
        """

    def reserved(self, datasets: Sequence[str]) -> dict[str, tuple[int, int]]:
        """For each dataset with a ``refreservation``: bytes a snapshot needs, and bytes available.

        A snapshot takes over the written part of the reservation. The dataset reserves that part
        again, so that all of it can still be overwritten.
        """

    def destroy_dataset(self, dataset: str) -> None:
        """Destroy one dataset that has no snapshots and no children.

        Raises:
            MountedError: it is mounted by another program, which the error names.
            PoolError: it was not destroyed.
        """

    def rollback(self, snapshot: str) -> None:
        """Roll a dataset back to its *latest* snapshot.

        Raises:
            PoolError: newer snapshots or bookmarks exist, or the dataset is busy.
        """

    def listing(self, datasets: Sequence[str]) -> DatasetListing:
        """The snapshots and bookmarks of exactly these datasets.

        Raises:
            PoolError: one does not exist, or the listing failed.
        """

    def bookmark(self, snapshot: str, name: str) -> None:
        """Create the bookmark ``dataset#name`` of a snapshot.

        Raises:
            PoolError: there is no such snapshot, or the bookmark exists.
        """

    def bookmarks(self, dataset: str) -> dict[str, Bookmark]:
        """The bookmarks of a dataset, by their full names ``dataset#name``."""

    def destroy_bookmark(self, name: str) -> None:
        """Destroy the bookmark ``dataset#bookmark``."""

    def clones(self, snapshots: Sequence[str]) -> dict[str, list[str]]:
        """The clones of each snapshot that has any."""

    def send_increment(
        self,
        origin: str,
        snapshot: str,
        path: Path,
        on_written: Callable[[int], None] = lambda _bytes: None,
        *,
        raw: bool,
    ) -> int:
        """Write the increments between two snapshots of a dataset to ``path``.

        Args:
            origin: the earlier snapshot.
            snapshot: the later one.
            path: a new file.
            raw: the dataset is encrypted, and is sent as it is on disk.
            on_written: is called several times a second with the bytes written so far.

        Returns: the bytes written.
        """

    def increment_size(self, origin: str, snapshot: str, *, raw: bool) -> int:
        """Estimated bytes that :meth:`send_increment` will write, with the same arguments."""

    def mounted_snapshot(self, snapshot: str) -> AbstractContextManager[Path]:
        """Mount the snapshot of a file system for reading, so that only this process has the mount.

        Yields: its root directory.

        Raises:
            PoolError: it cannot be mounted.
        """

    def written_since(self, snapshot: str) -> int:
        """Bytes written to the dataset since its snapshot (``written@…`` of zfsprops(7)).

        Raises:
            PoolError: ZFS gives no number, as for a snapshot that does not exist.
        """

    def is_volume_modified(self, snapshot: str) -> bool:
        """Whether the volume of a snapshot, which no process has open, has other data than that.

        An import of the pool writes to a volume (``written@…``), but changes no data: ``zfs
        receive`` ignores that, too (OpenZFS: ``dsl_dataset_modified_since_snap``). An increment to
        the volume itself shows it: without changes it has no record between the first and the last.
        The pool is synced first, so that what was just written counts.

        Raises:
            PoolError: the volume is open, or its snapshot does not exist.
        """

    def receive(self, dataset: str, path: Path) -> None:
        """Receive a stream of :meth:`send_increment` into a dataset, and discard later changes.

        Raises:
            PoolError: the origin is not the newest snapshot, or the stream is incomplete.
        """

    def available(self, dataset: str) -> int:
        """Bytes that can still be written to a dataset (``available`` of zfsprops(7))."""

    def user_properties(self, snapshots: Sequence[str]) -> dict[str, dict[str, str]]:
        """The user properties of each snapshot that has any set on itself or received."""
