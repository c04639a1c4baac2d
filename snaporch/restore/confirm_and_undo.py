"""``snaporch undo``: choose a safety copy, ask the user, undo under the domain's lock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from snaporch import default_paths
from snaporch.context import Context
from snaporch.locks import domain_lock
from snaporch.recovery.recover_runs import recover_leftovers, recover_runs
from snaporch.restore.plan import RAISED
from snaporch.restore.plan_model import RestorePlan
from snaporch.restore.preview import Refusals, RestorePreview, make_preview
from snaporch.restore.run import Restored, check_as_shown, restore
from snaporch.restore.safety_catalog import SafetyCopy, name_and_uuid
from snaporch.restore.select_undo import choose_copy, choose_last, undo_without_copy
from snaporch.restore.undo_plan import make_undo_plan


@dataclass(frozen=True, slots=True)
class UndoRequest:
    """The options of ``snaporch undo``."""

    domain: str
    copy: str | None = None
    """The name of the safety copy; ``None`` for that of the last restore."""
    disks_only: bool = False
    discard_newer: bool = False
    also_roll_back: bool = False
    safety: bool = True

    def plan(
        self,
        context: Context,
        copy: SafetyCopy,
        refusals: AbstractContextManager[object] = RAISED,
    ) -> RestorePlan:
        """Plan to undo with this copy and these options; see :func:`make_undo_plan`."""
        return make_undo_plan(
            context,
            copy,
            disks_only=self.disks_only,
            discard_newer=self.discard_newer,
            also_roll_back=self.also_roll_back,
            refusals=refusals,
        )


def preview_undo(
    context: Context, request: UndoRequest, report: Callable[[str], None]
) -> tuple[RestorePreview, SafetyCopy] | None:
    """Plan an undo, and make every check that changes nothing.

    Returns: the preview and its safety copy; ``None`` if the last restore is undone without a copy.

    Raises:
        SnaporchError: as :func:`choose_last` and :func:`make_undo_plan`.
    """
    name, uuid = name_and_uuid(context, request.domain)
    copy = _choose_copy(context, request, name, uuid, report, dry_run=True)
    if copy is None:
        return None
    refusals = Refusals()
    plan = request.plan(context, copy, refusals)
    return make_preview(context, plan, refusals, safety=request.safety), copy


def run_undo(
    context: Context,
    request: UndoRequest,
    *,
    confirm: Callable[[RestorePlan, SafetyCopy], None] | None,
    report: Callable[[str], None],
    wait: int | None,
) -> tuple[Restored, SafetyCopy] | None:
    """Undo a restore of one domain as requested.

    Args:
        confirm: shows the plan to the user, and raises unless the user agrees. It is called without
            the domain's lock, so that other runs do not wait for the answer. ``None``: do not ask.
        report: gets a line about each restore that was undone without a copy.
        wait: seconds to wait for locks; ``None`` for the domain's configured time.

    Returns: the result and the safety copy; ``None`` if the last restore was undone without a copy.

    Raises:
        SnaporchError: as :func:`make_undo_plan`, :func:`check_as_shown` and :func:`restore`.
    """
    name, uuid = name_and_uuid(context, request.domain)
    recover_leftovers(context)
    longest = context.config.settings(name, uuid).wait if wait is None else wait

    def lock() -> AbstractContextManager[object]:
        return domain_lock(
            default_paths.LOCKS,
            name,
            uuid,
            "undo",
            wait=longest,
            interrupt=context.interrupt,
            can_wait=True,
        )

    with lock():
        _recover(context, name, uuid)
        if (copy := _choose_copy(context, request, name, uuid, report)) is None:
            return None
        shown = request.plan(context, copy)
    if confirm is not None:
        confirm(shown, copy)
    with lock():
        _recover(context, name, uuid)
        current = request.plan(context, copy)
        if confirm is not None:
            check_as_shown(shown, current)
        return restore(context, current, safety=request.safety, wait=longest), copy


def _recover(context: Context, name: str, uuid: str) -> None:
    for result in recover_runs(context, uuid):
        context.progress.note(name, str(result))


def _choose_copy(
    context: Context,
    request: UndoRequest,
    name: str,
    uuid: str,
    report: Callable[[str], None],
    *,
    dry_run: bool = False,
) -> SafetyCopy | None:
    """Choose the safety copy to undo with; ``None`` if the last restore is undone without one."""
    taken = undo_without_copy(context, uuid, dry_run=dry_run)
    for text in taken.done:
        report(f"{name}: {text}")
    if request.copy is not None:
        return choose_copy(context, uuid, request.copy)
    return None if taken.is_enough else choose_last(context, uuid, taken.left)
