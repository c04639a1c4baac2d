"""Carry out a restore: keep a safety copy, stop the guest, roll back, resume or boot."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from snaporch import default_paths
from snaporch.context import Context
from snaporch.errors import AttentionError, RefusedError, RunFailedError, SnaporchError
from snaporch.locks import readers_lock
from snaporch.model import DomainState, SnapshotRecord
from snaporch.restore.disk_checks import check_files_beneath, check_places, check_volumes_unused
from snaporch.restore.journal import (
    Ending,
    InterruptedRestore,
    RestoreFacts,
    RestoreJournal,
    RestoreStep,
    unfinished,
)
from snaporch.restore.plan_model import RestorePlan
from snaporch.restore.processes_in_datasets import check_unused
from snaporch.restore.ram_from_pages import check_image
from snaporch.restore.ram_image import unusable_ram_error, with_ram_image
from snaporch.restore.recovery_decision import RestoreAction, choose_action
from snaporch.restore.restore_facts import make_facts
from snaporch.restore.shared_dataset_checks import check_others_writes
from snaporch.restore.source import IncompleteError
from snaporch.restore.start_bar import is_barred
from snaporch.restore.steps import (
    RestoreSteps,
    cancel_restore,
    check_newer_may_go,
    check_nothing_new,
    check_targets,
    forget_restore,
)
from snaporch.restore.undo_command import command_for, command_to_go_back


class RestorePoint(Enum):
    """A point of a restore where nothing is rolled back yet, in their order."""

    PLANNED = "planned"
    """The safety copy is written next."""
    SAVED = "saved"
    """The safety copy is written, as far as it can be while the guest runs."""
    AGAIN = "again"
    """What the guest wrote since is added to the safety copy next."""
    CHECKED = "checked"
    """The checks were repeated; the guest is stopped next."""
    BARRED = "barred"
    """The guest is off, and its definition cannot be started; the restore can be undone for the
    last time."""
    ROLLING = "rolling"
    """The first rollback is next; the restore can only be finished."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restore."""

    record: SnapshotRecord
    state: DomainState
    resumed: bool
    """Whether the guest was resumed from RAM."""
    clock_set: bool
    """Whether the guest's agent has set the guest's clock."""
    undo: str | None
    """The script that undoes the restore; ``None`` if no usable safety copy was kept."""

    def as_json(self) -> dict[str, object]:
        """The documented JSON object: that of the snapshot, and the result."""
        return self.record.as_json() | {
            "domain_state": self.state.value,
            "resumed": self.resumed,
            "clock_set": self.clock_set,
            "undo": self.undo,
        }


def check_as_shown(shown: RestorePlan, current: RestorePlan) -> None:
    """Refuse if the plan differs from the one that the user agreed to.

    Args:
        shown: the plan that the user was shown, while the domain was not locked.
        current: the plan made again, under the domain's lock.

    Raises:
        RefusedError: names what has changed.
    """
    now = _what_was_shown(current)
    changed = [what for what, then in _what_was_shown(shown).items() if then != now[what]]
    if changed:
        raise RefusedError(
            shown.thing,
            f"changed since it was shown: {', '.join(changed)}; nothing was touched",
            f"{'undo' if shown.undoes else 'restore'} it again",
        )


def _what_was_shown(plan: RestorePlan) -> dict[str, object]:
    domain = plan.domain
    return {
        "the snapshot": (plan.record.run, tuple((s.full_name, s.guid) for s in plan.snapshots)),
        "newer snapshots": plan.newer,
        "the guest": domain and (domain.boot, domain.state, domain.managed_save),
        "its definition": domain and domain.inactive_xml,
        "its bundle": (plan.ram, plan.damaged, tuple(plan.unfit)),
    }


