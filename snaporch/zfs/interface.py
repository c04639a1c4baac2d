"""What snaporch needs of ZFS, and nothing more.

Three things satisfy :class:`Pool`: libzfs_core, the ``zfs`` command, and the fake of the unit
tests. One contract test holds all three to the same behaviour.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from snaporch.errors import ExitCode, SnaporchError
from snaporch.model import Census, Dataset, PoolSnapshot, Survey
from snaporch.zfs.mount_users import ForeignMount

PREFIX = "snaporch:"
"""Of the user properties on our snapshots."""


RAM_PROPERTY = f"{PREFIX}ram"
"""On a page dataset the domain's UUID; on a snapshot of it the bundle: ``UUID/RUN``."""
RAM_POOLS_PROPERTY = f"{PREFIX}ram-pools"
"""On a snapshot of a page dataset: the pools that the guest's snapshots are in."""


class PoolError(SnaporchError):
    """ZFS refused or failed an operation."""

    exit_code = ExitCode.FAILED


class MountedError(PoolError):
    """What is to be destroyed is mounted where ZFS does not unmount it; later it can be."""


class Pool(Protocol):
    """Operations on datasets and snapshots; names are ``dataset`` or ``dataset@snapshot``."""

    def datasets(self) -> list[Dataset]:
        """Every file system and volume of every imported pool."""

    def encrypted(self) -> frozenset[str]:
        """The datasets whose content is encrypted on disk."""

    def snapshots(self, datasets: Sequence[str] | None = None) -> list[PoolSnapshot]:
        """Snapshots of exactly these datasets (all when ``None``), oldest first.

        Datasets that do not exist have no snapshots. ``properties`` holds the ``snaporch:…``
        properties set on each.

        Raises:
            PoolError: the listing failed; never an empty list in its place.
        """

    def sync(self, datasets: Collection[str]) -> None:
        """Wait until all that was begun in the pools of these is on disk, and is listed.

        A snapshot has the contents of its transaction group, and is listed only when that has been
        written (OpenZFS: ``dsl_sync_task``, ``zpool-sync(8)``).

        Raises:
            PoolError: it cannot be told, or it takes more than a minute.
        """

    def census(self) -> Census:
        """The pools that are imported and every snapshot in them, by one listing.

        Raises:
            PoolError: the listing failed or was empty; never an empty census in its place.
        """

    def survey(self) -> Survey:
        """Everything policies need to know, in one listing.

        Raises:
            PoolError: the listing failed; never an empty one in its place.
        """

    def snapshot(self, names: Sequence[str], properties: Mapping[str, str]) -> None:
        """Take all of ``names`` (of one pool) atomically, with user properties.

        Raises:
            PoolError: none of them was taken.
        """

    def destroy_snapshots(self, names: Sequence[str]) -> None:
        """Destroy snapshots of one pool, all or none; absent ones are not an error.

        Raises:
            MountedError: one is mounted by somebody, who is named; none was destroyed.
            PoolError: one is held or has clones; none was destroyed.
        """

    def foreign_mounts(self, names: Collection[str] | None = None) -> list[ForeignMount]:
        """Mounts that keep these (every snapshot when ``None``) from being destroyed."""

    def set_properties(self, names: Sequence[str], properties: Mapping[str, str]) -> None:
        """Set user properties on datasets or snapshots."""

    def hold(self, names: Sequence[str], tag: str) -> None:
        """Put the user hold ``tag`` on snapshots of one pool, all or none."""

    def release(self, names: Sequence[str], tag: str) -> None:
        """Release the user hold ``tag``; a hold that is not there is not an error."""

    def holds(self, name: str) -> list[str]:
        """The tags of the user holds on a snapshot."""

    def clone(self, origin: str, dataset: str, properties: Mapping[str, str] | None = None) -> None:
        """Create ``dataset`` as a clone of the snapshot ``origin``, and mount it.

        ``properties`` (user properties and ZFS's own) are set in the same transaction.

        Raises:
            PoolError: it was not created, or could not be mounted.
        """

    def local_properties(self, names: Sequence[str]) -> dict[str, dict[str, str]]:
        """Of each dataset that has one of the properties set on itself: those, with their values.

        Inherited and received values do not count.
        """

    def origins(self, datasets: Sequence[str]) -> dict[str, str]:
        """The snapshot that each of these datasets is a clone of; only those that are clones."""

    def sizes(self, snapshots: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Of each snapshot: bytes it alone holds, bytes it refers to (``used``, ``referenced``)."""

    def create_filesystem(self, dataset: str, properties: Mapping[str, str]) -> None:
        """Create a file system, with those above it if they are missing, and mount it.

        ``properties`` (user properties and ZFS's own) are set on it in the same transaction.

        Raises:
            PoolError: it exists, or was not created, or could not be mounted.
        """

    def reserved(self, datasets: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Of each of these with a ``refreservation``: bytes a snapshot needs, and bytes there are.

        What is written already belongs to the snapshot, too, and is reserved once more, so that the
        dataset can be overwritten.
        """

    def destroy_dataset(self, dataset: str) -> None:
        """Destroy one dataset that has no snapshots and no children.

        Raises:
            MountedError: it is mounted by somebody else, who is named.
            PoolError: it was not destroyed.
        """

    def rollback(self, snapshot: str) -> None:
        """Roll a dataset back to its *latest* snapshot.

        Raises:
            PoolError: newer snapshots or bookmarks exist, or the dataset is busy.
        """

    def newer(self, snapshot: str) -> list[str]:
        """Snapshots (``d@s``) and bookmarks (``d#b``) of the dataset newer than ``snapshot``."""

    def bookmark(self, snapshot: str, name: str) -> None:
        """Make the bookmark ``dataset#name`` of a snapshot.

        Raises:
            PoolError: there is no such snapshot, or a bookmark of that name.
        """

    def bookmarks(self, dataset: str) -> dict[str, int]:
        """The bookmarks of a dataset, as ``dataset#name``, with the txg of what they stand for."""

    def destroy_bookmark(self, name: str) -> None:
        """Destroy the bookmark ``dataset#bookmark``."""

    def clones(self, snapshots: Sequence[str]) -> dict[str, list[str]]:
        """The clones of each snapshot that has any."""

    def send_increment(self, origin: str, snapshot: str, path: Path) -> int:
        """Write all that lies between two snapshots of a dataset to ``path``; its size in bytes."""

    def increment_size(self, origin: str, snapshot: str) -> int:
        """Bytes that :meth:`send_increment` is expected to write."""

    def mounted_snapshot(self, snapshot: str) -> AbstractContextManager[Path]:
        """The root of a file system's snapshot, to read from, by a mount that nobody else gets.

        Raises:
            PoolError: it cannot be mounted.
        """

    def written_since(self, snapshot: str) -> int:
        """Bytes written to the dataset since its snapshot (``written@…`` of zfsprops(7)).

        Raises:
            PoolError: ZFS does not tell, as of a snapshot that is gone.
        """

    def receive(self, dataset: str, path: Path) -> None:
        """Add what :meth:`send_increment` wrote to a dataset, discarding what came since.

        Raises:
            PoolError: its origin is not the newest snapshot, or not all was received.
        """

    def available(self, dataset: str) -> int:
        """Bytes that can still be written to a dataset (``available`` of zfsprops(7))."""

    def user_properties(self, snapshots: Sequence[str]) -> dict[str, dict[str, str]]:
        """Of each snapshot that has any: the user properties set on itself, or received."""
