"""Limits how many snapshots run at once: on the host, in each pool, and by their RAM.

The limits are options of ``[schedule]`` (:mod:`snaporch.config.schema`); those of ``--jobs`` are
made by ``limits_for`` in :mod:`snaporch.schedule.parallel_snapshots`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from snaporch.config import Schedule


@dataclass(frozen=True, slots=True)
class SnapshotJob:
    """A snapshot to be taken of a domain or group, for a policy."""

    uuid: str
    domain: str
    policy: str
    pools: frozenset[str]
    ram_mib: int
    """RAM that will be saved, in MiB; 0 if no RAM is saved."""
    group: str = ""
    """The consistency group that is snapshotted with the domain; empty for none."""
    others: tuple[str, ...] = ()
    """UUIDs of the group's other domains."""

    @property
    def uuids(self) -> frozenset[str]:
        """UUIDs of all domains that are snapshotted."""
        return frozenset((self.uuid, *self.others))

    @property
    def key(self) -> str:
        """Identifies the job: ``UUID/POLICY``."""
        return f"{self.uuid}/{self.policy}"

    @property
    def keys(self) -> frozenset[str]:
        """The key for each domain of the group."""
        return frozenset(f"{uuid}/{self.policy}" for uuid in self.uuids)

    @property
    def label(self) -> str:
        """The name of the group or domain, for messages."""
        return f"group {self.group}" if self.group else self.domain


class LimiterClosedError(Exception):
    """The scheduler is stopping: no further snapshot may begin."""


class ConcurrencyLimiter:
    """Lets captures run as the limits allow; thread-safe."""

    def __init__(self, limits: Schedule) -> None:
        self._limits = limits
        self._changed = threading.Condition()
        self._inside: list[SnapshotJob] = []
        self._closed = False

    @property
    def inside(self) -> tuple[SnapshotJob, ...]:
        """The captures that are running."""
        with self._changed:
            return tuple(self._inside)

    def close(self) -> None:
        """Refuse all further captures, also those that are waiting."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def limit(self, limits: Schedule) -> None:
        """Replace the limits; waiting captures are checked against the new ones."""
        with self._changed:
            self._limits = limits
            self._changed.notify_all()

    @contextmanager
    def through(self, job: SnapshotJob) -> Iterator[None]:
        """Wait until the limits allow the job; it counts as running inside the block.

        Raises:
            LimiterClosedError: :meth:`close` was called.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._room(job))
            if self._closed:
                raise LimiterClosedError
            self._inside.append(job)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._inside.remove(job)
                self._changed.notify_all()

    def _room(self, job: SnapshotJob) -> bool:
        limits, inside = self._limits, self._inside
        if not inside:
            return True
        if any(other.uuids & job.uuids for other in inside):
            return False
        if sum(len(other.uuids) for other in (*inside, job)) > limits.jobs:
            return False
        used = Counter(pool for other in inside for pool in other.pools)
        if any(used[pool] >= limits.jobs_per_pool for pool in job.pools):
            return False
        saving = sum(other.ram_mib for other in inside)
        if not (limits.ram_in_flight_mib and saving and job.ram_mib):
            return True
        return saving + job.ram_mib <= limits.ram_in_flight_mib