def restore(
    context: Context,
    plan: RestorePlan,
    *,
    safety: bool,
    keep_running: bool = False,
    wait: int = 0,
    at_point: Callable[[RestorePoint], None] = lambda _point: None,
    together: str = "",
) -> Restored:
    """Carry out the plan. The caller holds the domain's lock, and the user has agreed.

    A guest that is off stays off until its disks are back. Once the first dataset was rolled back
    the restore can only be finished, so signals are obeyed only before that.

    Args:
        safety: keep a safety copy of the data that is discarded.
        keep_running: keep the RAM of a running guest in the safety copy.
        wait: seconds to wait for processes that clone, verify or copy a snapshot of the guest.
        at_point: is called at each point; what it raises undoes the restore, except at the last.
        together: if ``at_point`` waits for other guests that are restored too: a name that is
            common to these restores. If this process is killed before
            :func:`~snaporch.restore.journal.note_all_off`, recovery undoes the restore.

    Raises:
        BusyError: such a process did not end in time.
        RunFailedError: the restore failed before anything was rolled back.
        AttentionError: the restore failed after a rollback; the error has the command that
            finishes it.
    """
    record = plan.record
    with readers_lock(
        default_paths.LOCKS,
        record.domain,
        record.uuid,
        alone=True,
        wait=wait,
        interrupt=context.interrupt,
        can_wait=True,
    ):
        return _restore(
            context,
            plan,
            at_point,
            safety=safety,
            keep_running=keep_running,
            together=together,
        )


def _restore(
    context: Context,
    plan: RestorePlan,
    at_point: Callable[[RestorePoint], None],
    *,
    safety: bool,
    keep_running: bool,
    together: str,
) -> Restored:
    record = plan.record
    context.interrupt.check(record.domain)
    plan, run = with_ram_image(
        context, plan, safety=safety, alone=not together and not keep_running
    )
    try:
        older, was_stopped = _earlier_restores(context, record.uuid)
        facts = make_facts(context, plan, run, older, safety=safety, keep_running=keep_running)
        facts = replace(facts, together=together, was_stopped=was_stopped)
    except BaseException:
        context.store.discard_partial(record.uuid, run)
        raise
    journal = RestoreJournal(context.config.paths.journal, facts)
    steps = RestoreSteps(context, facts, journal)
    _prepare(context, plan, facts, journal, steps, at_point)
    try:
        for old in older:
            forget_restore(context, old.path, old.facts)
        at_point(RestorePoint.ROLLING)
        if facts.together:  # it may have waited for its turn
            check_volumes_unused(context, facts.thing, facts.datasets)
            check_newer_may_go(context, facts, context.pool.listing(facts.datasets))
        steps.go_forward()
    except (SnaporchError, OSError) as error:
        journal.close(settled=False)
        raise half_done_error(context, facts, error) from error
    journal.close(settled=True)
    context.store.discard_partial(record.uuid, run)
    state, clock = context.hypervisor.state(record.uuid), False
    if state is DomainState.RUNNING and plan.ram is not None:
        clock = context.hypervisor.set_guest_clock(record.uuid)
    undo = str(steps.undo) if steps.undo and not facts.half_way else None
    return Restored(record, state, plan.ram is not None, clock, undo)


def half_done_error(context: Context, facts: RestoreFacts, error: Exception) -> AttentionError:
    """Return the error for a restore that has begun to roll back and cannot be finished."""
    step = f"fix the cause, then: {shlex.join(['snaporch', 'recover', facts.domain])}"
    if facts.ending is Ending.RESUME and facts.undoes:
        again = command_for(context, facts.domain, facts.uuid, facts.undoes, disks_only=True)
        step += f" (or leave it off: {again})"
    elif facts.ending is Ending.RESUME:
        again = shlex.join(["snaporch", "restore", "--cold", facts.thing])
        step += f" (or boot it: {again})"
    if back := command_to_go_back(context, facts):
        step += f" (or go back: {back})"
    state, barred = _guest_state(context, facts.uuid)
    how = f"{state} and cannot be started until it is finished" if barred else state
    what = "undo" if facts.undoes else "restore"
    reason = f"the {what} stopped half way ({error}); the guest is {how}"
    return AttentionError(facts.thing, reason, step)


