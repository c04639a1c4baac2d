"""Who takes the ZFS snapshots of a run: the run, or somebody it holds the guest still for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from snaporch.catalog.properties import marks, own_snapshots
from snaporch.context import Context
from snaporch.model import GroupRun, Level, PoolSnapshot
from snaporch.snapshot.plan import Plan
from snaporch.zfs import PREFIX, PoolError


class Snapshotter(Protocol):
    """Asked in this order: ``prepare``, ``take``, ``level``, ``released``, ``taken``."""

    awaited: bool
    """Whether somebody else takes them; then they are not the run's to destroy."""
    window_seconds: int
    """How long the frozen window may stay open while somebody else takes them; 0 if nobody does."""
    group: GroupRun | None
    """The consistency group they are taken with."""

    def prepare(self, plan: Plan) -> None:
        """Before the guest is frozen."""

    def take(self, plan: Plan, properties: Mapping[str, str]) -> None:
        """Inside the frozen window; back when the snapshots are there.

        Raises:
            SnaporchError: there are none.
        """

    def level(self, reached: Level) -> Level:
        """What the snapshots are worth when the guest stood still for ``reached``."""

    def released(self) -> None:
        """The guest goes on."""

    def taken(self, plan: Plan, properties: Mapping[str, str]) -> list[PoolSnapshot]:
        """The snapshots, which carry ``properties`` now.

        Raises:
            PoolError: they are not all there any more.
        """


class LocalSnapshotter:
    """The run takes them: one atomic snapshot per pool."""

    awaited = False
    window_seconds = 0
    group: GroupRun | None = None

    def __init__(self, context: Context) -> None:
        self._context = context

    def prepare(self, plan: Plan) -> None:
        """Nothing."""

    def take(self, plan: Plan, properties: Mapping[str, str]) -> None:
        """See :class:`Snapshotter`; none is left of a pool that failed."""
        for names in plan.by_pool().values():
            self._context.pool.snapshot(names, properties)

    def level(self, reached: Level) -> Level:
        """Just that."""
        return reached

    def released(self) -> None:
        """Nobody waits for it."""

    def taken(self, plan: Plan, properties: Mapping[str, str]) -> list[PoolSnapshot]:
        """See :class:`Snapshotter`."""
        snapshots = own_snapshots(self._context, plan.facts)
        if len(snapshots) != len(plan.datasets):
            raise PoolError(f"@{plan.snapshot}", "was destroyed by someone else while it was taken")
        return snapshots


def properties_of(plan: Plan, reference: str) -> dict[str, str]:
    """What the snapshots of a run carry until its bundle is sealed."""
    mark = {f"{PREFIX}retention": plan.policy} if plan.policy else {}
    mark |= {f"{PREFIX}group": plan.group.mark} if plan.group else {}
    mark |= marks(plan.run, plan.domain.uuid, plan.domain.name, reference)
    return mark | {f"{PREFIX}level": Level.CRASH.value}  # until the bundle is sealed, no more
