"""The interface of a replica that snapshots and bundles are copied to."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from snaporch.config import AnyReplica, Config
from snaporch.errors import NotFoundError, SnaporchError
from snaporch.model import PoolSnapshot
from snaporch.remote_host import LIMIT_SECONDS

_SLOWEST = 1 << 20
"""Bytes per second that a replica reads or writes at least, beside other work."""


class ReplicaError(SnaporchError):
    """A transfer failed; everything that was copied before stays on the replica."""


@dataclass(frozen=True, slots=True)
class BundleCopy:
    """A bundle on a replica."""

    sizes: Mapping[str, int]
    """The bytes of each file."""
    unread: float
    """Seconds since its content was last read and found whole; infinite if that is not known."""


class Destination(Protocol):
    """A replica that snapshots and bundles are copied to."""

    def create(self) -> None:
        """Create what the copies are stored in, unless it exists; for a replica without copies.

        Raises:
            SnaporchError: it cannot be created.
        """

    def snapshots(self, datasets: Sequence[str]) -> list[PoolSnapshot]:
        """The replica's copies of snapshots of these datasets, with this host's dataset names.

        Raises:
            SnaporchError: the listing failed, or does not contain what the copies are stored in. So
                copies that are not listed do not exist.
        """

    def send(self, dataset: str, *, raw: bool, until: int) -> None:
        """Copy the snapshots of a dataset that the replica lacks.

        This host must have the replica's newest snapshot, or a bookmark of it.

        Args:
            dataset: a dataset of this host.
            raw: send encrypted blocks as they are.
            until: the txg of the newest snapshot to copy. Later ones have no bookmark yet.

        Raises:
            ReplicaError: the transfer failed.
            InterruptedRunError: a signal came; the next transfer continues where this one stopped.
        """

    def diverged(self, dataset: str, only_there: Sequence[str]) -> ReplicaError:
        """The error for a copy that no stream of this host continues.

        Args:
            dataset: a dataset of this host.
            only_there: the names of the copy's snapshots that are newer than all common ones.
        """

    def mark(self, properties: Mapping[str, Mapping[str, str]]) -> Collection[str]:
        """Set properties on copies of snapshots; the keys are this host's snapshot names.

        Returns:
            The names of those that cannot get properties any more, which was noted.
        """

    def is_encrypted(self) -> bool:
        """Whether the dataset above the copies is encrypted, so that those in clear are, too."""

    def has_encrypted_bundles(self) -> bool:
        """Whether the bundles are on an encrypted dataset; False if that is not known."""

    def free_bytes(self) -> list[int]:
        """The bytes that are free where the copies are, and where the bundles are.

        Empty if the replica has no such number.

        Raises:
            SnaporchError: it does not answer.
        """

    def set_policies(self, policies: Mapping[str, str]) -> None:
        """Set ``snaporch:policy`` on copies, so that it comes back with them.

        Args:
            policies: by this host's dataset, which the replica has; empty for none.
        """

    def bundles(self, uuid: str) -> dict[str, BundleCopy]:
        """The bundles of a domain that the replica has, by run.

        If the replica crashed while a bundle was replaced, that is finished first.

        Raises:
            SnaporchError: the listing failed, or the directory of all bundles is missing.
        """

    def damaged(self, reference: str, sums: Mapping[str, str]) -> list[str]:
        """Read a bundle on the replica.

        Args:
            reference: ``uuid/run``.
            sums: the SHA-256 of each file.

        Returns:
            The files that are missing, cannot be read or differ. If there is none, the time of the
            reading is recorded on the replica.
        """

    def manifest(self, reference: str) -> str:
        """The text of the manifest of a bundle that the replica has, which may be any text.

        Args:
            reference: ``uuid/run``.
        """

    def store(self, directory: Path, reference: str, sums: Mapping[str, str]) -> list[str]:
        """Copy a bundle; the replica has all of it or none.

        A bundle that is there is replaced when the copy is complete.

        Args:
            directory: the bundle.
            reference: ``uuid/run``.
            sums: the SHA-256 of each file.

        Returns:
            The files that differ from ``sums``; if there are any, the copy was discarded.

        Raises:
            ReplicaError: the transfer failed.
            InterruptedRunError: a signal came.
        """


def find_replica(config: Config, name: str) -> AnyReplica:
    """The replica with this name in the configuration.

    Raises:
        NotFoundError: there is none.
    """
    if name not in config.replica:
        known = ", ".join(config.replica) or "none is configured"
        raise NotFoundError(name, f"no such replica ({known})", "see docs/how-to/replication.md")
    return config.replica[name]


@contextmanager
def readable(name: str, label: str) -> Iterator[None]:
    """Read an answer of a replica, which may be anything.

    Args:
        name: the replica's name in the configuration.
        label: names its host.

    Raises:
        ReplicaError: the answer cannot be read.
    """
    try:
        yield
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        step = f"see: zfs list, on {label}"
        raise ReplicaError(name, "its answer cannot be read", step) from error


def seconds_to_read(size: int) -> float:
    """The seconds within which a replica must have read, or synced, so many bytes."""
    return LIMIT_SECONDS + size / _SLOWEST
