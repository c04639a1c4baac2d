"""The stage of a rebuild, a property of the guest's datasets: the same command continues there.

The values while data comes are in :mod:`snaporch.rebuild.local_datasets`.
"""

from __future__ import annotations

from enum import StrEnum

from snaporch.context import Context
from snaporch.rebuild.local_datasets import ARRIVED, RECEIVED
from snaporch.rebuild.plan import RebuildPlan
from snaporch.zfs import REBUILD_PROPERTY


class Stage(StrEnum):
    """What has yet to be done for a guest whose data came back: a property of its datasets."""

    TRANSFER = RECEIVED
    RESTORE = ARRIVED
    FINISH = "finish"
    """It was restored; policies and autostart are to be set."""


def set_stage(context: Context, plan: RebuildPlan, stage: Stage | None) -> None:
    """Record what has yet to be done, so that the same command finishes it; None for nothing."""
    names = [each.dataset for each in plan.incoming]
    if stage is None:
        context.pool.clear_properties(names, [REBUILD_PROPERTY])
    else:
        context.pool.set_properties(names, {REBUILD_PROPERTY: stage})


def stage_of(context: Context, plan: RebuildPlan) -> Stage | None:
    """What has yet to be done for a guest that is here; None for nothing."""
    found = context.pool.local_properties([REBUILD_PROPERTY])
    values = {found.get(each.dataset, {}).get(REBUILD_PROPERTY) for each in plan.incoming}
    return next((stage for stage in Stage if stage in values), None)
