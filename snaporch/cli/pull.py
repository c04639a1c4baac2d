"""``snaporch pull``: copies guests from sources by :mod:`snaporch.pull.pull`, and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, QuietOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snaporch.cli.command_host import CommandHost
    from snaporch.cli.policy_observers import PolicyObservers
    from snaporch.cli.result_printer import ResultPrinter
    from snaporch.context import Context
    from snaporch.pull.pull import Pulled
    from snaporch.pull.pull_guest import GuestResult

_NAMED = 3
"""Snapshots that are named in the line of a guest."""


def pull_command(
    context: typer.Context,
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SOURCE]...", help="Names of sources in the configuration.", show_default=False
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All sources of the configuration.")
    ] = False,
    due: Annotated[
        bool, typer.Option("--due", help="Only the sources that are due by their `every`.")
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Copy guests from hosts that cannot reach this machine.

    Copies their snapshots and bundles: asks `snaporch send` on each source for what is missing
    here, by ssh. Destroys nothing and rolls nothing back. A failure of a guest or source does not
    stop the others. The next pull resumes an interrupted transfer. One pull at a time runs on a
    machine, at low priority.
    """
    from snaporch.cli.session import session

    if [bool(sources), everything, due].count(True) != 1:
        raise typer.BadParameter("expected SOURCE... or --all, or --due")
    opening = session(context, config, quiet=quiet or json, read_only=not due, of_copies=True)
    with opening as opened:
        return pull_and_report(context.obj, opened, sources or [], due=due, json=json)


def pull_and_report(
    host: CommandHost, context: Context, names: Sequence[str], *, due: bool, json: bool
) -> int:
    """Pull sources and print the results; with ``due``, notify of failures, too."""
    from datetime import UTC, datetime

    from snaporch.cli.policy_observers import observing
    from snaporch.cli.result_printer import ResultPrinter
    from snaporch.errors import BusyError
    from snaporch.pull.pull import (
        due_sources,
        find_sources,
        pull_lock,
        pull_sources,
        without_windows,
    )

    outcomes = ResultPrinter(json=json)
    wanted = (
        due_sources(context, datetime.now(UTC)) if due else [*find_sources(context.config, names)]
    )
    if not due:
        context = without_windows(context, wanted, datetime.now(UTC))
        with pull_lock(context):
            for each in pull_sources(context, wanted, host.open_pull):
                _report(outcomes, each)
        outcomes.print_documents()
        return outcomes.code
    try:
        with observing(context) as observers, pull_lock(context):
            _prune_daily(context, outcomes, observers)
            for each in pull_sources(context, wanted, host.open_pull):
                _report(outcomes, each)
                for failure in each.failures:
                    observers.failed(context.config, failure, each.succeeded)
                _prune_daily(context, outcomes, observers)  # a pull may take days
    except BusyError as error:
        context.progress.note(error.thing, f"{error.reason}; due sources are pulled later")
    outcomes.print_documents()
    return outcomes.code


def _prune_daily(context: Context, outcomes: ResultPrinter, observers: PolicyObservers) -> None:
    """Prune the copies once a day; a failure is one of the pull."""
    from snaporch.cli.prune import decision_line
    from snaporch.prune.decision import PruneAction
    from snaporch.schedule.prune_received_copies import prune_copies_daily

    interrupt = context.interrupt
    pruned = prune_copies_daily(context.config, context.pool, lambda: interrupt.signum is not None)
    for each in pruned.of(PruneAction.TRASH, PruneAction.DELETE, PruneAction.PUT_BACK):
        context.progress.note("prune", decision_line(each))
    for failure in (*pruned.failures, *pruned.undecided_items):
        outcomes.fail(failure)
        observers.failed(context.config, failure)


def _report(outcomes: ResultPrinter, pulled: Pulled) -> None:
    for failure in pulled.failures:
        outcomes.fail(failure)
    if pulled.result is not None:
        outcomes.add(_document(pulled), _line(pulled.source, pulled.result))


def _document(pulled: Pulled) -> dict[str, object]:
    result = pulled.result
    if result is None:
        return {}
    return {
        "source": pulled.source,
        "domain": result.domain,
        "uuid": result.uuid,
        "arrived": result.arrived,
        "waiting": list(result.waiting),
        "skipped": result.skipped,
        "dropped": result.dropped,
        "failures": [each.line() for each in result.failures],
    }


def _line(source: str, result: GuestResult) -> str:
    count = len(result.arrived)
    text = f"{count} snapshot{'' if count == 1 else 's'} pulled" if count else "up to date"
    if result.failures and not count:
        text = "no whole snapshot pulled" if result.skipped else "nothing pulled"
    if count:
        text += f", up to @{result.arrived[-1]}"
    if result.waiting:
        text += f"; {len(result.waiting)} wait for a run on the source to end"
    if result.skipped:
        names = ", ".join(f"@{name}" for name in result.skipped[:_NAMED])
        more = f" and {len(result.skipped) - _NAMED} more" if len(result.skipped) > _NAMED else ""
        text += f"; not whole: {names}{more}"
    return f"{result.domain}  {source}  {text}"
