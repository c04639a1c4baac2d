"""A window: one frozen instant of a guest, shared by all that snapshot its disks meanwhile.

Whoever calls the pre hook for one of the guest's datasets *joins*, and *leaves* with the post hook.
sanoid comes to the datasets of a guest one after the other, so the window also waits for those it
has promised to come to, as long as that sanoid lives. Pure: no clock, no process, no socket.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

Key = tuple[int, str]
"""sanoid's process, and the dataset it is at."""


class WindowPhase(StrEnum):
    """Where a window is."""

    OPENING = "opening"
    """The guest is being frozen."""
    OPEN = "open"
    """It is frozen: snapshots may be taken."""
    CLOSED = "closed"
    """They are being looked at; nobody may join any more."""


class JoinState(StrEnum):
    """Where somebody is who joined."""

    INSIDE = "inside"
    DONE = "done"
    """His post hook was called, or he has ended: there will be no more of him."""


@dataclass(frozen=True, slots=True)
class HoldRequest:
    """One call of the pre hook."""

    sanoid: int
    """Its process; 0 if unknown."""
    target: str
    datasets: frozenset[str]
    """The guest's datasets that will be snapshotted for it."""
    promised: frozenset[str]
    """Those that the same sanoid will come to later, or has come to."""
    names: tuple[str, ...]

    @property
    def key(self) -> Key:
        """By which the post hook finds it."""
        return self.sanoid, self.target


class HoldWindow:
    """Who is in it, and whom it waits for."""

    def __init__(self) -> None:
        self.phase = WindowPhase.OPENING
        self.joins: list[HoldRequest] = []
        self._places: dict[Key, JoinState] = {}
        self._ended: set[int] = set()

    def join(self, join: HoldRequest) -> bool:
        """Whether it is not too late; a target that comes again in one sanoid starts anew."""
        if self.phase is WindowPhase.CLOSED:
            return False
        self.joins.append(join)
        self._places[join.key] = JoinState.INSIDE
        self._ended.discard(join.sanoid)
        return True

    def opening(self) -> None:
        """The guest is to be frozen, maybe once more."""
        if self.phase is WindowPhase.OPEN:
            self.phase = WindowPhase.OPENING

    def opened(self) -> None:
        """The guest is frozen."""
        self.phase = WindowPhase.OPEN

    def leave(self, key: Key) -> bool:
        """The post hook was called; whether its pre hook had joined."""
        if key not in self._places:
            return False
        self._places[key] = JoinState.DONE
        return True

    def withdraw(self, key: Key) -> bool:
        """Nothing will come of a join after all; whether there was one."""
        if self._places.pop(key, None) is None:
            return False
        self.joins = [join for join in self.joins if join.key != key]
        return True

    def ended(self, sanoid: int) -> None:
        """A sanoid has ended: what it has not done it will not do."""
        self._ended.add(sanoid)
        for key in self._places:
            if key[0] == sanoid:
                self._places[key] = JoinState.DONE

    def close(self) -> None:
        """Too late for others."""
        self.phase = WindowPhase.CLOSED

    @property
    def deserted(self) -> bool:
        """Whether everybody has withdrawn."""
        return not self.joins

    @property
    def abandoned(self) -> bool:
        """Whether everybody has withdrawn or has ended."""
        return all(join.sanoid in self._ended for join in self.joins)

    @property
    def over(self) -> bool:
        """Whether there is nothing to wait for any more."""
        if self.phase is not WindowPhase.OPEN:
            return False
        if JoinState.INSIDE in self._places.values():
            return False
        return not self.awaited

    @property
    def awaited(self) -> frozenset[str]:
        """Datasets that a sanoid which still runs has promised to come to."""
        promised = {
            dataset
            for join in self.joins
            if join.sanoid and join.sanoid not in self._ended
            for dataset in join.promised
        }
        return frozenset(promised - self._seen())

    def _seen(self) -> set[str]:
        return {dataset for join in self.joins for dataset in join.datasets}

    @property
    def expected(self) -> dict[str, set[str]]:
        """The snapshots that are to be there at the end: dataset → names."""
        found: dict[str, set[str]] = {}
        for join in self.joins:
            for dataset in join.datasets:
                found.setdefault(dataset, set()).update(join.names)
        return found
