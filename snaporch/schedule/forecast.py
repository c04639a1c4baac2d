"""Forecasts for each domain: next snapshots, deletions, verifications and replications.

Reads ZFS, libvirt and the bundle store, and changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from snaporch.catalog.records import marked_records
from snaporch.clone.find_clones import clones_at_work
from snaporch.config import Config
from snaporch.context import Context
from snaporch.journal import read_journals
from snaporch.model import (
    Domain,
    Level,
    PolicyView,
    PoolSnapshot,
    SnapshotRecord,
    moment_of,
)
from snaporch.schedule.carried_out_since import read_first_runs, record_first_runs
from snaporch.schedule.failed_attempts import (
    COMPLETED,
    REPLICATIONS,
    SNAPSHOTS,
    STOPPED,
    VERIFICATIONS,
    WAITING,
    FailedAttempt,
    read_failed,
    write_failed,
)
from snaporch.schedule.own_or_copied import came_back, without_copies
from snaporch.schedule.policy_assignment import Assignment, assign, datasets
from snaporch.schedule.recurrence import Times, read_zone_again, times, verify_times, zone_of
from snaporch.schedule.replication_due import (
    PendingReplication,
    next_replication,
    start_window,
    waiting_since,
)
from snaporch.schedule.retention import (
    RetentionDecision,
    RetentionSnapshot,
    decide_retention,
    keep_together,
)
from snaporch.schedule.verification_due import DueVerification, next_verification
from snaporch.snapshot.group import group_of


@dataclass(frozen=True, slots=True)
class NextSnapshot:
    """The next snapshot of a policy on a domain."""

    policy: str
    at: datetime
    reason: str
    scheduled: datetime | None = None
    """The policy's own time; ``at`` is later after a failure. ``None`` without a snapshot."""
    failed: FailedAttempt | None = None
    """The last attempt, if it failed."""
    first_run: datetime | None = None
    """When the policy was first carried out for the domain, if that is recorded."""

    def due(self, now: datetime) -> bool:
        """Whether the snapshot is due at ``now``."""
        return self.at <= now

    @property
    def due_but_for_failures(self) -> datetime:
        """When the snapshot would be due if no attempt had failed; in the past while it is late."""
        if self.scheduled is None:
            return self.first_run or self.at
        return self.at if self.failed is None else self.scheduled


@dataclass(frozen=True, slots=True)
class Forecast:
    """What policies will do for one domain."""

    domain: Domain
    assignment: Assignment
    next_snapshots: tuple[NextSnapshot, ...]
    retention: tuple[RetentionDecision, ...]
    """The retention decision for each of its snapshots, oldest first."""
    names: Mapping[str, tuple[str, ...]]
    """Full names of the ZFS snapshots, by run."""
    records: tuple[SnapshotRecord, ...] = ()
    """All its snapshots, oldest first."""
    finished: tuple[SnapshotRecord, ...] = ()
    """The snapshots whose run has ended."""
    verifications: tuple[DueVerification, ...] = ()
    """The next verification for each policy that verifies."""
    replications: tuple[PendingReplication, ...] = ()
    """The next replication for each replica that lacks snapshots."""
    failed_replications: Mapping[str, FailedAttempt] = field(default_factory=dict)
    """The failed last attempts, by replica; also by one that no policy names."""

    @property
    def to_delete(self) -> list[RetentionDecision]:
        """The decisions to delete."""
        return [verdict for verdict in self.retention if verdict.delete]


def make_forecasts(context: Context, now: datetime, only: str | None = None) -> list[Forecast]:
    """Forecasts for all domains except clones on which a verification works.

    Args:
        only: name or UUID of a domain; the only one that is returned.

    Raises:
        NotFoundError: the domain ``only`` does not exist.
    """
    read_zone_again()
    hypervisor = context.hypervisor
    own = None if only is None else hypervisor.domain(only)
    view = context.pool.policy_view()
    snapshots: dict[str, list[PoolSnapshot]] = defaultdict(list)
    for snapshot in view.snapshots:
        snapshots[snapshot.properties.get("uuid", "")].append(snapshot)
    if own is None:
        hidden = clones_at_work(context)
        domains = hypervisor.domains()
        hidden |= clones_at_work(context)  # one may begin or end meanwhile
        domains = [each for each in domains if each.uuid not in hidden]
    else:
        others = (hypervisor.find(uuid) for uuid in _members_with(snapshots, own.uuid))
        domains = [own, *(each for each in others if each is not None)]
    guids = frozenset(snapshot.guid for snapshot in view.snapshots)
    memory = _Memory.of(context)
    forecasts = [
        _forecast(context, domain, snapshots[domain.uuid], view, guids, memory, now)
        for domain in domains
    ]
    decisions = keep_together({each.domain.name: each.retention for each in forecasts})
    return [
        replace(each, retention=tuple(decisions[each.domain.name]))
        for each in forecasts
        if own in (None, each.domain)
    ]


