"""``snaporch check``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, config_path

ConfigDirOption = Annotated[
    Path,
    typer.Option(
        "--configdir", metavar="DIRECTORY", help="Where sanoid's configuration is, as for sanoid."
    ),
]


def check_command(
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
            help="Print one line, and exit with 0 (OK), 1 (WARNING), 2 (CRITICAL) or 3 (UNKNOWN).",
        ),
    ] = False,
    configdir: ConfigDirOption = Path("/etc/sanoid"),
    config: ConfigOption = None,
) -> int:
    """Find what would make snapshots fail or disappoint.

    Says the line to write that mends it. Reads sanoid's configuration by sanoid's own rules, and
    looks at guests, datasets and snaporch's directories. Changes nothing. Exits with 0 when there
    is nothing but hints, 10 with warnings, 9 with errors.
    """
    from snaporch.cli.checking import check_all, check_for_nagios

    path = config_path(context, config)
    if nagios:
        return check_for_nagios(path, domains or [], configdir, json=json)
    return check_all(path, domains or [], configdir, json=json)
