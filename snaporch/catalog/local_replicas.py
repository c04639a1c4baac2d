"""Copies on a replica that is a pool of this host are not the guests' own snapshots."""

from __future__ import annotations

from collections.abc import Iterable

from snaporch.catalog.records import COPY
from snaporch.config import Config
from snaporch.model import PoolSnapshot


def without_replicas_here(config: Config, snapshots: Iterable[PoolSnapshot]) -> list[PoolSnapshot]:
    """The snapshots without those that this host has copied to a replica on a pool of its own.

    The bundles of these copies are on the replica. Without the originals they would be snapshots
    whose bundle is missing.
    """
    below = {
        name: f"{replica.dataset}/" for name, replica in config.replica.items() if not replica.host
    }
    return [
        each
        for each in snapshots
        if (above := below.get(each.properties.get(COPY, ""))) is None
        or not each.dataset.startswith(above)
    ]
