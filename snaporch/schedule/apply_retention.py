"""Deletes what retention decided: ZFS snapshots pool by pool, then the bundles.

The decisions are made by :mod:`snaporch.schedule.retention`.

Once a day it also prunes the bundle store: expired trash, expired safety copies of restores, and
bundles whose ZFS snapshots were destroyed by another program; and the copies that this machine has
retention for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from snaporch import default_paths
from snaporch.catalog.run_snapshots import by_pool
from snaporch.context import Context
from snaporch.errors import BusyError, SnaporchError
from snaporch.locks import (
    REPLICATING,
    RETENTION,
    LockHolder,
    domain_lock,
    held_by,
    replication_lock_name,
)
from snaporch.model import Domain
from snaporch.prune.decision import PruneAction
from snaporch.prune.decision import PruneDecision as Pruning
from snaporch.prune.prune import PruneResult, prune
from snaporch.replication.bookmarks import bookmark_prefix
from snaporch.restore.start_bar import may_be_barred
from snaporch.schedule.forecast import Forecast, make_forecasts, replicas_of
from snaporch.schedule.prune_received_copies import begin_day, prune_copies_daily
from snaporch.schedule.retention import RetentionDecision
from snaporch.zfs import MountedError, PoolError

_HELD_SECONDS = 60
"""How long a domain's lock is held at most; a snapshot that becomes due must wait for it."""
_PRUNED_NAME = "pruned"
"""A file whose mtime is the time of the last prune of the whole store."""


@dataclass
class RetentionResult:
    """What was deleted, and what was not."""

    deleted: list[tuple[str, RetentionDecision]] = field(default_factory=list)
    """Name of the domain and decision, for each deleted snapshot."""
    pruned: list[Pruning] = field(default_factory=list)
    """What was moved to the trash, deleted, or put back from the trash."""
    failures: list[SnaporchError] = field(default_factory=list)
    busy: list[str] = field(default_factory=list)
    """Domains that were locked, or whose lock was held long enough; retention runs next time."""
    mounted: list[MountedError] = field(default_factory=list)
    """Snapshots that are mounted somewhere, and so cannot be destroyed; tried again next time."""


def apply_retention(
    context: Context, forecasts: Sequence[Forecast], now: datetime
) -> RetentionResult:
    """Delete the snapshots that no rule keeps; a failure on one domain does not stop the others."""
    done = RetentionResult()
    for forecast in forecasts:
        if forecast.to_delete:
            context.interrupt.check(forecast.domain.name)
            try:
                _retire(context, forecast, now, done)
            except BusyError:
                done.busy.append(forecast.domain.name)
            except SnaporchError as error:
                done.failures.append(error)
    return done


def prune_daily(context: Context, stopped: Callable[[], bool]) -> RetentionResult:
    """Prune the store, and copies, if the last prune is a day old; needs no lock of the schedule.

    It runs once a day even if it fails: errors are reported, and retried the next day. If the file
    that marks the time cannot be written (a full disk), it runs at each call.

    Args:
        stopped: returns True if pruning must end before the next item.
    """
    done = RetentionResult()
    journal, find = context.config.paths.journal, context.hypervisor.find
    mark = context.config.paths.schedule / _PRUNED_NAME
    copies = prune_copies_daily(context.config, context.pool, stopped)
    _add(done, copies)
    if stopped() or not begin_day(mark):
        return done
    try:
        pruned = prune(
            context.config,
            context.pool,
            may_be_barred=lambda uuid: may_be_barred(journal, lambda: find(uuid)),
            stopped=stopped,
        )
    except SnaporchError as error:
        done.failures.append(error)
        return done
    _add(done, pruned)
    return done


def _add(done: RetentionResult, pruned: PruneResult) -> None:
    done.failures += [*pruned.failures, *pruned.undecided_items]
    done.pruned += pruned.of(PruneAction.TRASH, PruneAction.DELETE, PruneAction.PUT_BACK)


def last_daily_prune(schedule: Path) -> datetime | None:
    """When the last daily prune began, as ``paths.schedule`` has it; ``None`` if there was none."""
    try:
        return datetime.fromtimestamp((schedule / _PRUNED_NAME).stat().st_mtime, UTC)
    except OSError:
        return None


