"""``snaporch verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, QuietOption, config_path


def verify_command(
    context: typer.Context,
    snapshots: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DOMAIN@SNAPSHOT]...",
            help="As `snaporch list` shows them.",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All snapshots there are.")] = False,
    due: Annotated[
        bool, typer.Option("--due", help="What policies want verified now, and nothing else.")
    ] = False,
    sample: Annotated[
        int | None,
        typer.Option(
            "--sample",
            min=1,
            metavar="N",
            help="With --all: the N whose verification is longest ago.",
            show_default=False,
        ),
    ] = None,
    checksums: Annotated[
        bool, typer.Option("--checksums", help="Run nothing, only read and compare.")
    ] = False,
    disks: Annotated[
        bool, typer.Option("--disks", help="Read all data of the disks, too.")
    ] = False,
    script: Annotated[
        Path | None,
        typer.Option(
            "--script", metavar="PATH", help="Run this against each clone.", show_default=False
        ),
    ] = None,
    script_timeout: Annotated[
        int, typer.Option("--script-timeout", min=1, metavar="SECONDS", help="For the script.")
    ] = 300,
    screenshots: Annotated[
        Path | None,
        typer.Option(
            "--screenshots",
            metavar="DIR",
            help="Keep a picture of each clone's screen here.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[
        int | None,
        typer.Option(
            "--wait",
            min=0,
            metavar="SECONDS",
            help="Wait this long for another verification on this host [default: 0].",
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Prove that snapshots can be restored: run a throw-away clone of each, without a network.

    Checks every checksum and GUID, resumes a clone from RAM (or boots it, where there is none),
    looks for life in it, removes it, and writes the verdict on the snapshot. One at a time on a
    host, behind everything else on it.
    """
    from snaporch.cli.session import session
    from snaporch.cli.verifying import verify_several, verify_what_is_due
    from snaporch.verify.verify import VerifyOptions

    if [bool(snapshots), everything, due].count(True) != 1 or (sample and not everything):
        raise typer.BadParameter("wanted is DOMAIN@SNAPSHOT..., or --all [--sample N], or --due")
    if due and (checksums or disks or script or screenshots or wait is not None):
        raise typer.BadParameter("--due goes with --json and --quiet alone")
    if checksums and (script or screenshots):
        raise typer.BadParameter("--checksums runs no clone for a script or a picture")
    ordeal = VerifyOptions(
        run=not checksums,
        disks=disks,
        script=script and script.absolute(),
        script_seconds=script_timeout,
        screenshots=screenshots,
    )
    with session(config_path(context, config), quiet=quiet or json) as opened:
        if due:
            return verify_what_is_due(opened, json=json)
        return verify_several(
            opened, snapshots or [], sample=sample, ordeal=ordeal, wait=wait, json=json
        )
