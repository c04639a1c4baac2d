"""Test restores that policies have due: one after the other, one at a time on a host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from snaporch.context import Context
from snaporch.errors import InterruptedRunError, SnaporchError
from snaporch.schedule.failures import VERIFICATIONS, remember_try
from snaporch.schedule.queue import due_items
from snaporch.schedule.verification_due import DueVerification
from snaporch.verify.verify import Verification, VerifyOptions, verify


@dataclass(frozen=True, slots=True)
class VerificationOutcome:
    """What came of one: a verdict, or why nothing was found out."""

    check: DueVerification
    outcome: Verification | SnaporchError

    @property
    def trouble(self) -> SnaporchError | None:
        """What somebody should be told, if anything went wrong."""
        if isinstance(self.outcome, SnaporchError):
            return self.outcome
        return self.outcome.trouble


def verify_due(context: Context) -> Iterator[VerificationOutcome]:
    """Verify what is due, what has waited longest first; the caller sees that nobody else does.

    Raises:
        InterruptedRunError: a signal came; the one under way has found nothing out.
    """
    for _, check in due_items(context, "verify", lambda forecast: forecast.checks):
        yield _verify(context, check)


def _verify(context: Context, check: DueVerification) -> VerificationOutcome:
    try:
        outcome = verify(context, check.record, VerifyOptions(disks=check.disks))
    except InterruptedRunError:
        raise
    except SnaporchError as error:
        # A verdict is on the snapshots; what was not found out is tried again after a while.
        remember_try(context, check.key, error.reason, VERIFICATIONS)
        return VerificationOutcome(check, error)
    remember_try(context, check.key, None, VERIFICATIONS)
    return VerificationOutcome(check, outcome)
