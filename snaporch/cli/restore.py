"""``snaporch restore``: asks and reports; :mod:`snaporch.restore.confirm_and_restore` restores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snaporch.cli.confirm import confirm
from snaporch.cli.options import (
    AcceptOption,
    AlsoRollBackOption,
    ConfigOption,
    JsonOption,
    QuietOption,
    WaitOption,
    YesOption,
    whole_number,
)

if TYPE_CHECKING:
    from snaporch.context import Context
    from snaporch.restore.confirm_and_restore import RestoreRequest
    from snaporch.restore.plan_model import RestorePlan
    from snaporch.restore.preview import RestorePreview
    from snaporch.restore.run import Restored


def restore_command(
    context: typer.Context,
    snapshot: Annotated[
        str,
        typer.Argument(
            metavar="DOMAIN@SNAPSHOT",
            help="As `snaporch list` shows it; with --to-time only the domain.",
            show_default=False,
        ),
    ],
    yes: YesOption = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Make the checks, print what would be done, discarded and refused; change "
            "nothing.",
        ),
    ] = False,
    to_time: Annotated[
        str | None,
        typer.Option(
            "--to-time",
            metavar="TIME",
            help="Restore the newest snapshot not taken after this time, such as 2026-11-21T10:00 "
            "(local time) or 2026-11-21T10:00Z.",
            show_default=False,
        ),
    ] = None,
    cold: Annotated[
        bool, typer.Option("--cold", help="Boot from the disks instead of resuming from RAM.")
    ] = False,
    paused: Annotated[
        bool, typer.Option("--paused", help="Resume from RAM, and leave the guest paused.")
    ] = False,
    disks_only: Annotated[
        bool, typer.Option("--disks-only", help="Roll the disks back, and leave the guest off.")
    ] = False,
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle",
            metavar="DIR",
            help="The directory of the bundle, if it is not in the store.",
            show_default=False,
        ),
    ] = None,
    discard_newer: Annotated[
        bool,
        typer.Option("--discard-newer", help="Destroy snapshots that are newer than this one."),
    ] = False,
    keep_running_state: Annotated[
        bool,
        typer.Option(
            "--keep-running-state",
            help="Also keep the RAM of the running guest, so that the undo can resume it.",
        ),
    ] = False,
    despite_other_disks: Annotated[
        bool,
        typer.Option(
            "--despite-other-disks",
            help="Restore even if disks that the guest writes to are not in the snapshot, or a "
            "backing file that is in no snapshot has changed.",
        ),
    ] = False,
    also_roll_back: AlsoRollBackOption = False,
    keep_definition: Annotated[
        bool,
        typer.Option(
            "--keep-definition",
            help="Leave the domain defined as it is now; with --cold or --disks-only.",
        ),
    ] = False,
    despite_damage: Annotated[
        bool,
        typer.Option(
            "--despite-damage",
            help="Restore even if UEFI variables, TPM state or the definition in the bundle are "
            "damaged: the host's current files are kept; the guest then boots.",
        ),
    ] = False,
    accept: AcceptOption = None,
    group: Annotated[
        bool,
        typer.Option(
            "--group",
            help="Restore all that the consistency group took at the same instant; none is rolled "
            "back before all are off.",
        ),
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            parser=whole_number(1, 64),
            metavar="N",
            help="With --group: roll back and resume this many at once [default: all].",
            show_default=False,
        ),
    ] = None,
    replica: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="REPLICA",
            help="Bring a guest that this host has lost back from this replica, as `rebuild` does; "
            "only with --cold, --accept, --host, --identity, --dry-run and --yes.",
            show_default=False,
        ),
    ] = "",
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="HOST",
            help="With --from: read from this host, such as root@nas, instead of the configured "
            "one.",
            show_default=False,
        ),
    ] = "",
    identity: Annotated[
        Path | None,
        typer.Option(
            "--identity",
            metavar="FILE",
            help="With --from: the private key of age that decrypts the bundle.",
            show_default=False,
        ),
    ] = None,
    no_safety: Annotated[
        bool,
        typer.Option("--no-safety", help="Keep no safety copy; the restore cannot be undone."),
    ] = False,
    wait: WaitOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Restore a domain to a snapshot, and resume it from RAM.

    Prints what will be lost, and asks for confirmation unless --yes is given. Then copies the data
    that will be discarded to the bundle store: `snaporch undo` brings it back. Then stops the
    guest, rolls its datasets back, restores UEFI variables, TPM state and definition, and resumes
    it from RAM.
    """
    from snaporch.cli.restore_group import GroupChoices, restore_group
    from snaporch.cli.session import session
    from snaporch.errors import UsageError
    from snaporch.output.terminal import print_json, print_result
    from snaporch.restore.confirm_and_restore import (
        RestoreRequest,
        preview_restore,
        run_restore,
    )

    request = RestoreRequest(
        snapshot,
        to_time=to_time,
        cold=cold,
        paused=paused,
        disks_only=disks_only,
        bundle=bundle,
        discard_newer=discard_newer,
        keep_running=keep_running_state,
        safety=not no_safety,
        despite_other_disks=despite_other_disks,
        also_roll_back=also_roll_back,
        keep_definition=keep_definition,
        despite_damage=despite_damage,
        accepted=tuple(accept or ()),
    )
    with session(context, config, quiet=quiet or json) as opened:
        if jobs is not None and not group:
            raise UsageError("--jobs", "is for --group", "leave it out")
        if group and (replica or host or identity):
            raise UsageError("--group and --from", "exclude one another", "name each domain")
        if replica or host or identity:
            from snaporch.cli.rebuild import Rebuild, RebuildOptions, opened_identity

            _check_lost(request, replica, wait)
            options = RebuildOptions(
                cold=cold, dry_run=dry_run, yes=yes, json=json, accepted=request.accepted
            )
            source, local = context.obj.open_source(opened, replica, host)
            with opened_identity(identity) as key:
                return Rebuild(opened, source, local, options, key).run([snapshot])
        if group:
            choices = GroupChoices(yes=yes, dry_run=dry_run, json=json, wait=wait, jobs=jobs)
            return restore_group(opened, request, choices)
        if dry_run:
            preview = preview_restore(opened, request)
            if json:
                print_json(preview.as_json())
            else:
                print_preview(request, preview)
            return print_refusals(preview)
        ask = None if yes else partial(_ask, opened, request)
        restored = run_restore(opened, request, confirm=ask, wait=wait)
        if json:
            print_json(restored.as_json())
        else:
            print_result(line_of(restored))
        print_undo_command(opened, restored)
    return 0


