"""``snaporch restore``."""

from __future__ import annotations

from typing import Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, QuietOption, WaitOption, config_path


def restore_command(
    context: typer.Context,
    snapshot: Annotated[
        str,
        typer.Argument(
            metavar="DOMAIN@SNAPSHOT", help="As `snaporch list` shows them.", show_default=False
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    cold: Annotated[
        bool, typer.Option("--cold", help="Boot from the disks instead of resuming from RAM.")
    ] = False,
    discard_newer: Annotated[
        bool,
        typer.Option("--discard-newer", help="Destroy snapshots newer than this one."),
    ] = False,
    no_safety: Annotated[
        bool,
        typer.Option("--no-safety", help="Keep no copy of what is discarded; cannot be undone."),
    ] = False,
    wait: WaitOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Bring a domain back to a snapshot, to the very instant.

    Stops the guest, rolls its datasets back, restores NVRAM and definition and resumes it from RAM.
    What is discarded is kept in the bundle store first, with a script that undoes the restore.
    """
    from snaporch.cli.restoring import restore_one
    from snaporch.cli.session import session

    with session(config_path(context, config), quiet=quiet or json) as opened:
        return restore_one(
            opened,
            snapshot,
            yes=yes,
            cold=cold,
            discard_newer=discard_newer,
            safety=not no_safety,
            wait=wait,
            json=json,
        )
