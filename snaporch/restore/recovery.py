"""Finish or undo an interrupted restore; every command that recovers uses this.

What is done is decided by :mod:`snaporch.restore.recovery_decision`; an interrupted snapshot is
recovered by :mod:`snaporch.recovery.recover_runs`.

Before the first rollback, a guest that still runs is left alone and the restore is undone; if the
guest was stopped already, the restore is finished. After the first rollback it is always finished.
The restore of a guest with a fence is left as it is: its datasets may have received what is newer.
"""

from __future__ import annotations

import shlex
from contextlib import AbstractContextManager, nullcontext

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from snaporch import default_paths
from snaporch.context import Context
from snaporch.errors import AttentionError, SnaporchError
from snaporch.journal import OtherJournal
from snaporch.locks import readers_lock
from snaporch.model import DomainState
from snaporch.restore.disk_checks import check_volumes_unused
from snaporch.restore.journal import (
    InterruptedRestore,
    RestoreFacts,
    RestoreJournal,
    RestoreStep,
    read,
    unfinished,
)
from snaporch.restore.recovery_decision import RestoreAction, choose_action
from snaporch.restore.restore_command import restore_command
from snaporch.restore.run import half_done_error
from snaporch.restore.steps import (
    RestoreSteps,
    cancel_restore,
    check_newer_may_go,
    forget_restore,
    forget_together,
    release_targets,
)
from snaporch.restore.undo_command import command_for, command_to_go_back

_JOB_SECONDS = 120
_POLL_SECONDS = 0.2


def recover_restore(context: Context, journal: OtherJournal, *, dry_run: bool) -> list[str]:
    """Finish or undo one interrupted restore. The caller holds the domain's lock.

    Args:
        dry_run: change nothing.

    Returns: lines that describe what was done, or would be.

    Raises:
        AttentionError: neither is possible; everything was kept.
        BusyError: disks would be rolled back while a snapshot of the guest is being read.
        JournalError: the journal cannot be read.
    """
    old = read(journal)
    facts = old.facts
    if _is_superseded(context, old):
        if not dry_run:
            forget_restore(context, old.path, facts)
        return [f"forget the {facts.what}: a later one has replaced it"]
    if (fence := context.fences.find(facts.uuid)) is not None:
        return [f"the {facts.what} stays interrupted: it {fence.reason}"]
    if not dry_run:
        _await_libvirt(context, facts.uuid)
    action = choose_action(context, old, dry_run=dry_run)
    if dry_run:
        return [f"the {facts.what} was interrupted: {action}"]
    if action is RestoreAction.UNDO:
        how = cancel_restore(context, facts, old.path)
        if old.has_stopped_in_vain and _is_off(context, facts.uuid):
            raise _stopped_in_vain_error(context, facts)
        return [f"undid the {facts.what}, which had been interrupted: {how}"]
    if action in (RestoreAction.TORN, RestoreAction.APART, RestoreAction.CHANGED):
        raise _undecided_error(context, old, action)
    with _exclude_readers(context, old, action):
        text = _finish(context, old, action)
    forget_together(context, facts)
    return [text]


def _exclude_readers(
    context: Context, old: InterruptedRestore, action: RestoreAction
) -> AbstractContextManager[None]:
    """Lock out readers of the guest's snapshots while datasets are rolled back."""
    facts = old.facts
    over = all(old.progress.has_ended(RestoreStep.ROLLBACK, each) for each in facts.datasets)
    if over or action is not RestoreAction.FORWARD:
        return nullcontext()
    return readers_lock(
        default_paths.LOCKS, facts.domain, facts.uuid, alone=True, interrupt=context.interrupt
    )


