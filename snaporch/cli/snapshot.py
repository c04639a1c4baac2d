"""``snaporch snapshot``."""

from __future__ import annotations

from typing import Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, QuietOption, WaitOption, config_path


def snapshot_command(
    context: typer.Context,
    domains: Annotated[
        list[str],
        typer.Argument(metavar="DOMAIN...", help="Domains by name or UUID.", show_default=False),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            help="Name of the snapshot [default: snaporch_<UTC time>_manual].",
            show_default=False,
        ),
    ] = None,
    wait: WaitOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Take a consistent snapshot of one or more domains.

    A running guest goes on running: its RAM is saved live, all its disks are switched to overlays
    in one instant, ZFS snapshots are taken of what lies beneath, and the overlays are committed
    back. A guest that is off gets a plain snapshot.
    """
    from snaporch.cli.session import session
    from snaporch.cli.snapshots import snapshot_each

    with session(config_path(context, config), quiet=quiet or json) as opened:
        return snapshot_each(opened, domains, name=name, wait=wait, json=json)
