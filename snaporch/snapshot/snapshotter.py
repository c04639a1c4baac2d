"""The part of a run that takes the ZFS snapshots, or lets another program take them.

How long another program is waited for at most is ``longest_window`` in
:mod:`snaporch.sanoid.hold.window`. What the host caches of volumes was written before, by
:mod:`snaporch.snapshot.run`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Protocol

from snaporch.catalog.note import NOTE_PROPERTY
from snaporch.catalog.run_snapshots import by_pool, marks, own_snapshots
from snaporch.context import Context
from snaporch.model import GroupRun, Level, PoolSnapshot
from snaporch.snapshot.plan import Plan
from snaporch.zfs import PREFIX, Pool, PoolError


class Snapshotter(Protocol):
    """Called in this order: ``prepare``, ``take``, ``level``, ``released``, ``taken``."""

    taken_by_other_program: bool
    """Whether another program takes the snapshots; then a run never destroys them."""
    window_seconds: int
    """Seconds for which the guest may stay frozen for another program; 0 if there is none."""
    group: GroupRun | None
    """The consistency group with which the snapshots are taken."""

    def prepare(self, plan: Plan) -> None:
        """Prepare the snapshots; called before the guest is frozen."""

    def take(self, plan: Plan, properties: Mapping[str, str]) -> None:
        """Take the snapshots, or wait for them; called while the guest is frozen.

        Raises:
            SnaporchError: the snapshots do not exist.
        """

    def others_wait(self) -> bool:
        """Whether other guests are known to wait, frozen, for the snapshots."""

    def level(self, reached: Level) -> Level:
        """Return the level of the snapshots, if the freeze reached the level ``reached``."""

    def released(self) -> None:
        """Called when the guest is released."""

    def taken(self, plan: Plan, properties: Mapping[str, str]) -> list[PoolSnapshot]:
        """Return the snapshots, which have the ``properties`` now.

        Raises:
            PoolError: a snapshot was destroyed meanwhile.
        """


class LocalSnapshotter:
    """Takes the snapshots itself."""

    taken_by_other_program = False
    window_seconds = 0
    group: GroupRun | None = None

    def __init__(self, context: Context) -> None:
        self._context = context

    def prepare(self, plan: Plan) -> None:
        """Need no preparation."""

    def take(self, plan: Plan, properties: Mapping[str, str]) -> None:
        """Take the snapshots; a pool whose call fails has none of them."""
        take_in_pools(self._context.pool, plan.full_names, properties)

    def others_wait(self) -> bool:
        """No guest waits: this is the only one."""
        return False

    def level(self, reached: Level) -> Level:
        """Return ``reached``."""
        return reached

    def released(self) -> None:
        """Notify no other program."""

    def taken(self, plan: Plan, properties: Mapping[str, str]) -> list[PoolSnapshot]:
        """Return the snapshots that have the properties of this run."""
        snapshots = own_snapshots(self._context, plan.facts)
        if len(snapshots) != len(plan.datasets):
            raise PoolError(
                f"@{plan.snapshot}", "was destroyed by another program while it was taken"
            )
        return snapshots


def take_in_pools(pool: Pool, names: Iterable[str], properties: Mapping[str, str]) -> None:
    """Take snapshots, by one atomic call for each pool; all calls run at the same time.

    So a guest that is paused for them waits for the slowest pool, not for one after the other.

    Args:
        names: the full names of the snapshots.

    Raises:
        PoolError: a call failed; no call runs any more, and other pools may have their snapshots.
    """
    pools = by_pool(names)
    with ThreadPoolExecutor(len(pools)) as executor:
        calls = [
            executor.submit(copy_context().run, pool.snapshot, each, properties) for each in pools
        ]
    for call in calls:
        call.result()


def initial_properties(plan: Plan, reference: str) -> dict[str, str]:
    """Return the user properties of a run's snapshots until its bundle is sealed."""
    mark = {f"{PREFIX}retention": plan.policy} if plan.policy else {}
    mark |= {NOTE_PROPERTY: plan.note} if plan.note else {}
    mark |= {f"{PREFIX}group": plan.group.mark} if plan.group else {}
    mark |= marks(plan.run, plan.domain.uuid, plan.domain.name, reference)
    return mark | {f"{PREFIX}level": Level.CRASH.value}  # until the bundle is sealed, no more
