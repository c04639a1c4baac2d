"""ZFS for copies that this machine pulls: nothing here destroys, rolls back or overwrites."""

from __future__ import annotations

from typing import NamedTuple

from snaporch.zfs.interface import PoolError
from snaporch.zfs.received import ReceivedZfs
from snaporch.zfs.remote import creations
from snaporch.zfs.send_stream import beginning

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

    def beginning(self, snapshot: str) -> bytes:
        """The first record of a raw stream of a snapshot, with its payload.

        Raises:
            PoolError: it cannot be sent.
        """
        found, errors = self._start_of_stream(["send", "-w", snapshot], beginning)
        if found is None:
            raise PoolError(f"zfs send {snapshot}", errors.strip() or "sends nothing")
        return found

    def is_encrypted(self, place: str) -> bool:
        """Whether a dataset, or the one that has a directory, is encrypted by ZFS."""
        try:
            return self.values(place, ["encryption"])["encryption"].startswith("aes-")
        except PoolError:  # the directory is of another file system
            return False
