"""The window of a consistency group: all members are frozen before any pool is snapshotted.

Each member has the ordinary run of ``snapshot/run.py``, in a thread of its own, with its own
journal, lock and guardian. The runs share a :class:`GroupBarrier`. No member is frozen before all
are ready. Members whose RAM is saved finish at about the same time. The last member to be frozen
takes the snapshots of all, with one atomic call for each pool. If a member cannot be frozen, all
are released.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from snaporch.context import Context
from snaporch.errors import CalledOffError, NotFoundError, RunFailedError
from snaporch.model import GroupRun, PoolSnapshot, Strategy
from snaporch.progress import LockedProgress
from snaporch.snapshot.plan import Plan
from snaporch.snapshot.snapshotter import LocalSnapshotter, take_in_pools
from snaporch.zfs import PREFIX

_RAM_STRATEGIES = (Strategy.OVERLAY, Strategy.MANUAL)
_FREEZE_ORDER = (
    _RAM_STRATEGIES,
    (Strategy.QUIESCED,),
    (Strategy.PAUSED, Strategy.CRASH, Strategy.OFF),
)
"""The order of freezing: saving RAM takes long, an agent takes a while, suspending is immediate."""


@dataclass
class _MemberState:
    """How far the run of a member is."""

    name: str
    ram: int = 0
    plan: Plan | None = None
    frozen: bool = False
    remaining: int = 0
    """Estimated bytes of RAM that are still to be saved."""

    @property
    def turn(self) -> int:
        """Its place in the order of freezing; members with a lower one are frozen first."""
        assert self.plan is not None
        strategy = self.plan.strategy
        return next(number for number, each in enumerate(_FREEZE_ORDER) if strategy in each)


class GroupBarrier:
    """Lets each member's run wait for the others; used by one thread for each member."""

    def __init__(self, context: Context, group: GroupRun) -> None:
        self.group = group
        self.poll_seconds = 0.2
        """How long a member waits at most before it checks again."""
        self._context = context
        self._changed = threading.Condition()
        self._members = {uuid: _MemberState(name) for uuid, name in group.members}
        self._failed: tuple[str, BaseException] | None = None
        self._taken = False

    @property
    def failed(self) -> tuple[str, BaseException] | None:
        """The member that failed first, and its error; ``None`` if none has."""
        return self._failed

    def fail(self, uuid: str, error: BaseException) -> None:
        """Record that a run failed: unless the snapshots exist, no member gets any."""
        with self._changed:
            self._fail(self._members[uuid], error)

    def _fail(self, member: _MemberState, error: BaseException) -> None:
        if self._failed is None and not self._taken:
            self._failed = member.name, error
        self._changed.notify_all()

    def check(self, uuid: str) -> None:
        """Stop a member's run if another member has failed.

        Raises:
            CalledOffError: another member has failed.
        """
        if self._failed is not None:
            raise CalledOffError(self._members[uuid].name, self._failed[0])

    def others_wait(self, uuid: str) -> bool:
        """Whether a member other than this one is frozen, so that it waits for the others."""
        with self._changed:
            return any(each.frozen for key, each in self._members.items() if key != uuid)

    def record_saved(self, subject: str, done: int, total: int) -> tuple[int, int]:
        """Record the saved bytes of one member; return the saved and total bytes of all members."""
        with self._changed:
            for member in self._members.values():
                if member.name == subject:
                    member.remaining, member.ram = max(total - done, 0), total
            self._changed.notify_all()
            whole = sum(member.ram for member in self._members.values())
            return whole - sum(member.remaining for member in self._members.values()), whole

    # -- called by the members' runs --------------------------------------------------------

    def await_turn(self, uuid: str, plan: Plan, check: Callable[[str], None]) -> None:
        """Wait until all members are ready, and those that come before this one are far enough."""
        own = self._members[uuid]
        with self._changed:
            own.plan, own.frozen = plan, False
            if plan.strategy in _RAM_STRATEGIES:
                own.remaining = own.ram = self._ram_of(uuid)
            else:
                own.remaining = 0
            self._changed.notify_all()
            while not self._may_freeze(uuid):
                self._changed.wait(self.poll_seconds)
                check(own.name)

    def _ram_of(self, uuid: str) -> int:
        with suppress(NotFoundError):  # the run reports it
            return self._context.hypervisor.ram_in_use(uuid)
        return 0

    def _may_freeze(self, uuid: str) -> bool:
        own = self._members[uuid]
        members = self._members.values()
        if any(member.plan is None for member in members):
            return False
        before = [member for member in members if member.turn < own.turn]
        return all(member.frozen for member in before) and all(
            each.remaining <= own.ram for each in members
        )

    def take(
        self, uuid: str, plan: Plan, properties: Mapping[str, str], check: Callable[[str], None]
    ) -> None:
        """Record that this member is frozen, and wait until the snapshots of all exist.

        Raises:
            CalledOffError: another member failed.
            PoolError: the snapshots cannot be taken.
            RunFailedError: this member was frozen for too long.
        """
        own = self._members[uuid]
        with self._changed:
            own.frozen, own.remaining = True, 0
            self._changed.notify_all()
            try:
                self._await_all(own, plan, properties, check)
            except BaseException as error:
                self._fail(own, error)  # at once: the others are still frozen
                raise

    def _await_all(
        self,
        own: _MemberState,
        plan: Plan,
        properties: Mapping[str, str],
        check: Callable[[str], None],
    ) -> None:
        """Wait until all are frozen; the last member takes the snapshots of all."""
        seconds = plan.max_frozen
        end = time.monotonic() + seconds
        while not self._taken:
            check(own.name)
            if all(member.frozen for member in self._members.values()):
                self._take_all(properties)
                self._taken = True
            elif time.monotonic() > end:
                raise self._too_long(own, seconds)
            else:
                self._changed.wait(self.poll_seconds)

    def _too_long(self, own: _MemberState, seconds: float) -> RunFailedError:
        late = [member.name for member in self._members.values() if not member.frozen]
        return RunFailedError(
            own.name,
            f"was frozen for {seconds:.0f} s, and {', '.join(late)} was not frozen yet",
            'raise freeze_deadline, or set ram_strategy = "overlay" for those that wait',
        )

    def _take_all(self, properties: Mapping[str, str]) -> None:
        """Take the snapshots of all members; each run sets its properties later."""
        names: list[str] = []
        for member in self._members.values():
            assert member.plan is not None
            names += member.plan.full_names
        common = {PREFIX + key for key in ("retention", "level", "group")}
        shared = {key: value for key, value in properties.items() if key in common}
        take_in_pools(self._context.pool, sorted(names), shared)


