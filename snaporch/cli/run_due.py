"""``snaporch run-due``."""

from __future__ import annotations

from typing import Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, QuietOption, config_path


def run_due_command(
    context: typer.Context,
    retention: Annotated[
        bool,
        typer.Option("--retention/--no-retention", help="Whether to delete what need not stay."),
    ] = True,
    verification: Annotated[
        bool,
        typer.Option("--verify/--no-verify", help="Whether to verify what policies want verified."),
    ] = True,
    replication: Annotated[
        bool,
        typer.Option("--replicate/--no-replicate", help="Whether to copy what is to be copied."),
    ] = True,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Take what policies have due, delete what need not stay, copy and verify what is to be.

    For a timer. What is due follows from the snapshots that exist: a time that was missed is made
    up for once. A snapshot that fails does not keep the others from being taken.
    """
    from snaporch.cli.running_due import run_due
    from snaporch.cli.session import session

    with session(config_path(context, config), quiet=quiet or json) as opened:
        return run_due(
            opened,
            retention=retention,
            verification=verification,
            replication=replication,
            json=json,
        )
