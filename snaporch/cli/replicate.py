"""``snaporch replicate``."""

from __future__ import annotations

from typing import Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, QuietOption, config_path


def replicate_command(
    context: typer.Context,
    domains: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DOMAIN]...", help="Names or UUIDs.", show_default=False),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All domains of libvirt's that have snapshots.")
    ] = False,
    due: Annotated[
        bool, typer.Option("--due", help="What policies want copied now, and nothing else.")
    ] = False,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="REPLICA",
            help="Only to this one [default: those of the domain's policies].",
            show_default=False,
        ),
    ] = None,
    anew: Annotated[
        bool, typer.Option("--anew", help="Look at all snapshots, also those it got before.")
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Copy snapshots and their bundles elsewhere: to another pool, or another machine by ssh.

    Sends what the replica lacks, and only then counts a snapshot as replicated. A transfer that
    is broken off goes on the next time. One at a time on a host, behind everything else on it.
    """
    from snaporch.cli.replicating import replicate_several, replicate_what_is_due
    from snaporch.cli.session import session

    if [bool(domains), everything, due].count(True) != 1 or (due and (to or anew)):
        raise typer.BadParameter("wanted is DOMAIN... or --all, with --to or without, or --due")
    with session(config_path(context, config), quiet=quiet or json) as opened:
        if due:
            return replicate_what_is_due(opened, json=json)
        return replicate_several(opened, domains or [], replicas=to or [], anew=anew, json=json)
