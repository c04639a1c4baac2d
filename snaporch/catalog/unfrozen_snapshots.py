"""Find other programs that snapshot a guest's datasets, perhaps while overlays are committed.

What a plan does then is decided by :mod:`snaporch.snapshot.choose_strategy`; what ``check``
reports, by :mod:`snaporch.check.rules.guests`.

Snapshots that sanoid took of a guest that was not frozen are recorded by
:mod:`snaporch.sanoid.hooks.record_unfrozen`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from snaporch.context import Context
from snaporch.model import PoolSnapshot

RECENT = timedelta(days=8)
"""A program that took a snapshot within a week and a day is likely to take another."""
_OWN_PREFIX = "snaporch"
"""The beginning of snaporch's snapshot names: those of restores and copies have no properties."""
_SANOID_PREFIX = "autosnap_"
"""The beginning of sanoid's snapshot names. Where snaporch's hooks freeze the guest for sanoid, a
snapshot without properties is older than the hooks, or its run failed: sanoid will take none while
overlays are committed."""


def find_other_program(context: Context, datasets: Sequence[str]) -> str:
    """Find a program that snapshots the datasets without freezing the guest.

    Returns:
        The reason to assume one, for messages; empty if there is none.

    Raises:
        PoolError: the snapshots cannot be listed.
    """
    configured = context.unfrozen_by(datasets)
    if configured:
        return configured
    since = context.clock.now() - RECENT
    there = context.pool.snapshots(datasets)
    foreign = [each for each in there if each.created > since and is_unfrozen(each)]
    if any(each.name.startswith(_SANOID_PREFIX) for each in foreign):
        held = context.frozen_by_hooks(datasets)
        foreign = [
            s for s in foreign if s.dataset not in held or not s.name.startswith(_SANOID_PREFIX)
        ]
    return f"{foreign[-1].full_name} is not snaporch's" if foreign else ""


def is_unfrozen(snapshot: PoolSnapshot) -> bool:
    """Whether neither a run took the snapshot, nor a hook froze the guest for it."""
    marked = {"run", "group", "ram"} & snapshot.properties.keys()
    return not marked and not snapshot.name.startswith(_OWN_PREFIX)
