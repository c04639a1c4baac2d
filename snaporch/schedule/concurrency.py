"""How many snapshots may be taken at once: on the host, in a pool, and by their RAM."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from snaporch.config import Schedule


@dataclass(frozen=True, slots=True)
class PolicyCapture:
    """A snapshot that a policy wants of a domain."""

    uuid: str
    domain: str
    policy: str
    pools: frozenset[str]
    ram_mib: int
    """RAM that will be saved; 0 when none is."""
    group: str = ""
    """The consistency group that is taken along; empty for none."""
    others: tuple[str, ...] = ()
    """UUIDs of the group's other domains."""

    @property
    def uuids(self) -> frozenset[str]:
        """All domains that are snapshotted."""
        return frozenset((self.uuid, *self.others))

    @property
    def key(self) -> str:
        """What tells it from others: ``UUID/POLICY``."""
        return f"{self.uuid}/{self.policy}"

    @property
    def keys(self) -> frozenset[str]:
        """The key of each domain."""
        return frozenset(f"{uuid}/{self.policy}" for uuid in self.uuids)

    @property
    def label(self) -> str:
        """For people."""
        return f"group {self.group}" if self.group else self.domain


class LimiterClosedError(Exception):
    """No snapshot may begin any more."""


class ConcurrencyLimiter:
    """Lets captures in as the limits allow; for use by many threads."""

    def __init__(self, limits: Schedule) -> None:
        self._limits = limits
        self._changed = threading.Condition()
        self._inside: list[PolicyCapture] = []
        self._closed = False

    @property
    def inside(self) -> tuple[PolicyCapture, ...]:
        """Those that are being taken."""
        with self._changed:
            return tuple(self._inside)

    def close(self) -> None:
        """Let nobody in any more; those who wait are told."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def limit(self, limits: Schedule) -> None:
        """Other limits from now on."""
        with self._changed:
            self._limits = limits
            self._changed.notify_all()

    @contextmanager
    def through(self, capture: PolicyCapture) -> Iterator[None]:
        """Wait until there is room, and take it until the end.

        Raises:
            LimiterClosedError: the limiter was closed before.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._room(capture))
            if self._closed:
                raise LimiterClosedError
            self._inside.append(capture)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._inside.remove(capture)
                self._changed.notify_all()

    def _room(self, capture: PolicyCapture) -> bool:
        limits, inside = self._limits, self._inside
        if not inside:
            return True
        if any(other.uuids & capture.uuids for other in inside):
            return False
        if sum(len(other.uuids) for other in (*inside, capture)) > limits.jobs:
            return False
        used = Counter(pool for other in inside for pool in other.pools)
        if any(used[pool] >= limits.jobs_per_pool for pool in capture.pools):
            return False
        saving = sum(other.ram_mib for other in inside)
        if not (limits.ram_in_flight_mib and saving and capture.ram_mib):
            return True
        return saving + capture.ram_mib <= limits.ram_in_flight_mib