def _finish(context: Context, old: InterruptedRestore, action: RestoreAction) -> str:
    facts = old.facts
    journal = RestoreJournal.reopen(old.path)
    steps = RestoreSteps(context, facts, journal, old.progress)
    try:
        if action is RestoreAction.FORWARD:
            if not old.progress.has_begun(RestoreStep.ROLLBACK) and not _is_stopped(old):
                steps.save()
                with journal.step(RestoreStep.STOP):
                    steps.stop()
            if not old.progress.has_begun(RestoreStep.ROLLBACK):
                check_volumes_unused(context, facts.thing, facts.datasets)
                check_newer_may_go(context, facts, context.pool.listing(facts.datasets))
            _forget_superseded(context, old)
            steps.go_forward()
        else:
            _forget_superseded(context, old)
            steps.define()
            _ensure_resumed(context, old)
            release_targets(context, facts)
    except (SnaporchError, OSError) as error:
        journal.close(settled=False)
        raise half_done_error(context, facts, error) from error
    journal.close(settled=True)
    context.store.discard_partial(facts.uuid, facts.run)
    state = context.hypervisor.state(facts.uuid)
    text = f"finished the {facts.what}, which had been interrupted: it is {state}"
    if action is RestoreAction.LEAVE_OFF:
        text += ", with its disks as it left them when it ended"
    if back := command_to_go_back(context, facts):
        text += f"; undo it with: {back}"
    return text


def _forget_superseded(context: Context, old: InterruptedRestore) -> None:
    for other in unfinished(context.config.paths.journal, old.facts.uuid):
        if other.facts.run in old.facts.supersedes:
            forget_restore(context, other.path, other.facts)


def _is_stopped(old: InterruptedRestore) -> bool:
    return old.progress.has_ended(RestoreStep.STOP)


def _ensure_resumed(context: Context, old: InterruptedRestore) -> None:
    """Resume a guest that libvirt left paused because the restore was killed while it resumed."""
    if not old.facts.running or not old.progress.has_begun(RestoreStep.RESUME):
        return
    if old.progress.has_ended(RestoreStep.RESUME):
        return  # it was paused after the restore, on purpose
    domain = context.hypervisor.find(old.facts.uuid)
    if domain is not None and domain.state is DomainState.PAUSED:
        context.hypervisor.resume(old.facts.uuid)


def _await_libvirt(context: Context, uuid: str) -> None:
    """Wait until libvirt has saved or loaded RAM as a killed restore had asked it to."""

    def busy() -> bool:
        domain = context.hypervisor.find(uuid)
        if domain is None or not domain.active:
            return False
        return context.hypervisor.busy_with(uuid) is not None

    Retrying(
        stop=stop_after_delay(_JOB_SECONDS),
        wait=wait_fixed(_POLL_SECONDS),
        retry=retry_if_result(lambda still: still),
        retry_error_callback=lambda _state: None,
    )(busy)


def _is_superseded(context: Context, old: InterruptedRestore) -> bool:
    return any(
        old.facts.run in other.facts.supersedes
        and other.progress.has_ended(RestoreStep.STOP)
        and not other.may_be_undone
        for other in unfinished(context.config.paths.journal, old.facts.uuid)
    )


def _is_off(context: Context, uuid: str) -> bool:
    domain = context.hypervisor.find(uuid)
    return domain is not None and not domain.active


def _stopped_in_vain_error(context: Context, facts: RestoreFacts) -> AttentionError:
    start = shlex.join(["virsh", "start", facts.domain])
    group = f"{restore_command(context, facts)} --group"
    return AttentionError(
        facts.domain,
        f"is off: it was stopped for the {facts.what}, and others of its group were not yet; its "
        "disks are as they were",
        f"start it: {start}; or restore them again: {group}",
    )


def _undecided_error(
    context: Context, old: InterruptedRestore, action: RestoreAction
) -> AttentionError:
    facts = old.facts
    finish = (
        f"{shlex.join(['virsh', 'destroy', facts.domain])}, then: "
        f"{shlex.join(['snaporch', 'recover', facts.domain])}"
    )
    if action is RestoreAction.APART:
        leave = shlex.join(["snaporch", "undo", facts.domain])
        return AttentionError(
            facts.domain,
            f"runs on disks that were not rolled back, and others of its group were, in the "
            f"{facts.what}",
            f"restore it too, which discards what it has written since: {finish}; or leave it: "
            f"{leave}",
        )
    if action is RestoreAction.TORN:
        return AttentionError(
            facts.domain,
            f"runs while the {facts.what} is half done: its disks are of two instants",
            finish,
        )
    if facts.undoes:
        again = command_for(context, facts.domain, facts.uuid, facts.undoes)
    else:
        again = restore_command(context, facts)
    return AttentionError(
        facts.domain,
        f"was redefined while the {facts.what} was half done, so it may have run",
        f"do it again: {again}",
    )
