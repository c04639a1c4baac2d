"""Restore what a consistency group took at one instant: ``restore --group``.

Each member has the ordinary restore of :mod:`snaporch.restore.run`, in a thread of its own, with
its own lock, journal and safety copy. None is stopped before all are checked, and none is rolled
back before all are off: no member that was restored meets one that was not.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from snaporch import default_paths
from snaporch.catalog.records import all_records
from snaporch.command_log import fields
from snaporch.context import Context
from snaporch.errors import (
    CalledOffError,
    InterruptedRunError,
    RefusedError,
    RunFailedError,
    SnaporchError,
    UsageError,
)
from snaporch.interrupt import MemberInterrupt
from snaporch.locks import domain_lock
from snaporch.model import SnapshotRecord
from snaporch.progress import LockedProgress
from snaporch.recovery.recover_runs import recover_leftovers
from snaporch.restore.bundle_checks import check_bundle
from snaporch.restore.confirm_and_restore import (
    RestoreRequest,
    make_preview_of,
    plan_under_lock,
)
from snaporch.restore.host_requirements import MemoryNeed, check_needs
from snaporch.restore.journal import forget_all_off, note_all_off
from snaporch.restore.plan import memory_of
from snaporch.restore.plan_model import RestorePlan
from snaporch.restore.preview import Refusals, RestorePreview
from snaporch.restore.run import (
    Restored,
    RestorePoint,
    check_as_shown,
    check_not_left_off,
    restore,
)
from snaporch.restore.select import of_group, records_of

_POLL_SECONDS = 0.2


@dataclass
class GroupRestored:
    """The results of a group's members, and their failures."""

    restored: list[Restored] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    """Errors of the members that failed by themselves, the first failure first."""

    @property
    def signal(self) -> InterruptedRunError | None:
        """The error of a member that a signal has stopped; ``None`` if none was."""
        stopped = (each for each in self.failures if isinstance(each, InterruptedRunError))
        return next(stopped, None)


class MembersMeeting:
    """Lets the restores of a group wait for each other; used by one thread for each member.

    Safety copies are written one after the other, so that each finds the room that is left.

    Args:
        members: the names of the members' domains, by their UUIDs.
        jobs: the most members that are rolled back and resumed at once.
        on_all_off: is called once, when all are off; what it raises undoes all.
    """

    def __init__(
        self, members: dict[str, str], jobs: int, on_all_off: Callable[[], None] = lambda: None
    ) -> None:
        self._members = members
        self._on_all_off = on_all_off
        self._all_off = False
        self._changed = threading.Condition()
        self._arrived: dict[RestorePoint, set[str]] = {point: set() for point in RestorePoint}
        self._failed: tuple[str, BaseException] | None = None
        one = dict.fromkeys((RestorePoint.PLANNED, RestorePoint.AGAIN), 1)
        self._most = {**one, RestorePoint.ROLLING: jobs}
        self._at_work: dict[RestorePoint, set[str]] = {point: set() for point in self._most}

    @property
    def first_failure(self) -> BaseException | None:
        """The error of the member that failed first; ``None`` if none has."""
        return self._failed[1] if self._failed else None

    def fail(self, uuid: str, error: BaseException) -> None:
        """Record that a restore failed: if a member is not off yet, none is rolled back."""
        with self._changed:
            self._fail(uuid, error)

    def _fail(self, uuid: str, error: BaseException) -> None:
        if self._failed is None:
            self._failed = self._members[uuid], error
        self._changed.notify_all()

    def check(self, uuid: str) -> None:
        """Stop a member's restore if another has failed, unless all are off already.

        Raises:
            CalledOffError: another member has failed.
        """
        if self._failed is not None and not self._all_off:
            raise CalledOffError(self._members[uuid], self._failed[0])

    def wait_at(self, uuid: str, check: Callable[[str], None], point: RestorePoint) -> None:
        """Wait for this member's turn, or until all members are at this point.

        Args:
            uuid: of the member.
            check: raises if the member has to stop; it is not called once all are off.
            point: where the member's restore is.

        Raises:
            InterruptedRunError: a signal came, or another member has failed.
        """
        with self._changed:
            self._arrived[point].add(uuid)
            self._leave(uuid)
            try:
                while not self._may_go_on(point):
                    if point is not RestorePoint.ROLLING:
                        check(self._members[uuid])
                    self._changed.wait(_POLL_SECONDS)
            except BaseException as error:
                # it must not count as waiting: the last to arrive would go on without it
                self._arrived[point].discard(uuid)
                self._fail(uuid, error)
                raise
            if point in self._most:
                self._at_work[point].add(uuid)

    def _may_go_on(self, point: RestorePoint) -> bool:
        if point in self._most:
            return len(self._at_work[point]) < self._most[point]
        if len(self._arrived[point]) < len(self._members):
            return False
        if point is RestorePoint.BARRED and not self._all_off:
            self._on_all_off()
            self._all_off = True
        return True

    def leave(self, uuid: str) -> None:
        """Let another member have its turn."""
        with self._changed:
            self._leave(uuid)

    def _leave(self, uuid: str) -> None:
        for working in self._at_work.values():
            working.discard(uuid)
        self._changed.notify_all()


