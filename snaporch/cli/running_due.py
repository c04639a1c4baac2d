"""Taking, deleting and telling, behind ``snaporch run-due``."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime

from snaporch.cli.outcomes import Outcomes
from snaporch.cli.planning import tell_unknown
from snaporch.cli.prune import decision_line
from snaporch.cli.replicate import replicate_and_report_due
from snaporch.cli.verify import verify_and_report_due
from snaporch.cli.watching import PolicyObservers, watchers
from snaporch.context import Context
from snaporch.errors import ExitCode, SnaporchError
from snaporch.locks import SCHEDULE, domain_lock
from snaporch.output.terminal import print_error, print_result
from snaporch.recovery.settle import recover_leftovers
from snaporch.schedule.apply_retention import RetentionResult, prune_daily, retire
from snaporch.schedule.concurrency import ConcurrencyLimiter
from snaporch.schedule.forecast import Forecast, carried_out, look
from snaporch.schedule.run_due import due_captures, remember, take_all
from snaporch.schedule.subprocesses import CaptureOutcome, Subprocesses, snapshot_command


def run_due(
    context: Context, *, retention: bool, verification: bool, replication: bool, json: bool
) -> int:
    """Carry policies out once; the exit code of the first failure.

    Copying and verifying come last and keep nobody else from taking snapshots meanwhile.

    Raises:
        BusyError: another ``run-due`` or the daemon is at it.
    """
    with watchers(context) as watching:
        with _alone(context):
            outlooks, outcomes, retired = _carry_out(context, watching, retention=retention)
        if retention:
            _prune(context, watching, retired)
        if not json:
            _tell(context, outcomes, retired)
        sent, told = Outcomes(json=json), Outcomes(json=json)
        if replication and context.interrupt.signum is None:
            sent = replicate_and_report_due(context, watching, json=json)
        if verification and context.interrupt.signum is None:
            told = verify_and_report_due(context, watching, json=json)
    if json:
        document = _document(outcomes, retired)
        document |= {"replicated": sent.documents, "verified": told.documents}
        print_result(json_format.dumps(document, indent=2, ensure_ascii=False))
    context.interrupt.check(SCHEDULE)
    return _exit_code(outcomes, retired, tell_unknown(outlooks)) or sent.code or told.code


def _prune(context: Context, watching: PolicyObservers, retired: RetentionResult) -> None:
    daily = prune_daily(context, lambda: context.interrupt.signum is not None)
    for error in daily.failures:
        watching.failed(context.config, error)
    retired.failures += daily.failures
    retired.pruned += daily.pruned


def _alone(context: Context) -> AbstractContextManager[None]:
    runtime, interrupt = context.config.paths.runtime, context.interrupt
    return domain_lock(runtime, SCHEDULE, SCHEDULE, "run-due", wait=0, interrupt=interrupt)


def _carry_out(
    context: Context, watching: PolicyObservers, *, retention: bool
) -> tuple[list[Forecast], list[CaptureOutcome], RetentionResult]:
    """What was in store, what was taken, and what was deleted."""
    recover_leftovers(context)
    config, now = context.config, datetime.now(UTC)
    outlooks = look(context, now)
    wanted = due_captures(context, outlooks, now)
    captures = Subprocesses(
        ConcurrencyLimiter(config.schedule), snapshot_command(context.config_path)
    )
    outcomes = take_all(context, captures, wanted, lambda each: watching.ended(config, each))
    retired = RetentionResult()
    unwritten = _write_down(context, outlooks, outcomes, now)
    if context.interrupt.signum is None and (retention or config.metrics.textfile):
        later = datetime.now(UTC)
        after = look(context, later)
        if retention:
            retired = retire(context, after, later)
        watching.looked(context, after, later)
    retired.failures += unwritten
    for error in retired.failures:
        watching.failed(config, error)
    return outlooks, outcomes, retired


def _write_down(
    context: Context,
    outlooks: Sequence[Forecast],
    outcomes: Sequence[CaptureOutcome],
    now: datetime,
) -> list[SnaporchError]:
    """What could not be: a full disk must not keep retention from making room on it."""
    try:
        carried_out(context, outlooks, now)
    except SnaporchError as error:
        context.progress.note("snaporch", error.line())
    try:
        remember(context, outcomes)
    except SnaporchError as error:
        return [error]
    return []


def _exit_code(outcomes: Sequence[CaptureOutcome], retired: RetentionResult, unknown: int) -> int:
    for outcome in outcomes:
        if not outcome.ok:
            print_error(f"{outcome.capture.label}: {outcome.capture.policy}: {outcome.text}")
    for error in retired.failures:
        print_error(error.line())
    codes = [outcome.status for outcome in outcomes if not outcome.ok]
    codes += [int(error.exit_code) for error in retired.failures]
    return next((code for code in [*codes, unknown] if code), ExitCode.OK)


def _tell(context: Context, outcomes: Sequence[CaptureOutcome], retired: RetentionResult) -> None:
    for outcome in outcomes:
        if outcome.ok:
            print_result(outcome.text)
    for domain, verdict in retired.deleted:
        print_result(f"{domain}@{verdict.taken.snapshot}  deleted: {verdict.reason}")
    for pruned in retired.pruned:
        print_result(decision_line(pruned))
    for domain in retired.busy:
        context.progress.note(domain, "busy: what need not stay is deleted the next time")
    for error in retired.mounted:
        context.progress.note("retention", error.line())
    if not (outcomes or retired.deleted or retired.pruned):
        context.progress.step("snaporch", "nothing is due")


def _document(outcomes: Sequence[CaptureOutcome], retired: RetentionResult) -> dict[str, object]:
    return {
        "runs": [
            {
                "domain": outcome.capture.domain,
                "uuid": outcome.capture.uuid,
                "group": outcome.capture.group or None,
                "policy": outcome.capture.policy,
                "status": outcome.status,
                "text": outcome.text,
            }
            for outcome in outcomes
        ],
        "deleted": [
            {
                "domain": domain,
                "snapshot": verdict.taken.snapshot,
                "policy": verdict.taken.policy,
                "reason": verdict.reason,
            }
            for domain, verdict in retired.deleted
        ],
        "pruned": [verdict.as_json() for verdict in retired.pruned],
        "failures": [error.line() for error in retired.failures],
        "busy": retired.busy,
        "mounted": [error.line() for error in retired.mounted],
    }
