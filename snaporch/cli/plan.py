"""``snaporch plan``."""

from __future__ import annotations

from typing import Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, config_path


def plan_command(
    context: typer.Context,
    domain: Annotated[
        str | None,
        typer.Argument(
            metavar="[DOMAIN]", help="Only this domain, by name or UUID.", show_default=False
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Name the snapshots that stay, too.")
    ] = False,
    json: JsonOption = False,
    config: ConfigOption = None,
) -> int:
    """Say what policies will take, and would delete.

    Looks, and changes nothing.
    """
    from snaporch.cli.planning import plan_and_tell
    from snaporch.cli.session import session

    with session(config_path(context, config), quiet=True, to_look=True) as opened:
        return plan_and_tell(opened, domain, verbose=verbose, json=json)
