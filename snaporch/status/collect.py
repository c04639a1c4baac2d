"""Collects the data of ``snaporch status``. Changes nothing.

What of it is a problem is decided in :mod:`snaporch.status.problems`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Container, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from snaporch import default_paths
from snaporch.bundle.encrypted_bundles import ENCRYPTED_NAME
from snaporch.bundle.store import RAW_NAME
from snaporch.config import Config
from snaporch.context import Context
from snaporch.disks.overlay_files import QUARANTINE, is_empty
from snaporch.errors import NotFoundError
from snaporch.journal import (
    OtherJournal,
    SnapshotJournal,
    Step,
    UnreadableJournal,
    explains_no_pause,
    list_journals,
)
from snaporch.locks import (
    RECOVERING,
    REPLICATING,
    SCHEDULE,
    LockHolder,
    held_by,
    replication_lock_name,
)
from snaporch.model import BundleState, DomainState, SnapshotRecord
from snaporch.private_files import subdirectories
from snaporch.prune.scan import TRASH_NAME
from snaporch.pull.record import choose_guests, read_records, record_key
from snaporch.recovery.start_guardian import is_guarded
from snaporch.recovery.unknown_overlays import overlays_in_use
from snaporch.restore.undo_command import guests_left_barred
from snaporch.schedule.apply_retention import last_daily_prune
from snaporch.schedule.forecast import Forecast, make_forecasts, replicas_of
from snaporch.schedule.recurrence import times
from snaporch.schedule.replication_due import last_arrived
from snaporch.snapshot.group import group_of, is_in_group
from snaporch.status.missed_snapshots import missed
from snaporch.status.model import (
    DomainStatus,
    OpenRun,
    PolicyStatus,
    ReplicaStatus,
    SchedulerState,
    SourceStatus,
    Status,
    StoreUsage,
)
from snaporch.status.unwatched_overlays import exceeded_limit
from snaporch.verify.copy_results import CopyResults
from snaporch.verify.restore_results import RestoreResult, restore_results
from snaporch.zfs import REBUILD_PROPERTY, BlockingMount

_RESTORE_PHASE = "under way"


def current_status(context: Context, now: datetime, names: Sequence[str] = ()) -> Status:
    """The state of all domains, or only of those named.

    Args:
        names: names or UUIDs of domains.

    Raises:
        NotFoundError: a domain does not exist.
        UnavailableError: the journals cannot be read.
    """
    forecasts = make_forecasts(context, now)
    chosen: set[str] = set()
    for name in names:
        found = {e.domain.uuid for e in forecasts if name in (e.domain.name, e.domain.uuid)}
        if not found:
            raise NotFoundError(name, "no such domain", "see `virsh list --all` for their names")
        chosen |= found
    status = collect_status(context, forecasts, now)
    if not names:
        return status
    return replace(
        status,
        domains=tuple(domain for domain in status.domains if domain.uuid in chosen),
        runs=tuple(run for run in status.runs if run.uuid in chosen),
        copies=tuple(each for each in status.copies if each.uuid in chosen),
        test_restores=tuple(each for each in status.test_restores if each.uuid in chosen),
        overlays_without_journal=(),
        exceeded_limits=(),
        sources=(),
        unused_policies=(),
        unknown_domains=(),
    )


def collect_status(context: Context, forecasts: Sequence[Forecast], now: datetime) -> Status:
    """The state of all domains, based on forecasts.

    Raises:
        UnavailableError: the journals cannot be read.
    """
    config = context.config
    overlays = _directories(config.paths.overlays)  # first: a run removes its journal last
    paused = {e.domain.uuid for e in forecasts if e.domain.state is DomainState.PAUSED}
    runs = _runs(config, paused)
    stray = _stray(overlays, runs)
    by_groups = {
        (group, policy)
        for each in forecasts
        if (group := group_of(config, each.domain)) is not None
        for policy in each.assignment.policies
    }
    domains = tuple(_domain(context, each, runs, by_groups, now) for each in forecasts)
    used = {str(Path(path).parent) for each in domains for path in each.unknown_overlays}
    limits = [(path, exceeded_limit(config.paths, Path(path))) for path in stray if path in used]
    copies, unreadable = CopyResults(config.paths.schedule).all(config.replica)
    return Status(
        at=now,
        scheduler=SchedulerState(
            held_by(config.paths.runtime, SCHEDULE),
            context.unit_states(),
            config.schedule.refresh,
            last_daily_prune(config.paths.schedule),
        ),
        domains=domains,
        runs=tuple(runs),
        overlays_without_journal=stray,
        quarantined=tuple(
            str(path)
            for path in _directories(config.paths.overlays / QUARANTINE)
            if not is_empty(path)
        ),
        exceeded_limits=tuple(each for each in limits if each[1]),
        sources=_sources(config),
        store=usage(config.paths.bundles),
        store_missing=_store_gone(context, forecasts),
        unused_policies=_unused(config, forecasts),
        unknown_domains=_unknown_domains(config, forecasts),
        mounted_snapshots=_mounted(context, forecasts),
        unfinished_rebuilds=tuple(context.pool.local_properties([REBUILD_PROPERTY])),
        barred_guests=tuple(
            (left.thing, left.explanation)
            for left in guests_left_barred(context, [each.domain for each in forecasts])
        ),
        **_fenced(context, forecasts),
        copies=tuple(copies),
        test_restores=_test_restores(context),
        unreadable_copies=tuple((each.thing, each.explanation) for each in unreadable),
    )


def _test_restores(context: Context) -> tuple[RestoreResult, ...]:
    if not context.config.copies_here:
        return ()
    return tuple(restore_results(context.config, context.pool.snapshots()))


def _fenced(context: Context, forecasts: Sequence[Forecast]) -> dict[str, Any]:
    """The fields about fences: of the guests, and which of them have no effect, or no copy yet."""
    found = ((each.domain, context.fences.find(each.domain.uuid)) for each in forecasts)
    fenced = [(domain, fence) for domain, fence in found if fence]
    problem = context.hypervisor.start_hook_problem() if fenced else None
    why = (
        f"is fenced, and libvirt would start it: {problem.reason}; run: {problem.step}"
        if problem
        else ""
    )
    runs = "is fenced, and runs here all the same; if a copy runs elsewhere: virsh destroy"
    off = [(domain.name, fence) for domain, fence in fenced if not domain.active]
    return {
        "fences": tuple((domain.name, fence) for domain, fence in fenced),
        "fenced_guests": tuple((e.name, f"{fence.reason}; {fence.step}") for e, fence in fenced),
        "open_fences": tuple((e.name, f"{runs} {e.uuid}") for e, _ in fenced if e.active)
        + tuple((e.name, why) for e, _ in fenced if why),
        "unfinished_failovers": tuple(
            (name, f"has ended here, and {each.replica} may lack its last snapshot; {each.rerun}")
            for name, each in off
            if each.replica and not each.delivered
        ),
    }


def _sources(config: Config) -> tuple[SourceStatus, ...]:
    """The state of each source; a guest that ``domains`` does not name any more is left out."""
    records = read_records(config.paths.schedule) if config.source else {}
    found = []
    for name, source in config.source.items():
        start, whole = record_key(name), records.get(record_key(name))
        guests = {
            key.removeprefix(start): each
            for key, each in records.items()
            if key.startswith(start) and key != start
        }
        chosen, _ = choose_guests(
            {uuid: each.domain for uuid, each in guests.items()}, source.domains
        )
        own = {uuid: each for uuid, each in guests.items() if uuid in chosen}
        within, window = source.newest_within, source.start_window
        found.append(SourceStatus(name, source.every, whole, own, within, window))
    return tuple(found)


def _mounted(context: Context, forecasts: Sequence[Forecast]) -> tuple[BlockingMount, ...]:
    """Mounted snapshots; also of other programs, because they too can block a restore."""
    records = [record for each in forecasts for record in each.records]
    datasets = {name for record in records for name in record.datasets}
    found = context.pool.blocking_mounts()
    return tuple(each for each in found if each.name.partition("@")[0] in datasets)


def _unused(config: Config, forecasts: Sequence[Forecast]) -> tuple[str, ...]:
    used = {policy for each in forecasts for policy in each.assignment.policies}
    timed = [name for name, policy in config.policy.items() if policy.every or policy.cron]
    return tuple(name for name in timed if name not in used)


def _store_gone(context: Context, forecasts: Sequence[Forecast]) -> bool:
    """Whether snapshots have bundles, and the store is missing."""
    gone = (BundleState.MISSING, BundleState.NONE)
    lost = (record.state in gone for each in forecasts for record in each.records)
    return any(lost) and not context.store.is_known()


def _unknown_domains(config: Config, forecasts: Sequence[Forecast]) -> tuple[tuple[str, str], ...]:
    """Names and UUIDs in the configuration without a domain; patterns need not match."""
    known = {name for each in forecasts for name in (each.domain.name, each.domain.uuid)}
    named = [(f"policy.{name}", d) for name, p in config.policy.items() for d in p.domains]
    named += [("domain", name) for name, own in config.domain.items() if "policies" in own]
    return tuple((where, n) for where, n in named if n not in known and not set("*?[") & set(n))


def _domain(
    context: Context,
    forecast: Forecast,
    runs: Sequence[OpenRun],
    by_groups: Collection[tuple[str, str]],
    now: datetime,
) -> DomainStatus:
    config, domain, records = context.config, forecast.domain, forecast.records
    verified = [record for record in records if record.verified is not None]
    known = any(run.uuid == domain.uuid and _is_watched(run) for run in runs)
    return DomainStatus(
        name=domain.name,
        uuid=domain.uuid,
        policies=_policies(config, forecast, now),
        unknown_policies=forecast.assignment.unknown,
        newest={
            record.level: record.created for record in records
        },  # the last one wins, which is the newest
        counts=Counter(record.level for record in records),
        last=records[-1] if records else None,
        verified=tuple(sorted(verified, key=_verified_at, reverse=True)),
        replicas=_replicas(config, forecast),
        unknown_overlays=() if known else overlays_in_use(context, domain),
        lost_policy=_lost(config, forecast, by_groups),
        replicated_by=_replication(domain.uuid),
        assigned_by=forecast.assignment.source,
        has_verify_command=bool(config.settings(domain.name, domain.uuid).verify_command),
    )


def _replication(uuid: str) -> LockHolder | None:
    holder = held_by(default_paths.LOCKS, replication_lock_name(uuid))
    return holder if holder is not None and holder.doing == REPLICATING else None


def _lost(config: Config, forecast: Forecast, by_groups: Collection[tuple[str, str]]) -> str:
    """The policy of the newest snapshot if no place assigns any, as after a rename.

    Args:
        by_groups: the policies that are carried out for a group, because one of its domains has
            them; they snapshot the other domains of the group too.
    """
    assignment = forecast.assignment
    if assignment.policies or assignment.unknown or assignment.source:
        return ""
    last = next((record.policy for record in reversed(forecast.records) if record.policy), "")
    with_group = (
        policy == last and is_in_group(config, group, forecast.domain)
        for group, policy in by_groups
    )
    return "" if any(with_group) else last


def _verified_at(record: SnapshotRecord) -> datetime:
    return record.verified.at if record.verified else datetime.min.replace(tzinfo=UTC)


def _replicas(config: Config, forecast: Forecast) -> tuple[ReplicaStatus, ...]:
    replications = {shipment.replica: shipment for shipment in forecast.replications}
    failed = forecast.failed_replications
    names = dict.fromkeys([*replicas_of(config, forecast.assignment), *failed])
    return tuple(
        ReplicaStatus(
            name, last_arrived(name, forecast.records), replications.get(name), failed.get(name)
        )
        for name in names
    )


def _policies(config: Config, forecast: Forecast, now: datetime) -> tuple[PolicyStatus, ...]:
    place = group_of(config, forecast.domain) or forecast.domain.uuid
    whole = [each for each in forecast.records if each.state.is_there]
    last = {each.policy: each for each in whole}
    next_snapshots = {coming.policy: coming for coming in forecast.next_snapshots}
    return tuple(
        PolicyStatus(
            name,
            last[name].created if name in last else None,
            next_snapshots.get(name),
            missed(next_snapshots.get(name), times(config, name, place), config.status.grace, now),
            None if forecast.domain.active else _found_unchanged(last.get(name), now),
        )
        for name in forecast.assignment.policies
    )


def _found_unchanged(record: SnapshotRecord | None, now: datetime) -> datetime | None:
    """When the guest was last found unchanged; ``None`` for a time in the future."""
    if record is None or record.unchanged is None or record.unchanged > now:
        return None
    return record.unchanged


# -- runs and overlays ---------------------------------------------------------------------------


def _runs(config: Config, paused: Container[str]) -> list[OpenRun]:
    found = []
    for journal in list_journals(config.paths.journal, sweep=False):
        try:
            since = datetime.fromtimestamp(journal.path.stat().st_mtime, UTC)
        except FileNotFoundError:  # the run has just ended
            continue
        uuid = journal.uuid or ""
        holder = held_by(default_paths.LOCKS, uuid) if uuid else None
        guest_held = isinstance(journal, SnapshotJournal) and (
            journal.held or (uuid in paused and explains_no_pause(journal.facts, journal.notes))
        )
        # a recovery that holds the lock has not released the guest yet
        held = holder is not None and not (guest_held and holder.doing == RECOVERING)
        if isinstance(journal, UnreadableJournal):
            reason, step = journal.error.reason, journal.error.step
            path = str(journal.path)
            found.append(
                OpenRun(uuid or "?", uuid, "", reason, False, since, held, path, step=step)
            )
        else:
            run = replace(_run(journal, since, held=held), guest_may_be_frozen=guest_held)
            found.append(replace(run, guarded=guest_held and _is_guarded(journal.path)))
    return found


def _is_guarded(journal: Path) -> bool:
    try:
        return is_guarded(journal)
    except OSError:  # the run has just ended
        return False


def _run(journal: SnapshotJournal | OtherJournal, since: datetime, *, held: bool) -> OpenRun:
    if isinstance(journal, SnapshotJournal):
        kind, (phase, window) = "snapshot", _phase(journal.ended)
    else:
        kind, phase, window = journal.kind, _RESTORE_PHASE, False
    return OpenRun(
        journal.domain, journal.uuid, kind, phase, window, since, held, str(journal.path)
    )


def _phase(ended: Collection[Step]) -> tuple[str, bool]:
    """The phase of a snapshot run, and whether the guest is frozen or on overlays."""
    if Step.RELEASE in ended:
        return "sealing", False
    if Step.POOL_SNAPSHOT in ended:
        return "committing", True
    if Step.FREEZE in ended:
        return "frozen", True
    return ("freezing" if Step.PREPARE in ended else "preparing"), False


def _is_watched(run: OpenRun) -> bool:
    """Whether the run itself or a guardian watches the guest: a guardian needs the journal."""
    return bool(run.kind) or run.locked


def _stray(overlays: Sequence[Path], runs: Sequence[OpenRun]) -> tuple[str, ...]:
    """Directories of overlays without a readable journal; each is named after its run."""
    known = {QUARANTINE, *(Path(run.path).stem for run in runs if _is_watched(run))}
    return tuple(str(path) for path in overlays if path.name not in known and not is_empty(path))


# -- the store -----------------------------------------------------------------------------------


def usage(store: Path) -> StoreUsage:
    """How much space the bundle store uses and has left."""
    bundles = bundle_bytes = trash = other = 0
    for domain in _directories(store):
        if domain.name == ENCRYPTED_NAME:
            other += _encrypted_size(domain)
            continue
        with suppress(OSError):
            other += (domain / RAW_NAME).lstat().st_size
        for path in _directories(domain):
            size = _size(path)
            if domain.name == TRASH_NAME:
                trash += size
            elif path.name.startswith((".", "safety-")):
                other += size
            else:
                bundles, bundle_bytes = bundles + 1, bundle_bytes + size
    existing = next(each for each in (store, *store.parents) if each.is_dir())
    room = os.statvfs(existing)
    free = room.f_bavail * room.f_frsize
    used = (room.f_blocks - room.f_bfree) * room.f_frsize
    return StoreUsage(str(store), bundles, bundle_bytes, trash, other, free, used + free)


def _encrypted_size(above: Path) -> int:
    """The bytes of what waits for replicas encrypted, and of the records of what they got."""
    replicas = _directories(above)
    domains = (each for replica in replicas for each in _directories(replica))
    return sum(_size(run) for domain in domains for run in _directories(domain))


def _directories(path: Path) -> list[Path]:
    try:
        return subdirectories(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _size(directory: Path) -> int:
    try:
        with os.scandir(directory) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    except FileNotFoundError:  # removed meanwhile
        return 0
