"""Deleting what retention says: ZFS snapshots pool by pool, then the bundles.

And once a day what else has had its time in the store: trash, safety copies of restores, bundles
whose snapshots others have destroyed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from snaporch import default_paths
from snaporch.bundle.store import private_directory
from snaporch.context import Context
from snaporch.errors import BusyError, SnaporchError
from snaporch.locks import RETENTION, domain_lock
from snaporch.prune.decision import PruneAction
from snaporch.prune.decision import PruneDecision as Pruning
from snaporch.prune.prune import prune
from snaporch.replication.replicate import replication_lock_name
from snaporch.restore.start_lock import may_have_bar
from snaporch.schedule.forecast import Forecast, look
from snaporch.schedule.retention import RetentionDecision
from snaporch.zfs import MountedError, PoolError

_HELD_SECONDS = 60
"""For which a domain's lock is held at most; a snapshot that is due meanwhile waits longer."""
_PRUNED_NAME = "pruned"
"""A file that is touched whenever the store was pruned as a whole."""
_DAY_SECONDS = 86_400


@dataclass
class RetentionResult:
    """What came of it."""

    deleted: list[tuple[str, RetentionDecision]] = field(default_factory=list)
    """Domain's name and verdict of each snapshot that is gone."""
    pruned: list[Pruning] = field(default_factory=list)
    """Of what was in the store and went, or came back out of the trash."""
    failures: list[SnaporchError] = field(default_factory=list)
    busy: list[str] = field(default_factory=list)
    """Domains others work with, or may want to: what is left of theirs waits for the next time."""
    mounted: list[MountedError] = field(default_factory=list)
    """Snapshots that somebody has mounted; they wait for the next time, too."""


def retire(context: Context, forecasts: Sequence[Forecast], now: datetime) -> RetentionResult:
    """Delete what retention foresees; a failure on one domain does not stop the others."""
    done = RetentionResult()
    for forecast in forecasts:
        if forecast.doomed:
            context.interrupt.check(forecast.domain.name)
            try:
                _retire(context, forecast, now, done)
            except BusyError:
                done.busy.append(forecast.domain.name)
            except SnaporchError as error:
                done.failures.append(error)
    return done


def prune_daily(context: Context, stopped: Callable[[], bool]) -> RetentionResult:
    """Prune the store as a whole, if that was not done today; nothing that is due waits for it.

    Once a day, whether it fails or not: what cannot be judged is told, and waits for the next.
    Without a mark, on a full disk say, it is done each time.

    Args:
        stopped: whether to end before the next thing.
    """
    done = RetentionResult()
    journal, find = context.config.paths.journal, context.hypervisor.find
    mark = context.config.paths.schedule / _PRUNED_NAME
    if stopped() or not _is_a_day_old(mark):
        return done
    with suppress(OSError):
        private_directory(mark.parent)
        mark.touch(mode=0o600)
    try:
        pruned = prune(
            context.config,
            context.pool,
            may_be_barred=lambda uuid: may_have_bar(journal, lambda: find(uuid)),
            stopped=stopped,
        )
    except SnaporchError as error:
        done.failures.append(error)
        return done
    done.failures += [*pruned.failures, *pruned.unjudged]
    done.pruned += pruned.of(PruneAction.TRASH, PruneAction.DELETE, PruneAction.PUT_BACK)
    return done


def _is_a_day_old(mark: Path) -> bool:
    """Or from the future: the clock went back."""
    try:
        return not 0 <= time.time() - mark.stat().st_mtime < _DAY_SECONDS
    except OSError:
        return True


def _retire(context: Context, forecast: Forecast, now: datetime, done: RetentionResult) -> None:
    domain = forecast.domain
    gone: list[str] = []

    def hold(uuid: str) -> AbstractContextManager[None]:
        return domain_lock(
            default_paths.LOCKS, domain.name, uuid, RETENTION, wait=0, interrupt=context.interrupt
        )

    with hold(domain.uuid), hold(replication_lock_name(domain.uuid)):
        # What was seen before the lock was held may have been rolled away meanwhile.
        (current,) = look(context, now, domain.uuid)
        foreseen = {verdict.taken.run for verdict in forecast.doomed}
        end = time.monotonic() + _HELD_SECONDS
        for verdict in current.doomed:
            if verdict.taken.run not in foreseen:
                continue
            if time.monotonic() > end:
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


def _destroy(context: Context, names: Sequence[str]) -> None:
    """Atomic in each pool; what cannot be destroyed in one pool stays in the later ones, too."""
    pools: dict[str, list[str]] = {}
    for name in names:
        pools.setdefault(name.split("/", 1)[0].split("@", 1)[0], []).append(name)
    for members in pools.values():
        context.pool.destroy_snapshots(members)