class GroupMemberSnapshotter(LocalSnapshotter):
    """Takes the snapshots of one member together with those of the others."""

    def __init__(self, context: Context, barrier: GroupBarrier, uuid: str) -> None:
        super().__init__(context)
        self.group = barrier.group
        self._barrier = barrier
        self._uuid = uuid

    def prepare(self, plan: Plan) -> None:
        """Wait until this member may be frozen."""
        self._barrier.await_turn(self._uuid, plan, self._context.interrupt.check)

    def take(self, plan: Plan, properties: Mapping[str, str]) -> None:
        """Wait for the snapshots of all members; the last member takes them."""
        self._barrier.take(self._uuid, plan, properties, self._context.interrupt.check)

    def others_wait(self) -> bool:
        """Whether another member is frozen."""
        return self._barrier.others_wait(self._uuid)

    def taken(self, plan: Plan, properties: Mapping[str, str]) -> list[PoolSnapshot]:
        """Set the properties of this run on the member's snapshots, and return these."""
        snapshots = super().taken(plan, properties)
        self._context.pool.set_properties([s.full_name for s in snapshots], properties)
        return snapshots


@dataclass
class SharedProgress(LockedProgress):
    """Passes the progress of all members to one listener, and their bytes as one sum."""

    barrier: GroupBarrier
    title: str

    def amount(self, subject: str, done: int, total: int) -> None:
        """Report the sum of all members' bytes."""
        arrived, whole = self.barrier.record_saved(subject, done, total)
        with self._lock:
            self.listener.amount(self.title, arrived, whole)
