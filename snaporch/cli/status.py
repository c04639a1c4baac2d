"""``snaporch status``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, config_path


def status_command(
    context: typer.Context,
    domains: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DOMAIN]...", help="Only these, by name or UUID.", show_default=False
        ),
    ] = None,
    json: JsonOption = False,
    nagios: Annotated[
        bool,
        typer.Option(
            "--nagios",
            help="Print one line with performance data, and exit with 0 (OK), 1 (WARNING), "
            "2 (CRITICAL) or 3 (UNKNOWN).",
        ),
    ] = False,
    prometheus: Annotated[
        Path | None,
        typer.Option(
            "--prometheus",
            metavar="FILE",
            help="Write metrics to this file, which is replaced in one step; - for standard "
            "output. Exits with 0 whatever they say.",
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
) -> int:
    """Say how it stands.

    Who carries policies out, when each took its last snapshot and takes the next, the age of the
    newest snapshot of each level, runs under way or cut short, the bundle store. Looks, and changes
    nothing. Exits with 0, or 10 when something needs attention.
    """
    from snaporch.cli.standing import status_for_nagios, tell_status

    path = config_path(context, config)
    if nagios:
        return status_for_nagios(path, domains or [], json=json, prometheus=prometheus)
    return tell_status(path, domains or [], json=json, prometheus=prometheus)
