"""When the next replication of a domain is due, derived from what its snapshots record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from snaporch.config import AnyReplica, Replica
from snaporch.config.transfer_window import ALWAYS, Windows
from snaporch.model import Level, SnapshotRecord, iso
from snaporch.replication.transfer import limits_rate
from snaporch.schedule.failed_attempts import FailedAttempt


@dataclass(frozen=True, slots=True)
class PendingReplication:
    """The next replication of a domain's snapshots to a replica."""

    domain: str
    uuid: str
    replica: str
    at: datetime
    reason: str
    last: datetime | None
    """When the newest snapshot that the replica has was taken; ``None`` without one."""
    since: datetime
    """When the oldest snapshot that the replica lacks was taken; that one may be deleted since."""
    failed: FailedAttempt | None = None
    """The last attempt, if it failed."""
    window: Windows = ALWAYS
    """When it may start by itself."""
    stopped: datetime | None = None
    """When the last attempt was stopped, because its window had ended."""
    completed: str = ""
    """When the last one without a failure ended, in ISO 8601; empty if that is not known."""

    @property
    def turn(self) -> tuple[datetime, datetime, datetime]:
        """The order of those that are due.

        Those that the end of a window stopped come last, in the order of that: or else a guest that
        takes longer than a window would keep the others waiting each time.
        """
        return self.stopped or datetime.min.replace(tzinfo=UTC), self.at, self.since

    def waits_for_window(self, now: datetime) -> bool:
        """Whether it would be due, and its window is closed."""
        return bool(self.window) and self.at > now and not self.window.is_open(now)

    def is_late(self, late: timedelta, now: datetime) -> bool:
        """Whether the replica has lacked a snapshot for too long.

        With a window, also the first whole window since the snapshot must have passed.
        """
        return self.since < now - late and self.window.had_one(self.since, now)

    @property
    def key(self) -> str:
        """Identifies the replication: ``UUID/REPLICA``."""
        return f"{self.uuid}/{self.replica}"

    def due(self, now: datetime) -> bool:
        """Whether the replication is due at ``now``."""
        return self.at <= now


def next_replication(
    replica: str,
    policies: Iterable[str],
    records: Sequence[SnapshotRecord],
    failed: Mapping[str, FailedAttempt],
    retry: timedelta,
    now: datetime,
    window: Windows = ALWAYS,
    stopped: Mapping[str, FailedAttempt] | None = None,
    completed: Mapping[str, FailedAttempt] | None = None,
    waited: Mapping[str, FailedAttempt] | None = None,
) -> PendingReplication | None:
    """When to replicate to a replica next.

    Torn snapshots are not replicated. An older snapshot whose bundle is incomplete here cannot be
    replicated and is left out; the newest snapshot is always included. A snapshot that the replica
    cannot get any more is left out, too.

    Args:
        policies: the policies that replicate to this replica.
        records: finished snapshots of one domain, oldest first.
        failed: failed attempts, by ``UUID/REPLICA``.
        retry: how long after those the next attempt is due.
        now: the time.
        window: when it may start by itself.
        stopped: attempts that the end of a window stopped, by ``UUID/REPLICA``.
        completed: the last ones without a failure, by ``UUID/REPLICA``.
        waited: since when each has waited, as :func:`waiting_since` found earlier: retention may
            have deleted the snapshot of that time.

    Returns:
        ``None`` if the replica lacks no snapshot.
    """
    named = set(policies)
    own = [r for r in records if r.policy in named and r.level is not Level.TORN]
    wanted = [r for r in own if replica not in r.dropped]
    waiting = [
        record.created
        for record in wanted
        if replica not in record.replicated and (record is wanted[-1] or record.state.is_there)
    ]
    if not waiting:
        return None
    newest = wanted[-1]
    last = last_arrived(replica, records)
    reason = f"{len(waiting)} not copied yet" if last else "nothing copied yet"
    found = PendingReplication(
        newest.domain, newest.uuid, replica, now, reason, last, min(waiting), window=window
    )
    if end := (completed or {}).get(found.key):
        found = replace(found, completed=iso(end.at))
    waits = (waited or {}).get(found.key)
    if waits is not None and waits.reason == found.completed:  # nothing was completed meanwhile
        found = replace(found, since=min(found.since, waits.at))
    if stop := (stopped or {}).get(found.key):
        found = replace(found, stopped=stop.at)
    before = failed.get(found.key)
    if before is not None and before.at <= now:
        found = replace(found, failed=before)
        if before.repeated_at(retry) > now:
            again = before.repeated_at(retry)
            found = replace(found, at=again, reason=before.repeated_because)
    if window.is_open(found.at):
        return found
    reason = f"{found.reason}; waits for its window {window} since {found.since:%Y-%m-%d %H:%M} UTC"
    return replace(found, at=window.opens(found.at), reason=reason)


def start_window(replica: AnyReplica) -> Windows:
    """When a replication may start by itself, and continue.

    Without ``mbuffer`` nothing limits ``zfs send``, so ``rate_outside`` counts as not set.
    """
    return replica.window if lacks_mbuffer(replica) else replica.start_window


def lacks_mbuffer(replica: AnyReplica) -> bool:
    """Whether ``rate_outside`` is set, and has no effect here."""
    is_set = isinstance(replica, Replica) and replica.rate_outside is not None
    return is_set and not limits_rate()


def waiting_since(pending: Iterable[PendingReplication]) -> dict[str, FailedAttempt]:
    """What is to be recorded of those that wait; see :func:`next_replication`."""
    return {
        each.key: FailedAttempt(each.since.replace(microsecond=0), each.completed)
        for each in pending
    }


def last_arrived(replica: str, records: Iterable[SnapshotRecord]) -> datetime | None:
    """When the newest snapshot that a replica has was taken; ``None`` if it has none."""
    return max((r.created for r in records if replica in r.replicated), default=None)
