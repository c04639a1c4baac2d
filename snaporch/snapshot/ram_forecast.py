"""Forecast how saving a guest's RAM ends, if the guest goes on changing it as fast as now. Pure.

The forecast follows the limits that a run obeys: the rate is lifted, and the vCPUs are slowed down,
when RAM has been saved so many times (:mod:`snaporch.snapshot.strategies.ram_limits`,
:mod:`snaporch.snapshot.strategies.vcpu_brake`); a budget ends it. It assumes that the guest changes
other pages each second, which is the worst case: a guest that changes the same pages again and
again has its RAM saved sooner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import inf

_ALL = 100


class RamOutcome(StrEnum):
    """How saving RAM ends."""

    FITS = "fits"
    """While the guest runs at its own speed."""
    SLOWED = "slowed"
    """The guest is slowed down for it."""
    SUSPENDED = "suspended"
    """A budget is used up, and the guest is suspended until its RAM is saved."""
    ABORTED = "aborted"
    """A budget is used up, and the run fails."""
    ENDLESS = "endless"
    """It does not end by itself, and there is no budget."""


@dataclass(frozen=True, slots=True)
class RamSaveFacts:
    """What a forecast is made from. All amounts are MiB, all times seconds."""

    ram: float
    """RAM in use."""
    changed: float
    """How much of it the guest changes a second."""
    speed: float
    """How much can be saved a second."""
    rate: float = 0
    """The limit for that, at first; 0 for none."""
    rate_passes: float = 2
    """How many times the RAM is saved before the limit is lifted."""
    steps: tuple[tuple[float, int], ...] = ()
    """How many times the RAM is saved before each step, and the percent of CPU time then."""
    time_budget: float = 0
    """0 for none."""
    budget: float = 0
    """RAM to save at most; 0 for no limit."""
    aborts: bool = False
    """Whether the run is aborted when a budget is used up."""


@dataclass(frozen=True, slots=True)
class RamForecast:
    """How saving RAM ends."""

    outcome: RamOutcome
    seconds: float = 0.0
    """The time that saving takes if it fits, else for which the guest is slowed or suspended."""
    percent: int = _ALL
    """The least CPU time of the guest, in percent."""


def forecast_save(facts: RamSaveFacts) -> RamForecast:
    """Forecast how saving RAM ends.

    Args:
        facts: RAM and speed are more than 0.
    """
    clock = saved = 0.0
    left, slowed_at, least = facts.ram, inf, _ALL
    for limit, speed, percent in _phases(facts):
        if percent < _ALL:
            slowed_at, least = min(slowed_at, clock), percent
        gain = speed - facts.changed * percent / _ALL
        done = left / gain if gain > 0 else inf
        over = min(
            facts.time_budget - clock if facts.time_budget else inf,
            (facts.budget - saved) / speed if facts.budget else inf,
        )
        step = min(done, over, (limit * facts.ram - saved) / speed)
        if step == inf:
            break
        if step == done:
            if least == _ALL:
                return RamForecast(RamOutcome.FITS, clock + done)
            return RamForecast(RamOutcome.SLOWED, clock + done - slowed_at, least)
        clock, saved = clock + step, saved + speed * step
        left = min(left - gain * step, facts.ram)
        if step == over:
            if facts.aborts:
                return RamForecast(RamOutcome.ABORTED, percent=least)
            return RamForecast(RamOutcome.SUSPENDED, left / facts.speed, least)
    return RamForecast(RamOutcome.ENDLESS, percent=least)


def _phases(facts: RamSaveFacts) -> Iterator[tuple[float, float, int]]:
    """How many times RAM is saved until the end of each phase, its speed, its percent of CPU."""
    first = min(facts.rate or inf, facts.speed)
    begins = [(0.0, first, _ALL), (facts.rate_passes, facts.speed, _ALL)]
    begins += [(passes, facts.speed, percent) for passes, percent in facts.steps]
    ends = [passes for passes, _, _ in begins[1:]]
    for (_, speed, percent), end in zip(begins, [*ends, inf], strict=True):
        yield end, speed, percent