def choose_members(context: Context, request: RestoreRequest) -> list[SnapshotRecord]:
    """Return the snapshots of one instant of a group, sorted by the domains' names.

    Of several that claim to be of one member, the one counts whose manifest names that instant.

    Args:
        context: of this host.
        request: the options, and one member's snapshot.

    Raises:
        NotFoundError: there is no such snapshot.
        RefusedError: it was not taken with a group.
        UsageError: an option is for one domain only.
    """
    request.check()
    alone = {"--bundle": request.bundle is not None, "--keep-running-state": request.keep_running}
    for option, given in alone.items():
        if given:
            raise UsageError(f"--group and {option}", "exclude one another", "choose one")
    domain, name = request.choose(context)
    snapshots = context.pool.snapshots()
    chosen = records_of(context, snapshots, domain, name)
    if chosen[-1].group_run is None:
        step = "leave --group out; see the column GROUP of `snaporch list --wide`"
        raise RefusedError(chosen[-1].full_name, "was not taken with a group", step)
    others = of_group(all_records(context.store, snapshots, renamed_too=True), chosen)
    others.sort(key=partial(_is_named_by_its_bundle, context))  # the last one of a UUID counts
    members = {record.uuid: record for record in (*others, *chosen)}
    return sorted(members.values(), key=lambda each: each.domain)


def _is_named_by_its_bundle(context: Context, record: SnapshotRecord) -> bool:
    """Whether the manifest says that it was taken with the group of its mark."""
    _, manifest = context.store.state(f"{record.uuid}/{record.run}")
    group = manifest.group if manifest is not None else None
    return group is not None and group.run == record.group_run


def check_complete(plans: Sequence[RestorePlan]) -> None:
    """Refuse if a member has no snapshot of the instant any more, or cannot be stopped and kept.

    The marks on ZFS snapshots may be forged. So each manifest of that instant has to name each
    domain that has the mark.

    Args:
        plans: of all domains that have the mark of the group's instant.

    Raises:
        RefusedError: names the domains that the group had then.
    """
    group = f"{plans[0].record.group}@{plans[0].record.snapshot}"
    step = "restore the others one by one, without --group"
    run = plans[0].record.group_run
    entries = [plan.manifest.group for plan in plans if plan.manifest is not None]
    groups = [entry.members for entry in entries if entry is not None and entry.run == run]
    had = {each.uuid: each.domain for members in groups for each in members}
    if not had:
        reason = "no bundle says any more who belonged to the group"
        raise RefusedError(group, reason, "restore each by itself, without --group")
    named = set(had).intersection(*({each.uuid for each in members} for members in groups))
    if extra := sorted(plan.record.domain for plan in plans if plan.record.uuid not in named):
        text = f"{', '.join(extra)} is marked as a member, and the members' bundles do not name it"
        raise RefusedError(group, text, f"the mark may be forged: {step}")
    there = {plan.record.uuid for plan in plans}
    if missing := sorted(name for uuid, name in had.items() if uuid not in there):
        text = f"{', '.join(missing)} has no snapshot of that instant any more"
        raise RefusedError(group, text, step)
    for plan in plans:
        check_persistent(plan)


