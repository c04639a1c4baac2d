"""Keep snapshots until the admin releases them: a ZFS hold, and a property that ``list`` shows.

The hold keeps every program from destroying them. The property shows since when they are kept, and
snaporch respects it even if the hold was released with ``zfs release``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime

from snaporch.catalog.run_snapshots import by_pool
from snaporch.model import PoolSnapshot, iso
from snaporch.zfs import PREFIX, Pool, PoolError

KEEP_HOLD = "snaporch-keep"
"""The tag of the hold."""
KEPT = f"{PREFIX}kept"
"""The property that records since when."""


def keep(pool: Pool, members: Sequence[PoolSnapshot], now: datetime) -> None:
    """Hold the ZFS snapshots of a snapshot and mark them; kept ones stay as they are.

    Args:
        pool: ZFS.
        members: the ZFS snapshots.
        now: the time that the mark records.

    Raises:
        PoolError: one does not exist, or cannot be held; repeat it.
    """
    held: list[str] = []
    try:
        for names in by_pool(member.full_name for member in members):
            if free := [
                name for name, tags in pool.holds_of(names).items() if KEEP_HOLD not in tags
            ]:
                pool.hold(free, KEEP_HOLD)
                held += free
        if unmarked := [each.full_name for each in members if "kept" not in each.properties]:
            pool.set_properties(unmarked, {KEPT: iso(now)})
    except PoolError:
        for names in by_pool(held):
            with suppress(PoolError):
                pool.release(names, KEEP_HOLD)
        raise


def unkeep(pool: Pool, members: Sequence[PoolSnapshot]) -> None:
    """Remove the mark and the hold of :func:`keep`; snapshots without them are no error.

    Raises:
        PoolError: one does not exist, or cannot be released; repeat it.
    """
    full_names = [member.full_name for member in members]
    pool.clear_properties(full_names, [KEPT])
    for names in by_pool(full_names):
        if held := [name for name, tags in pool.holds_of(names).items() if KEEP_HOLD in tags]:
            pool.release(held, KEEP_HOLD)
