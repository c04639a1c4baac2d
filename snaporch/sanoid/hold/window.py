"""A window: the time for which a guest is frozen, shared by all calls of sanoid that use it.

The times are options, ``hook_deadline`` and ``freeze_deadline`` in :mod:`snaporch.config.schema`;
:mod:`snaporch.snapshot.plan` makes ``max_frozen`` of the latter.

:func:`window_end` and :func:`longest_window` say how long a guest is held at most.

Each call of the pre hook for one of the guest's datasets *joins*, and *leaves* with the post hook.
sanoid handles the datasets of a guest one after the other, so the window also waits for datasets
that a running sanoid is going to handle. Pure: no clock, no process, no socket.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

Key = tuple[int, str]
"""sanoid's process, and the dataset that it handles."""


class WindowPhase(StrEnum):
    """The phase of a window."""

    OPENING = "opening"
    """The guest is being frozen."""
    OPEN = "open"
    """The guest is frozen: snapshots may be taken."""
    CLOSED = "closed"
    """The snapshots are being listed; no call may join any more."""


@dataclass(frozen=True, slots=True)
class HoldRequest:
    """One call of the pre hook."""

    sanoid: int
    """Its process; 0 if unknown."""
    target: str
    datasets: frozenset[str]
    """The guest's datasets that will be snapshotted in this call."""
    promised: frozenset[str]
    """The guest's datasets that the same sanoid handles in the same round."""
    names: tuple[str, ...]

    @property
    def key(self) -> Key:
        """The key by which the post hook finds the request."""
        return self.sanoid, self.target


def window_end(
    frozen_at: float, begun_at: float | None, hook_deadline: float, max_frozen: float
) -> float:
    """The time at which a guest is released at the latest, also if sanoid has not finished.

    Args:
        frozen_at: when the guest was frozen, in seconds of any clock.
        begun_at: when all guests of a call were frozen, so that sanoid's snapshots began; ``None``
            before.
        hook_deadline: seconds for which it is held until all are frozen, and again from then on.
        max_frozen: seconds for which it is held in all.
    """
    began = frozen_at if begun_at is None else begun_at
    return min(frozen_at + max_frozen, began + hook_deadline)


def longest_window(hook_deadline: int) -> int:
    """Seconds for which a guest is held at most, if ``max_frozen`` is not shorter.

    Once until all guests of a call are frozen, and once for the snapshots.
    """
    return 2 * hook_deadline


class HoldWindow:
    """The calls that share a window, and the calls that it still waits for."""

    def __init__(self) -> None:
        self.phase = WindowPhase.OPENING
        self.joins: list[HoldRequest] = []
        self._joined: set[Key] = set()
        self._inside: set[Key] = set()
        """Calls whose post hook was not called, and whose sanoid runs."""
        self._ended: set[int] = set()

    def join(self, request: HoldRequest) -> bool:
        """Add a call. A repeated target of one sanoid counts as new.

        Returns: False if the window is closed.
        """
        if self.phase is WindowPhase.CLOSED:
            return False
        self.joins.append(request)
        self._joined.add(request.key)
        self._inside.add(request.key)
        self._ended.discard(request.sanoid)
        return True

    def set_opening(self) -> None:
        """The guest will be frozen, for the first time or again."""
        if self.phase is WindowPhase.OPEN:
            self.phase = WindowPhase.OPENING

    def set_open(self) -> None:
        """The guest is frozen."""
        self.phase = WindowPhase.OPEN

    def leave(self, key: Key) -> bool:
        """The post hook was called. Returns: whether its pre hook had joined."""
        self._inside.discard(key)
        return key in self._joined

    def withdraw(self, key: Key) -> bool:
        """Remove a call, which takes no snapshots after all. Returns: whether it had joined."""
        if key not in self._joined:
            return False
        self._joined.discard(key)
        self._inside.discard(key)
        self.joins = [join for join in self.joins if join.key != key]
        return True

    def ended(self, sanoid: int) -> None:
        """A sanoid has exited, and takes no more snapshots."""
        self._ended.add(sanoid)
        self._inside = {key for key in self._inside if key[0] != sanoid}

    def close(self) -> None:
        """Admit no more calls."""
        self.phase = WindowPhase.CLOSED

    @property
    def all_withdrawn(self) -> bool:
        """Whether every call has withdrawn."""
        return not self.joins

    @property
    def abandoned(self) -> bool:
        """Whether every call has withdrawn or its sanoid has exited."""
        return all(join.sanoid in self._ended for join in self.joins)

    @property
    def over(self) -> bool:
        """Whether the window is open and waits for no call any more."""
        return self.phase is WindowPhase.OPEN and not self._inside and not self.awaited

    @property
    def awaited(self) -> frozenset[str]:
        """Datasets that a running sanoid is going to handle, and for which no call came yet."""
        promised = {
            dataset
            for join in self.joins
            if join.sanoid and join.sanoid not in self._ended
            for dataset in join.promised
        }
        return frozenset(promised - {dataset for join in self.joins for dataset in join.datasets})

    @property
    def expected(self) -> dict[str, set[str]]:
        """The snapshots that must exist at the end: dataset → names."""
        found: dict[str, set[str]] = {}
        for join in self.joins:
            for dataset in join.datasets:
                found.setdefault(dataset, set()).update(join.names)
        return found
