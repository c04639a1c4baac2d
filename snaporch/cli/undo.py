"""``snaporch undo``: asks and reports; :mod:`snaporch.restore.confirm_and_undo` carries it out."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from snaporch.cli.confirm import confirm
from snaporch.cli.options import (
    AlsoRollBackOption,
    ConfigOption,
    JsonOption,
    QuietOption,
    WaitOption,
    YesOption,
)
from snaporch.cli.restore import print_refusals, print_steps, print_undo_command

if TYPE_CHECKING:
    from snaporch.context import Context
    from snaporch.restore.confirm_and_undo import UndoRequest
    from snaporch.restore.plan_model import RestorePlan
    from snaporch.restore.preview import RestorePreview
    from snaporch.restore.run import Restored
    from snaporch.restore.safety_catalog import SafetyCopy

_OTHERS = 3
"""How many of the other safety copies are named: the newest."""


def undo_command(
    context: typer.Context,
    domain: Annotated[
        str, typer.Argument(metavar="DOMAIN", help="By name or UUID.", show_default=False)
    ],
    yes: YesOption = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print what would be undone and lost, and list the other safety copies.",
        ),
    ] = False,
    copy: Annotated[
        str | None,
        typer.Option(
            "--copy",
            metavar="NAME",
            help="Bring back this safety copy [default: the newest, of the last restore].",
            show_default=False,
        ),
    ] = None,
    disks_only: Annotated[
        bool,
        typer.Option(
            "--disks-only", help="Leave the guest off, even if its running state was kept."
        ),
    ] = False,
    discard_newer: Annotated[
        bool,
        typer.Option(
            "--discard-newer", help="Destroy snapshots that were taken since the restore."
        ),
    ] = False,
    also_roll_back: AlsoRollBackOption = False,
    no_safety: Annotated[
        bool,
        typer.Option("--no-safety", help="Keep no safety copy; the undo cannot be undone."),
    ] = False,
    wait: WaitOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Undo the last restore of a domain.

    Stops the guest, and brings disks, newer snapshots, UEFI variables, TPM state and definition
    back from the safety copy that the restore made. Then the guest is off, or is resumed where it
    was stopped if its running state was kept.
    """
    from snaporch.cli.session import session
    from snaporch.output.terminal import print_json, print_result
    from snaporch.restore.confirm_and_undo import UndoRequest, preview_undo, run_undo

    request = UndoRequest(
        domain,
        copy=copy,
        disks_only=disks_only,
        discard_newer=discard_newer,
        also_roll_back=also_roll_back,
        safety=not no_safety,
    )
    with session(context, config, quiet=quiet or json) as opened:
        report = partial(opened.progress.note, request.domain) if json else print_result
        if dry_run:
            planned = preview_undo(opened, request, report)
            if planned is not None:
                return _print_preview(opened, request, *planned, json=json)
            if json:
                print_json(_without_copy(opened, request) | {"dry_run": True})
            return 0
        ask = None if yes else partial(_ask, opened, request)
        undone = run_undo(opened, request, confirm=ask, report=report, wait=wait)
        if undone is not None:
            _print_undone(opened, *undone, json=json)
        elif json:
            print_json(_document_without_copy(opened, request))
    return 0


def _ask(context: Context, request: UndoRequest, plan: RestorePlan, copy: SafetyCopy) -> None:
    """Print what the undo discards, and wait for a yes.

    Raises:
        RefusedError: the answer is no, or standard input is no terminal.
    """
    from snaporch.output.terminal import print_error
    from snaporch.restore.losses import losses

    _print_losses(context, request, losses(context, plan), copy, print_error)
    confirm(plan.thing)


def _print_preview(
    context: Context,
    request: UndoRequest,
    preview: RestorePreview,
    copy: SafetyCopy,
    *,
    json: bool,
) -> int:
    """Print what the undo would do; the exit code of the first refusal, or 0."""
    from snaporch.output.terminal import print_json, print_result

    if json:
        undo = {
            "copy": copy.name,
            "restored": copy.manifest.snapshot,
            "other_copies": [other.name for other in _other_copies(context, copy)],
        }
        print_json(preview.as_json() | undo)
    else:
        print_steps(f"undoing {copy.thing}", preview)
        _print_losses(context, request, preview.discarded, copy, print_result)
    return print_refusals(preview)


def _print_losses(
    context: Context,
    request: UndoRequest,
    lost: Iterable[str],
    copy: SafetyCopy,
    output: Callable[[str], None],
) -> None:
    """Print what is undone, what is discarded, and which other safety copies exist."""
    output(f"undoing {copy.thing} brings back what {copy.name} holds, and discards:")
    for loss in lost:
        output(f"  {loss}")
    if request.safety:
        output("  (a copy of the disks is kept, which can be brought back in the same way)")
    others = _other_copies(context, copy)
    for other in others[-_OTHERS:]:
        output(f"  (--copy {other.name} would undo {other.thing})")
    if len(others) > _OTHERS:
        output(f"  ({len(others) - _OTHERS} older copies are in {copy.directory.parent})")


def _other_copies(context: Context, copy: SafetyCopy) -> list[SafetyCopy]:
    from snaporch.restore.safety_catalog import safety_copies

    found = safety_copies(context.store, copy.manifest.uuid)
    return [other for other in found if other.name != copy.name and other.is_offered]


def _print_undone(context: Context, restored: Restored, copy: SafetyCopy, *, json: bool) -> None:
    from snaporch.output.terminal import print_json, print_result
    from snaporch.restore.safety_catalog import MANAGED_SAVE

    name = restored.record.domain
    if json:
        print_json(_document(restored, copy))
    else:
        resumed = ", resumed from RAM" if restored.resumed else ""
        print_result(f"{name}  undid {copy.thing}; {restored.state}{resumed}")
    saved = copy.directory / MANAGED_SAVE
    if saved.exists():
        command = shlex.join(["virsh", "restore", str(saved)])
        context.progress.note(name, f"to resume its managed save image: {command}")
    print_undo_command(context, restored)


def _document_without_copy(context: Context, request: UndoRequest) -> dict[str, object]:
    """The document of an undo that needed no safety copy: the restore had rolled back nothing."""
    state = context.hypervisor.domain(request.domain).state.value
    rest = {"domain_state": state, "resumed": False, "undo": None}
    return _without_copy(context, request) | rest


def _without_copy(context: Context, request: UndoRequest) -> dict[str, object]:
    domain = context.hypervisor.domain(request.domain)
    return {"domain": domain.name, "uuid": domain.uuid, "copy": None, "restored": None}


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
