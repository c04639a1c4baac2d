"""``snaporch check``: prints the findings that :mod:`snaporch.check.apply_rules` makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, config_path

if TYPE_CHECKING:
    from snaporch.check.facts import HostFacts
    from snaporch.check.findings import Finding
    from snaporch.check.host_files import HostFiles
    from snaporch.context import Context

    Opened = AbstractContextManager[Context]

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
    from snaporch.cli.session import session
    from snaporch.errors import UsageError

    if nagios and json:
        raise UsageError("--nagios", "prints a line of its own", "leave out --json")
    opened = session(context, config, quiet=True)
    chosen = domains or []

    def find() -> tuple[list[Finding], HostFacts]:
        file = config_path(context, config)
        return _findings(opened, chosen, configdir, file, context.obj.host_files())

    return _check_for_nagios(find) if nagios else _check(find, json=json)


def _check(find: Callable[[], tuple[list[Finding], HostFacts]], *, json: bool) -> int:
    from snaporch.check.findings import exit_code
    from snaporch.check.next_steps import next_steps
    from snaporch.output.findings import print_findings
    from snaporch.output.terminal import print_json, print_result

    findings, facts = find()
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


def _check_for_nagios(find: Callable[[], tuple[list[Finding], HostFacts]]) -> int:
    """Print one line for monitoring; an error is printed as UNKNOWN."""
    from snaporch.errors import SnaporchError
    from snaporch.output.findings import NAGIOS_UNKNOWN, nagios, nagios_line
    from snaporch.output.terminal import print_result

    try:
        line, status = nagios(find()[0])
    except SnaporchError as error:
        line, status = nagios_line("UNKNOWN", error.line()), NAGIOS_UNKNOWN
    print_result(line)
    return status


def _findings(
    opened: Opened,
    names: Sequence[str],
    configdir: Path,
    config_file: Path | None,
    files: HostFiles,
) -> tuple[list[Finding], HostFacts]:
    from snaporch import default_paths
    from snaporch.check.apply_rules import apply_rules
    from snaporch.check.gather import choose_domains, gather

    with opened as context:
        file = (config_file or default_paths.CONFIG).absolute()
        facts = gather(context, choose_domains(context, names), files, configdir, file)
        return apply_rules(facts), facts
