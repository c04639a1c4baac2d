"""The window of a consistency group: all its domains stand still before any pool is snapshotted.

Each domain has the ordinary run of ``snapshot/run.py``, in a thread of its own, with its own
journal, lock and guardian. What they share is a :class:`GroupBarrier`: nobody is frozen before
all are ready, those with RAM to save finish at about the same time, and the last to be frozen takes
the snapshots of all, one atomic call for each pool. If one cannot be frozen, all are let go.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from snaporch.context import Context, Interrupt
from snaporch.errors import InterruptedRunError, NotFoundError, RunFailedError
from snaporch.model import GroupRun, PoolSnapshot, Strategy
from snaporch.progress import Progress
from snaporch.snapshot.plan import Plan
from snaporch.snapshot.snapshotter import LocalSnapshotter
from snaporch.zfs import PREFIX

_LOOK_SECONDS = 0.2
_MARGIN_SECONDS = 2
_RAM = (Strategy.OVERLAY, Strategy.MANUAL)
_TURNS = (_RAM, (Strategy.QUIESCED,), (Strategy.PAUSED, Strategy.CRASH, Strategy.OFF))
"""RAM takes its time, and an agent some; suspending takes none: that comes last."""


class CalledOffError(InterruptedRunError):
    """The run undoes itself because another member's failed; there is no other level to try."""

    def __init__(self, thing: str, because: str) -> None:
        super().__init__(thing, f"let go, because {because} failed", 0)


@dataclass
class _MemberState:
    """Where a member is."""

    name: str
    ram: int = 0
    plan: Plan | None = None
    frozen: bool = False
    left: int = 0
    """Bytes of RAM that are still to be saved, as far as can be told."""

    @property
    def turn(self) -> int:
        """By what it is frozen; lower ones first."""
        assert self.plan is not None
        strategy = self.plan.strategy
        return next(number for number, turn in enumerate(_TURNS) if strategy in turn)


class GroupBarrier:
    """Who is where, and what the others may do; for use by one thread per member."""

    def __init__(self, context: Context, group: GroupRun) -> None:
        self.group = group
        self._context = context
        self._changed = threading.Condition()
        self._places = {uuid: _MemberState(name) for uuid, name in group.members}
        self._failed: tuple[str, BaseException] | None = None
        self._taken = False

    @property
    def failed(self) -> tuple[str, BaseException] | None:
        """The member that ended it for all, and why."""
        return self._failed

    def fail(self, uuid: str, error: BaseException) -> None:
        """A run has failed: unless the snapshots are there, nobody shall have any."""
        with self._changed:
            self._fail(self._places[uuid], error)

    def _fail(self, place: _MemberState, error: BaseException) -> None:
        if self._failed is None and not self._taken:
            self._failed = place.name, error
        self._changed.notify_all()

    def check(self, uuid: str) -> None:
        """Raise when the group has failed: there will be nothing that would be worth keeping.

        Raises:
            CalledOffError: it has.
        """
        if self._failed is not None:
            raise CalledOffError(self._places[uuid].name, self._failed[0])

    def arrives(self, subject: str, done: int, total: int) -> tuple[int, int]:
        """So much RAM of the domain called ``subject`` has been saved; what all have together."""
        with self._changed:
            for place in self._places.values():
                if place.name == subject:
                    place.left, place.ram = max(total - done, 0), total
            self._changed.notify_all()
            whole = sum(place.ram for place in self._places.values())
            return whole - sum(place.left for place in self._places.values()), whole

    # -- for the members' runs --------------------------------------------------------------

    def await_turn(self, uuid: str, plan: Plan, check: Callable[[str], None]) -> None:
        """Until this member may be frozen: all are ready, and those before it are far enough."""
        own = self._places[uuid]
        with self._changed:
            own.plan, own.frozen = plan, False
            if plan.strategy in _RAM:
                own.left = own.ram = self._ram_of(uuid)
            else:
                own.left = 0
            self._changed.notify_all()
            while not self._may_freeze(uuid):
                self._changed.wait(_LOOK_SECONDS)
                check(own.name)

    def _ram_of(self, uuid: str) -> int:
        with suppress(NotFoundError):  # which the run will say
            return self._context.hypervisor.ram_in_use(uuid)
        return 0

    def _may_freeze(self, uuid: str) -> bool:
        own = self._places[uuid]
        places = self._places.values()
        if any(place.plan is None for place in places):
            return False
        before = [place for place in places if place.turn < own.turn]
        return all(place.frozen for place in before) and all(p.left <= own.ram for p in places)

    def take(
        self, uuid: str, plan: Plan, properties: Mapping[str, str], check: Callable[[str], None]
    ) -> None:
        """This member is frozen; back when the snapshots of all are there.

        Raises:
            CalledOffError: another member failed.
            PoolError: they cannot be taken.
        """
        own = self._places[uuid]
        with self._changed:
            own.frozen, own.left = True, 0
            self._changed.notify_all()
            try:
                self._await_all(own, plan, properties, check)
            except BaseException as error:
                self._fail(own, error)  # at once: the others stand still, and it no longer does
                raise

    def _await_all(
        self,
        own: _MemberState,
        plan: Plan,
        properties: Mapping[str, str],
        check: Callable[[str], None],
    ) -> None:
        """Until all are frozen and have their snapshots, which the last of them takes."""
        seconds = _patience(plan)
        end = time.monotonic() + seconds
        while not self._taken:
            check(own.name)
            if all(place.frozen for place in self._places.values()):
                self._take_all(properties)
                self._taken = True
            elif time.monotonic() > end:
                raise self._too_long(own, seconds)
            else:
                self._changed.wait(_LOOK_SECONDS)

    def _too_long(self, own: _MemberState, seconds: float) -> RunFailedError:
        late = [place.name for place in self._places.values() if not place.frozen]
        return RunFailedError(
            own.name,
            f"stood still for {seconds:.0f} s, and {', '.join(late)} still was not frozen",
            'raise freeze_deadline, or set ram_strategy = "overlay" for those that wait',
        )

    def _take_all(self, properties: Mapping[str, str]) -> None:
        """One atomic call for each pool, over all members; the marks of each come later."""
        pools: dict[str, list[str]] = {}
        for place in self._places.values():
            assert place.plan is not None
            for pool, names in place.plan.by_pool().items():
                pools.setdefault(pool, []).extend(names)
        common = {PREFIX + key for key in ("retention", "level", "group")}
        shared = {key: value for key, value in properties.items() if key in common}
        for pool in sorted(pools):
            self._context.pool.snapshot(sorted(pools[pool]), shared)


