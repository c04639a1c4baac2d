"""``snaporch extract``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from snaporch.cli.options import (
    ConfigOption,
    JsonOption,
    QuietOption,
    SnapshotArgument,
    config_path,
)


def extract_command(
    context: typer.Context,
    snapshot: SnapshotArgument,
    destination: Annotated[
        Path,
        typer.Argument(
            metavar="DEST", help="The image to write, or a directory.", show_default=False
        ),
    ],
    disk: Annotated[
        str | None,
        typer.Option(
            "--disk", metavar="TARGET", help="Only this disk, such as vda.", show_default=False
        ),
    ] = None,
    ram: Annotated[
        bool, typer.Option("--ram", help="Its RAM instead, as an image for `virsh restore`.")
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Copy disks out of a snapshot, as sparse images, or its RAM. The guest is not touched."""
    from snaporch.cli.extracting import extract_all
    from snaporch.cli.session import session

    if ram and disk is not None:
        raise typer.BadParameter("--ram copies no disk")
    with session(config_path(context, config), quiet=quiet or json) as opened:
        return extract_all(opened, snapshot, destination, disk=disk, ram=ram, json=json)
