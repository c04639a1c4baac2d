"""``snaporch check``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, config_path

if TYPE_CHECKING:
    from snaporch.check.facts import HostFacts
    from snaporch.check.findings import Finding

DomainsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[DOMAIN]...",
        help="Only these domains, by name or UUID [default: all].",
        show_default=False,
    ),
]
ConfigDirOption = Annotated[
    Path,
    typer.Option("--configdir", metavar="DIRECTORY", help="sanoid's configuration directory."),
]


def check_command(
    context: typer.Context,
    domains: DomainsArgument = None,
    json: JsonOption = False,
    nagios: Annotated[
        bool,
        typer.Option(
            "--nagios",
            help="Print one line, and exit with 0 (OK), 1 (WARNING), 2 (CRITICAL) or 3 (UNKNOWN).",
        ),
    ] = False,
    configdir: ConfigDirOption = Path("/etc/sanoid"),
    config: ConfigOption = None,
) -> int:
    """Find problems that would make snapshots fail or be incomplete.

    Prints for each problem the line that fixes it. Reads sanoid's configuration as sanoid reads
    it, and inspects guests, datasets and snaporch's directories. Changes nothing. Exits with 0 if
    there are only hints, 10 with warnings, 9 with errors.
    """
    from snaporch.errors import UsageError

    path = config_path(context, config)
    if nagios and json:
        raise UsageError("--nagios", "prints a line of its own", "leave out --json")
    if nagios:
        return _check_for_nagios(path, domains or [], configdir)
    return _check(path, domains or [], configdir, json=json)


def _check(config: Path | None, names: Sequence[str], configdir: Path, *, json: bool) -> int:

    from snaporch.check.findings import exit_code
    from snaporch.check.next_steps import next_steps
    from snaporch.output.findings import print_findings
    from snaporch.output.terminal import print_json, print_result

    findings, facts = _findings(config, names, configdir)
    if json:
        documents = [finding.as_json() for finding in findings]
        print_json(documents)
    else:
        mode = f"{facts.capture.describe()}\n" if facts.capture else ""
        guests = len(facts.guests)
        print_findings(findings, f"{mode}{guests} guest{'' if guests == 1 else 's'} checked")
        for step in next_steps(facts):
            print_result(step)
    return int(exit_code(findings))


def _check_for_nagios(config: Path | None, names: Sequence[str], configdir: Path) -> int:
    """Print one line for monitoring; an error is printed as UNKNOWN."""
    from snaporch.errors import SnaporchError
    from snaporch.output.findings import NAGIOS_UNKNOWN, nagios, nagios_line
    from snaporch.output.terminal import print_result

    try:
        line, status = nagios(_findings(config, names, configdir)[0])
    except SnaporchError as error:
        line, status = nagios_line("UNKNOWN", error.line()), NAGIOS_UNKNOWN
    print_result(line)
    return status


def _findings(
    config: Path | None, names: Sequence[str], configdir: Path
) -> tuple[list[Finding], HostFacts]:
    from snaporch.check.apply_rules import apply_rules
    from snaporch.check.gather import choose_domains, gather
    from snaporch.cli.session import session

    with session(config, quiet=True) as context:
        facts = gather(context, choose_domains(context, names), configdir)
        return apply_rules(facts), facts