def _retire(context: Context, forecast: Forecast, now: datetime, done: RetentionResult) -> None:
    domain = forecast.domain
    gone: list[str] = []

    with _held(context, domain) as copying:
        # A restore may have rolled back snapshots before this lock was held.
        (current,) = make_forecasts(context, now, domain.uuid)
        foreseen = {verdict.taken.run for verdict in forecast.to_delete}
        if copying is not None:  # which may take days
            needed = foreseen - runs_not_needed(context, current, copying.replica)
            done.busy += [domain.name] if needed else []
            foreseen -= needed
        end = context.clock.monotonic() + _HELD_SECONDS
        for verdict in current.to_delete:
            if verdict.taken.run not in foreseen:
                continue
            is_over = copying is not None and _copying(domain) != copying  # another may have begun
            if is_over or context.clock.monotonic() > end:
                done.busy.append(domain.name)
                break
            try:
                _destroy(context, current.names[verdict.taken.run])
            except MountedError as error:
                done.mounted.append(error)
                continue
            except PoolError as error:
                done.failures.append(error)
                continue
            done.deleted.append((domain.name, verdict))
            gone.append(f"{domain.uuid}/{verdict.taken.run}")
    if gone:
        done.failures += prune(context.config, context.pool, only=gone).failures


@contextmanager
def _held(context: Context, domain: Domain) -> Iterator[LockHolder | None]:
    """Hold a domain's locks.

    Yields:
        The replication under way, whose lock is not held then; ``None`` if there is none.

    Raises:
        BusyError: a run works on it, or a backup machine pulls it.
    """

    def hold(uuid: str) -> AbstractContextManager[None]:
        return domain_lock(
            default_paths.LOCKS, domain.name, uuid, RETENTION, wait=0, interrupt=context.interrupt
        )

    name = replication_lock_name(domain.uuid)
    with hold(domain.uuid), ExitStack() as copying:
        try:
            copying.enter_context(hold(name))
        except BusyError:
            holder = _copying(domain)
            if holder is None:
                raise
            yield holder
        else:
            yield None


def _copying(domain: Domain) -> LockHolder | None:
    """The replication of a domain that is under way."""
    holder = held_by(default_paths.LOCKS, replication_lock_name(domain.uuid))
    return holder if holder is not None and holder.doing == REPLICATING else None


def runs_not_needed(context: Context, forecast: Forecast, replica: str = "") -> set[str]:
    """The runs of a domain that the replication under way does not need: the replica has them.

    A replication needs the snapshots from the newest one that the replica has, which it bookmarks
    before it sends anything. So older ones than its bookmarks are not needed. Another replica does
    not count, such as one that never answers: without a replication retention waits for none.
    If the replica is not known, every one must have bookmarks that is configured and has any, or
    that the domain's policies name: making them may have failed.

    Args:
        context: the configuration, and the pools.
        forecast: of the domain.
        replica: the one that is being copied to; empty if it is not known.
    """
    datasets = sorted({dataset for record in forecast.records for dataset in record.datasets})
    oldest: dict[str, int] = {}
    replicas: dict[str, set[str]] = {}
    for dataset in datasets:
        bookmarks = context.pool.bookmarks(dataset)
        for each in [replica] if replica else context.config.replica:
            start = f"{dataset}#{bookmark_prefix(each)}"
            txgs = [mark.createtxg for name, mark in bookmarks.items() if name.startswith(start)]
            if txgs:
                replicas.setdefault(dataset, set()).add(each)
                oldest[dataset] = min([oldest.get(dataset, txgs[0]), *txgs])
    wanted = {replica} if replica else {*replicas_of(context.config, forecast.assignment)}
    births = {each.full_name: each.createtxg for each in context.pool.snapshots(datasets)}
    found = set()
    for record in forecast.records:
        there = {*record.replicated, *record.dropped}
        names = [(dataset, f"{dataset}@{record.snapshot}") for dataset in record.datasets]
        if all(
            replicas.get(dataset)
            and wanted <= replicas[dataset] <= there
            and name in births
            and births[name] < oldest[dataset]
            for dataset, name in names
        ):
            found.add(record.run)
    return found


def _destroy(context: Context, names: Sequence[str]) -> None:
    """Destroy a run's snapshots, atomically in each pool; an error stops before the next pool."""
    for members in by_pool(names):
        context.pool.destroy_snapshots(members)