def _patience(plan: Plan) -> float:
    """How long a member may stand still; the guardian would come a moment later."""
    if plan.strategy not in (Strategy.MANUAL, Strategy.PAUSED, Strategy.QUIESCED):
        return math.inf
    return max(plan.settings.freeze_deadline - _MARGIN_SECONDS, 1)


class GroupMemberSnapshotter(LocalSnapshotter):
    """A :class:`~snaporch.snapshot.snapshotter.Snapshotter` of one domain of the group."""

    def __init__(self, context: Context, window: GroupBarrier, uuid: str) -> None:
        super().__init__(context)
        self.group = window.group
        self._window = window
        self._uuid = uuid

    def prepare(self, plan: Plan) -> None:
        """Wait for the others."""
        self._window.await_turn(self._uuid, plan, self._context.interrupt.check)

    def take(self, plan: Plan, properties: Mapping[str, str]) -> None:
        """See :class:`~snaporch.snapshot.snapshotter.Snapshotter`."""
        self._window.take(self._uuid, plan, properties, self._context.interrupt.check)

    def taken(self, plan: Plan, properties: Mapping[str, str]) -> list[PoolSnapshot]:
        """Mark the member's snapshots as its run's."""
        snapshots = super().taken(plan, properties)
        self._context.pool.set_properties([s.full_name for s in snapshots], properties)
        return snapshots


class MemberInterrupt(Interrupt):
    """What asks a member's run to stop: a signal to the process, or the end of the group."""

    def __init__(self, signal: Interrupt, window: GroupBarrier, uuid: str) -> None:
        self._signal = signal
        self._window = window
        self._uuid = uuid

    def check(self, thing: str) -> None:
        """See :class:`~snaporch.context.Interrupt`."""
        self._signal.check(thing)
        self._window.check(self._uuid)


@dataclass
class SharedProgress:
    """One listener for all members; their bytes are told as one sum."""

    listener: Progress
    window: GroupBarrier
    title: str
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def step(self, subject: str, text: str) -> None:
        """A step."""
        with self._lock:
            self.listener.step(subject, text)

    def note(self, subject: str, text: str) -> None:
        """A warning."""
        with self._lock:
            self.listener.note(subject, text)

    def amount(self, subject: str, done: int, total: int) -> None:
        """Bytes of one member."""
        arrived, whole = self.window.arrives(subject, done, total)
        with self._lock:
            self.listener.amount(self.title, arrived, whole)
