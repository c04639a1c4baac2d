"""Asking, restoring and telling, behind ``snaporch restore``."""

from __future__ import annotations

import json as json_format
import sys

from snaporch.errors import RefusedError
from snaporch.report.terminal import print_error, print_result
from snaporch.restore.plan import RestorePlan, make_restore_plan, split_name
from snaporch.restore.restore import Restored, check_bundle, restore
from snaporch.run.context import Context
from snaporch.run.lock import domain_lock
from snaporch.run.settle import recover, recover_leftovers


def restore_one(
    context: Context,
    text: str,
    *,
    yes: bool,
    cold: bool,
    discard_newer: bool,
    safety: bool,
    wait: int | None,
    json: bool,
) -> int:
    """Restore one domain; 0 when it was done."""
    domain, snapshot = split_name(text)
    recover_leftovers(context)

    def plan() -> RestorePlan:
        return make_restore_plan(context, domain, snapshot, cold=cold, discard_newer=discard_newer)

    record = plan().record
    settings = context.config.settings(record.domain, record.uuid)
    with domain_lock(
        context.config.paths.runtime,
        record.domain,
        record.uuid,
        "restore",
        wait=settings.wait if wait is None else wait,
        interrupt=context.interrupt,
    ):
        for done in recover(context, record.uuid):
            context.progress.note(record.domain, done)
        current = check_bundle(context, plan())
        if not yes:
            _ask(context, current, safety=safety)
        restored = restore(context, current, safety=safety)
    if json:
        print_result(json_format.dumps(restored.as_json(), indent=2, ensure_ascii=False))
    else:
        print_result(_line(restored))
    return 0


def _ask(context: Context, plan: RestorePlan, *, safety: bool) -> None:
    """Say what will be lost and wait for a yes.

    Raises:
        RefusedError: no, or nobody there to ask.
    """
    thing = f"{plan.record.domain}@{plan.record.snapshot}"
    print_error(f"restoring {thing} discards:")
    for loss in plan.losses(context):
        print_error(f"  {loss}")
    if safety:
        print_error("  (a copy of the disks is kept, with a script to undo the restore)")
    if not sys.stdin.isatty():
        raise RefusedError(thing, "not confirmed, and no terminal to ask on", "use --yes")
    sys.stderr.write("Go on? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RefusedError(thing, "not confirmed; nothing was touched")


def _line(restored: Restored) -> str:
    record = restored.record
    text = f"{record.domain}@{record.snapshot}  restored, {restored.state}"
    if restored.resumed:
        text += ", resumed from RAM"
    if restored.clock_set:
        text += ", clock set"
    return text
