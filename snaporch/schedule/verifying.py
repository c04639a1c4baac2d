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
from snaporch.schedule.tries import VERIFICATIONS, Failed, read_failed, write_failed


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
    try:
        outcome = verify(context, check.record, Ordeal())
    except InterruptedRunError:
        raise
    except SnaporchError as error:
        _remember(context, check, error.reason)
        return Checked(check, error)
    _remember(context, check, None)
    return Checked(check, outcome)


def _remember(context: Context, check: Check, reason: str | None) -> None:
    """A verdict is on the snapshots; what was not found out is tried again after a while."""
    directory = context.config.paths.schedule
    known = read_failed(directory, VERIFICATIONS)
    changed = {key: each for key, each in known.items() if key != check.key}
    if reason is not None:
        changed[check.key] = Failed(datetime.now(UTC), reason)
    if changed != known:
        write_failed(directory, changed, VERIFICATIONS)
