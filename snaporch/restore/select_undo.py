"""Choose the restore that ``snaporch undo`` undoes: the last one, even if it was interrupted."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.restore.journal import InterruptedRestore, RestoreStep, unfinished
from snaporch.restore.recovery_decision import RestoreAction, choose_action
from snaporch.restore.safety_catalog import RECORD, SafetyCopy, choose_copy
from snaporch.restore.start_bar import has_bar
from snaporch.restore.steps import cancel_restore


@dataclass(frozen=True, slots=True)
class UndoneRestores:
    """The result of :func:`undo_without_copy`."""

    done: tuple[str, ...]
    """A line for each restore that was undone."""
    left: tuple[InterruptedRestore, ...]
    """The other restores: they rolled back something, or have a safety copy. Oldest first."""
    kept_off: bool
    """Whether the definition is still barred because only some disks were rolled back."""

    @property
    def is_enough(self) -> bool:
        """Whether the last restore was undone by this, so that no safety copy is needed."""
        return bool(self.done) and not self.left and not self.kept_off


def undo_without_copy(context: Context, uuid: str, *, dry_run: bool = False) -> UndoneRestores:
    """Undo interrupted restores that rolled back nothing. The caller holds the domain's lock.

    Args:
        dry_run: change nothing.

    Raises:
        AttentionError: a restore cannot be undone.
        JournalError: a journal cannot be read.
    """
    journal = context.config.paths.journal
    done, left = [], []
    for old in unfinished(journal, uuid):
        if not _needs_no_copy(context, old, dry_run=dry_run):
            left.append(old)
        elif dry_run:
            done.append(f"the {old.facts.what} was interrupted: {RestoreAction.UNDO}")
        else:
            how = cancel_restore(context, old.facts, old.path)
            done.append(f"undid the {old.facts.what}, which had been interrupted: {how}")
    kept_off = not dry_run and has_bar(journal, context.hypervisor.find(uuid))
    return UndoneRestores(tuple(done), tuple(left), kept_off)


def _needs_no_copy(context: Context, old: InterruptedRestore, *, dry_run: bool) -> bool:
    action, progress = choose_action(context, old, dry_run=dry_run), old.progress
    if action is RestoreAction.UNDO:
        return True
    if (
        action is not RestoreAction.FORWARD
        or progress.has_begun(RestoreStep.ROLLBACK)
        or _has_copy(old)
    ):
        return False
    if old.facts.before is None:  # a transient guest that was stopped has no definition left
        return False
    # once the guest was stopped, the journals of the replaced restores may be deleted already
    return not (old.facts.supersedes and progress.has_ended(RestoreStep.STOP))


def choose_last(context: Context, uuid: str, left: tuple[InterruptedRestore, ...]) -> SafetyCopy:
    """Return the safety copy of the last restore, never one older than an interrupted restore.

    Args:
        left: the interrupted restores.

    Raises:
        NotFoundError: the domain has no safety copy.
        RefusedError: an interrupted restore has no safety copy, or a record cannot be read.
    """
    for old in left:
        if not _has_copy(old):
            domain = old.facts.domain
            raise RefusedError(
                domain,
                f"the {old.facts.what} was interrupted and has no safety copy to undo it with",
                f"{shlex.join(['snaporch', 'recover', domain])} first, or choose an older one "
                "with --copy",
            )
    return choose_copy(context, uuid, None)


def _has_copy(old: InterruptedRestore) -> bool:
    back = old.facts.way_back
    return bool(back) and (Path(back) / RECORD).exists()
