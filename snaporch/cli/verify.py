"""``snaporch verify``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, QuietOption, parse_wait

if TYPE_CHECKING:
    from snaporch.cli.policy_observers import PolicyObservers
    from snaporch.cli.result_printer import ResultPrinter
    from snaporch.context import Context
    from snaporch.errors import SnaporchError
    from snaporch.verify.verify import Verification, VerifyOptions

_REACHED = {
    "nothing": "it is not whole",
    "checked": "checksums and GUIDs are correct",
    "booted": "a clone booted",
    "resumed": "a clone resumed from RAM",
}


def verify_command(
    context: typer.Context,
    snapshots: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DOMAIN@SNAPSHOT]...",
            help="As `snaporch list` shows them.",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All snapshots.")] = False,
    due: Annotated[
        bool,
        typer.Option("--due", help="Only those due by policy."),
    ] = False,
    sample: Annotated[
        int | None,
        typer.Option(
            "--sample",
            min=1,
            metavar="N",
            help="With --all: only the N whose last verification is longest ago.",
            show_default=False,
        ),
    ] = None,
    checksums: Annotated[
        bool, typer.Option("--checksums", help="Run no clone, only compare checksums and GUIDs.")
    ] = False,
    disks: Annotated[
        bool, typer.Option("--disks", help="Also read all data of the disks.")
    ] = False,
    script: Annotated[
        Path | None,
        typer.Option(
            "--script",
            metavar="PATH",
            help="Run this program against each clone.",
            show_default=False,
        ),
    ] = None,
    script_timeout: Annotated[
        int,
        typer.Option(
            "--script-timeout", min=1, metavar="SECONDS", help="The time limit of the script."
        ),
    ] = 300,
    screenshots: Annotated[
        Path | None,
        typer.Option(
            "--screenshots",
            metavar="DIR",
            help="Save a screenshot of each clone in this directory.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[
        int | None,
        typer.Option(
            "--wait",
            parser=parse_wait,
            metavar="DURATION",
            help="Wait this long for another verification on this host [default: 0s].",
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Verify that snapshots can be restored.

    Checks every checksum and GUID, runs a temporary clone without a network (resumed from RAM, or
    booted if there is none), checks that it is alive, removes it, and writes the result on the
    snapshot. One verification at a time runs on a host, at low priority.
    """
    from snaporch.cli.session import session
    from snaporch.verify.verify import VerifyOptions

    if [bool(snapshots), everything, due].count(True) != 1 or (sample and not everything):
        raise typer.BadParameter("expected DOMAIN@SNAPSHOT..., or --all [--sample N], or --due")
    if due and (checksums or disks or script or screenshots or wait is not None):
        raise typer.BadParameter("--due takes only --json and --quiet")
    if checksums and (script or screenshots):
        raise typer.BadParameter(
            "--checksums runs no clone, so --script and --screenshots do not apply"
        )
    options = VerifyOptions(
        run=not checksums,
        disks=disks,
        script=script and script.absolute(),
        script_seconds=script_timeout,
        screenshots=screenshots,
    )
    with session(context, config, quiet=quiet or json) as opened:
        if due:
            return _verify_due(opened, json=json)
        return _verify(opened, snapshots or [], sample, options, wait=wait or 0, json=json)


def _verify(
    context: Context,
    texts: list[str],
    sample: int | None,
    options: VerifyOptions,
    *,
    wait: int,
    json: bool,
) -> int:
    from snaporch.catalog.local_replicas import without_replicas_here
    from snaporch.catalog.records import all_records
    from snaporch.cli.result_printer import ResultPrinter
    from snaporch.output.terminal import print_error, print_json
    from snaporch.restore.source import find_records
    from snaporch.verify.verify import check_options, host_lock, longest_ago, verify_all

    check_options(options)
    if texts:
        records = [find_records(context, text)[-1] for text in texts]
    else:
        snapshots = without_replicas_here(context.config, context.pool.snapshots())
        records = longest_ago(all_records(context.store, snapshots), sample)
    outcomes = ResultPrinter(json=json)
    with host_lock(context, wait):
        for outcome in verify_all(context, records, options):
            _report(outcomes, outcome)
    if json:
        documents = outcomes.documents
        shown = documents[0] if len(texts) == 1 and documents else documents
        print_json(shown)
    elif not records:
        print_error("there are no snapshots; take one: snaporch snapshot DOMAIN")
    return outcomes.code


def _verify_due(context: Context, *, json: bool) -> int:
    from snaporch.cli.policy_observers import observing

    with observing(context) as observers:
        outcomes = verify_and_report_due(context, observers, json=json)
    outcomes.print_documents()
    return outcomes.code


def verify_and_report_due(
    context: Context, observers: PolicyObservers, *, json: bool
) -> ResultPrinter:
    """Run the verifications that are due by policy, print the results and notify of failures.

    While another verification runs on the host, only a note is printed.
    """
    from snaporch.cli.result_printer import ResultPrinter
    from snaporch.errors import BusyError
    from snaporch.schedule.run_verifications import verify_due
    from snaporch.verify.verify import host_lock

    outcomes = ResultPrinter(json=json)
    try:
        with host_lock(context):
            for each in verify_due(context):
                _report(outcomes, each.outcome)
                if each.problem is not None:
                    observers.failed(context.config, each.problem)
    except BusyError as error:
        context.progress.note(error.thing, f"{error.reason}; due verifications run later")
    return outcomes


def _report(outcomes: ResultPrinter, outcome: Verification | SnaporchError) -> None:
    from snaporch.errors import SnaporchError

    if isinstance(outcome, SnaporchError):
        outcomes.fail(outcome)
        return
    result = "passed" if outcome.passed else "FAILED"
    line = f"{outcome.record.full_name}  {result}, {_REACHED[outcome.reached]}"
    outcomes.add(outcome.as_json(), line)
    if outcome.problem is not None:
        outcomes.fail(outcome.problem)