def _prepare(
    context: Context,
    plan: RestorePlan,
    facts: RestoreFacts,
    journal: RestoreJournal,
    steps: RestoreSteps,
    at_point: Callable[[RestorePoint], None],
) -> None:
    """Do the steps before the first rollback; undo them on any failure.

    Raises:
        SnaporchError: the failure, with the state of the guest.
    """
    stopping = facts.was_stopped
    try:
        at_point(RestorePoint.PLANNED)
        with journal.step(RestoreStep.SAFETY):
            steps.save()
        at_point(RestorePoint.SAVED)
        if facts.together:  # all guests wait, off, for the last part of the slowest copy
            at_point(RestorePoint.AGAIN)
            with journal.step(RestoreStep.SAFETY):
                steps.save_again()
        context.interrupt.check(facts.domain)
        _check_unchanged(context, plan, facts)
        steps.check_room()
        at_point(RestorePoint.CHECKED)
        with journal.step(RestoreStep.STOP):
            stopping = True
            steps.stop()
        at_point(RestorePoint.BARRED)
    except BaseException as error:
        journal.close(settled=False)
        text = cancel_restore(context, facts, journal.path)
        if stopping and isinstance(error, (SnaporchError, OSError)) and _is_off(context, facts):
            raise _left_off_error(facts.domain, error, text) from error
        raise


def check_not_left_off(context: Context, record: SnapshotRecord, error: SnaporchError) -> None:
    """Undo earlier restores of a guest whose restore ended before it has looked for them.

    Args:
        record: of the guest, whose lock the caller holds.
        error: what has ended the restore.

    Raises:
        RunFailedError: an earlier one has stopped the guest, which stays off.
    """
    _, was_stopped = _earlier_restores(context, record.uuid)
    if was_stopped and context.hypervisor.state(record.uuid) is DomainState.OFF:
        raise _left_off_error(record.domain, error, "the guest is shut off") from error


def _left_off_error(domain: str, error: Exception, state: str) -> RunFailedError:
    step = "start it again with virsh, or fix the cause and restore it again"
    return RunFailedError(domain, f"the restore could not begin ({error}); {state}", step)


def _is_off(context: Context, facts: RestoreFacts) -> bool:
    return (
        bool(facts.boot or facts.was_stopped)
        and context.hypervisor.state(facts.uuid) is DomainState.OFF
    )


def _check_unchanged(context: Context, plan: RestorePlan, facts: RestoreFacts) -> None:
    """Repeat the checks before anything is stopped or destroyed: saving may have taken hours.

    Raises:
        RefusedError: the guest was started meanwhile, snapshots have appeared or can no longer be
            destroyed, a disk's path leads elsewhere, or others have written to the datasets.
    """
    domain = context.hypervisor.find(facts.uuid)
    boot = domain.boot if domain is not None else ""
    if boot and boot != facts.boot:
        raise RefusedError(plan.record.domain, "was started meanwhile", "restore it again")
    if plan.manifest is not None:
        check_places(context, plan.thing, plan.manifest)
        check_files_beneath(plan, plan.manifest)
    check_others_writes(context, plan)
    if plan.undoes:
        check_unused(context.resolver, plan.thing, facts.datasets, facts.uuid)
    there = check_targets(context, facts.targets)
    check_nothing_new(context, facts, there)
    check_newer_may_go(context, facts, there)


def _earlier_restores(context: Context, uuid: str) -> tuple[list[InterruptedRestore], bool]:
    """Undo interrupted restores that rolled back nothing.

    Returns: those that this one replaces; and whether one that was undone has stopped the guest.
    """
    older, was_stopped = [], False
    for old in unfinished(context.config.paths.journal, uuid):
        if choose_action(context, old, dry_run=False) is RestoreAction.UNDO:
            was_stopped = was_stopped or old.has_stopped_in_vain
            cancel_restore(context, old.facts, old.path)
        else:
            older.append(old)
    return older, was_stopped


def check_feasible(
    context: Context, plan: RestorePlan, *, safety: bool, keep_running: bool
) -> None:
    """Make the checks of :func:`restore` that change nothing; the caller needs no lock.

    Raises:
        SnaporchError: :func:`restore` would refuse the plan.
    """
    if plan.pages is not None:
        try:
            check_image(context, plan.record.domain, plan.pages, context.store.root)
        except IncompleteError as error:
            raise unusable_ram_error(error) from error
    older = unfinished(context.config.paths.journal, plan.record.uuid)
    make_facts(context, plan, "", older, safety=safety, keep_running=keep_running)


def _guest_state(context: Context, uuid: str) -> tuple[str, bool]:
    """Return the state of the guest, and whether it is off and barred from starting."""
    try:
        domain = context.hypervisor.find(uuid)
        if domain is None:
            return "undefined", False
        return domain.state.value, not domain.active and is_barred(context, domain)
    except SnaporchError:
        return "out of reach", False
