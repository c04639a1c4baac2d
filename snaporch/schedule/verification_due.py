"""Which test restores policies have due: by the verdicts on the snapshots, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from snaporch.model import SnapshotRecord
from snaporch.schedule.failures import FailedAttempt
from snaporch.schedule.recurrence import Times


@dataclass(frozen=True, slots=True)
class DueVerification:
    """The next test restore that a policy wants of a domain."""

    policy: str
    record: SnapshotRecord
    """The newest snapshot now; there may be a newer one when the time has come."""
    at: datetime
    reason: str
    disks: bool = False
    """Whether all data of its disks is to be read."""

    @property
    def key(self) -> str:
        """What tells it from others: ``UUID/POLICY``."""
        return f"{self.record.uuid}/{self.policy}"

    def due(self, now: datetime) -> bool:
        """Whether its time has come."""
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
    """When the newest snapshot of a policy is to be verified; ``None`` while there is none.

    What counts is the last that *passed*: where one failed, the next newer one is looked at as
    soon as there is one, and the same one again when its time comes.

    Args:
        records: finished snapshots of one domain, oldest first.
        failed: verifications that found nothing out, by ``UUID/POLICY``.
        retry: how long after these the next try comes.
        disks: only those verifications have passed that have read the disks.
    """
    own = [record for record in records if record.policy == policy]
    if not own:
        return None
    check = replace(_by_verdicts(policy, when, own, now, disks=disks), disks=disks)
    last = failed.get(check.key)
    if last is None or last.at > now or last.at + retry <= check.at:
        return check
    reason = f"again after it failed: {last.reason}"
    return replace(check, at=last.at + retry, reason=reason)


def _by_verdicts(
    policy: str, when: Times, own: Sequence[SnapshotRecord], now: datetime, *, disks: bool
) -> DueVerification:
    newest = own[-1]
    verdicts = [record.verified for record in own if record.verified]
    past = [verdict for verdict in verdicts if verdict.at <= now]
    if newest.verified in past and newest.verified is not None and not newest.verified.passed:
        at = when.after(newest.verified.at)
        return DueVerification(policy, newest, at, "it failed, and there is no newer one")
    passed = [verdict.at for verdict in past if verdict.passed and verdict.disks >= disks]
    if not passed:
        reason = "none has passed yet" if past else "none was verified yet"
        return DueVerification(policy, newest, now, reason)
    return DueVerification(policy, newest, when.after(max(passed)), when.rule)
