"""``snaporch restore --group``: asks once, and reports each member of a consistency group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from snaporch.cli.confirm import confirm
from snaporch.cli.restore import (
    line_of,
    print_losses,
    print_preview,
    print_refusals,
    print_undo_command,
)

if TYPE_CHECKING:
    from snaporch.context import Context
    from snaporch.restore.confirm_and_restore import RestoreRequest
    from snaporch.restore.plan_model import RestorePlan


@dataclass(frozen=True, slots=True)
class GroupChoices:
    """The options of the command that concern it as a whole."""

    yes: bool
    dry_run: bool
    json: bool
    wait: int | None
    jobs: int | None


def restore_group(context: Context, request: RestoreRequest, choices: GroupChoices) -> int:
    """Restore all members, and print the result of each; the exit code of the first failure, or 0.

    Raises:
        SnaporchError: nothing was touched.
    """
    from snaporch.errors import SnaporchError
    from snaporch.output.terminal import print_error, print_json, print_result
    from snaporch.restore.restore_group import run_group_restore

    if choices.dry_run:
        return _preview(context, request, json=choices.json)
    ask = None if choices.yes else partial(_ask, context, request)
    outcome = run_group_restore(context, request, confirm=ask, wait=choices.wait, jobs=choices.jobs)
    if choices.json:
        print_json([restored.as_json() for restored in outcome.restored])
    for restored in outcome.restored:
        if not choices.json:
            print_result(line_of(restored))
        print_undo_command(context, restored)
    errors = [each for each in outcome.failures if isinstance(each, SnaporchError)]
    bugs = [each for each in outcome.failures if not isinstance(each, SnaporchError)]
    last = outcome.signal or next(iter(bugs), None)  # the caller reports that one
    for error in errors:
        if error is not last:
            print_error(error.line())
    for bug in bugs:
        if bug is not last:
            print_error(f"a bug in snaporch, or an error of the system: {bug!r}")
    if last is not None:
        raise last
    return int(errors[0].exit_code) if errors else 0


def _preview(context: Context, request: RestoreRequest, *, json: bool) -> int:
    from snaporch.output.terminal import print_json
    from snaporch.restore.restore_group import preview_group

    previews = preview_group(context, request)
    if json:
        print_json([preview.as_json() for preview in previews])
    statuses = []
    for preview in previews:
        if not json:
            print_preview(request, preview)
        statuses.append(print_refusals(preview))
    return next((status for status in statuses if status), 0)


def _ask(context: Context, request: RestoreRequest, plans: Sequence[RestorePlan]) -> None:
    """Print what the restores discard, and wait for a yes.

    Raises:
        RefusedError: the answer is no, or standard input is no terminal.
    """
    from snaporch.output.terminal import print_error
    from snaporch.restore.losses import losses

    for plan in plans:
        print_losses(request, plan, losses(context, plan), print_error)
    record = plans[0].record
    confirm(f"{record.group}@{record.snapshot}")
