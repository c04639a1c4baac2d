"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="SNAPORCH_CONFIG",
        metavar="FILE",
        help="Configuration file [default: /etc/snaporch/snaporch.toml, if there is one].",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only notes.")]
WaitOption = Annotated[
    int | None,
    typer.Option(
        "--wait",
        min=0,
        metavar="SECONDS",
        help="Wait this long for another run on the domain [default: from the configuration, 0].",
        show_default=False,
    ),
]


def config_path(context: typer.Context, own: Path | None) -> Path | None:
    """The command's own ``--config``, or the one given before the command."""
    given: Path | None = own or context.obj
    return given
