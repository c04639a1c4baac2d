"""``snaporch render``: configuration for other programs."""

from __future__ import annotations

import typer

from snaporch.cli.check import DomainsArgument
from snaporch.cli.options import Command, ConfigOption

render_app = typer.Typer(
    help="Print configuration for other programs.", no_args_is_help=True, rich_markup_mode=None
)


@render_app.callback()
def render_command() -> None:
    """Print configuration for other programs."""


@render_app.command("sanoid", cls=Command)
def render_sanoid_command(
    context: typer.Context, domains: DomainsArgument = None, config: ConfigOption = None
) -> int:
    """Print sections for sanoid.conf, with snaporch's hooks.

    They make sanoid's snapshots of these domains consistent. The hooks have no time limit. A guest
    with several datasets below a parent of its own gets one recursive section.
    """
    from snaporch.check.gather import choose_domains, gather_guests
    from snaporch.check.gather_sanoid import own_command
    from snaporch.cli.session import session
    from snaporch.output.terminal import print_result
    from snaporch.sanoid.config.render import render_sanoid

    with session(context, config, quiet=True) as opened:
        guests = gather_guests(opened, choose_domains(opened, domains or []))
        existing = {dataset.name for dataset in opened.pool.datasets()}
        text = render_sanoid(guests, existing, own_command(context.obj.host_files().path))
    print_result(text.rstrip("\n"))
    return 0
