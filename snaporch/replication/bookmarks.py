"""Bookmarks of the snapshots that a replica has, or is about to get.

A later stream can begin at a bookmark (zfs-send(8)), so these snapshots may be destroyed on this
host. Every snapshot is bookmarked before it is sent: wherever a transfer ends, the replica's newest
snapshot then is one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from snaporch.model import PoolSnapshot
from snaporch.zfs import Pool, PoolError


def bookmark_prefix(replica: str) -> str:
    """How the names of all bookmarks for a replica begin."""
    return f"snaporch-{replica}-"


class ReplicaBookmarks:
    """The bookmarks that this host keeps for one replica.

    A transfer begins at any bookmark with the right GUID. The names only show whose they are, and
    which may be destroyed: a bookmark of a name that is not configured may be all that a renamed
    replica, or one that is configured again later, can continue from. No other replica's
    bookmark or snapshot replaces it, because those are destroyed by the progress of the other one.

    Args:
        pool: the pools of this host.
        replica: the replica's name in the configuration.
    """

    def __init__(self, pool: Pool, replica: str) -> None:
        self._pool = pool
        self._prefix = bookmark_prefix(replica)

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
        """Destroy this replica's bookmarks that are older than that of its newest snapshot.

        Newer ones stay: a snapshot may still arrive after its transfer was given up.

        Args:
            dataset: a dataset of this host.
            copies: the snapshots that the replica has of it, oldest first; at least one.

        Raises:
            PoolError: a bookmark was not destroyed.
        """
        own = {
            name: mark
            for name, mark in self._pool.bookmarks(dataset).items()
            if name.startswith(f"{dataset}#{self._prefix}")
            and name.removeprefix(f"{dataset}#{self._prefix}").isdecimal()
        }
        newest = copies[-1].guid
        base = next((mark.createtxg for mark in own.values() if mark.guid == newest), None)
        if base is None:
            return
        for name, mark in own.items():
            if mark.createtxg < base:
                self._pool.destroy_bookmark(name)
