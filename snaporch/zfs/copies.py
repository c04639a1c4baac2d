"""The copies on a replica, which are all directly below one dataset."""

from __future__ import annotations

from collections.abc import Sequence

from snaporch.model import PoolSnapshot
from snaporch.zfs.cli import ZfsCommand
from snaporch.zfs.interface import PoolError


class CopiesZfs(ZfsCommand):
    """:class:`~snaporch.zfs.interface.Pool` with a listing of copies."""

    def all_copies(self, root: str) -> list[PoolSnapshot]:
        """The snapshots of all datasets directly below one, and its own, oldest first.

        Raises:
            PoolError: the listing failed, or does not contain ``root``.
        """
        return self._snapshots("-d", "2", names=[root], root=root)

    def copies(self, root: str, datasets: Sequence[str]) -> list[PoolSnapshot]:
        """The snapshots of those of the datasets that exist, oldest first.

        Args:
            root: the dataset that all of them are directly below; its presence in the listing
                distinguishes missing datasets from a pool that is not imported.
            datasets: their names.

        Raises:
            PoolError: the listing failed, or does not contain ``root``.
        """
        try:
            return self._snapshots("-d", "1", names=[root, *datasets], root=root)
        except PoolError:
            listing = ("list", "-H", "-t", "filesystem,volume", "-d", "1", "-o", "name", root)
            present = self._run(*listing).splitlines()
            if set(present).issuperset(datasets):
                raise
        names = [root, *(name for name in datasets if name in present)]
        return self._snapshots("-d", "1", names=names, root=root)