def _check_lost(request: RestoreRequest, replica: str, wait: int | None) -> None:
    """Refuse options that concern a guest that is here, with a replica.

    Raises:
        UsageError: with the reason.
    """
    from snaporch.errors import UsageError
    from snaporch.restore.select import split_name

    if not replica:
        raise UsageError("--host, --identity", "are for --from REPLICA", "name the replica")
    split_name(request.name)
    other = replace(request, name="", cold=False, accepted=())
    if other != type(request)("") or wait is not None:
        reason = (
            "goes only with --cold, --accept, --host, --identity, --dry-run, --yes, --json and "
            "--quiet"
        )
        raise UsageError("--from", reason, "leave the others out")


def _ask(context: Context, request: RestoreRequest, plan: RestorePlan) -> None:
    """Print what the restore discards, and wait for a yes.

    Raises:
        RefusedError: the answer is no, or standard input is no terminal.
    """
    from snaporch.output.terminal import print_error
    from snaporch.restore.losses import losses

    print_losses(request, plan, losses(context, plan), print_error)
    confirm(plan.thing)


def print_losses(
    request: RestoreRequest,
    plan: RestorePlan,
    lost: Iterable[str],
    output: Callable[[str], None],
) -> None:
    """Print what a restore discards."""
    output(f"restoring {plan.thing} discards:")
    for loss in lost:
        output(f"  {loss}")
    if request.safety:
        kept = "the disks and the RAM" if request.keep_running else "the disks"
        output(f"  (a copy of {kept} is kept; snaporch undo brings it back)")


def print_preview(request: RestoreRequest, preview: RestorePreview) -> None:
    """Print what a restore would do, and what it would discard."""
    from snaporch.output.terminal import print_result

    print_steps(f"restoring {preview.plan.thing}", preview)
    print_losses(request, preview.plan, preview.discarded, print_result)


def print_steps(heading: str, preview: RestorePreview) -> None:
    """Print what would be done with the disks and the guest."""
    from snaporch.output.terminal import print_result

    print_result(f"{heading}:")
    for line in preview.lines():
        print_result(f"  {line}")


def print_refusals(preview: RestorePreview) -> int:
    """Print why the restore would be refused; the exit code of the first reason, or 0."""
    from snaporch.output.terminal import print_error

    for error in preview.refusals:
        print_error(error.line())
    return int(preview.refusals[0].exit_code) if preview.refusals else 0


def print_undo_command(context: Context, restored: Restored) -> None:
    """Print the command that undoes this restore, if a safety copy was kept."""
    from snaporch.restore.undo_command import command_for

    if restored.undo is not None:
        record, name = restored.record, Path(restored.undo).parent.name
        command = command_for(context, record.domain, record.uuid, name, is_last=True)
        context.progress.step(record.domain, f"undo it with: {command}")


def line_of(restored: Restored) -> str:
    """Describe the result of a restore on one line."""
    text = f"{restored.record.full_name}  restored, {restored.state}"
    if restored.resumed:
        text += ", resumed from RAM"
    if restored.clock_set:
        text += ", clock set"
    return text