def _members_with(snapshots: Mapping[str, Sequence[PoolSnapshot]], uuid: str) -> set[str]:
    """UUIDs of the domains that were snapshotted together with this one."""
    instants = {
        other: {group for each in own if (group := each.properties.get("group", ""))}
        for other, own in snapshots.items()
    }
    own = instants.pop(uuid, set())
    return {other for other, groups in instants.items() if groups & own}


def record_carried_out(context: Context, forecasts: Sequence[Forecast], now: datetime) -> None:
    """Record which policies are carried out for which domains, by the daemon or ``run-due``.

    Also since when replicas lack snapshots.

    Raises:
        UnavailableError: a file is not writable.
    """
    keys = [
        f"{each.domain.uuid}/{coming.policy}"
        for each in forecasts
        for coming in each.next_snapshots
    ]
    paths = context.config.paths
    record_first_runs(paths.schedule, keys, now)
    waiting = waiting_since(each for forecast in forecasts for each in forecast.replications)
    if waiting != read_failed(paths.schedule, WAITING, spare=paths.runtime):
        write_failed(paths.schedule, waiting, WAITING, spare=paths.runtime)


@dataclass(frozen=True, slots=True)
class _Memory:
    """What cannot be derived from the snapshots."""

    first_runs: Mapping[str, datetime]
    snapshots: Mapping[str, FailedAttempt]
    verifications: Mapping[str, FailedAttempt]
    replications: Mapping[str, FailedAttempt]
    stopped: Mapping[str, FailedAttempt]
    completed: Mapping[str, FailedAttempt]
    waited: Mapping[str, FailedAttempt]
    under_way: frozenset[str]
    """Runs that have a journal: their snapshots are not finished."""

    @classmethod
    def of(cls, context: Context) -> _Memory:
        paths = context.config.paths
        runs = frozenset(journal.facts.run for journal in read_journals(paths.journal))
        snapshots, verifications, replications, stopped, completed, waited = (
            read_failed(paths.schedule, name, spare=paths.runtime)
            for name in (SNAPSHOTS, VERIFICATIONS, REPLICATIONS, STOPPED, COMPLETED, WAITING)
        )
        first = read_first_runs(paths.schedule)
        return cls(first, snapshots, verifications, replications, stopped, completed, waited, runs)


def _forecast(
    context: Context,
    domain: Domain,
    snapshots: Sequence[PoolSnapshot],
    view: PolicyView,
    guids: Collection[int],
    memory: _Memory,
    now: datetime,
) -> Forecast:
    config = context.config
    assignment = assign(context, domain, view.policies)
    snapshots = without_copies(context, [domain], snapshots)
    records = _records(context, domain, snapshots, guids)
    keeps = {name: policy.keep for name, policy in config.policy.items() if policy.keep}
    pinned = {**came_back(snapshots), **view.pinned}
    verdicts = decide_retention(
        (retention_snapshot(record, pinned) for record in records),
        keeps,
        now,
        zone_of(config),
    )
    next_snapshots = []
    retry = config.schedule.retry
    for name in assignment.policies:
        taken = _names_of(record for record in records if _stands(config, name, record))
        own = [s for s in snapshots if s.full_name in taken]
        when = times(config, name, group_of(config, domain) or domain.uuid)
        if when.known:
            key = f"{domain.uuid}/{name}"
            since = memory.first_runs.get(key)
            since = since if since is None or since <= now else None  # the clock was set back
            found = replace(_next(name, when, own, now), first_run=since)
            last = _last_failure(memory.snapshots.get(key), own, now)
            next_snapshots.append(_after_failure(found, last, retry, now))
    finished = [record for record in records if record.run not in memory.under_way]
    as_named = [record for record in finished if not record.renamed]
    wanted = ((name, verify_times(config, name, domain.uuid)) for name in assignment.policies)
    checks = [
        next_verification(
            name,
            when,
            finished,
            memory.verifications,
            retry,
            now,
            disks=config.policy[name].verify_disks,
        )
        for name, when in wanted
        if when.known
    ]
    replications = [
        next_replication(
            name,
            policies,
            as_named,
            memory.replications,
            retry,
            now,
            start_window(config.replica[name]),
            memory.stopped,
            memory.completed,
            memory.waited,
        )
        for name, policies in replicas_of(config, assignment).items()
    ]
    return Forecast(
        domain,
        assignment,
        tuple(next_snapshots),
        tuple(verdicts),
        names={record.run: _full_names(record) for record in records},
        records=tuple(records),
        finished=tuple(finished),
        verifications=tuple(check for check in checks if check is not None),
        replications=tuple(pending for pending in replications if pending is not None),
        failed_replications={
            name: failed
            for name in config.replica
            if (failed := memory.replications.get(f"{domain.uuid}/{name}")) and failed.at <= now
        },
    )