def check_persistent(plan: RestorePlan) -> None:
    """Refuse a transient domain: it could not be started again if the group is called off.

    Raises:
        RefusedError: libvirt forgets the domain as soon as it is off.
    """
    domain = plan.domain
    if domain is not None and domain.active and domain.inactive_xml is None:
        raise RefusedError(
            plan.thing,
            "its domain is transient: libvirt forgets it as soon as it is off",
            "make it persistent by `virsh define`, or restore each by itself, without --group",
        )


def check_memory_together(context: Context, plans: Sequence[RestorePlan]) -> None:
    """Refuse if all members together need more memory than the host has once they are off.

    Args:
        context: of this host.
        plans: of all members.

    Raises:
        RefusedError: with the memory that is needed and the memory that is free.
    """
    record = plans[0].record
    needs = [_more_than_now(memory_of(context, plan), plan) for plan in plans]
    check_needs(f"{record.group}@{record.snapshot}", needs, context.resolver.host)


def _more_than_now(need: MemoryNeed, plan: RestorePlan) -> MemoryNeed:
    """What a member needs; one that runs now and boots uses as much as now until it uses more.

    So a host whose guests have more memory than it has is not refused what it has now.
    """
    runs = plan.domain is not None and plan.domain.active
    if runs and plan.ram is None:
        return replace(need, needed=min(need.needed, need.freed))
    return need


def preview_group(context: Context, request: RestoreRequest) -> list[RestorePreview]:
    """Plan the restores of all members, and make every check that changes nothing.

    A refusal of all together is in the last preview.

    Args:
        context: of this host.
        request: the options, and one member's snapshot.

    Raises:
        SnaporchError: there is no plan; as :func:`choose_members` and :func:`make_restore_plan`.
    """
    members = choose_members(context, request)
    previews = [make_preview_of(context, request, (each.uuid, each.run)) for each in members]
    plans = [preview.plan for preview in previews]
    check_complete(plans)
    refusals = Refusals()
    with refusals:
        check_memory_together(context, plans)
    last = previews[-1]
    return [*previews[:-1], replace(last, refusals=(*last.refusals, *refusals.found))]


def run_group_restore(
    context: Context,
    request: RestoreRequest,
    *,
    confirm: Callable[[Sequence[RestorePlan]], None] | None,
    wait: int | None,
    jobs: int | None,
) -> GroupRestored:
    """Restore all domains that the group had.

    The locks of all members are taken in the order of their UUIDs, so that two commands with the
    same members cannot wait for each other.

    Args:
        context: of this host.
        request: the options, and one member's snapshot.
        confirm: shows the plans to the user, and raises unless the user agrees; it is called
            without the locks. ``None``: do not ask.
        wait: seconds to wait for locks; ``None`` for each domain's configured time.
        jobs: the most members that are rolled back and resumed at once; ``None`` for all.

    Raises:
        SnaporchError: nothing was touched; as :func:`preview_group` and :func:`check_as_shown`.
    """
    recover_leftovers(context)
    members = choose_members(context, request)
    shown = [request.plan(context, each.uuid, each.run) for each in members]
    check_complete(shown)
    check_memory_together(context, shown)
    if confirm is not None:
        damaged = request.despite_damage
        shown = [check_bundle(context, plan, despite_damage=damaged) for plan in shown]
        confirm(shown)
    together = secrets.token_hex(8)
    asked = confirm is not None
    restores = _MemberRestores(context, request, wait, was_asked=asked, together=together)
    with fields(), ExitStack() as all_locks:
        locks = {each.uuid: all_locks.enter_context(ExitStack()) for each in members}
        for each in sorted(members, key=lambda one: one.uuid):
            locks[each.uuid].enter_context(restores.lock(each))
        if asked:  # the answer may have taken long
            check_memory_together(context, shown)
        return _restore_together(restores, shown, locks, jobs or len(members))


