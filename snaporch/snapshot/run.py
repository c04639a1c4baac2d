"""The run: freeze the guest, snapshot the pools while it is frozen, release it, seal the bundle.

A signal during ``PREPARE`` or ``FREEZE`` undoes the run. From ``POOL_SNAPSHOT`` on a run always
finishes, because finishing takes no longer than undoing. The exception is RAM that can no longer be
stored: a signal ends the wait for it.

A failover ends the guest after its snapshot: it stays paused while its bundle is sealed, and is
then ended in place of the release. Any failure before its fence exists releases it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from snaporch import default_paths
from snaporch.bundle.manifest import Manifest, Part, SurroundingsEntry
from snaporch.catalog.records import record_of
from snaporch.catalog.torn import commits_of_all, is_torn, mark_torn
from snaporch.context import Context
from snaporch.errors import (
    AttentionError,
    ChangedError,
    InterruptedRunError,
    RunFailedError,
    SnaporchError,
    one_line,
)
from snaporch.hypervisor import CancelledError
from snaporch.journal import Journal, Note, Step, release_mark
from snaporch.locks import domain_lock
from snaporch.model import BundleState, Domain, DomainState, Level, PoolSnapshot, SnapshotRecord
from snaporch.recovery.recover_runs import QUARANTINE_STEP, recover, recover_run
from snaporch.recovery.result import Effect
from snaporch.recovery.start_guardian import await_guardian, start_guardian
from snaporch.snapshot.bundle_parts import build_manifest, side_parts
from snaporch.snapshot.choose_strategy import lower_level
from snaporch.snapshot.plan import Plan, make_plan
from snaporch.snapshot.plan_still_valid import check_idle
from snaporch.snapshot.request import AS_CONFIGURED, SnapshotRequest
from snaporch.snapshot.skip_unchanged import find_unchanged
from snaporch.snapshot.snapshotter import LocalSnapshotter, Snapshotter, initial_properties
from snaporch.snapshot.store_pages import store_as_pages
from snaporch.snapshot.strategies import make_strategy
from snaporch.snapshot.strategies.base import FreezeStrategy, RunMaterial, StrategyUnavailableError
from snaporch.snapshot.surroundings import read_surroundings
from snaporch.zfs import PREFIX


class FreezeFailedError(RunFailedError):
    """The guest could not be frozen; it runs on its base images, and nothing was kept."""


EndGuest = Callable[[SnapshotRecord, Callable[[], None]], None]
"""Fences and ends a guest: gets its last snapshot, and a check that it is paused all the time."""

_TRY_ANOTHER_WAY = (FreezeFailedError, StrategyUnavailableError)


def take_snapshot(
    context: Context,
    domain: Domain,
    request: SnapshotRequest = AS_CONFIGURED,
    *,
    taker: Snapshotter | None = None,
    end: EndGuest | None = None,
) -> SnapshotRecord:
    """Snapshot one domain.

    Args:
        context: configuration, hypervisor, pools and progress.
        domain: the domain; it is read again when its lock is held.
        request: what the caller asks for.
        taker: takes the ZFS snapshots; the run itself does if ``None``.
        end: fences and ends the guest, which has been paused since its RAM was saved; it is called
            with the complete snapshot, and with a check that raises if the guest was resumed. The
            guest is released if ``None``.

    Returns:
        The new snapshot; or with ``request.if_changed`` the policy's last one, if the guest is off
        and nothing has changed since.

    Raises:
        RefusedError, BusyError, UnavailableError: nothing was touched.
        RunFailedError: it failed and the guest is back on its base images.
        AttentionError: it failed and the guest may still be on overlays; says what to do.
    """
    taker = taker or LocalSnapshotter(context)
    with snapshot_lock(context, domain, request):
        plan = _plan_for(context, context.hypervisor.domain(domain.uuid), request, taker)
        if request.if_changed and (last := find_unchanged(context, plan)) is not None:
            context.progress.step(domain.name, f"off, unchanged since @{last.snapshot}")
            return last
        return run_plan(context, plan, request, taker, end)


@contextmanager
def snapshot_lock(context: Context, domain: Domain, request: SnapshotRequest) -> Iterator[None]:
    """Hold a domain's lock for a snapshot, and first recover an interrupted run of the domain.

    Raises:
        BusyError: another process holds the lock for longer than the request's ``wait``.
        AttentionError: the interrupted run cannot be recovered.
    """
    settings = context.config.settings(domain.name, domain.uuid)
    with domain_lock(
        default_paths.LOCKS,
        domain.name,
        domain.uuid,
        "snapshot",
        wait=settings.wait if request.wait is None else request.wait,
        interrupt=context.interrupt,
        can_wait=True,
    ):
        for result in recover(context, domain.uuid):
            context.progress.note(domain.name, str(result))
        yield


def run_plan(
    context: Context,
    plan: Plan,
    request: SnapshotRequest,
    taker: Snapshotter,
    end: EndGuest | None = None,
) -> SnapshotRecord:
    """Carry out a plan; if the guest cannot be frozen, try the other ways that are allowed.

    The caller holds the domain's lock. The other ways are overlays where they were avoided only for
    another program, and then the lower level of ``on_unavailable``.

    Raises:
        As :func:`take_snapshot`.
    """
    while True:
        try:
            return _Run(context, plan, taker, end).execute()
        except _TRY_ANOTHER_WAY as error:
            another = _plan_another_way(context, plan, request, taker, error.reason)
            if another is None:
                raise
            plan = another


def _plan_another_way(
    context: Context, failed: Plan, request: SnapshotRequest, taker: Snapshotter, failure: str
) -> Plan | None:
    lower = lower_level(failed.settings, failed.level)
    if not failed.yields_to_other_program and lower is None:
        return None
    now = context.hypervisor.domain(failed.domain.uuid)
    reason = "; ".join(filter(None, (failure, _changed_state(failed.domain, now))))
    if failed.yields_to_other_program:
        text = f"{failed.strategy} failed ({reason}): taking overlay instead"
        context.progress.note(failed.domain.name, text)
        return _plan_for(context, now, request, taker, avoid_other_programs=False)
    plan = _plan_for(context, now, replace(request, level=lower), taker)
    return replace(plan, downgrade=f"{failed.level} failed ({reason}): taking {lower} instead")


def _plan_for(
    context: Context,
    domain: Domain,
    request: SnapshotRequest,
    taker: Snapshotter,
    *,
    avoid_other_programs: bool = True,
) -> Plan:
    return make_plan(
        context,
        domain,
        request,
        awaited=taker.window_seconds if taker.taken_by_other_program else None,
        group=taker.group,
        avoid_other_programs=avoid_other_programs,
    )


class _Run:
    def __init__(
        self,
        context: Context,
        plan: Plan,
        taker: Snapshotter,
        end: EndGuest | None,
    ) -> None:
        self._context = context
        self._plan = plan
        self._taker = taker
        self._end = end
        self._domain = plan.domain
        self._started = context.clock.now()
        self._surroundings: SurroundingsEntry | None = None
        self._freezing = False
        self._touched = False
        self._taken = False
        self._paused_by: str | None = None
        """libvirt's reason for the guest's pause, when the freeze ended; only for a failover."""

    def execute(self) -> SnapshotRecord:
        plan, progress = self._plan, self._context.progress
        self._announce()
        self._context.interrupt.check(self._domain.name)
        journal = Journal(self._context.config.paths.journal, plan.facts)
        try:
            start_guardian(self._context, plan.facts, journal.path)
            record = self._carry_out(journal)
        except BaseException as error:
            outcome = self._recover(journal, error)
            if outcome is error:
                raise
            raise outcome from error
        journal.close(settled=True)
        record = store_as_pages(self._context, record)
        progress.step(plan.domain.name, f"done: {record.level} snapshot {record.snapshot}")
        return record

    def _announce(self) -> None:
        progress, name = self._context.progress, self._domain.name
        places = ", ".join(dataset.name for dataset in self._plan.datasets)
        what = f"{self._plan.level} snapshot @{self._plan.snapshot} of {places}"
        progress.step(name, f"{what} ({self._plan.strategy})")
        if self._plan.downgrade:
            progress.note(name, self._plan.downgrade)
        if self._plan.facts.overlays and (missing := self._context.hypervisor.start_hook_problem()):
            danger = "if power is lost now, libvirt may start it on its overlays"
            progress.note(name, f"{danger}: {missing.reason}; run: {missing.step}")
        for out in self._plan.left_out:
            report = progress.note if out.matters else progress.step
            report(name, f"left out: {out.describe()}")
        for text in (*_about_other_program(self._plan), *self._plan.shared_disk_warnings):
            progress.note(name, text)
        for file in self._plan.backing_files:
            if file.is_unknown:
                text = "not snapshotted, and a later change of it cannot be detected"
                progress.note(name, f"{text}: {file.path}, beneath {file.target}")
            elif file.dataset is None:
                progress.step(name, f"not snapshotted, must not be changed: {file.path}")
        if self._plan.level is Level.RAM and any(out.matters for out in self._plan.left_out):
            progress.note(name, "RAM and the disks that are left out will be of different instants")

    def _carry_out(self, journal: Journal) -> SnapshotRecord:
        plan = self._plan
        bundle = self._context.store.create(plan.domain.uuid, plan.run)
        strategy = make_strategy(
            RunMaterial(
                self._context,
                plan,
                bundle,
                journal,
                ends_guest=self._end is not None,
                others_wait=self._taker.others_wait,
            )
        )
        properties = initial_properties(plan, bundle.reference)
        # abandon() closes what prepare() opened even if the journal cannot be written any more.
        try:
            with journal.step(Step.PREPARE):
                await_guardian(self._context, plan.facts, journal.path)
                strategy.check_unchanged()
                self._surroundings = read_surroundings(self._context, plan)
                self._taker.prepare(plan)
                strategy.prepare()
                strategy.check_unchanged()
                if plan.facts.strategy.level is Level.RAM:  # a job from now on may be the run's
                    check_idle(self._context.hypervisor, plan.domain)
            self._freezing = self._touched = True
            with journal.step(Step.FREEZE):
                strategy.freeze()
            if self._end is not None and plan.domain.active:
                self._paused_by = self._context.hypervisor.paused_by(plan.domain.uuid)
            self._context.interrupt.check(plan.domain.name)
            self._freezing = False
            with journal.step(Step.POOL_SNAPSHOT):
                strategy.check_unchanged(state=False)
                self._snapshot_pools(properties)
                level = self._reached(strategy)
                if level not in (Level.CRASH, Level.TORN) and release_mark(journal.path).exists():
                    level = strategy.record_disturbance(level)
                level = self._taker.level(level)
            if self._end is None:
                with journal.step(Step.RELEASE):
                    strategy.release()
                self._taker.released()
            with journal.step(Step.SEAL):
                snapshots = self._taker.taken(plan, properties)
                if self._are_torn(snapshots):
                    level = Level.TORN
                parts = side_parts(bundle, plan.domain, strategy.pause)
                self._context.progress.step(plan.domain.name, "sealing the bundle")
                bundle.seal(self._manifest(strategy, level, parts, snapshots))
        except BaseException:
            strategy.abandon()
            raise
        with journal.step(Step.RECORD):
            names = [snapshot.full_name for snapshot in snapshots]
            self._context.pool.set_properties(names, {f"{PREFIX}level": level.value})
        there = self._context.pool.snapshots(plan.facts.datasets)
        record = record_of(self._context.store, there, plan.run, snapshots[0].name)
        if self._end is not None:
            with journal.step(Step.RELEASE):
                self._end_guest(journal, strategy, record, self._end)
        return record

    def _end_guest(
        self,
        journal: Journal,
        strategy: FreezeStrategy,
        record: SnapshotRecord,
        end: EndGuest,
    ) -> None:
        """End the guest in place of its release, if the snapshot has all that it ever did.

        Raises:
            RunFailedError: the guest may have run since, or not all of its RAM is in the snapshot.
        """
        self._context.interrupt.check(self._domain.name)
        journal.note(Note.ENDING)  # before the mark is looked for: see guardian.py
        level = Level.RAM if self._domain.active else Level.OFF
        is_whole = record.level is level and record.state is BundleState.COMPLETE
        if not is_whole or strategy.held or release_mark(journal.path).exists():
            raise self._not_ended()
        self._check_paused(strategy)
        end(record, lambda: self._check_paused(strategy))

    def _check_paused(self, strategy: FreezeStrategy) -> None:
        """Check that no other program resumed the guest since its RAM was saved, or started it.

        libvirt has another reason (``user``) for a guest that was resumed and paused again.

        Raises:
            ChangedError, RunFailedError: it may have run.
        """
        strategy.check_unchanged(state=False)  # another boot, too
        if not self._domain.active:
            return
        now = self._context.hypervisor.paused_by(self._domain.uuid)
        if now is None or now != self._paused_by:
            raise self._not_ended()

    def _not_ended(self) -> RunFailedError:
        how = "paused" if self._domain.active else "off"
        reason = f"it did not stay {how} until its snapshot was complete, so it was not ended"
        return RunFailedError(self._domain.name, reason, "try again")

    def _reached(self, strategy: FreezeStrategy) -> Level:
        """Return the level of the snapshots; the guest may have changed while it was frozen."""
        level = strategy.reached()
        if level is Level.TORN or (level is Level.CRASH and self._plan.level is not Level.CRASH):
            return level
        try:
            strategy.check_unchanged(state=False)
        except ChangedError as error:
            if level is Level.CRASH:  # the guest runs: the snapshots may lack some of its disks
                raise
            self._context.progress.note(self._domain.name, error.reason)
            return strategy.record_disturbance(level)
        return level

    def _are_torn(self, snapshots: list[PoolSnapshot]) -> bool:
        """Whether the run's snapshots fell into a commit, its own or another guest's."""
        context, datasets = self._context, self._plan.facts.datasets
        commits = commits_of_all(context.config.paths.journal)
        for torn in mark_torn(context.pool, datasets, commits):
            context.progress.note(self._domain.name, str(Effect.TORN.of(torn.full_name)))
        own = {snapshot.guid for snapshot in snapshots}
        return any(is_torn(each) for each in context.pool.snapshots(datasets) if each.guid in own)

    def _snapshot_pools(self, properties: Mapping[str, str]) -> None:
        """Take the ZFS snapshots; what can be done before or after the pause must not be here."""
        for planned in self._plan.disks:
            self._context.flush_volume(planned.path)
        self._taker.take(self._plan, properties)
        self._taken = True

    def _manifest(
        self,
        strategy: FreezeStrategy,
        level: Level,
        parts: list[Part],
        snapshots: list[PoolSnapshot],
    ) -> Manifest:
        ram = strategy.ram_part()
        return build_manifest(
            self._context.resolver,
            self._plan,
            level,
            [ram, *parts] if ram else parts,
            snapshots,
            self._context.hypervisor.versions(self._domain),
            strategy.pause,
            self._started,
            strategy.pause.began or snapshots[0].created,
            self._surroundings,
        )

    # -- after a failure --------------------------------------------------------------------

    def _recover(self, journal: Journal, error: BaseException) -> BaseException:
        """Recover the run and return the error to raise; keep the journal if recovery fails."""
        name = self._domain.name
        cancelled = isinstance(error, CancelledError) and not release_mark(journal.path).exists()
        doing = "finishing the run" if self._taken else "undoing the run"
        self._context.progress.step(name, doing)
        try:
            keep = self._taken or self._taker.taken_by_other_program
            notes = journal.all_notes()
            done = recover_run(
                self._context, self._plan.facts, notes, keep_snapshots=keep, alive=True
            )
        except AttentionError as problem:
            journal.close(settled=False)
            reason = f"{_reason(error, name)}; then: {problem.thing}: {problem.reason}"
            return AttentionError(name, reason + self._unsealed(), problem.step)
        except (SnaporchError, OSError) as problem:
            journal.close(settled=False)
            step = f"run: snaporch recover {self._domain.uuid}"
            reason = f"{_reason(error, name)}; then cleaning up failed: {problem}"
            return AttentionError(name, reason + self._unsealed(), step)
        journal.close(settled=True)
        for result in done:
            self._context.progress.note(name, str(result))
        if kept := [str(each) for each in done if each.effect is Effect.QUARANTINED]:
            return AttentionError(
                name, f"{_reason(error, name)}; {'; '.join(kept)}", QUARANTINE_STEP
            )
        completed = any(each.effect is Effect.COMPLETED for each in done)
        if isinstance(error, InterruptedRunError) and self._taken:
            reason = f"{error.reason}; {self._remains(completed=completed)}"
            return InterruptedRunError(name, reason, error.signum)
        if isinstance(error, InterruptedRunError) or not isinstance(error, Exception):
            return error
        if isinstance(error, SnaporchError) and not self._touched:
            return error  # refused before anything was touched, with its own exit code
        cannot = self._freezing or isinstance(error, StrategyUnavailableError)
        kind = FreezeFailedError if cannot and not cancelled else RunFailedError
        return kind(name, _reason(error, name), self._remains(completed=completed))

    def _remains(self, *, completed: bool) -> str:
        guest = self._guest_state()
        if not self._taken:
            return f"{guest} and nothing was kept"
        if completed:
            return f"{guest}; @{self._plan.snapshot} was kept and is complete"
        return f"{guest}; {self._kept_as_crash()}"

    def _kept_as_crash(self) -> str:
        """Describe a snapshot without a sealed bundle: the RAM of such a run is deleted."""
        without = ", without its RAM" if self._plan.level is Level.RAM else ""
        return f"@{self._plan.snapshot} was kept, but only as crash-consistent{without}"

    def _unsealed(self) -> str:
        """Describe the snapshot of a run that still has to be recovered, unless it is sealed."""
        state, _ = self._context.store.state(f"{self._plan.domain.uuid}/{self._plan.run}")
        is_crash = self._taken and state is not BundleState.COMPLETE
        return f"; {self._kept_as_crash()}" if is_crash else ""

    def _guest_state(self) -> str:
        try:
            now = self._context.hypervisor.find(self._domain.uuid)
        except SnaporchError:
            return "the guest was released"
        return _changed_state(self._domain, now) or "the guest is as it was"


def _changed_state(before: Domain, now: Domain | None) -> str:
    """Describe how the guest is now; empty if it is as it was before."""
    if before.active and (now is None or now.boot != before.boot):
        return "the guest's QEMU ended meanwhile"
    if now is None or now.state is before.state:
        return ""
    state = f"the guest is {now.state}, and was {before.state}"
    if now.state is not DomainState.SUSPENDED:
        return state
    return f"{state} (if `virsh dompmwakeup` does not wake it: virsh destroy, virsh start)"


def _about_other_program(plan: Plan) -> tuple[str, ...]:
    """Describe what another program that snapshots the datasets means for the run."""
    if plan.yields_to_other_program:
        return (f"{plan.other_program}: {plan.strategy}, without overlays",)
    if plan.other_program and plan.facts.overlays:
        return (f"{plan.other_program}; what it takes during the commit will be torn",)
    return ()


def _reason(error: BaseException, name: str) -> str:
    """Describe an error for a line that names the guest already."""
    if isinstance(error, SnaporchError):
        if error.thing == name:
            return one_line(error.explanation)
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    return f"{type(error).__name__}: {error}"
