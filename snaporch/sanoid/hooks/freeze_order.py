"""In which order guests are frozen for one call of sanoid's, and whether their deadlines allow it.

Pure: no clock, no socket. First come guests that run on over overlays, ``jobs`` at a time; then
those that stay paused once their RAM is saved, all together and the largest first, so that they
finish at about the same time; then those whose agent freezes file systems; at last those that are
suspended.
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
    """What freezing a guest will take, as far as can be told before."""

    strategy: Strategy
    ram: int
    """Bytes of RAM to save."""
    seconds: float
    """How long saving them is expected to take."""
    patience: float
    """Seconds for which it may be held, once it is frozen, until all are."""
    gives_way: bool = False
    """Whether it takes overlays if it does not fit as it is."""

    @property
    def turn(self) -> int:
        """When it is frozen; lower ones first."""
        return next(number for number, turn in enumerate(_TURNS) if self.strategy in turn)

    def as_json(self) -> dict[str, Any]:
        """For a message."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> FreezeEstimate:
        """From a message."""
        return cls(**{**document, "strategy": Strategy(document["strategy"])})


@dataclass
class GuestPosition:
    """Where a guest is."""

    prospect: FreezeEstimate
    asked: bool = False
    """Whether it was told to freeze."""
    frozen: bool = False
    left: int = 0
    """Bytes of RAM that are still to be saved."""


def next_places(places: Collection[GuestPosition], jobs: int) -> list[GuestPosition]:
    """Those that are to be frozen now."""
    open_ = [place for place in places if not place.frozen]
    if not open_:
        return []
    turn = min(place.prospect.turn for place in open_)
    beside = [place for place in open_ if place.prospect.turn == turn]
    waiting = sorted(
        (place for place in beside if not place.asked),
        key=lambda place: (place.prospect.seconds, place.prospect.ram),
        reverse=True,
    )
    if _TURNS[turn] == (Strategy.OVERLAY,):
        under_way = sum(place.asked for place in beside)
        return waiting[: max(jobs - under_way, 0)]
    if _TURNS[turn] == (Strategy.MANUAL,):
        most = max(place.left if place.asked else place.prospect.ram for place in beside)
        return [place for place in waiting if place.prospect.ram >= most]
    return waiting


@dataclass(frozen=True, slots=True)
class Misfit:
    """A guest that cannot be frozen together with the others in the time there is."""

    guest: str
    reason: str
    step: str


def find_misfit(prospects: Mapping[str, FreezeEstimate], jobs: int) -> Misfit | None:
    """The guest whose RAM, of all that is to be saved, is too much; ``None`` when all fits.

    Before any other, it is one that has another way without a lower level.

    Args:
        prospects: of the guests that are to be frozen for one call, by name.
    """
    ram = {name: each for name, each in prospects.items() if each.strategy.level is Level.RAM}
    misfit = _too_far_apart(ram) or _too_long(ram, jobs)
    givers = [name for name, each in ram.items() if each.gives_way]
    if misfit is None or not givers or misfit.guest in givers:
        return misfit
    return replace(misfit, guest=givers[0], reason=f"{misfit.guest}: {misfit.reason}")


def _too_far_apart(ram: Mapping[str, FreezeEstimate]) -> Misfit | None:
    """Of two that are to finish together, one may be done when the other has hardly begun."""
    still = {name: each for name, each in ram.items() if each.strategy is Strategy.MANUAL}
    names = sorted(still, key=lambda name: still[name].seconds, reverse=True)
    if len(names) < 2:  # noqa: PLR2004 - one waits for no other
        return None
    first, second = names[:2]
    seconds, room = still[second].seconds, min(each.patience for each in still.values())
    if seconds <= room:
        return None
    return Misfit(
        second,
        f"it may stand still for {seconds:.0f} s while the RAM of {first} is saved, and "
        f"{room:.0f} s are allowed",
        "raise freeze_deadline, or set on_unavailable; `snaporch check` says whether a fault of "
        "QEMU is why it is not held on an overlay",
    )


def _too_long(ram: Mapping[str, FreezeEstimate], jobs: int) -> Misfit | None:
    """One that runs on over its overlays is held until the RAM of all is saved."""
    total = sum(
        _seconds_for([each for each in ram.values() if each.strategy is strategy], jobs)
        for strategy in (Strategy.OVERLAY, Strategy.MANUAL)
    )
    held = [each for each in ram.values() if each.strategy is Strategy.OVERLAY]
    if all(total - each.seconds <= each.patience for each in held):
        return None
    room = min(each.patience for each in held)
    longest = max(ram, key=lambda name: ram[name].seconds)
    return Misfit(
        longest,
        f"saving the RAM of all {len(ram)} guests takes about {total:.0f} s, and those that are "
        f"frozen first are held for {room:.0f} s",
        f'set hook_deadline = "{math.ceil(total)}s", raise sanoid_hook_jobs, or set on_unavailable',
    )


def _seconds_for(prospects: Collection[FreezeEstimate], jobs: int) -> float:
    seconds = [prospect.seconds for prospect in prospects]
    return max([sum(seconds) / jobs, *seconds])
