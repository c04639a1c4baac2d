"""In which order the guests of one call of sanoid are frozen, and whether their deadlines allow it.

Pure: no clock, no socket. The order:

1. guests that keep running on overlays, ``sanoid_hook_jobs`` at a time;
2. guests that stay paused once their RAM is saved, all together and the largest first, so that
   they finish at about the same time;
3. guests whose agent freezes file systems;
4. guests that are suspended.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from snaporch.model import Level, Strategy

_TURNS = (
    (Strategy.OVERLAY,),
    (Strategy.MANUAL,),
    (Strategy.QUIESCED,),
    (Strategy.PAUSED, Strategy.CRASH, Strategy.OFF),
)


@dataclass(frozen=True, slots=True)
class FreezeEstimate:
    """What freezing a guest is expected to take."""

    strategy: Strategy
    ram: int
    """Bytes of RAM to save."""
    seconds: float
    """Expected time to save them."""
    patience: float
    """Seconds for which the guest may be held, once it is frozen, until all are."""
    yields_to_other_program: bool = False
    """Whether it takes overlays if it does not fit with its strategy."""

    @property
    def turn(self) -> int:
        """Its place in the order; lower turns are frozen first."""
        return next(number for number, turn in enumerate(_TURNS) if self.strategy in turn)

    def as_json(self) -> dict[str, Any]:
        """For a message."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> FreezeEstimate:
        """From a message.

        Raises:
            KeyError, TypeError, ValueError: it is no estimate.
        """
        return cls(**{**document, "strategy": Strategy(document["strategy"])})


@dataclass
class FreezeProgress:
    """How far the freeze of a guest is."""

    estimate: FreezeEstimate
    ordered: bool = False
    """Whether its hold process was ordered to freeze it."""
    frozen: bool = False
    left: int = 0
    """Bytes of RAM that are still to be saved."""


def next_to_freeze(guests: Collection[FreezeProgress], jobs: int) -> list[FreezeProgress]:
    """The guests to freeze now."""
    unfrozen = [guest for guest in guests if not guest.frozen]
    if not unfrozen:
        return []
    turn = min(guest.estimate.turn for guest in unfrozen)
    current = [guest for guest in unfrozen if guest.estimate.turn == turn]
    waiting = sorted(
        (guest for guest in current if not guest.ordered),
        key=lambda guest: (guest.estimate.seconds, guest.estimate.ram),
        reverse=True,
    )
    if _TURNS[turn] == (Strategy.OVERLAY,):
        under_way = sum(guest.ordered for guest in current)
        return waiting[: max(jobs - under_way, 0)]
    if _TURNS[turn] == (Strategy.MANUAL,):
        most = max(guest.left if guest.ordered else guest.estimate.ram for guest in current)
        return [guest for guest in waiting if guest.estimate.ram >= most]
    return waiting


@dataclass(frozen=True, slots=True)
class FreezeConflict:
    """A guest that cannot be frozen together with the others within their deadlines."""

    guest: str
    reason: str
    step: str


def find_conflict(estimates: Mapping[str, FreezeEstimate], jobs: int) -> FreezeConflict | None:
    """The guest whose RAM takes too long to save together with the others; ``None`` if all fit.

    If a guest can take overlays instead, without a lower level, it is that guest.

    Args:
        estimates: of the guests of one call, by name.
    """
    ram = {name: each for name, each in estimates.items() if each.strategy.level is Level.RAM}
    conflict = _too_far_apart(ram) or _too_long(ram, jobs)
    givers = [name for name, each in ram.items() if each.yields_to_other_program]
    if conflict is None or not givers or conflict.guest in givers:
        return conflict
    return replace(conflict, guest=givers[0], reason=f"{conflict.guest}: {conflict.reason}")


def _too_far_apart(ram: Mapping[str, FreezeEstimate]) -> FreezeConflict | None:
    """Two guests that stay paused: the shorter may be done when the longer has hardly begun."""
    paused = {name: each for name, each in ram.items() if each.strategy is Strategy.MANUAL}
    names = sorted(paused, key=lambda name: paused[name].seconds, reverse=True)
    if len(names) < 2:  # noqa: PLR2004 - one guest waits for no other
        return None
    first, second = names[:2]
    seconds, limit = paused[second].seconds, min(each.patience for each in paused.values())
    if seconds <= limit:
        return None
    return FreezeConflict(
        second,
        f"it may be paused for {seconds:.0f} s while the RAM of {first} is saved, and "
        f"{limit:.0f} s are allowed",
        "raise freeze_deadline, or set on_unavailable; `snaporch check` reports whether a fault of "
        "QEMU is why it is not held on an overlay",
    )


def _too_long(ram: Mapping[str, FreezeEstimate], jobs: int) -> FreezeConflict | None:
    """A guest on overlays is held until the RAM of all guests is saved."""
    total = sum(
        _seconds_for([each for each in ram.values() if each.strategy is strategy], jobs)
        for strategy in (Strategy.OVERLAY, Strategy.MANUAL)
    )
    held = [each for each in ram.values() if each.strategy is Strategy.OVERLAY]
    if all(total - each.seconds <= each.patience for each in held):
        return None
    limit = min(each.patience for each in held)
    longest = max(ram, key=lambda name: ram[name].seconds)
    return FreezeConflict(
        longest,
        f"saving the RAM of all {len(ram)} guests takes about {total:.0f} s, and those that are "
        f"frozen first are held for {limit:.0f} s",
        f'set hook_deadline = "{math.ceil(total)}s", raise sanoid_hook_jobs, or set on_unavailable',
    )


def _seconds_for(estimates: Collection[FreezeEstimate], jobs: int) -> float:
    seconds = [estimate.seconds for estimate in estimates]
    return max([sum(seconds) / jobs, *seconds])
