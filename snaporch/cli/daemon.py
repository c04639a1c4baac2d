"""``snaporch daemon``."""

from __future__ import annotations

from typing import Annotated

import typer

from snaporch.cli.options import ConfigOption, config_path


def daemon_command(
    context: typer.Context,
    config: ConfigOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say only what went wrong.")] = False,
) -> int:
    """Carry policies out until stopped.

    It does what run-due does, each at its time.
    SIGHUP reads the configuration anew. SIGTERM and SIGINT end it, once the snapshots under way
    have undone or finished themselves.
    """
    from snaporch.cli.serving import serve

    return serve(config_path(context, config), quiet=quiet)
