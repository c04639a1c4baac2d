"""What policies want copied elsewhere: by what the snapshots say has arrived, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from snaporch.model import Level, SnapshotRecord
from snaporch.schedule.failures import FailedAttempt


@dataclass(frozen=True, slots=True)
class PendingReplication:
    """The next copying of a domain's snapshots to a replica."""

    domain: str
    uuid: str
    replica: str
    at: datetime
    reason: str
    last: datetime | None
    """When the newest snapshot that has arrived was taken."""
    since: datetime
    """When the oldest one was taken that should have followed it."""
    failed: FailedAttempt | None = None
    """The last try, if it failed."""

    @property
    def key(self) -> str:
        """What tells it from others: ``UUID/REPLICA``."""
        return f"{self.uuid}/{self.replica}"

    def due(self, now: datetime) -> bool:
        """Whether its time has come."""
        return self.at <= now


def next_replication(
    replica: str,
    policies: Iterable[str],
    records: Sequence[SnapshotRecord],
    failed: Mapping[str, FailedAttempt],
    retry: timedelta,
    now: datetime,
) -> PendingReplication | None:
    """When to copy to a replica; ``None`` while it has every snapshot that is wanted there.

    An older one whose bundle is not whole here can never arrive; the newest is asked for anyway.
    One that is torn is good for nothing there either.

    Args:
        policies: those that want their snapshots there.
        records: finished snapshots of one domain, oldest first.
        failed: tries that failed, by ``UUID/REPLICA``.
        retry: how long after these the next try comes.
    """
    named = set(policies)
    wanted = [r for r in records if r.policy in named and r.level is not Level.TORN]
    waiting = [
        record.created
        for record in wanted
        if replica not in record.replicated and (record is wanted[-1] or record.state.is_there)
    ]
    if not waiting:
        return None
    newest = wanted[-1]
    last = last_arrived(replica, records)
    reason = f"{len(waiting)} not there yet" if last else "nothing is there yet"
    found = PendingReplication(newest.domain, newest.uuid, replica, now, reason, last, min(waiting))
    before = failed.get(found.key)
    if before is None or before.at > now:
        return found
    if before.at + retry <= now:
        return replace(found, failed=before)
    reason = f"again after it failed: {before.reason}"
    return replace(found, at=before.at + retry, reason=reason, failed=before)


def last_arrived(replica: str, records: Iterable[SnapshotRecord]) -> datetime | None:
    """When the newest snapshot was taken that a replica has."""
    return max((r.created for r in records if replica in r.replicated), default=None)