def _records(
    context: Context, domain: Domain, snapshots: Sequence[PoolSnapshot], guids: Collection[int]
) -> list[SnapshotRecord]:
    """The domain's snapshots, also of renamed datasets.

    Snapshots of a renamed dataset count only if the old name is free and the domain uses the new
    one. Otherwise they are in a promoted clone or a copy of the pool.
    """
    records = marked_records(context.store, snapshots, guids, renamed_too=True)
    if not any(record.renamed for record in records):
        return records
    existing = {dataset.name for dataset in context.pool.datasets()}
    own = datasets(context, domain)
    return [
        record
        for record in records
        if not record.renamed or (existing.isdisjoint(record.renamed) and own & {*record.datasets})
    ]


def _stands(config: Config, policy: str, record: SnapshotRecord) -> bool:
    """Whether a snapshot counts for the policy's times; one whose run failed does not."""
    read_back = not (record.has_failed and config.policy[policy].reads_back)
    return record.policy == policy and record.state.is_there and read_back


def _names_of(records: Iterable[SnapshotRecord]) -> set[str]:
    return {name for record in records for name in _full_names(record)}


def replicas_of(config: Config, assignment: Assignment) -> dict[str, list[str]]:
    """The replicas of a domain, each with the policies that replicate to it."""
    found: dict[str, list[str]] = {}
    for policy in assignment.policies:
        for name in config.policy[policy].replicate:
            found.setdefault(name, []).append(policy)
    return found


def _next(
    policy: str, when: Times, snapshots: Iterable[PoolSnapshot], now: datetime
) -> NextSnapshot:
    """When the next snapshot is due, counted from the newest one.

    The newest one has the highest ``createtxg``: its time may be wrong, and a clock that was set
    back must not stop snapshots until it reaches that time again.
    """
    newest: dict[str, PoolSnapshot] = {}
    for snapshot in snapshots:
        pool = snapshot.dataset.split("/", 1)[0]
        newest[pool] = max(newest.get(pool, snapshot), snapshot, key=lambda s: s.createtxg)
    at = when.next_due(moment for each in newest.values() for moment in _met(each, now))
    if at is None:
        reason = "the clock was set back" if newest else "no snapshot yet"
        return NextSnapshot(policy, now, reason)
    return NextSnapshot(policy, at, when.rule, scheduled=at)


def _met(snapshot: PoolSnapshot, now: datetime) -> list[datetime]:
    """Times at which a snapshot met the policy: when it was taken, and last found unchanged.

    Without times in the future, which appear after the clock was set back.
    """
    unchanged = moment_of(snapshot.properties.get("unchanged"))
    return [each for each in (snapshot.created, unchanged) if each is not None and each <= now]


def _last_failure(
    failed: FailedAttempt | None, own: Iterable[PoolSnapshot], now: datetime
) -> FailedAttempt | None:
    """The failed attempt, unless a later snapshot or an unchanged guest met the policy."""
    if failed is None:
        return None
    over = any(moment > failed.at for each in own for moment in _met(each, now))
    return None if over else failed


def _after_failure(
    found: NextSnapshot, failed: FailedAttempt | None, retry: timedelta, now: datetime
) -> NextSnapshot:
    if failed is None or failed.at > now:
        return found
    at = failed.repeated_at(retry)
    if at <= found.at:
        return replace(found, failed=failed)
    return replace(found, at=at, reason=failed.repeated_because, failed=failed)


def retention_snapshot(record: SnapshotRecord, pinned: Mapping[str, str]) -> RetentionSnapshot:
    """The facts of a record that retention needs.

    Args:
        record: of a snapshot.
        pinned: by a ZFS snapshot's full name, why it cannot be destroyed.
    """
    pins = ["kept"] if record.kept else []
    pins += [pinned[name] for name in _full_names(record) if name in pinned]
    complete = record.state.is_there
    return RetentionSnapshot(
        run=record.run,
        snapshot=record.snapshot,
        created=record.created,
        policy=record.policy,
        good_ram=complete and record.level is Level.RAM,
        incomplete=not complete,
        pinned=pins[0] if pins else "",
        passed=record.verified.passed if record.verified else None,
        group_run=record.group_run or "",
    )


def _full_names(record: SnapshotRecord) -> tuple[str, ...]:
    return tuple(f"{dataset}@{record.snapshot}" for dataset in record.datasets)
