"""Carries out the verifications that are due, one after the other.

Which are due is decided by :mod:`snaporch.schedule.verification_due`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from snaporch.context import Context
from snaporch.errors import InterruptedRunError, SnaporchError
from snaporch.schedule.bulk_queue import due_items
from snaporch.schedule.failed_attempts import VERIFICATIONS, record_attempt
from snaporch.schedule.verification_due import DueVerification
from snaporch.verify.verify import Verification, VerifyOptions, verify


@dataclass(frozen=True, slots=True)
class VerificationOutcome:
    """The result of one verification, or the error that prevented a result."""

    check: DueVerification
    outcome: Verification | SnaporchError

    @property
    def problem(self) -> SnaporchError | None:
        """The error to report; ``None`` if the snapshot passed."""
        if isinstance(self.outcome, SnaporchError):
            return self.outcome
        return self.outcome.problem


def verify_due(context: Context) -> Iterator[VerificationOutcome]:
    """Verify what is due, the longest overdue first. The caller holds the verification lock.

    Raises:
        InterruptedRunError: a signal was received; the running verification has no result.
    """
    for _, check in due_items(context, "verify", lambda forecast: forecast.verifications):
        yield _verify(context, check)


def _verify(context: Context, check: DueVerification) -> VerificationOutcome:
    try:
        outcome = verify(context, check.record, VerifyOptions(disks=check.disks))
    except InterruptedRunError:
        raise
    except SnaporchError as error:
        # Results are recorded on the snapshots; an attempt without one is retried later.
        record_attempt(context, check.key, error.reason, VERIFICATIONS)
        return VerificationOutcome(check, error)
    record_attempt(context, check.key, None, VERIFICATIONS)
    return VerificationOutcome(check, outcome)
