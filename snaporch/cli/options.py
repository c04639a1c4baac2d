"""Options that several commands have."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from snaporch.cli.completion import add_completion

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Configuration file [default: $SNAPORCH_CONFIG, /etc/snaporch/snaporch.toml].",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output.")
]
SnapshotArgument = Annotated[
    str,
    typer.Argument(
        metavar="DOMAIN@SNAPSHOT",
        help="A snapshot, as `snaporch list` shows it.",
        show_default=False,
    ),
]
SnapshotsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="DOMAIN@SNAPSHOT...",
        help="Snapshots, as `snaporch list` shows them.",
        show_default=False,
    ),
]
NetworkOption = Annotated[
    str,
    typer.Option(
        "--network",
        metavar="isolated|none|NAME",
        help="`none`: no network, link down; `isolated`: no network, link up; NAME: a libvirt "
        "network.",
    ),
]
WithGroupOption = Annotated[
    bool,
    typer.Option("--group", help="Also those that the consistency group took at the same instant."),
]


def _start_log(verbose: bool) -> None:
    if verbose:
        from snaporch import command_log
        from snaporch.output.log_handler import TerminalLogHandler

        command_log.start(TerminalLogHandler())


VerboseOption = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        callback=_start_log,
        help="Log each external command, and each libvirt call that changes something.",
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress, only notes.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
AcceptOption = Annotated[
    list[str] | None,
    typer.Option(
        "--accept",
        metavar="WHAT",
        help="If the snapshot comes from another host: something of this host that its definition "
        "or its disks name, as the error has it.",
        show_default=False,
    ),
]
AlsoRollBackOption = Annotated[
    bool,
    typer.Option(
        "--also-roll-back",
        help="Also roll back other files in the guest's datasets.",
    ),
]


def parse_wait(text: str) -> int:
    """Return the whole seconds of a duration such as ``90s``, as in ``snaporch.toml``.

    Raises:
        typer.BadParameter: the text is no such duration.
    """
    from snaporch.config.duration import Seconds

    try:
        return Seconds().validate(text)
    except ValueError as error:
        raise typer.BadParameter("expected whole seconds, such as 90s, 5m or 1h") from error


def whole_number(least: int, most: int) -> Callable[[object], int]:
    """Return a parser of numbers from ``least`` to ``most``; its error names what is expected."""

    def parse(text: object) -> int:
        digits = str(text)
        number = int(digits) if re.fullmatch("[0-9]{1,9}", digits) else -1
        if not least <= number <= most:
            raise typer.BadParameter(f"expected a whole number from {least} to {most}")
        return number

    return parse


WaitOption = Annotated[
    int | None,
    typer.Option(
        "--wait",
        parser=parse_wait,
        metavar="DURATION",
        help="Wait this long for another run on the domain [default: option `wait`, 0s].",
        show_default=False,
    ),
]


class Command(TyperCommand):
    """A command whose help is the same with each version of typer.

    Values have a name (``LEVEL``) or their choices (``overlay|base``), never a Python type. A shell
    completes domains, snapshots, policies, groups and replicas.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for each in self.params:
            if each.param_type_name == "argument":  # typer 0.29 prints its type behind its name
                setattr(each, "display_type_rich", lambda **_: "")  # noqa: B010 - of typer 0.29
            if each.metavar is None and not getattr(each, "is_flag", False):
                kind = getattr(each, "type_descriptor", None) or getattr(each, "type", None)
                choices = [str(choice) for choice in getattr(kind, "choices", None) or ()]
                each.metavar = "|".join(choices) or str(each.name).upper().replace("_", "-")
            add_completion(each)

    def get_help(self, ctx: Any) -> str:
        """Return the help without the escapes that typer 0.15 (Debian 13) adds for rich."""
        return super().get_help(ctx).replace("\\[", "[")

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the arguments' own names; later versions of typer add brackets to them."""
        del ctx
        arguments = [each for each in self.params if each.param_type_name == "argument"]
        return ["[OPTIONS]", *(each.metavar or str(each.name).upper() for each in arguments)]


def config_path(context: typer.Context, own: Path | None) -> Path | None:
    """Return the configuration file.

    In this order: ``own``, the command's ``--config``; the one before the command;
    ``$SNAPORCH_CONFIG``; ``None`` for the default.
    """
    path: Path | None = own or context.obj.config
    if path is None and (variable := os.environ.get("SNAPORCH_CONFIG")):
        return Path(variable)
    return path
