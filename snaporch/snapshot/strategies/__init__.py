"""How a guest is frozen while its disks are snapshotted: one module for each strategy."""

from __future__ import annotations

from snaporch import model
from snaporch.snapshot.strategies.base import FreezeStrategy, RunMaterial
from snaporch.snapshot.strategies.manual import Manual
from snaporch.snapshot.strategies.overlay import Overlay
from snaporch.snapshot.strategies.paused import Paused
from snaporch.snapshot.strategies.quiesced import Quiesced
from snaporch.snapshot.strategies.zfs_only import ZfsOnly

_KINDS: dict[model.Strategy, type[FreezeStrategy]] = {
    model.Strategy.OVERLAY: Overlay,
    model.Strategy.MANUAL: Manual,
    model.Strategy.QUIESCED: Quiesced,
    model.Strategy.PAUSED: Paused,
    model.Strategy.CRASH: ZfsOnly,
    model.Strategy.OFF: ZfsOnly,
}


def make_strategy(work: RunMaterial) -> FreezeStrategy:
    """Return the strategy that the plan chose."""
    return _KINDS[work.plan.strategy](work)
