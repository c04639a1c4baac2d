"""When the next replication of a domain is due, derived from what its snapshots record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from snaporch.model import Level, SnapshotRecord
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
    """When the oldest snapshot that the replica lacks was taken."""
    failed: FailedAttempt | None = None
    """The last attempt, if it failed."""

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
    found = PendingReplication(newest.domain, newest.uuid, replica, now, reason, last, min(waiting))
    before = failed.get(found.key)
    if before is None or before.at > now:
        return found
    if before.repeated_at(retry) <= now:
        return replace(found, failed=before)
    return replace(
        found, at=before.repeated_at(retry), reason=before.repeated_because, failed=before
    )


def last_arrived(replica: str, records: Iterable[SnapshotRecord]) -> datetime | None:
    """When the newest snapshot that a replica has was taken; ``None`` if it has none."""
    return max((r.created for r in records if replica in r.replicated), default=None)
