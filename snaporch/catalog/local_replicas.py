"""Copies in a pool of this host, replicated or pulled, are not its guests' own snapshots.

What retention counts as the guest's own is decided by :mod:`snaporch.schedule.own_or_copied`.
"""

from __future__ import annotations

from collections.abc import Iterable

from snaporch.catalog.records import COPY
from snaporch.config import Config
from snaporch.model import PoolSnapshot


def without_replicas_here(config: Config, snapshots: Iterable[PoolSnapshot]) -> list[PoolSnapshot]:
    """The snapshots without the copies in pools of this host: of its replicas, and of its sources.

    The bundles of these copies are with them. Without the originals they would be snapshots
    whose bundle is missing.
    """
    below = {
        name: f"{replica.dataset}/"
        for name, replica in config.zfs_replicas.items()
        if not replica.host
    }
    below |= {name: f"{source.dataset}/" for name, source in config.source.items()}
    return [
        each
        for each in snapshots
        if (above := below.get(each.properties.get(COPY, ""))) is None
        or not each.dataset.startswith(above)
    ]
