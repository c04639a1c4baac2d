"""``snaporch replicate``: copies guests by :mod:`snaporch.replication.replicate`, and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, QuietOption

if TYPE_CHECKING:
    from snaporch.cli.command_host import CommandHost
    from snaporch.cli.policy_observers import PolicyObservers
    from snaporch.cli.result_printer import ResultPrinter
    from snaporch.context import Context
    from snaporch.errors import SnaporchError
    from snaporch.replication.replicate import ReplicationResult


def replicate_command(
    context: typer.Context,
    domains: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DOMAIN]...", help="Names or UUIDs.", show_default=False),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All of libvirt's domains that have snapshots.")
    ] = False,
    due: Annotated[bool, typer.Option("--due", help="Only those due by policy.")] = False,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="REPLICA",
            help="Copy only to this replica [default: those of the domain's policies].",
            show_default=False,
        ),
    ] = None,
    recheck: Annotated[
        bool,
        typer.Option(
            "--recheck", help="Read all bundles on the replica; copy damaged and missing ones."
        ),
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Copy snapshots and their bundles to another pool or machine.

    Sends the ZFS snapshots and bundles that the replica lacks, and only then marks a snapshot as
    replicated. The mark is removed when the replica no longer has all of it. The next run resumes
    an interrupted transfer. One replication at a time runs on a host, at low priority.

    --all names the domains that no policy replicates; if it has nothing to replicate, it fails.
    """
    from snaporch.cli.session import session

    if [bool(domains), everything, due].count(True) != 1 or (due and (to or recheck)):
        raise typer.BadParameter("expected DOMAIN... or --all, with --to or without, or --due")
    with session(context, config, quiet=quiet or json) as opened:
        host: CommandHost = context.obj
        if due:
            return _replicate_due(host, opened, json=json)
        return _replicate(host, opened, domains or [], to or [], recheck=recheck, json=json)


def _replicate(
    host: CommandHost,
    context: Context,
    domains: list[str],
    replicas: list[str],
    *,
    recheck: bool,
    json: bool,
) -> int:
    from snaporch.cli.result_printer import ResultPrinter
    from snaporch.errors import NotFoundError
    from snaporch.replication.replicate import host_lock
    from snaporch.schedule.replicate_domains import choose_targets, replicate_domains

    targets = choose_targets(context, domains, replicas)
    if left_out := [each.domain.name for each in targets if not each.replicas]:
        context.progress.note("--all", f"no policy of these replicates: {', '.join(left_out)}")
    outcomes, tried = ResultPrinter(json=json), False
    with host_lock(context):
        for each in replicate_domains(context, targets, host.open_replica, recheck=recheck):
            tried = True
            _report(outcomes, *each)
    if not tried:
        step = "take one: snaporch snapshot DOMAIN"
        outcomes.fail(NotFoundError("--all", "no domain has snapshots to replicate", step))
    outcomes.print_documents()
    return outcomes.code


def _replicate_due(host: CommandHost, context: Context, *, json: bool) -> int:
    from snaporch.cli.policy_observers import observing

    with observing(context) as observers:
        outcomes = replicate_and_report_due(host, context, observers, json=json)
    outcomes.print_documents()
    return outcomes.code


def replicate_and_report_due(
    host: CommandHost, context: Context, observers: PolicyObservers, *, json: bool
) -> ResultPrinter:
    """Run the replications that are due by policy, print the results and notify of failures.

    While another replication runs on the host, only a note is printed.
    """
    from snaporch.cli.result_printer import ResultPrinter
    from snaporch.errors import BusyError, SnaporchError, WindowClosedError
    from snaporch.replication.replicate import host_lock
    from snaporch.schedule.run_replications import replicate_due

    outcomes = ResultPrinter(json=json)
    try:
        with host_lock(context):
            for each in replicate_due(context, host.open_replica):
                if isinstance(each.outcome, WindowClosedError):
                    context.progress.note(
                        f"{each.pending.domain}: {each.pending.replica}",
                        f"{each.outcome.reason}; the next one continues",
                    )
                    continue
                _report(outcomes, each.pending.domain, each.pending.replica, each.outcome)
                if isinstance(each.outcome, SnaporchError):
                    observers.failed(context.config, each.outcome)
    except BusyError as error:
        context.progress.note(error.thing, f"{error.reason}; due replications run later")
    return outcomes


def _report(
    outcomes: ResultPrinter, domain: str, replica: str, outcome: ReplicationResult | SnaporchError
) -> None:
    from snaporch.errors import SnaporchError

    if isinstance(outcome, SnaporchError):
        outcomes.fail(outcome)
        return
    document: dict[str, object] = {
        "domain": domain,
        "replica": replica,
        "arrived": [record.snapshot for record in outcome.arrived],
        "incomplete": [record.snapshot for record in outcome.missing],
        "damaged": [record.snapshot for record in outcome.damaged],
        "read": outcome.read,
        "encrypted": [record.snapshot for record in outcome.encrypted],
    }
    outcomes.add(document, _line(domain, replica, outcome))


def _line(domain: str, replica: str, outcome: ReplicationResult) -> str:
    from snaporch.errors import one_line

    count = len(outcome.arrived)
    text = f"{count} snapshot{'' if count == 1 else 's'} replicated" if count else "up to date"
    if count:
        text += f", up to @{outcome.arrived[-1].snapshot}"
    if outcome.missing:
        text += f"; {len(outcome.missing)} without their bundles, which are not whole here"
    if outcome.damaged:
        text += f"; the replica's bundles of {len(outcome.damaged)} were missing or damaged"
    if outcome.encrypted:
        text += f"; {len(outcome.encrypted)} that were there in clear are encrypted now"
    if outcome.read:
        text += f"; {outcome.read} of the replica's bundles read, and whole"
    return one_line(f"{domain}  {replica}  {text}")
