"""Who else snapshots a guest's datasets, and may do so while its overlays are committed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from snaporch.context import Context
from snaporch.model import PoolSnapshot

RECENT = timedelta(days=8)
"""Whoever took a snapshot within a week, and a day, is likely to take another."""
_OWN_NAMES = "snaporch"
"""How snapshots without properties begin that are ours: of restores, and copies of ours."""
_SANOIDS = "autosnap_"
"""How sanoid's begin. Where our hooks hold the guest for it, those without properties are of before
they did, or of a run that failed: none will be taken while overlays are committed."""


def find_stranger(context: Context, datasets: Sequence[str]) -> str:
    """Who snapshots the datasets without holding the guest still, in words; empty if nobody does.

    Raises:
        PoolError: nobody can say which snapshots there are.
    """
    configured = context.strangers(datasets)
    if configured:
        return configured
    since = datetime.now(UTC) - RECENT
    there = context.pool.snapshots(datasets)
    theirs = [each for each in there if each.created > since and is_strange(each)]
    if any(each.name.startswith(_SANOIDS) for each in theirs):
        held = context.held(datasets)
        theirs = [s for s in theirs if s.dataset not in held or not s.name.startswith(_SANOIDS)]
    return f"{theirs[-1].full_name} is not snaporch's" if theirs else ""


def is_strange(snapshot: PoolSnapshot) -> bool:
    """Whether neither a run of ours took it, nor a hook of ours held the guest still for it."""
    marked = {"run", "group", "ram"} & snapshot.properties.keys()
    return not marked and not snapshot.name.startswith(_OWN_NAMES)
