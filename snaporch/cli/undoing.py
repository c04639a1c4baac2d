"""Asking, undoing and telling, behind ``snaporch undo``."""

from __future__ import annotations

import json as json_format
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from snaporch import default_paths
from snaporch.cli.restoring import confirm, tell_way_back
from snaporch.context import Context
from snaporch.locks import domain_lock
from snaporch.output.terminal import print_error, print_result
from snaporch.recovery.settle import recover_leftovers, recover_runs
from snaporch.restore.losses import losses
from snaporch.restore.plan_model import RestorePlan
from snaporch.restore.run import Restored, check_as_shown, restore
from snaporch.restore.safety_catalog import MANAGED_SAVE, SafetyCopy, choose, copies_of, identity
from snaporch.restore.select_undo import choose_last, take_back
from snaporch.restore.undo_plan import make_undo_plan


@dataclass(frozen=True, slots=True)
class UndoRequest:
    """What was asked for."""

    domain: str
    copy: str | None
    disks_only: bool
    discard_newer: bool
    also_roll_back: bool
    safety: bool

    def plan(self, context: Context, copy: SafetyCopy) -> RestorePlan:
        """What would be done.

        Raises:
            RefusedError: it cannot be done safely.
        """
        return make_undo_plan(
            context,
            copy,
            disks_only=self.disks_only,
            discard_newer=self.discard_newer,
            also_roll_back=self.also_roll_back,
        )


def undo_one(
    context: Context, wishes: UndoRequest, *, yes: bool, dry_run: bool, wait: int | None, json: bool
) -> int:
    """Undo a restore of one domain; 0 when it was done."""
    name, uuid = identity(context, wishes.domain)
    if dry_run:
        if (copy := _copy_after(context, wishes, name, uuid, dry_run=True)) is not None:
            _tell(context, wishes.plan(context, copy), copy, wishes, print_result)
        return 0
    recover_leftovers(context)
    longest = context.config.settings(name, uuid).wait if wait is None else wait

    def lock() -> AbstractContextManager[object]:
        return domain_lock(
            default_paths.LOCKS, name, uuid, "undo", wait=longest, interrupt=context.interrupt
        )

    with lock():
        for text in recover_runs(context, uuid):
            context.progress.note(name, text)
        if (copy := _copy_after(context, wishes, name, uuid)) is None:
            return 0
        shown = wishes.plan(context, copy)
    if not yes:  # nobody has to wait for a human who may be at lunch
        _ask(context, shown, copy, wishes)
    with lock():
        for text in recover_runs(context, uuid):
            context.progress.note(name, text)
        current = wishes.plan(context, copy)
        if not yes:
            check_as_shown(shown, current)
        restored = restore(context, current, safety=wishes.safety, wait=longest)
    _say_undone(context, restored, copy, json=json)
    return 0


def _copy_after(
    context: Context, wishes: UndoRequest, name: str, uuid: str, *, dry_run: bool = False
) -> SafetyCopy | None:
    """The safety copy to undo with; ``None`` if the last restore is undone without one."""
    taken = take_back(context, uuid, dry_run=dry_run)
    for text in taken.done:
        print_result(f"{name}: {text}")
    if wishes.copy is not None:
        return choose(context, uuid, wishes.copy)
    return None if taken.suffices else choose_last(context, uuid, taken.left)


def _say_undone(context: Context, restored: Restored, copy: SafetyCopy, *, json: bool) -> None:
    name = restored.record.domain
    if json:
        print_result(json_format.dumps(_document(restored, copy), indent=2, ensure_ascii=False))
    else:
        resumed = ", resumed from RAM" if restored.resumed else ""
        print_result(f"{name}  undid {copy.thing}; {restored.state}{resumed}")
    saved = copy.directory / MANAGED_SAVE
    if saved.exists():
        command = shlex.join(["virsh", "restore", str(saved)])
        context.progress.note(name, f"to resume its managed save image: {command}")
    tell_way_back(context, restored)


def _tell(
    context: Context,
    plan: RestorePlan,
    copy: SafetyCopy,
    wishes: UndoRequest,
    tell: Callable[[str], None],
) -> None:
    """What is undone, what is lost, and what else there is to undo."""
    tell(f"undoing {copy.thing} brings back what {copy.name} holds, and discards:")
    for loss in losses(context, plan):
        tell(f"  {loss}")
    if wishes.safety:
        tell("  (a copy of the disks is kept, which can be brought back in the same way)")
    for other in copies_of(context.store, copy.manifest.uuid):
        if other.name != copy.name and not other.record.half_way:
            tell(f"  (--copy {other.name} would undo {other.thing})")


def _ask(context: Context, plan: RestorePlan, copy: SafetyCopy, wishes: UndoRequest) -> None:
    """Say what will be lost and wait for a yes.

    Raises:
        RefusedError: no, or nobody there to ask.
    """
    _tell(context, plan, copy, wishes, print_error)
    confirm(plan.thing)


def _document(restored: Restored, copy: SafetyCopy) -> dict[str, object]:
    return {
        "domain": copy.manifest.domain,
        "uuid": copy.manifest.uuid,
        "copy": copy.name,
        "restored": copy.manifest.snapshot,
        "domain_state": restored.state.value,
        "resumed": restored.resumed,
        "undo": restored.undo,
    }
