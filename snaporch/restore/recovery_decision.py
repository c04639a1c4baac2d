"""Decide what is done with an interrupted restore: a pure function of what is observed.

What is done with an interrupted snapshot is decided by :mod:`snaporch.recovery.decision`.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import StrEnum

from snaporch.context import Context
from snaporch.errors import AttentionError
from snaporch.restore.journal import Ending, InterruptedRestore, RestoreStep
from snaporch.restore.start_bar import is_barred
from snaporch.restore.written_since_rollback import written_now
from snaporch.zfs import PoolError


class RestoreAction(StrEnum):
    """The action on an interrupted restore."""

    UNDO = "undo it: nothing was rolled back"
    FORWARD = "finish it"
    COMPLETE = "complete it: the guest runs on the disks of the snapshot"
    LEAVE_OFF = "complete it: the guest ran and has ended, and its disks stay as it left them"
    TORN = "nothing: the guest runs on disks of two instants"
    APART = "nothing: the guest runs on its disks of now, and others of its group are restored"
    CHANGED = "nothing: the guest was redefined or started meanwhile"


@dataclass(frozen=True, slots=True)
class RestoreObservation:
    """The content of the journal and the state of the guest."""

    active: bool
    """The guest runs or is paused."""
    barred: bool
    """The definition is barred or missing, so the guest cannot have been started by mistake."""
    untouched: bool
    """The disks were not written to since the restore began to resume the guest."""
    stopping: bool
    """The step that stops the guest had begun."""
    together: bool
    """Other guests are restored with it, and may not be off yet."""
    all_off: bool
    """Other guests are restored with it, and all were off, so some may be rolled back."""
    rolling: bool
    """The rollback of a dataset had begun."""
    rolled_back: bool
    """All datasets were rolled back."""
    resuming: bool
    """The step that resumes the guest had begun."""
    ending: Ending


def decide(observed: RestoreObservation) -> RestoreAction:
    """Choose the action. Nothing is rolled back under a guest, or after the guest may have run."""
    if not observed.rolling:
        if observed.all_off and observed.active:
            return RestoreAction.APART
        alone = observed.stopping and not observed.active and not observed.together
        return RestoreAction.FORWARD if alone else RestoreAction.UNDO
    if not observed.rolled_back:
        if observed.active:
            return RestoreAction.TORN
        return RestoreAction.FORWARD if observed.barred else RestoreAction.CHANGED
    if observed.active:
        return RestoreAction.COMPLETE
    if observed.ending is not Ending.RESUME:
        return RestoreAction.FORWARD
    if observed.resuming:
        return (
            RestoreAction.FORWARD
            if observed.barred and observed.untouched
            else RestoreAction.LEAVE_OFF
        )
    return RestoreAction.FORWARD if observed.barred else RestoreAction.CHANGED


def choose_action(context: Context, old: InterruptedRestore, *, dry_run: bool) -> RestoreAction:
    """Observe the guest and its disks, and choose the action.

    Args:
        dry_run: take no snapshot to find out what was written; ZFS's number may be some seconds
            old.

    Raises:
        AttentionError: a file system is not mounted, so it is unknown whether the guest has
            written to it.
    """
    facts, progress = old.facts, old.progress
    domain = context.hypervisor.find(facts.uuid)
    resuming = progress.has_begun(RestoreStep.RESUME)
    active = domain is not None and domain.active
    return decide(
        RestoreObservation(
            active=active,
            barred=is_barred(context, domain),
            untouched=resuming and not active and _untouched(context, old, probing=not dry_run),
            stopping=progress.has_begun(RestoreStep.STOP),
            together=old.may_be_undone,
            all_off=bool(facts.together) and not old.may_be_undone,
            rolling=progress.has_begun(RestoreStep.ROLLBACK),
            rolled_back=all(
                progress.has_ended(RestoreStep.ROLLBACK, each) for each in facts.datasets
            ),
            resuming=resuming,
            ending=facts.ending,
        )
    )


def _untouched(context: Context, old: InterruptedRestore, *, probing: bool) -> bool:
    """Whether no dataset was written to since the restore began to resume the guest."""
    facts, then = old.facts, old.progress.written
    try:
        now = written_now(context, facts, probing=probing)
    except PoolError:
        return False
    for dataset, was in then.items():
        if isinstance(was, str) and not isinstance(now.get(dataset), str):
            raise AttentionError(
                facts.domain,
                f"{dataset} is not mounted, so it is unknown whether the guest has run since its "
                f"{facts.what} was interrupted",
                f"{shlex.join(['zfs', 'mount', '-l', dataset])}, then: "
                f"{shlex.join(['snaporch', 'recover', facts.domain])}",
            )
    return now == then and now.keys() == set(facts.datasets)
