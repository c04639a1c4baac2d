"""``snaporch render``: texts for other programs' configuration."""

from __future__ import annotations

from typing import Annotated

import typer

from snaporch.cli.options import Command, ConfigOption, config_path

render_app = typer.Typer(
    help="Print configuration for other programs.", no_args_is_help=True, rich_markup_mode=None
)


@render_app.callback()
def render_command() -> None:
    """Print configuration for other programs."""


@render_app.command("sanoid", cls=Command)
def render_sanoid_command(
    context: typer.Context,
    domains: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DOMAIN]...", help="Only these, by name or UUID.", show_default=False
        ),
    ] = None,
    config: ConfigOption = None,
) -> int:
    """Print sections for sanoid.conf that make its snapshots of these domains consistent.

    With snaporch's hooks, without a time limit on them, and with one recursive snapshot where a
    guest has several datasets under a parent of its own.
    """
    from snaporch.cli.rendering import print_sanoid

    return print_sanoid(config_path(context, config), domains or [])
