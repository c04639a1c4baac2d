"""Test restores that policies have due: one after the other, one at a time on a host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from snaporch.errors import InterruptedRunError, SnaporchError
from snaporch.restore.verify import Ordeal, Verification, verify
from snaporch.run.context import Context
from snaporch.schedule.checks import Check
from snaporch.schedule.outlook import look
from snaporch.schedule.tries import VERIFICATIONS, remember_try


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of one: a verdict, or why nothing was found out."""

    check: Check
    outcome: Verification | SnaporchError


def verify_due(context: Context) -> Iterator[Checked]:
    """Verify what is due, what has waited longest first; the caller sees that nobody else does.

    Looks anew after each, for each takes its time: snapshots come and go meanwhile.

    Raises:
        InterruptedRunError: a signal came; the one under way has found nothing out.
    """
    done: set[str] = set()
    while True:
        context.interrupt.check("verify")
        now = datetime.now(UTC)
        due = [check for each in look(context, now) for check in each.checks if check.due(now)]
        left = sorted(
            (check for check in due if check.key not in done),
            key=lambda check: (check.at, check.record.domain, check.policy),
        )
        if not left:
            return
        done.add(left[0].key)
        yield _verify(context, left[0])


def _verify(context: Context, check: Check) -> Checked:
    directory = context.config.paths.schedule
    try:
        outcome = verify(context, check.record, Ordeal())
    except InterruptedRunError:
        raise
    except SnaporchError as error:
        # A verdict is on the snapshots; what was not found out is tried again after a while.
        remember_try(directory, check.key, error.reason, VERIFICATIONS)
        return Checked(check, error)
    remember_try(directory, check.key, None, VERIFICATIONS)
    return Checked(check, outcome)