@dataclass
class _MemberRestores:
    """The restores of members, with the options of one command."""

    context: Context
    request: RestoreRequest
    wait: int | None
    was_asked: bool
    """Whether the user has seen the plans."""
    together: str
    """See :func:`~snaporch.restore.run.restore`."""

    def _longest(self, record: SnapshotRecord) -> int:
        settings = self.context.config.settings(record.domain, record.uuid)
        return settings.wait if self.wait is None else self.wait

    def lock(self, record: SnapshotRecord) -> AbstractContextManager[None]:
        return domain_lock(
            default_paths.LOCKS,
            record.domain,
            record.uuid,
            "restore",
            wait=self._longest(record),
            interrupt=self.context.interrupt,
            can_wait=True,
        )

    def restore(
        self, shown: RestorePlan, meeting: MembersMeeting, progress: LockedProgress
    ) -> Restored:
        """Restore one member, whose lock is held; it waits for the others at each point."""
        record, uuid = shown.record, shown.record.uuid
        interrupt = MemberInterrupt(
            outer=self.context.interrupt, check_others=partial(meeting.check, uuid)
        )
        own = replace(self.context, progress=progress, interrupt=interrupt)
        current = plan_under_lock(own, self.request, record, (uuid, record.run))
        check_persistent(current)
        if self.was_asked:
            check_as_shown(shown, current)
        return restore(
            own,
            current,
            safety=self.request.safety,
            keep_running=self.request.keep_running,
            wait=self._longest(record),
            at_point=partial(meeting.wait_at, uuid, interrupt.check),
            together=self.together,
        )


def _restore_together(
    restores: _MemberRestores,
    shown: Sequence[RestorePlan],
    locks: Mapping[str, AbstractContextManager[object]],
    jobs: int,
) -> GroupRestored:
    """Restore all members at once; each lock is released when its member's restore ends."""
    journals = restores.context.config.paths.journal
    meeting = MembersMeeting(
        {plan.record.uuid: plan.record.domain for plan in shown},
        jobs,
        partial(note_all_off, journals, restores.together),
    )
    progress = LockedProgress(restores.context.progress)

    def put_back(plan: RestorePlan) -> Restored:
        uuid = plan.record.uuid
        try:
            with locks[uuid], fields(DOMAIN=plan.record.domain):
                try:
                    return restores.restore(plan, meeting, progress)
                except CalledOffError as error:
                    check_not_left_off(restores.context, plan.record, error)
                    raise
        except BaseException as error:
            meeting.fail(uuid, error)
            if isinstance(error, RunFailedError):  # it may be off, and others take their time
                progress.note(plan.record.domain, error.explanation)
            raise
        finally:
            meeting.leave(uuid)

    result = GroupRestored()
    with ThreadPoolExecutor(len(shown), thread_name_prefix="member") as threads:
        try:
            futures = [threads.submit(put_back, plan) for plan in shown]
        except BaseException as bug:  # no thread is left: those that wait have to end
            meeting.fail(shown[-1].record.uuid, bug)
            raise
    with suppress(SnaporchError):  # the next recovery does it
        forget_all_off(journals, restores.together)
    for future in futures:
        error = future.exception()
        if error is None:
            result.restored.append(future.result())
        elif not isinstance(error, CalledOffError):
            result.failures.append(error)
    result.failures.sort(key=lambda error: error is not meeting.first_failure)
    return result
