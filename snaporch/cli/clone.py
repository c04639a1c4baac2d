"""``snaporch clone``."""

from __future__ import annotations

from typing import Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, QuietOption, config_path


def clone_command(
    context: typer.Context,
    snapshot: Annotated[
        str,
        typer.Argument(
            metavar="DOMAIN@SNAPSHOT",
            help="As `snaporch list` shows them; with --delete, the clone.",
            show_default=False,
        ),
    ],
    new: Annotated[
        str | None,
        typer.Argument(metavar="NEW", help="The clone's name.", show_default=False),
    ] = None,
    running: Annotated[
        bool, typer.Option("--running", help="Resume it from RAM, as it was in that instant.")
    ] = False,
    network: Annotated[
        str,
        typer.Option(
            "--network",
            metavar="isolated|none|NAME",
            help="What its network cards are connected to: nothing, with the cable in (isolated) "
            "or out (none), or a libvirt network.",
        ),
    ] = "none",
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove the clone and all it has.")
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Make a guest of a snapshot, beside the original; or remove it again (--delete CLONE).

    Its disks are ZFS clones. It gets a name, a UUID and, unless it is resumed from RAM, MAC
    addresses of its own.
    """
    from snaporch.cli.cloning import clone_one, delete_one
    from snaporch.cli.session import session

    if delete != (new is None) or (delete and running):
        raise typer.BadParameter("wanted is DOMAIN@SNAPSHOT NEW, or --delete CLONE")
    with session(config_path(context, config), quiet=quiet or json) as opened:
        if new is None:
            return delete_one(opened, snapshot, json=json)
        return clone_one(opened, snapshot, new, running=running, network=network, json=json)
