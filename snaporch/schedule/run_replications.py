"""Carries out the replications that are due, one after the other.

Which are due is decided by :mod:`snaporch.schedule.replication_due`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial

from snaporch.context import Context
from snaporch.errors import InterruptedRunError, SnaporchError, WindowClosedError
from snaporch.interrupt import WindowInterrupt
from snaporch.model import Level, SnapshotRecord
from snaporch.replication.interface import Destination
from snaporch.replication.replicate import ReplicationResult, replicate
from snaporch.schedule.bulk_queue import due_items
from snaporch.schedule.failed_attempts import COMPLETED, REPLICATIONS, STOPPED, record_attempt
from snaporch.schedule.replication_due import PendingReplication, lacks_mbuffer, start_window

Opened = Callable[[Context, str], Destination]
"""Opens a replica by its name."""


@dataclass(frozen=True, slots=True)
class ReplicationOutcome:
    """The result of one replication, or the error."""

    pending: PendingReplication
    outcome: ReplicationResult | SnaporchError


def replicate_due(
    context: Context,
    opened: Opened,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Iterator[ReplicationOutcome]:
    """Replicate what is due, by turns: the longest overdue first. The caller holds the lock.

    Those that the end of a window has stopped come last.

    Args:
        context: the configuration, libvirt and ZFS.
        opened: opens a replica.
        now: the clock by which windows end.

    Raises:
        InterruptedRunError: a signal was received; what was already copied stays.
    """
    destinations = cache(partial(_open, context, opened, now))
    for forecast, pending in due_items(
        context, "replicate", lambda forecast: forecast.replications
    ):
        records = [each for each in forecast.finished if each.level is not Level.TORN]
        yield _send(context, records, pending, destinations)


def _send(
    context: Context,
    records: Sequence[SnapshotRecord],
    pending: PendingReplication,
    destinations: Callable[[str], tuple[Context, Destination]],
) -> ReplicationOutcome:
    try:
        context, destination = destinations(pending.replica)
        outcome = replicate(context, records, pending.replica, destination)
    except WindowClosedError as error:
        record_attempt(context, pending.key, error.reason, STOPPED)
        return ReplicationOutcome(pending, error)
    except InterruptedRunError:
        raise
    except SnaporchError as error:
        record_attempt(context, pending.key, error.line(), REPLICATIONS)
        return ReplicationOutcome(pending, error)
    record_attempt(context, pending.key, None, REPLICATIONS)
    record_attempt(context, pending.key, None, STOPPED)
    record_attempt(context, pending.key, "", COMPLETED)
    return ReplicationOutcome(pending, outcome)


def _open(
    context: Context, opened: Opened, now: Callable[[], datetime], name: str
) -> tuple[Context, Destination]:
    """Open a replica; what it is copied with stops at the end of its window, too."""
    replica = context.config.replica[name]
    window = start_window(replica)
    if lacks_mbuffer(replica):
        text = "rate_outside has no effect without mbuffer, so it stops at the end of its window"
        context.progress.note(name, f"{text}; apt install mbuffer")
    if window:

        def closed() -> str:
            return "" if window.is_open(now()) else f"its window ({window}) has ended"

        context = replace(
            context, interrupt=WindowInterrupt(outer=context.interrupt, closed=closed)
        )
    return context, opened(context, name)
