"""``snaporch show``."""

from __future__ import annotations

import typer

from snaporch.cli.options import ConfigOption, JsonOption, SnapshotArgument, config_path


def show_command(
    context: typer.Context,
    snapshot: SnapshotArgument,
    json: JsonOption = False,
    config: ConfigOption = None,
) -> int:
    """Show all there is to know of a snapshot, and how to restore it by zfs and virsh alone."""
    from snaporch.cli.session import session
    from snaporch.cli.showing import show_one

    with session(config_path(context, config), quiet=True, to_look=True) as opened:
        return show_one(opened, snapshot, json=json)
