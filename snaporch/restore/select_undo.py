"""Choose what ``snaporch undo`` undoes, and the safety copy that it uses.

Without ``--copy`` that is the last restore, even if it was interrupted.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from snaporch.context import Context
from snaporch.errors import NotFoundError, RefusedError
from snaporch.restore.journal import InterruptedRestore, RestoreStep, unfinished
from snaporch.restore.recovery_decision import RestoreAction, choose_action
from snaporch.restore.safety_catalog import (
    DIRECTORY,
    NAMES_OPTIONS,
    RECORD,
    UNDONE,
    SafetyCopy,
    name_and_uuid,
    read_record,
)
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
    if action in (RestoreAction.UNDO, RestoreAction.APART):
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


def choose_copy(context: Context, domain: str, name: str | None) -> SafetyCopy:
    """Return the safety copy called ``name``, or the newest one whose disks are of one instant.

    Without a name those that ``undo.sh`` has brought back are left out. If every other copy has
    disks of two instants, the newest of these; :meth:`SafetyCopy.check` refuses it.

    Raises:
        NotFoundError: the domain has no such safety copy, or ``undo.sh`` has brought back all.
        RefusedError: a record cannot be read by this version of snaporch.
    """
    called, uuid = name_and_uuid(context, domain)
    paths = sorted((context.store.root / uuid).glob(f"{DIRECTORY}*/{RECORD}"))
    if not paths:
        raise NotFoundError(
            called,
            "there is no safety copy of a restore, so none can be undone",
            "see `snaporch list` for snapshots to go back to",
        )
    found = [path for path in paths if name in (None, path.parent.name)]
    if not found:
        there = ", ".join(path.parent.name for path in paths)
        raise NotFoundError(called, f"has no safety copy {name}", f"it has {there}")
    if name is None:
        found = [path for path in found if not (path.parent / UNDONE).exists()]
    if not found:
        words = ["snaporch", "undo", called, "--copy", paths[-1].parent.name]
        step = f"to bring the newest copy back again: {shlex.join(words)} {NAMES_OPTIONS}"
        raise NotFoundError(called, "undo.sh has undone its restores already", step)
    copies = (SafetyCopy(path.parent, read_record(path)) for path in reversed(found))
    newest = next(copies)
    if not newest.record.half_way:
        return newest
    return next((copy for copy in copies if not copy.record.half_way), newest)


def _has_copy(old: InterruptedRestore) -> bool:
    back = old.facts.way_back
    return bool(back) and (Path(back) / RECORD).exists()
