"""``snaporch undo``."""

from __future__ import annotations

from typing import Annotated

import typer

from snaporch.cli.options import (
    AlsoRollBackOption,
    ConfigOption,
    JsonOption,
    QuietOption,
    WaitOption,
    YesOption,
    config_path,
)


def undo_command(
    context: typer.Context,
    domain: Annotated[
        str, typer.Argument(metavar="DOMAIN", help="By name or UUID.", show_default=False)
    ],
    yes: YesOption = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Say what would be undone and lost, and which copies there are."
        ),
    ] = False,
    copy: Annotated[
        str | None,
        typer.Option(
            "--copy",
            metavar="NAME",
            help="The safety copy to bring back [default: the newest, of the last restore].",
            show_default=False,
        ),
    ] = None,
    disks_only: Annotated[
        bool,
        typer.Option(
            "--disks-only", help="Leave the guest off, also where its running state was kept."
        ),
    ] = False,
    discard_newer: Annotated[
        bool,
        typer.Option("--discard-newer", help="Destroy snapshots taken since the restore."),
    ] = False,
    also_roll_back: AlsoRollBackOption = False,
    no_safety: Annotated[
        bool,
        typer.Option("--no-safety", help="Keep no copy of what is discarded."),
    ] = False,
    wait: WaitOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Undo the last restore of a domain: bring back what it discarded.

    Stops the guest, and brings disks, newer snapshots, NVRAM, TPM state and definition back from
    the safety copy that the restore made. The guest is off then, or goes on where it was if its
    running state was kept.
    """
    from snaporch.cli.session import session
    from snaporch.cli.undoing import UndoRequest, undo_one

    wishes = UndoRequest(
        domain,
        copy=copy,
        disks_only=disks_only,
        discard_newer=discard_newer,
        also_roll_back=also_roll_back,
        safety=not no_safety,
    )
    with session(config_path(context, config), quiet=quiet or json) as opened:
        return undo_one(opened, wishes, yes=yes, dry_run=dry_run, wait=wait, json=json)
