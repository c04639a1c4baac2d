"""The preview of a restore or an undo, for ``--dry-run``: what it would do, discard and refuse."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

from snaporch import default_paths
from snaporch.context import Context
from snaporch.errors import InterruptedRunError, SnaporchError
from snaporch.journal import journals_of
from snaporch.locks import has_readers, held_by
from snaporch.restore.journal import Ending
from snaporch.restore.losses import changed_lines_of_definition, losses
from snaporch.restore.newer_snapshot_checks import is_safety
from snaporch.restore.plan_model import RestorePlan
from snaporch.restore.run import check_feasible
from snaporch.restore.safety_catalog import bookmarks_since


class Refusals(AbstractContextManager["Refusals"]):
    """Collects the errors of checks, so that the checks that follow are made too."""

    def __init__(self) -> None:
        self._found: dict[str, SnaporchError] = {}

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> bool:
        """Suppress an error of a check, and remember it."""
        if not isinstance(error, SnaporchError) or isinstance(error, InterruptedRunError):
            return False
        self._found.setdefault(error.line(), error)
        return True

    @property
    def found(self) -> tuple[SnaporchError, ...]:
        """The errors, each once, in the order of the checks."""
        return tuple(self._found.values())


@dataclass(frozen=True, slots=True)
class RestorePreview:
    """What a restore would do."""

    plan: RestorePlan
    written: tuple[tuple[str, int], ...]
    """The full name of each snapshot to roll back to, and the bytes written since."""
    discarded: tuple[str, ...]
    """See :func:`~snaporch.restore.losses.losses`."""
    lost_bookmarks: tuple[str, ...]
    """Bookmarks that no undo can make again."""
    safety: bool
    """Whether a safety copy would be kept."""
    refusals: tuple[SnaporchError, ...]
    """Why the restore would be refused; empty if it would be carried out."""

    def lines(self) -> list[str]:
        """Describe what would be done with the disks and the guest."""
        lines = [f"{full.partition('@')[0]} is rolled back to {full}" for full, _ in self.written]
        return [*lines, f"the guest is {_ENDINGS[self.plan.ending]}{self._paused}"]

    @property
    def _paused(self) -> str:
        return ", and left paused" if self.plan.ram and not self.plan.running else ""

    def as_json(self) -> dict[str, object]:
        """The documented JSON object."""
        plan = self.plan
        return {
            "dry_run": True,
            "domain": plan.record.domain,
            "uuid": plan.record.uuid,
            "snapshot": plan.record.snapshot,
            "run": plan.record.run,
            "rolled_back": [
                {"dataset": full.partition("@")[0], "snapshot": full, "written_bytes": size}
                for full, size in self.written
            ],
            "destroyed": [name for name in plan.newer if not is_safety(name)],
            "lost_bookmarks": list(self.lost_bookmarks),
            "stops_guest": plan.domain is not None and plan.domain.active,
            "ending": plan.ending.value,
            "paused": bool(self._paused),
            "definition": changed_lines_of_definition(plan),
            "discarded": list(self.discarded),
            "safety_copy": self.safety,
            "refusals": [
                {
                    "subject": error.thing,
                    "reason": error.reason,
                    "step": error.step,
                    "exit_code": int(error.exit_code),
                }
                for error in self.refusals
            ],
        }


_ENDINGS = {
    Ending.RESUME: "resumed from RAM",
    Ending.BOOT: "booted from its disks",
    Ending.OFF: "left off",
}


def make_preview(
    context: Context,
    plan: RestorePlan,
    refusals: Refusals,
    *,
    safety: bool,
    keep_running: bool = False,
) -> RestorePreview:
    """Make the checks that are left, and describe the plan. Changes nothing.

    Args:
        refusals: collects errors of the checks.
        safety: a safety copy would be kept.
        keep_running: the RAM of a running guest would be kept with it.
    """
    with refusals:
        check_feasible(context, plan, safety=safety, keep_running=keep_running)
    _note_runs(context, plan)
    names = [snapshot.full_name for snapshot in plan.snapshots]
    there = context.pool.listing([snapshot.dataset for snapshot in plan.snapshots])
    return RestorePreview(
        plan=plan,
        written=tuple((name, context.pool.written_since(name)) for name in names),
        discarded=tuple(losses(context, plan)),
        lost_bookmarks=tuple(mark for name in names for mark in bookmarks_since(there, name)[1]),
        safety=safety,
        refusals=refusals.found,
    )


def _note_runs(context: Context, plan: RestorePlan) -> None:
    """Report a run on the domain: it is waited for, or recovered first if it was interrupted."""
    record = plan.record
    if (holder := held_by(default_paths.LOCKS, record.uuid)) is not None:
        text = f"another run holds it ({holder.doing}, pid {holder.pid}) and would be waited for"
        context.progress.note(record.domain, text)
    elif journals_of(context.config.paths.journal, record.uuid):
        text = "a snapshot was interrupted, and would be recovered first: see snaporch recover"
        context.progress.note(record.domain, f"{text} --dry-run")
    if has_readers(default_paths.LOCKS, record.uuid):
        text = "a snapshot of it is being cloned, verified, copied or mounted"
        context.progress.note(record.domain, f"{text}: use --wait to wait for that")
