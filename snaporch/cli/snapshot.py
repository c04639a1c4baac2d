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
    rate: Annotated[
        int | None,
        typer.Option(
            "--rate",
            metavar="MIB",
            min=0,
            max=1 << 20,
            help="Most RAM in MiB a second to save while the guest runs; 0 for no limit "
            "[default: as configured].",
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
    from snaporch.cli.snapshots import Wishes, show_plans, snapshot_each

    with session(config_path(context, config), quiet=quiet or json) as opened:
        chosen = level.value if level else None
        if dry_run:
            return show_plans(opened, domains, name=name, level=chosen, policy=policy)
        return snapshot_each(
            opened,
            domains,
            Wishes(name=name, level=chosen, policy=policy, wait=wait, rate=rate),
            json=json,
        )
