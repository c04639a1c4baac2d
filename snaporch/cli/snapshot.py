"""``snaporch snapshot``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, QuietOption, WaitOption, config_path


class SnapshotLevel(StrEnum):
    """What ``--level`` takes."""

    AUTO = "auto"
    RAM = "ram"
    QUIESCED = "quiesced"
    PAUSED = "paused"
    CRASH = "crash"


def snapshot_command(
    context: typer.Context,
    domains: Annotated[
        list[str] | None,
        typer.Argument(metavar="DOMAIN", help="Domains by name or UUID.", show_default=False),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            metavar="NAME",
            help="The domains of this consistency group, all in one window or none.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            help="Name of the snapshot [default: snaporch_<UTC time>_manual].",
            show_default=False,
        ),
    ] = None,
    level: Annotated[
        SnapshotLevel | None,
        typer.Option(
            "--level", help="How consistent [default: as configured, auto].", show_default=False
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="Take it for this policy: its level, and its rules for how long it stays.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, and do nothing.")
    ] = False,
    wait: WaitOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Take a consistent snapshot of one or more domains.

    A running guest goes on running: its RAM is saved live, all its disks are switched to overlays
    in one instant, ZFS snapshots are taken of what lies beneath, and the overlays are committed
    back. A guest that is off gets a plain snapshot. With --policy a domain takes its consistency
    group along.
    """
    from snaporch.cli.session import session
    from snaporch.cli.snapshots import Wish, show_plans, snapshot_each

    if bool(domains) == (group is not None):
        raise typer.BadParameter("wanted is DOMAIN..., or --group NAME")
    with session(config_path(context, config), quiet=quiet or json) as opened:
        chosen = level.value if level else None
        wish = Wish(name=name, level=chosen, policy=policy)
        if dry_run:
            return show_plans(opened, domains or [], group, wish)
        return snapshot_each(opened, domains or [], group, wish, wait=wait, json=json)
