"""``snaporch status``: prints the state, and the problems of :mod:`snaporch.status.problems`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption

if TYPE_CHECKING:
    from snaporch.config import Config
    from snaporch.context import Context
    from snaporch.status.model import Problem, Status


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
            "output. Exits with 0, also if there are problems.",
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
) -> int:
    """Show the state of guests, policies and the store.

    Shows what carries policies out, the last and next snapshot of each policy, the age of the
    newest snapshot of each level, runs under way or interrupted, and the bundle store. Changes
    nothing. Exits with 0, or 10 if there are problems.
    """
    from snaporch.cli.session import session
    from snaporch.errors import UsageError

    opened = session(context, config, quiet=True, read_only=True)
    if nagios:
        if json or prometheus is not None:
            raise UsageError(
                "--nagios", "prints a line of its own", "leave out --json and --prometheus"
            )
        return _print_nagios(opened, domains or [])
    if json and prometheus is not None:
        raise UsageError("--prometheus", "has a format of its own", "leave out --json")
    current, status, problems = _status(opened, domains or [])
    if prometheus is not None:
        _write_metrics(prometheus, status, problems)
        return 0
    return _print_status(current, status, problems, json=json)


def _status(
    opening: AbstractContextManager[Context], names: Sequence[str]
) -> tuple[Config, Status, list[Problem]]:
    from datetime import UTC, datetime

    from snaporch.status.collect import current_status
    from snaporch.status.problems import find_problems

    with opening as opened:
        status = current_status(opened, datetime.now(UTC), names)
        return opened.config, status, find_problems(status, opened.config.status)


def _print_nagios(opening: AbstractContextManager[Context], names: Sequence[str]) -> int:
    from snaporch.errors import SnaporchError
    from snaporch.output.findings import NAGIOS_UNKNOWN, nagios_line
    from snaporch.output.status import nagios
    from snaporch.output.terminal import print_result

    try:
        config, status, problems = _status(opening, names)
        line, code = nagios(status, problems, config.status)
    except SnaporchError as error:
        line, code = nagios_line("UNKNOWN", error.line()), NAGIOS_UNKNOWN
    print_result(line)
    return code


def _write_metrics(target: Path, status: Status, problems: Sequence[Problem]) -> None:
    from snaporch.output.terminal import print_result
    from snaporch.status.metrics import as_text
    from snaporch.status.metrics_textfile import write_textfile

    text = as_text(status, problems)
    if str(target) == "-":
        print_result(text.decode().rstrip("\n"))
    else:
        write_textfile(target, text)


def _print_status(
    config: Config, status: Status, problems: Sequence[Problem], *, json: bool
) -> int:
    from snaporch.errors import ExitCode

    if json:
        from snaporch.output.terminal import print_json

        document = status.as_json() | {"problems": [each.as_json() for each in problems]}
        print_json(document)
    else:
        from snaporch.output.status import print_status
        from snaporch.schedule.recurrence import zone_of

        print_status(status, problems, zone_of(config))
    return ExitCode.WARNINGS if problems else ExitCode.OK
