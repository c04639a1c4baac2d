"""``snaporch run-due``: one pass over all policies by :mod:`snaporch.schedule.run_due`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, QuietOption

if TYPE_CHECKING:
    from snaporch.cli.policy_observers import PolicyObservers
    from snaporch.context import Context
    from snaporch.schedule.apply_retention import RetentionResult
    from snaporch.schedule.run_due import RunDueResult


def run_due_command(
    context: typer.Context,
    retention: Annotated[
        bool,
        typer.Option("--retention/--no-retention", help="Delete snapshots that no rule keeps."),
    ] = True,
    verification: Annotated[
        bool,
        typer.Option("--verify/--no-verify", help="Verify snapshots that are due."),
    ] = True,
    replication: Annotated[
        bool,
        typer.Option("--replicate/--no-replicate", help="Copy snapshots to replicas."),
    ] = True,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Take due snapshots, apply retention, replicate and verify.

    For a timer. What is due follows from the existing snapshots: one snapshot makes up for all
    times that were missed. A snapshot that fails does not stop the others.
    """
    from snaporch.cli.plan import print_unknown_policies
    from snaporch.cli.policy_observers import observing
    from snaporch.cli.replicate import replicate_and_report_due
    from snaporch.cli.result_printer import ResultPrinter
    from snaporch.cli.session import session
    from snaporch.cli.verify import verify_and_report_due
    from snaporch.locks import SCHEDULE, domain_lock
    from snaporch.output.terminal import print_json
    from snaporch.schedule.concurrency import ConcurrencyLimiter
    from snaporch.schedule.run_due import run_due
    from snaporch.schedule.subprocesses import Subprocesses, bulk_job_command, snapshot_command

    with session(context, config, quiet=quiet or json) as opened:
        runtime, interrupt = opened.config.paths.runtime, opened.interrupt
        subprocesses = Subprocesses(
            ConcurrencyLimiter(opened.config.schedule),
            snapshot_command(opened),
            bulk_job_command(opened),
        )
        with observing(opened) as watching:
            with domain_lock(runtime, SCHEDULE, SCHEDULE, "run-due", wait=0, interrupt=interrupt):
                done = run_due(opened, subprocesses, watching, retention=retention)
            if retention:
                _prune(opened, watching, done.retention)
            if not json:
                _print(opened, done)
            # Last, and without the lock: they may take hours, and stop no snapshot meanwhile.
            sent, verified = ResultPrinter(json=json), ResultPrinter(json=json)
            if replication and interrupt.signum is None:
                sent = replicate_and_report_due(context.obj, opened, watching, json=json)
            if verification and interrupt.signum is None:
                verified = verify_and_report_due(opened, watching, json=json)
        if json:
            document = _document(done)
            document |= {"replicated": sent.documents, "verified": verified.documents}
            print_json(document)
        interrupt.check(SCHEDULE)
        return (
            _exit_code(done, print_unknown_policies(done.forecasts)) or sent.code or verified.code
        )


def _prune(context: Context, watching: PolicyObservers, retention: RetentionResult) -> None:
    from snaporch.schedule.apply_retention import prune_daily

    daily = prune_daily(context, lambda: context.interrupt.signum is not None)
    for error in daily.failures:
        watching.failed(context.config, error)
    retention.failures += daily.failures
    retention.pruned += daily.pruned


def _exit_code(done: RunDueResult, unknown: int) -> int:
    from snaporch.output.terminal import print_error

    for outcome in done.outcomes:
        if not outcome.ok:
            print_error(f"{outcome.job.label}: {outcome.job.policy}: {outcome.text}")
    for error in done.retention.failures:
        print_error(error.line())
    codes = [outcome.status for outcome in done.outcomes if not outcome.ok]
    codes += [int(error.exit_code) for error in done.retention.failures]
    return next((code for code in [*codes, unknown] if code), 0)


def _print(context: Context, done: RunDueResult) -> None:
    from snaporch.cli.prune import decision_line
    from snaporch.output.terminal import print_result

    outcomes, retention = done.outcomes, done.retention
    for outcome in outcomes:
        if outcome.ok:
            print_result(outcome.text)
    for domain, verdict in retention.deleted:
        print_result(f"{domain}@{verdict.taken.snapshot}  deleted: {verdict.reason}")
    for pruned in retention.pruned:
        print_result(decision_line(pruned))
    for domain in retention.busy:
        context.progress.note(domain, "locked; retention runs next time")
    for error in retention.mounted:
        context.progress.note("retention", error.line())
    if not (outcomes or retention.deleted or retention.pruned):
        context.progress.step("snaporch", "nothing is due")


def _document(done: RunDueResult) -> dict[str, object]:
    retention = done.retention
    return {
        "runs": [
            {
                "domain": outcome.job.domain,
                "uuid": outcome.job.uuid,
                "group": outcome.job.group or None,
                "policy": outcome.job.policy,
                "status": outcome.status,
                "text": outcome.text,
            }
            for outcome in done.outcomes
        ],
        "deleted": [
            {
                "domain": domain,
                "snapshot": verdict.taken.snapshot,
                "policy": verdict.taken.policy,
                "reason": verdict.reason,
            }
            for domain, verdict in retention.deleted
        ],
        "pruned": [verdict.as_json() for verdict in retention.pruned],
        "failures": [error.line() for error in retention.failures],
        "busy": retention.busy,
        "mounted": [error.line() for error in retention.mounted],
    }
