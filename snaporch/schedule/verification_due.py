"""When the next verification of a domain is due, derived from the results on its snapshots.

One that ended without a result (no memory, no libvirt) is repeated after ``schedule.retry``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from snaporch.model import SnapshotRecord
from snaporch.schedule.failed_attempts import FailedAttempt
from snaporch.schedule.recurrence import Times


@dataclass(frozen=True, slots=True)
class DueVerification:
    """The next verification of a domain's snapshots for a policy."""

    policy: str
    record: SnapshotRecord
    """The newest snapshot now; at ``at`` there may be a newer one."""
    at: datetime
    reason: str
    disks: bool = False
    """Whether all data of the disks is read too."""

    @property
    def key(self) -> str:
        """Identifies the verification: ``UUID/POLICY``."""
        return f"{self.record.uuid}/{self.policy}"

    @property
    def turn(self) -> tuple[datetime]:
        """The longest overdue is the first of those that are due."""
        return (self.at,)

    def due(self, now: datetime) -> bool:
        """Whether the verification is due at ``now``."""
        return self.at <= now


def next_verification(
    policy: str,
    when: Times,
    records: Sequence[SnapshotRecord],
    failed: Mapping[str, FailedAttempt],
    retry: timedelta,
    now: datetime,
    *,
    disks: bool = False,
) -> DueVerification | None:
    """When the newest snapshot of a policy is verified next.

    Times are counted from the last verification that *passed*. If the newest snapshot failed, a
    newer one is due as soon as it exists, and the same one again at the policy's next time.

    Args:
        records: finished snapshots of one domain, oldest first.
        failed: verifications that ended without a result, by ``UUID/POLICY``.
        retry: how long after those the next attempt is due.
        disks: only verifications that read the disks count as passed.

    Returns:
        ``None`` if the policy has no snapshot.
    """
    own = [record for record in records if record.policy == policy]
    if not own:
        return None
    check = replace(_by_verdicts(policy, when, own, now, disks=disks), disks=disks)
    last = failed.get(check.key)
    if last is None or last.at > now or last.repeated_at(retry) <= check.at:
        return check
    return replace(check, at=last.repeated_at(retry), reason=last.repeated_because)


def _by_verdicts(
    policy: str, when: Times, own: Sequence[SnapshotRecord], now: datetime, *, disks: bool
) -> DueVerification:
    newest = own[-1]
    verdicts = [record.verified for record in own if record.verified]
    past = [verdict for verdict in verdicts if verdict.at <= now]
    if newest.verified in past and newest.verified is not None and not newest.verified.passed:
        at = when.after(newest.verified.at)
        return DueVerification(policy, newest, at, "it failed, and no newer snapshot exists")
    counted = [verdict.disks_at if disks else verdict.at for verdict in past if verdict.passed]
    passed = [at for at in counted if at is not None]
    if not passed:
        reason = "no verification has passed yet" if past else "no verification yet"
        return DueVerification(policy, newest, now, reason)
    return DueVerification(policy, newest, when.after(max(passed)), when.rule)
