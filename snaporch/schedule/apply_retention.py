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

    with _held(context, domain) as is_copied:
        # A restore may have rolled back snapshots before this lock was held.
        (current,) = make_forecasts(context, now, domain.uuid)
        foreseen = {verdict.taken.run for verdict in forecast.to_delete}
        if is_copied:  # which may take days
            needed = foreseen - runs_not_needed(context, current)
            done.busy += [domain.name] if needed else []
            foreseen -= needed
        end = context.clock.monotonic() + _HELD_SECONDS
        for verdict in current.to_delete:
            if verdict.taken.run not in foreseen:
                continue
            if context.clock.monotonic() > end:
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
def _held(context: Context, domain: Domain) -> Iterator[bool]:
    """Hold a domain's locks.

    Yields:
        Whether it is being replicated, so that the lock of that is not held.

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
            holder = held_by(default_paths.LOCKS, name)
            if holder is None or holder.doing != REPLICATING:
                raise
            yield True
        else:
            yield False


def runs_not_needed(context: Context, forecast: Forecast) -> set[str]:
    """The runs of a domain that no replication under way needs: every replica has all of them.

    A replication needs the snapshots from the newest one that the replica has, which it bookmarks
    before it sends anything. So older ones than the bookmarks of all replicas are not needed. Each
    replica of the domain's policies must have bookmarks: making them may have failed.

    Args:
        context: the configuration, and the pools.
        forecast: of the domain.
    """
    datasets = sorted({dataset for record in forecast.records for dataset in record.datasets})
    oldest: dict[str, int] = {}
    replicas: dict[str, set[str]] = {}
    for dataset in datasets:
        bookmarks = context.pool.bookmarks(dataset)
        for replica in context.config.replica:
            start = f"{dataset}#{bookmark_prefix(replica)}"
            txgs = [mark.createtxg for name, mark in bookmarks.items() if name.startswith(start)]
            if txgs:
                replicas.setdefault(dataset, set()).add(replica)
                oldest[dataset] = min([oldest.get(dataset, txgs[0]), *txgs])
    wanted = replicas_of(context.config, forecast.assignment).keys()
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
