"""``snaporch snapshot``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, QuietOption, WaitOption, config_path
from snaporch.errors import UsageError


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
        typer.Argument(metavar="[DOMAIN]...", help="Domains by name or UUID.", show_default=False),
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
    every: Annotated[
        bool, typer.Option("--all", help="All domains with disks on ZFS, but clones.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            min=1,
            max=64,
            metavar="N",
            help="Take this many at once, each in a process of its own [default: one after the "
            "other; with --all, schedule.jobs].",
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
    if_changed: Annotated[
        bool,
        typer.Option(
            "--if-changed",
            help="With --policy: take none of a guest that is off, and unchanged since the "
            "policy's last one.",
        ),
    ] = False,
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

    The RAM of a running guest is saved while it runs. Then it is paused for a moment: either until
    its disks write to overlays, which are committed back after the ZFS snapshots, or until the ZFS
    snapshots are there (--dry-run prints which). A guest that is off gets a plain snapshot. With
    --policy a domain takes its consistency group along.

    With --all or --jobs a failure stops no other, and the exit code is that of the worst.
    """
    from snaporch.cli.session import session
    from snaporch.cli.side_by_side import every_domain, snapshot_side_by_side
    from snaporch.cli.snapshots import SnapshotRequest, look_up, show_plans, snapshot_each

    if [bool(domains), every, group is not None].count(True) != 1:
        reason = "wanted is either DOMAIN..., or --all, or --group NAME"
        raise UsageError("DOMAIN", reason, "see `snaporch snapshot --help`")
    if group is not None and jobs is not None:
        raise UsageError("--jobs", "a group is snapshotted at once", "leave it out")
    wish = SnapshotRequest(name, level.value if level else None, policy, wait, rate, if_changed)
    with session(config_path(context, config), quiet=quiet or json) as opened:
        names = [domain.uuid for domain in every_domain(opened)] if every else domains or []
        if dry_run:
            return show_plans(opened, names, group, wish, json=json)
        if every or jobs is not None:
            found = look_up(opened, names)
            return snapshot_side_by_side(opened, found, wish, jobs=jobs, json=json)
        return snapshot_each(opened, names, group, wish, json=json)
