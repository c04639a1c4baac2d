"""Gathering, linting and telling, behind ``snaporch check``."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from pathlib import Path

from snaporch.check.facts import HostFacts
from snaporch.check.findings import Finding, Severity, worst
from snaporch.check.gather import gather
from snaporch.check.lint import lint
from snaporch.cli.session import session
from snaporch.context import Context
from snaporch.errors import ExitCode, SnaporchError, UsageError
from snaporch.model import Domain
from snaporch.output.findings import NAGIOS_UNKNOWN, nagios, nagios_line, print_findings
from snaporch.output.terminal import print_result

_CODES = {Severity.ERROR: ExitCode.ATTENTION, Severity.WARNING: ExitCode.WARNINGS}


def chosen_domains(context: Context, names: Sequence[str]) -> list[Domain]:
    """The domains named, or all.

    Raises:
        NotFoundError: one is misspelt.
    """
    if not names:
        return context.hypervisor.domains()
    found = [context.hypervisor.domain(name) for name in names]
    return list({domain.uuid: domain for domain in found}.values())


def check_all(config: Path | None, names: Sequence[str], configdir: Path, *, json: bool) -> int:
    """Print every finding; the exit code of the worst."""
    findings, facts = _findings(config, names, configdir)
    if json:
        documents = [finding.as_json() for finding in findings]
        print_result(json_format.dumps(documents, indent=2, ensure_ascii=False))
    else:
        mode = f"{facts.capture.describe()}\n" if facts.capture else ""
        guests = len(facts.guests)
        print_findings(findings, f"{mode}{guests} guest{'' if guests == 1 else 's'} checked")
    gravest = worst(findings)
    return int(_CODES.get(gravest, ExitCode.OK) if gravest else ExitCode.OK)


def check_for_nagios(
    config: Path | None, names: Sequence[str], configdir: Path, *, json: bool
) -> int:
    """Print the one line that monitoring reads, whatever happens.

    Raises:
        UsageError: JSON is wanted as well.
    """
    if json:
        raise UsageError("--nagios", "prints a line of its own", "leave out --json")
    try:
        line, status = nagios(_findings(config, names, configdir)[0])
    except SnaporchError as error:
        line, status = nagios_line("UNKNOWN", error.line()), NAGIOS_UNKNOWN
    print_result(line)
    return status


def _findings(
    config: Path | None, names: Sequence[str], configdir: Path
) -> tuple[list[Finding], HostFacts]:
    with session(config, quiet=True) as context:
        facts = gather(context, chosen_domains(context, names), configdir)
        return lint(facts), facts
