"""How a guest is made to stand still while its disks are snapshotted: one module per way."""

from __future__ import annotations

from snaporch import model
from snaporch.run.strategies.base import Strategy, Work
from snaporch.run.strategies.manual import Manual
from snaporch.run.strategies.overlay import Overlay
from snaporch.run.strategies.paused import Paused
from snaporch.run.strategies.quiesced import Quiesced
from snaporch.run.strategies.untouched import Untouched

_KINDS: dict[model.Strategy, type[Strategy]] = {
    model.Strategy.OVERLAY: Overlay,
    model.Strategy.MANUAL: Manual,
    model.Strategy.QUIESCED: Quiesced,
    model.Strategy.PAUSED: Paused,
    model.Strategy.CRASH: Untouched,
    model.Strategy.OFF: Untouched,
}


def make_strategy(work: Work) -> Strategy:
    """The strategy that the plan chose."""
    return _KINDS[work.plan.strategy](work)
