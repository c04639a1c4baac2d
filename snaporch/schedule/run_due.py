"""One pass over all policies: take the snapshots that are due, then apply retention.

What is due is decided by :mod:`snaporch.schedule.forecast`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from snaporch.context import Context
from snaporch.errors import NotFoundError, SnaporchError
from snaporch.model import Domain
from snaporch.recovery.recover_runs import recover_leftovers
from snaporch.schedule.apply_retention import RetentionResult, apply_retention
from snaporch.schedule.concurrency import SnapshotJob
from snaporch.schedule.failed_attempts import FailedAttempt, read_failed, write_failed
from snaporch.schedule.forecast import Forecast, make_forecasts, record_carried_out
from snaporch.schedule.observer import PolicyObserver
from snaporch.schedule.policy_assignment import datasets
from snaporch.schedule.subprocesses import SnapshotJobResult, Subprocesses
from snaporch.snapshot.group import group_of, members_of_group

_POLL_SECONDS = 0.2
_MOST_WAITING = 64
_NO_RAM = ("quiesced", "paused", "crash", "off")


@dataclass(frozen=True, slots=True)
class RunDueResult:
    """What one pass over the policies did."""

    forecasts: Sequence[Forecast]
    """As they were before anything was done."""
    outcomes: Sequence[SnapshotJobResult]
    retention: RetentionResult


def run_due(
    context: Context, subprocesses: Subprocesses, observer: PolicyObserver, *, retention: bool
) -> RunDueResult:
    """Take the snapshots that are due, and delete those that no rule keeps.

    The caller holds the lock of the schedule. A failure is part of the result and is reported to
    the observer; it does not stop the other snapshots.

    Args:
        subprocesses: starts the processes that take the snapshots.
        observer: hears of each outcome and failure.
        retention: whether to delete snapshots.
    """
    recover_leftovers(context)
    config, now = context.config, datetime.now(UTC)
    forecasts = make_forecasts(context, now)
    wanted = due_snapshots(context, forecasts, now)
    outcomes = take_all(context, subprocesses, wanted, lambda each: observer.ended(config, each))
    applied = RetentionResult()
    unwritten = _record(context, forecasts, outcomes, now)
    if context.interrupt.signum is None and (retention or config.metrics.textfile):
        later = datetime.now(UTC)
        after = make_forecasts(context, later)
        if retention:
            applied = apply_retention(context, after, later)
        observer.forecasts_made(context, after, later)
    applied.failures += unwritten
    for error in applied.failures:
        observer.failed(config, error)
    return RunDueResult(forecasts, outcomes, applied)


def _record(
    context: Context,
    forecasts: Sequence[Forecast],
    outcomes: Sequence[SnapshotJobResult],
    now: datetime,
) -> list[SnaporchError]:
    """Errors of writing failed attempts; on a full disk retention must still make room."""
    try:
        record_carried_out(context, forecasts, now)
    except SnaporchError as error:
        context.progress.note("snaporch", error.line())
    try:
        remember(context, outcomes)
    except SnaporchError as error:
        return [error]
    return []


def due_snapshots(
    context: Context, forecasts: Iterable[Forecast], now: datetime
) -> list[SnapshotJob]:
    """The snapshots that are due, each group once, the longest overdue first."""
    due = [
        (coming.at, each.domain.name, each.domain, coming.policy)
        for each in forecasts
        for coming in each.next_snapshots
        if coming.due(now)
    ]
    ordered = sorted(due, key=lambda entry: (entry[0], entry[1], entry[3]))
    return without_repeated_groups(
        snapshot_job(context, domain, policy) for _, _, domain, policy in ordered
    )


def without_repeated_groups(jobs: Iterable[SnapshotJob]) -> list[SnapshotJob]:
    """Without further jobs of the same group for the same policy."""
    unique: dict[tuple[str, str], SnapshotJob] = {}
    for job in jobs:
        unique.setdefault((job.group or job.uuid, job.policy), job)
    return list(unique.values())


def snapshot_job(context: Context, domain: Domain, policy: str) -> SnapshotJob:
    """The job of a domain for a policy, with its group."""
    return estimate_load(context, domain, policy, context.config.policy[policy].level)


def estimate_load(context: Context, domain: Domain, policy: str, level: str) -> SnapshotJob:
    """The job with the pools and the RAM that it will use.

    Args:
        policy: the policy, for which a domain is snapshotted with its group; empty for none.
        level: the level of the snapshot, which decides whether RAM is saved.
    """
    group = (group_of(context.config, domain) or "") if policy else ""
    others: list[Domain] = []
    if group:
        with suppress(NotFoundError):  # the run reports this error
            others = [d for d in members_of_group(context, group) if d.uuid != domain.uuid]
    all_of_them = [domain, *others]
    pools = {name.split("/", 1)[0] for each in all_of_them for name in datasets(context, each)}
    ram = sum(_ram_mib(context, each, level) for each in all_of_them)
    uuids = tuple(each.uuid for each in others)
    return SnapshotJob(domain.uuid, domain.name, policy, frozenset(pools), ram, group, uuids)


def _ram_mib(context: Context, domain: Domain, level: str) -> int:
    if level == "auto":
        level = context.config.settings(domain.name, domain.uuid).level
    if level in _NO_RAM or not domain.active:
        return 0
    try:
        return context.hypervisor.ram_in_use(domain.uuid) >> 20
    except SnaporchError:  # the domain no longer exists; the run reports it
        return 0


def take_all(
    context: Context,
    subprocesses: Subprocesses,
    wanted: Sequence[SnapshotJob],
    on_outcome: Callable[[SnapshotJobResult], None],
) -> list[SnapshotJobResult]:
    """Take snapshots in parallel as the limits allow; a failure does not stop the others.

    After a signal no further snapshot begins, and running ones undo or finish their work.

    Args:
        on_outcome: is called with each outcome as it comes.
    """
    outcomes: list[SnapshotJobResult] = []
    if not wanted:
        return outcomes
    with ThreadPoolExecutor(max_workers=min(len(wanted), _MOST_WAITING)) as threads:
        open_ones: set[Future[SnapshotJobResult]] = {
            threads.submit(subprocesses.take, each) for each in wanted
        }
        stopped = False
        while open_ones:
            done, open_ones = wait(open_ones, timeout=_POLL_SECONDS)
            for future in done:
                outcomes.append(future.result())
                _print_notes(context, outcomes[-1])
                on_outcome(outcomes[-1])
            if context.interrupt.signum is not None and not stopped:
                stopped = True
                subprocesses.stop()
    return outcomes


def remember(context: Context, outcomes: Iterable[SnapshotJobResult]) -> None:
    """Record which attempts failed, so that they are retried later.

    Raises:
        UnavailableError: the schedule's directory is not writable; the record may be in the runtime
            directory instead.
    """
    paths = context.config.paths
    known = read_failed(paths.schedule, spare=paths.runtime)
    changed = changed_by(known, outcomes, datetime.now(UTC))
    if changed != known:
        write_failed(paths.schedule, changed, spare=paths.runtime)


def changed_by(
    known: Mapping[str, FailedAttempt], outcomes: Iterable[SnapshotJobResult], now: datetime
) -> dict[str, FailedAttempt]:
    """The failed attempts after ``outcomes``; one that a signal interrupted is not a failure."""
    changed = dict(known)
    for outcome in outcomes:
        for key in outcome.job.keys:
            if outcome.ok:
                changed.pop(key, None)
            elif outcome.status < 128:  # noqa: PLR2004 - 128 + N is signal N
                changed[key] = FailedAttempt(now, outcome.text)
    return changed


def _print_notes(context: Context, outcome: SnapshotJobResult) -> None:
    name = outcome.job.label
    for text in outcome.notes:
        context.progress.note(name, text.removeprefix(f"{name}  note: "))
