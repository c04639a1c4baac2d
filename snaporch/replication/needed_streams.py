"""Which streams bring a copy up to date."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from snaporch.model import PoolSnapshot
from snaporch.zfs import Bookmark

RAW = "w"
"""The option for raw streams, which implies the others."""


class Stream(NamedTuple):
    """A stream of ``zfs send``."""

    base: str
    """The snapshot or bookmark at which it begins; empty for a full stream."""
    snapshot: str
    """The last snapshot in it; a stream that begins at a snapshot has all between, too."""


class Originals(NamedTuple):
    """What this host has of a dataset."""

    dataset: str
    snapshots: Sequence[PoolSnapshot]
    """Oldest first."""
    bookmarks: Mapping[str, Bookmark]
    """By their full names."""

    @property
    def births(self) -> dict[int, int]:
        """The txg of each snapshot and bookmark, by GUID."""
        births = dict(self.bookmarks.values())
        return births | {each.guid: each.createtxg for each in self.snapshots}


def streams(ours: Originals, newest: int | None, *, one_by_one: bool = False) -> list[Stream]:
    """The streams that a copy needs, in this order.

    Args:
        ours: the dataset; its snapshots are never empty.
        newest: the GUID of the copy's newest snapshot, which this host has, or has a bookmark of;
            None if the copy has no snapshot.
        one_by_one: a stream for each snapshot.
    """
    wanted = [each.full_name for each in later(ours, newest)]
    if not wanted:
        return []
    names = {mark.guid: name for name, mark in ours.bookmarks.items()}
    names |= {each.guid: each.full_name for each in ours.snapshots}
    base = "" if newest is None else names[newest]
    if one_by_one:
        return [Stream(*pair) for pair in pairwise([base, *wanted])]
    found = []
    if "@" not in base:  # such a stream has only one snapshot
        found.append(Stream(base, wanted[0]))
        base = wanted[0]
    return found if base == wanted[-1] else [*found, Stream(base, wanted[-1])]


def later(ours: Originals, newest: int | None) -> list[PoolSnapshot]:
    """The snapshots that a copy lacks, oldest first; the arguments as for :func:`streams`."""
    birth = -1 if newest is None else ours.births[newest]
    return [each for each in ours.snapshots if each.createtxg > birth]
