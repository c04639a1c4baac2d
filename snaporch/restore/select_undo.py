"""What ``snaporch undo`` undoes: the last restore, also one that was cut short."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.restore.journal import OldRestore, RestoreStep, unfinished
from snaporch.restore.recovery_decision import RestoreAction, choose_action
from snaporch.restore.safety_catalog import RECORD, SafetyCopy, choose
from snaporch.restore.start_lock import has_bar
from snaporch.restore.steps import cancel_restore


@dataclass(frozen=True, slots=True)
class UndoneRestores:
    """Restores that had been cut short before anything was rolled back, which needs no copy."""

    done: tuple[str, ...]
    """What was done with each, in words."""
    left: tuple[OldRestore, ...]
    """Those that have rolled back something, or have a copy to undo them with; oldest first."""
    kept_off: bool
    """Whether the guest still cannot be started, for its disks are half rolled back."""

    @property
    def is_enough(self) -> bool:
        """Whether the last restore is undone by it."""
        return bool(self.done) and not self.left and not self.kept_off


def undo_without_copy(context: Context, uuid: str, *, dry_run: bool = False) -> UndoneRestores:
    """Undo restores that have rolled back nothing. The caller holds the domain's lock.

    Args:
        dry_run: only say so.

    Raises:
        AttentionError: one cannot be undone.
        JournalError: one cannot be understood.
    """
    journal = context.config.paths.journal
    done, left = [], []
    for old in unfinished(journal, uuid):
        if not _needs_no_copy(context, old, dry_run=dry_run):
            left.append(old)
        elif dry_run:
            done.append(f"the {old.facts.what} was cut short: {RestoreAction.UNDO}")
        else:
            how = cancel_restore(context, old.facts, old.path)
            done.append(f"undid the {old.facts.what}, which had been cut short: {how}")
    kept_off = not dry_run and has_bar(journal, context.hypervisor.find(uuid))
    return UndoneRestores(tuple(done), tuple(left), kept_off)


def _needs_no_copy(context: Context, old: OldRestore, *, dry_run: bool) -> bool:
    action, progress = choose_action(context, old, dry_run=dry_run), old.progress
    if action is RestoreAction.UNDO:
        return True
    if (
        action is not RestoreAction.FORWARD
        or progress.has_begun(RestoreStep.ROLLBACK)
        or _has_copy(old)
    ):
        return False
    if old.facts.before is None:  # of a transient guest that was stopped nothing else is left
        return False
    return not (
        old.facts.supersedes and progress.has_ended(RestoreStep.STOP)
    )  # those are forgotten


def choose_last(context: Context, uuid: str, left: tuple[OldRestore, ...]) -> SafetyCopy:
    """The safety copy that undoes the last restore: none that is older than one cut short.

    Args:
        left: the restores that were cut short.

    Raises:
        NotFoundError: there is none.
        RefusedError: one that was cut short has none; or a copy is of another snaporch.
    """
    for old in left:
        if not _has_copy(old):
            domain = old.facts.domain
            raise RefusedError(
                domain,
                f"the {old.facts.what} was cut short, and has no safety copy to undo it with",
                f"{shlex.join(['snaporch', 'recover', domain])} first, or choose an older one "
                "with --copy",
            )
    return choose(context, uuid, None)


def _has_copy(old: OldRestore) -> bool:
    back = old.facts.way_back
    return bool(back) and (Path(back) / RECORD).exists()
