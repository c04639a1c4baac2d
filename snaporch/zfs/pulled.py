"""ZFS for copies that this machine pulls: nothing here destroys, rolls back or overwrites."""

from __future__ import annotations

from typing import NamedTuple

from snaporch.zfs.received import ReceivedZfs
from snaporch.zfs.remote import creations

_READ_ONLY = ("-o", "readonly=on")


class Counts(NamedTuple):
    """How much is below a dataset."""

    datasets: int
    snapshots: int


class PulledZfs(ReceivedZfs):
    """The copies of one source."""

    def exists(self, dataset: str) -> bool:
        """Whether a dataset exists.

        Raises:
            PoolError: the pools cannot be listed.
        """
        return any(each.name == dataset for each in self.datasets())

    def make_root(self, dataset: str) -> None:
        """Create the dataset of all copies, and its parents, unless they exist.

        The copies inherit what keeps them unmounted and unchanged.

        Raises:
            PoolError: its pool does not exist, or creating failed.
        """
        known = {each.name for each in self.datasets()}
        for words in creations(dataset, known):
            more = _READ_ONLY if words[-1] == dataset else ()
            self._run(*words[1:-1], *more, words[-1])

    def counts(self, dataset: str) -> Counts:
        """How many datasets and snapshots are directly below a dataset.

        Raises:
            PoolError: it does not exist.
        """
        kinds = ("-t", "filesystem,volume,snapshot", "-d", "2", "-o", "name")
        names = self._run("list", "-H", *kinds, dataset).splitlines()
        copies = [each for each in names if each.startswith(f"{dataset}/")]
        snapshots = sum("@" in each for each in copies)
        return Counts(len(copies) - snapshots, snapshots)
