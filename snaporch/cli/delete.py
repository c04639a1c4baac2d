"""``snaporch delete``: asks, and deletes what :mod:`snaporch.delete.decision` does not refuse."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from snaporch.cli.options import (
    ConfigOption,
    JsonOption,
    SnapshotsArgument,
    WaitOption,
    WithGroupOption,
    YesOption,
)

if TYPE_CHECKING:
    from snaporch.context import Context
    from snaporch.delete.delete import DeleteResult, Deletion
    from snaporch.delete.plan import DeletePlan


def delete_command(
    context: typer.Context,
    snapshots: SnapshotsArgument,
    yes: YesOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted and freed.")
    ] = False,
    group: WithGroupOption = False,
    also_newest: Annotated[
        bool,
        typer.Option(
            "--also-newest",
            help="Also delete a domain's newest good snapshot, its last good one with RAM, and its "
            "last that passed a verification.",
        ),
    ] = False,
    wait: WaitOption = None,
    json: JsonOption = False,
    config: ConfigOption = None,
) -> int:
    """Delete snapshots: their ZFS snapshots and their bundles.

    Prints what will be freed, and asks for confirmation unless --yes is given. Bundles are moved to
    the trash, as by `snaporch prune`. Snapshots that are kept, held, cloned, or needed by an undo
    or another guest are refused; then none is deleted.
    """
    from snaporch.cli.session import session
    from snaporch.delete.delete import delete, preview_delete
    from snaporch.delete.plan import DeleteRequest, make_delete_plan
    from snaporch.errors import ExitCode
    from snaporch.output.terminal import print_error, print_json

    request = DeleteRequest(tuple(snapshots), group=group, also_newest=also_newest)
    with session(context, config, quiet=True) as opened:
        if dry_run:
            plan = make_delete_plan(opened, request)
            result = preview_delete(opened, plan)
        else:
            ask = None if yes else partial(_ask, opened)
            result = delete(opened, request, confirm=ask, wait=wait)
        if json:
            print_json(result.as_json(dry_run=dry_run))
        else:
            _print_lines(opened, result, dry_run=dry_run)
        for failure in result.failures:
            print_error(failure.line())
        opened.interrupt.check("delete")
    return int(result.failures[0].exit_code) if result.failures else ExitCode.OK


def _ask(context: Context, plan: DeletePlan) -> None:
    """Print what the plan deletes, and wait for a yes.

    Raises:
        RefusedError: the answer is no, or standard input is no terminal.
    """
    from snaporch.cli.confirm import confirm
    from snaporch.delete.delete import preview_delete
    from snaporch.output.terminal import print_error

    result = preview_delete(context, plan)
    print_error("deleting these snapshots cannot be undone:")
    for each in result.deleted:
        print_error(f"  {_line(each)}")
    print_error(f"  ({_summary(context, result, dry_run=True)})")
    for name in plan.left:
        print_error(f"  ({name} of the same instant stays; --group deletes it, too)")
    confirm("delete")


def _print_lines(context: Context, result: DeleteResult, *, dry_run: bool) -> None:
    from snaporch.output.terminal import print_result

    for each in result.deleted:
        print_result(_line(each))
    if result.deleted:
        print_result(_summary(context, result, dry_run=dry_run))


def _line(each: Deletion) -> str:
    """One line: the snapshot, its datasets, and what is done with its bundle."""
    from snaporch.errors import one_line
    from snaporch.output.format import size

    parts = [", ".join(sorted(each.item.zfs_names)) or "only its bundle"]
    if (bundle := each.bundle) is not None:
        action = {"trash": "to the trash", "delete": "deleted", "keep": f"kept: {bundle.reason}"}
        text = action.get(bundle.action.value, bundle.action.value)
        parts.append(f"bundle ({size(bundle.found.bytes)}) {text}")
    return one_line(f"{each.item.name}  {'; '.join(parts)}")


def _summary(context: Context, result: DeleteResult, *, dry_run: bool) -> str:
    from snaporch.config.duration import duration_text
    from snaporch.output.format import size

    count = len(result.deleted)
    what = f"{count} snapshot{'s' * (count != 1)}"
    done = f"would delete {what} and free" if dry_run else f"deleted {what} and freed"
    text = f"{done} {size(result.freed)}"
    if result.trashed:
        later = duration_text(context.config.prune.trash_keep)
        text += f"; {size(result.trashed)} more when the trash is emptied, after {later}"
    return text
