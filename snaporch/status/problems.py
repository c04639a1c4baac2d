"""Finds the problems in a status: a pure function.

After which time something is late is set by the options of ``[status]`` in
:mod:`snaporch.config.monitoring`.

After how long a snapshot counts as missed is decided in :mod:`snaporch.status.missed_snapshots`,
when an overlay exceeds a limit in :mod:`snaporch.status.unwatched_overlays`.

A run under way is no problem, however long it takes: :mod:`snaporch.recovery.hold_limits` limits
how long it may hold a guest.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from snaporch.config import StatusOptions
from snaporch.model import BundleState, Level, SnapshotRecord, VerifyStep, moment_of
from snaporch.recovery.unknown_overlays import STEP
from snaporch.status.model import (
    DomainStatus,
    OpenRun,
    PolicyStatus,
    Problem,
    ProblemGrade,
    ReplicaStatus,
    SourceStatus,
    Status,
    StoreUsage,
)
from snaporch.systemd.unit_state import RUN_DUE
from snaporch.verify.copy_results import CopyResult
from snaporch.verify.next_step import next_step, repeat_command
from snaporch.verify.restore_results import RestoreResult
from snaporch.zfs import BlockingMount

_ORDER = tuple(ProblemGrade)[::-1]
_TWO = 2
_NAMED = 3
"""Copies of a domain that failed, and that a problem names."""


def find_problems(status: Status, limits: StatusOptions) -> list[Problem]:
    """All problems, the critical ones first."""
    found = [problem for run in status.runs for problem in _run(run)]  # first: may hold a guest
    for name, text in status.barred_guests:
        found.append(Problem("barred", ProblemGrade.CRITICAL, name, text))
    for name, text in status.open_fences:
        found.append(Problem("fence-open", ProblemGrade.CRITICAL, name, text))
    for name, text in status.unfinished_failovers:
        found.append(Problem("failover", ProblemGrade.CRITICAL, name, text))
    for name, text in status.fenced_guests:
        found.append(Problem("fenced", ProblemGrade.WARNING, name, text))
    found += _scheduler(status, limits)
    for domain in status.domains:
        found += _domain(domain, has_run=any(run.uuid == domain.uuid for run in status.runs))
        for policy in domain.policies:
            found += _policy(domain.name, policy, status.at - limits.grace)
        for replica in domain.replicas:
            found += _replica(domain.name, replica, status.at, limits.replica_late)
        found += _slow_replication(domain, status.at - limits.replica_late)
    found += _left_behind(status)
    if status.store_missing:
        text = "is no bundle store, and snapshots have their bundles in one: is it mounted?"
        found.append(Problem("no-store", ProblemGrade.CRITICAL, status.store.path, text))
    found += _copies(status)
    found += _test_restores(status)
    for source in status.sources:
        found += _source(source, status.at, limits.replica_late)
    found += _mounted(status.mounted_snapshots)
    found += _store(status.store, limits)
    return sorted(found, key=lambda problem: _ORDER.index(problem.grade))


def worst_grade(problems: Sequence[Problem]) -> ProblemGrade | None:
    """The worst grade; ``None`` without problems."""
    return min((each.grade for each in problems), key=_ORDER.index, default=None)


def _left_behind(status: Status) -> Iterator[Problem]:
    """What runs and rebuilds have left unfinished."""
    for dataset in status.unfinished_rebuilds:
        text = "the rebuild of its guest is not complete; unless it is running, run it again"
        yield Problem("rebuild", ProblemGrade.WARNING, dataset, text)
    for path in status.overlays_without_journal:
        text = "belongs to no known run; may hold writes of a guest: see docs/how-to/recovery.md"
        yield Problem("unknown-overlay", ProblemGrade.WARNING, path, text)
    for path in status.quarantined:
        text = "holds writes that its base lacks; commit or delete it: see docs/how-to/recovery.md"
        yield Problem("quarantined", ProblemGrade.WARNING, path, text)
    for path, text in status.exceeded_limits:
        commit = f"{text}; commit them: see docs/how-to/recovery.md"
        yield Problem("overlay-limit", ProblemGrade.CRITICAL, path, commit)


def _scheduler(status: Status, limits: StatusOptions) -> Iterator[Problem]:
    for unit, state in status.scheduler.units.items():
        if state == "failed":
            text = f"has failed; see: journalctl -u {unit}"
            grade = (
                ProblemGrade.WARNING if unit == RUN_DUE else ProblemGrade.CRITICAL
            )  # the timer starts it again
            yield Problem("unit-failed", grade, unit, text)
    checked = status.scheduler.checked
    if checked is not None and checked + status.scheduler.refresh + limits.grace < status.at:
        text = f"the daemon has not checked guests and policies since {_utc(checked)}"
        yield Problem(
            "check-late", ProblemGrade.WARNING, "policies", f"{text}; see: journalctl -u snaporch"
        )
    pruned = status.scheduler.prune_late_since
    if pruned is not None:
        text = f"the last daily prune began {_utc(pruned)}, and may hang"
        yield Problem(
            "prune-late",
            ProblemGrade.WARNING,
            "policies",
            f"{text}; see: systemctl status snaporch",
        )
    for name in status.unused_policies:
        yield Problem(
            "unused-policy", ProblemGrade.WARNING, f"policy.{name}", "no domain has this policy"
        )
    for section, name in status.unknown_domains:
        text = f"names the domain {name!r}, which does not exist"
        yield Problem("no-such-domain", ProblemGrade.WARNING, section, text)
    if not status.scheduler.is_active and _anything_waits(status, limits.grace):
        text = "snapshots are due, but neither the daemon nor the timer of run-due is active"
        yield Problem("scheduler-inactive", ProblemGrade.WARNING, "policies", text)


def _anything_waits(status: Status, grace: timedelta) -> bool:
    """Whether snapshots are due longer than ``grace``, so that no crontab takes them either."""
    coming = [each.next for domain in status.domains for each in domain.policies if each.next]
    return any(
        each.due(status.at) if each.scheduled is None else each.at + grace < status.at
        for each in coming
    )


def _domain(domain: DomainStatus, *, has_run: bool) -> Iterator[Problem]:
    """Problems of a domain; ``has_run``: a run on it has not ended, and may be reported itself."""
    for name in domain.unknown_policies:
        text = f"{domain.assigned_by} names the policy {name!r}, which does not exist"
        grade = ProblemGrade.WARNING if domain.policies else ProblemGrade.CRITICAL
        text += "" if domain.policies else ", and it has no other"
        yield Problem("unknown-policy", grade, domain.name, f"{text}; see: snaporch plan")
    if domain.lost_policy:
        text = f"had the policy {domain.lost_policy!r} but has none now; if intended, assign 'none'"
        yield Problem("no-policy", ProblemGrade.CRITICAL, domain.name, text)
    if domain.unknown_overlays:
        text = f"runs on an overlay of no known run: {', '.join(domain.unknown_overlays)}; {STEP}"
        yield Problem("on-overlay", ProblemGrade.CRITICAL, domain.name, text)
    last = domain.last
    if last is not None and not last.state.is_there and not has_run:
        text = f"its newest snapshot @{last.snapshot} is {_flaw(last)}"
        yield Problem("incomplete", ProblemGrade.WARNING, domain.name, text)
    yield from _failed_verifications(domain)


def _failed_verifications(domain: DomainStatus) -> Iterator[Problem]:
    """One problem for the snapshots in which the same steps of the verification failed."""
    alike: dict[tuple[object, ...], list[SnapshotRecord]] = {}
    for tested in domain.verified:
        if tested.verified is not None and tested.has_failed:
            key = (tested.verified.failed_steps, tested.state, tested.level is Level.TORN)
            alike.setdefault(key, []).append(tested)
    for failed in alike.values():
        steps = failed[0].verified.failed_steps if failed[0].verified else ()
        names = ", ".join(f"@{each.snapshot}" for each in failed)
        text = f"the verification of {names} failed; {next_step(failed, steps)}"
        is_last = failed[0] is domain.verified[0]
        grade = ProblemGrade.CRITICAL if is_last else ProblemGrade.WARNING
        yield Problem("verify-failed", grade, domain.name, text)


def _copies(status: Status) -> Iterator[Problem]:
    """One problem for the copies of a domain on a replica whose verification failed."""
    for path, text in status.unreadable_copies:
        yield Problem("copy-results", ProblemGrade.CRITICAL, path, text)
    by_place: dict[tuple[str, str, str], list[CopyResult]] = {}
    for result in status.copies:
        if not result.passed:
            by_place.setdefault((result.replica, result.uuid, result.domain), []).append(result)
    for (replica, _, domain), failed in by_place.items():
        few = len(failed) <= _NAMED
        shown = ", ".join(f"@{each.snapshot}" for each in failed) if few else len(failed)
        words = [each.full_name for each in failed] if few else [domain]
        again = shlex.join(["snaporch", "verify", "--on", replica, *words])
        text = (
            f"copies on replica {replica} ({shown}) failed their verification "
            f"({failed[-1].reason}); see docs/how-to/verify.md; to repeat it: {again}"
        )
        yield Problem("copy-failed", ProblemGrade.CRITICAL, domain, text)


def _test_restores(status: Status) -> Iterator[Problem]:
    """One problem for the copies of a domain whose test restore failed on this machine."""
    by_place: dict[tuple[str, str, str], list[RestoreResult]] = {}
    for each in status.test_restores:
        if not each.result.passed:
            by_place.setdefault((each.replica, each.uuid, each.domain), []).append(each)
    for (replica, _, domain), failed in by_place.items():
        shown = failed[-_NAMED:]
        steps = [step for step in VerifyStep if any(step in e.result.failed_steps for e in shown)]
        names = [each.full_name for each in shown]
        again = repeat_command(names, steps, ("--on", replica, "--test-restore"))
        text = (
            f"test restores of {len(failed)} copies in {replica} failed; see "
            f"docs/how-to/verify.md; to repeat the last ones: {again}"
        )
        yield Problem("copy-failed", ProblemGrade.CRITICAL, domain, text)


def _flaw(record: SnapshotRecord) -> str:
    if record.level is Level.TORN:
        return "torn"
    if record.state is BundleState.NONE:
        return "only crash-consistent: its run was interrupted, or the guest was not frozen"
    return f"not whole: its bundle is {record.state}"


def _policy(domain: str, policy: PolicyStatus, limit: datetime) -> Iterator[Problem]:
    """Problems of a policy; one carried out since before ``limit`` must have a snapshot."""
    coming = policy.next
    if coming is not None and coming.scheduled is None and _long_since(coming.first_run, limit):
        first = coming.first_run
        since = f"carried out since {_utc(first)}" if first else "never carried out"
        text = f"{policy.policy}: no snapshot that counts ({coming.reason}); {since}"
        yield Problem("never", ProblemGrade.CRITICAL, domain, text)
    failed = policy.next.failed if policy.next else None
    if failed is not None:
        grade = ProblemGrade.WARNING if policy.last else ProblemGrade.CRITICAL
        yield Problem("failed", grade, domain, f"{policy.policy}: {failed.reason}")
    if policy.missed:
        grade = ProblemGrade.CRITICAL if policy.missed >= _TWO else ProblemGrade.WARNING
        wanted = policy.next.scheduled if policy.next else None
        text = f"{policy.policy}: the snapshot of {_utc(wanted)} was missed"
        more = ", and at least one more" if policy.missed >= _TWO else ""
        yield Problem("missed", grade, domain, text + more)


def _long_since(since: datetime | None, limit: datetime) -> bool:
    return since is None or since < limit


def _replica(
    domain: str, replica: ReplicaStatus, at: datetime, late: timedelta
) -> Iterator[Problem]:
    if replica.failed is not None:
        grade = ProblemGrade.WARNING if replica.last else ProblemGrade.CRITICAL
        yield Problem("replica-failed", grade, domain, replica.failed.reason)
    if replica.next is not None and replica.next.is_late(late, at):
        text = f"replica {replica.replica} lacks the snapshots since {_utc(replica.next.since)}"
        yield Problem("replica-late", ProblemGrade.WARNING, domain, text)


def _source(source: SourceStatus, at: datetime, late: timedelta) -> Iterator[Problem]:
    """Problems of a source and of its guests.

    Args:
        source: the source.
        at: now.
        late: how late a pull may be, and how long snapshots may wait.
    """
    limit = at - late
    if source.whole is None:
        text = f"was never pulled; run: snaporch pull {source.source}"
        yield Problem("pull-late", ProblemGrade.WARNING, f"source.{source.source}", text)
        return
    records = [(f"source.{source.source}", source.whole)]
    records += [(f"{source.source}: {each.domain}", each) for each in source.guests.values()]
    reported = {each.failed for _, each in records[1:]}
    for subject, each in records:
        if each.failed and not (each is source.whole and each.failed in reported):
            grade = ProblemGrade.WARNING if each.pulled else ProblemGrade.CRITICAL
            yield Problem("pull-failed", grade, subject, each.failed)
        every = source.every
        if every is None or (each is source.whole and reported - {""}):
            continue  # its guests are reported
        if each.pulled is None or (
            each.pulled + every < limit and source.window.had_one(each.pulled + every, at)
        ):
            text = f"was last pulled without a failure {_utc(each.pulled)}"
            if each.pulled is None:
                text = "was never pulled without a failure"
            yield Problem("pull-late", ProblemGrade.WARNING, subject, text)
    yield from _old_copies(source, at, limit)


def _old_copies(source: SourceStatus, at: datetime, limit: datetime) -> Iterator[Problem]:
    """Guests of which nothing new comes, although no pull fails."""
    for each in source.guests.values():
        subject = f"{source.source}: {each.domain}"
        if each.waiting_since and each.waiting_since < limit:
            text = f"has had snapshots that wait for a run there since {_utc(each.waiting_since)}"
            yield Problem("pull-late", ProblemGrade.WARNING, subject, text)
        within = source.newest_within
        if within is not None and (each.newest is None or each.newest + within < at):
            text = "has no snapshot that was pulled as a whole"
            if each.newest:
                text = f"has its newest pulled snapshot of {_utc(each.newest)}"
            yield Problem("pull-late", ProblemGrade.WARNING, subject, text)


def _slow_replication(domain: DomainStatus, limit: datetime) -> Iterator[Problem]:
    holder = domain.replicated_by
    since = moment_of(holder.since) if holder else None
    if holder and since and since < limit:
        to, has = "", "all replicas have"
        if holder.replica:
            to, has = f" to {holder.replica}", f"{holder.replica} has"
        text = (
            f"is being replicated{to} since {_utc(since)}, and retention deletes only those of its "
            f"snapshots that {has}; to have it continue later: kill {holder.pid}"
        )
        yield Problem("replica-slow", ProblemGrade.WARNING, domain.name, text)


def _utc(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC" if moment else "?"


def _run(run: OpenRun) -> Iterator[Problem]:
    if not run.kind:
        text = "; ".join(filter(None, (f"{run.path} {run.phase}", run.step)))
        yield Problem("unreadable-journal", ProblemGrade.CRITICAL, run.domain, text)
    elif not run.locked and run.guest_may_be_frozen:
        step = "its guardian keeps trying, or run" if run.guarded else "run"
        text = (
            f"a {run.kind} was interrupted while {run.phase}, and the guest may still be paused or "
            f"frozen; {step}: snaporch recover {run.uuid}"
        )
        yield Problem("held", ProblemGrade.CRITICAL, run.domain, text)
    elif not run.locked:
        text = f"a {run.kind} was interrupted while {run.phase}; run: snaporch recover {run.uuid}"
        yield Problem("interrupted", ProblemGrade.CRITICAL, run.domain, text)


def _mounted(mounts: Sequence[BlockingMount]) -> Iterator[Problem]:
    """One problem for each place with mounted snapshots."""
    for holder, count in Counter(each.program for each in mounts).items():
        what = "1 snapshot" if count == 1 else f"{count} snapshots"
        text = (
            f"has {what} mounted, which therefore cannot be destroyed: see docs/reference/hosts.md"
        )
        yield Problem("mounted", ProblemGrade.WARNING, holder, text)


def _store(store: StoreUsage, limits: StatusOptions) -> Iterator[Problem]:
    used = store.used_percent
    if used >= limits.store_warning:
        grade = ProblemGrade.CRITICAL if used >= limits.store_critical else ProblemGrade.WARNING
        text = f"{used:.0f} % of its file system is used; see: snaporch prune --dry-run"
        yield Problem("store-full", grade, store.path, text)
