"""``snaporch install`` and ``snaporch uninstall``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from snaporch.cli.options import ConfigOption, config_path

RootOption = Annotated[
    Path,
    typer.Option(
        "--root",
        metavar="DIR",
        envvar="DESTDIR",
        help="Work below this directory, as packages are built.",
        show_default=False,
        show_envvar=True,
    ),
]


def install_command(
    context: typer.Context,
    root: RootOption = Path("/"),
    command: Annotated[
        str | None,
        typer.Option(
            "--command",
            metavar="PATH",
            help="What the units start [default: this snaporch].",
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
) -> int:
    """Write snaporch's systemd units, libvirt's hook, and a configuration to edit.

    Enables nothing.

    A unit that was edited is kept beside the new one; a configuration is left as it is.
    """
    from snaporch.cli.installing import install_units

    return install_units(root, command, config_path(context, config))


def uninstall_command(root: RootOption = Path("/")) -> int:
    """Remove what `snaporch install` wrote, but edited files."""
    from snaporch.cli.installing import uninstall_units

    return uninstall_units(root)
