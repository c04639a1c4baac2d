"""Recovery of interrupted runs of other kinds, such as restores.

What is done with an interrupted restore is decided by :mod:`snaporch.restore.recovery_decision`.

Packages above this one finish them: :attr:`~snaporch.context.Context.finishers` has their
functions.
"""

from __future__ import annotations

from snaporch.context import Context
from snaporch.errors import AttentionError
from snaporch.journal import OtherJournal, other_journals_of
from snaporch.recovery.result import Effect, RecoveryResult


def finish_other_runs(context: Context, uuid: str) -> list[RecoveryResult]:
    """Finish or undo a domain's interrupted runs of other kinds; the caller holds its lock.

    Raises:
        AttentionError: one cannot be finished, or there is no finisher for its kind.
    """
    done: list[RecoveryResult] = []
    for journal in other_journals_of(context.config.paths.journal, uuid):
        if journal.path.exists():  # finishing one may have removed an older one
            done += _finish(context, journal, dry_run=False)
    return done


def preview_other_runs(context: Context, uuid: str) -> list[RecoveryResult]:
    """What :func:`finish_other_runs` would do, without doing it."""
    lines: list[RecoveryResult] = []
    for journal in other_journals_of(context.config.paths.journal, uuid):
        lines += _finish(context, journal, dry_run=True)
    return lines


def _finish(context: Context, journal: OtherJournal, *, dry_run: bool) -> list[RecoveryResult]:
    if journal.kind not in context.finishers:
        raise AttentionError(
            journal.domain,
            f"a {journal.kind} of it was interrupted",
            f"run: snaporch recover {journal.uuid}",
        )
    texts = context.finishers[journal.kind](context, journal, dry_run)
    return [Effect.OTHER_KIND.of(text) for text in texts]
