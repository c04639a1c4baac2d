"""Gathering, judging and telling, behind ``snaporch status``."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from snaporch.cli.session import session
from snaporch.config import Config
from snaporch.errors import ExitCode, NotFoundError, SnaporchError, UsageError
from snaporch.output.findings import NAGIOS_UNKNOWN, nagios_line
from snaporch.output.status import nagios, print_status
from snaporch.output.terminal import print_result
from snaporch.schedule.forecast import Forecast, look
from snaporch.schedule.recurrence import zone_of
from snaporch.status.collect import gather
from snaporch.status.metrics import as_text, write_textfile
from snaporch.status.model import Problem, Status
from snaporch.status.problems import judge

_STANDARD_OUTPUT = Path("-")


def tell_status(
    path: Path | None, names: Sequence[str], *, json: bool, prometheus: Path | None
) -> int:
    """Print how it stands; 10 when something needs attention.

    Raises:
        UsageError: JSON and metrics are wanted at once.
    """
    if json and prometheus is not None:
        raise UsageError("--prometheus", "has a format of its own", "leave out --json")
    config, status, troubles = _standing(path, names)
    if prometheus is not None:
        _give_metrics(prometheus, as_text(status, troubles))
        return ExitCode.OK
    if json:
        document = status.as_json() | {
            "troubles": [
                {
                    "code": each.code,
                    "grade": each.grade.value,
                    "subject": each.subject,
                    "text": each.text,
                }
                for each in troubles
            ]
        }
        print_result(json_format.dumps(document, indent=2, ensure_ascii=False))
    else:
        print_status(status, troubles, zone_of(config))
    return ExitCode.WARNINGS if troubles else ExitCode.OK


def status_for_nagios(
    path: Path | None, names: Sequence[str], *, json: bool, prometheus: Path | None
) -> int:
    """Print the one line that monitoring reads, whatever happens.

    Raises:
        UsageError: another format is wanted as well.
    """
    if json or prometheus is not None:
        raise UsageError("--nagios", "prints a line of its own", "leave out the other format")
    try:
        config, status, troubles = _standing(path, names)
        line, code = nagios(status, troubles, config.status)
    except SnaporchError as error:
        line, code = nagios_line("UNKNOWN", error.line()), NAGIOS_UNKNOWN
    print_result(line)
    return code


def _standing(path: Path | None, names: Sequence[str]) -> tuple[Config, Status, list[Problem]]:
    with session(path, quiet=True, to_look=True) as context:
        now = datetime.now(UTC)
        outlooks = look(context, now)
        status = gather(context, outlooks, now)
        if names:
            status = _only(status, {each.domain.uuid for each in _chosen(outlooks, names)})
        return context.config, status, judge(status, context.config.status)


def _chosen(outlooks: Sequence[Forecast], names: Sequence[str]) -> list[Forecast]:
    for name in names:
        if not any(name in (each.domain.name, each.domain.uuid) for each in outlooks):
            raise NotFoundError(name, "no such domain", "see `virsh list --all` for their names")
    return [
        each
        for each in outlooks
        if not names or each.domain.name in names or each.domain.uuid in names
    ]


def _only(status: Status, chosen: set[str]) -> Status:
    """Without what is about other domains."""
    domains = tuple(domain for domain in status.domains if domain.uuid in chosen)
    runs = tuple(run for run in status.runs if run.uuid in chosen)
    return replace(status, domains=domains, runs=runs, overlays=(), unused=(), strangers=())


def _give_metrics(target: Path, text: bytes) -> None:
    if target == _STANDARD_OUTPUT:
        print_result(text.decode().rstrip("\n"))
    else:
        write_textfile(target, text)
