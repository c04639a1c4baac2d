"""Bookmarks of the snapshots that a replica has, or is about to get.

A later stream can begin at a bookmark (zfs-send(8)), so these snapshots may be destroyed on this
host. Every snapshot is bookmarked before it is sent: wherever a transfer ends, the replica's newest
snapshot then is one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from snaporch.model import PoolSnapshot
from snaporch.zfs import Bookmark, Pool, PoolError


class ReplicaBookmarks:
    """The bookmarks that this host keeps for one replica.

    They are recognised by GUID, and their names only show whose they are: the replica may have had
    another name in the configuration.

    Args:
        pool: the pools of this host.
        replica: the replica's name in the configuration.
        replicas: the names of all replicas in the configuration.
    """

    def __init__(self, pool: Pool, replica: str, replicas: Collection[str]) -> None:
        self._pool = pool
        self._prefix = f"snaporch-{replica}-"
        self._others = tuple(f"snaporch-{each}-" for each in replicas if each != replica)

    def keep(self, dataset: str, snapshots: Iterable[PoolSnapshot]) -> None:
        """Bookmark snapshots of a dataset, unless they are bookmarked for this replica.

        A snapshot that was destroyed meanwhile is left out.

        Raises:
            PoolError: a snapshot that exists was not bookmarked.
        """
        known = self._pool.bookmarks(dataset)
        for each in snapshots:
            name = f"{self._prefix}{each.guid}"
            if f"{dataset}#{name}" in known:
                continue
            try:
                self._pool.bookmark(each.full_name, name)
            except PoolError:
                if each.guid in {now.guid for now in self._pool.snapshots([dataset])}:
                    raise

    def tidy(self, dataset: str, copies: Sequence[PoolSnapshot]) -> None:
        """Destroy the bookmarks that are older than the one of the replica's newest snapshot.

        Newer ones stay: a snapshot may still arrive after its transfer was given up.

        Args:
            dataset: a dataset of this host.
            copies: the snapshots that the replica has of it, oldest first; at least one.

        Raises:
            PoolError: a bookmark was not destroyed.
        """
        known = self._pool.bookmarks(dataset)
        newest = copies[-1].guid
        own = {name: mark for name, mark in known.items() if self._is_own(name, self._prefix)}
        base = next((mark.createtxg for mark in own.values() if mark.guid == newest), None)
        if base is None:
            return
        former = self._former(known, {each.guid for each in copies})
        for name, mark in {**own, **former}.items():
            if mark.createtxg < base or name in former:
                self._pool.destroy_bookmark(name)

    def _former(
        self, known: Mapping[str, Bookmark], arrived: Collection[int]
    ) -> dict[str, Bookmark]:
        """Bookmarks of snapshots that this replica has, by a name that no replica has any more."""
        return {
            name: mark
            for name, mark in known.items()
            if mark.guid in arrived
            and name.endswith(f"-{mark.guid}")
            and name.partition("#")[2].startswith("snaporch-")
            and not any(self._is_own(name, prefix) for prefix in (self._prefix, *self._others))
        }

    @staticmethod
    def _is_own(name: str, prefix: str) -> bool:
        """Whether a bookmark is a replica's: another replica's name may begin with this one's."""
        rest = name.partition("#")[2]
        return rest.startswith(prefix) and rest[len(prefix) :].isdecimal()
