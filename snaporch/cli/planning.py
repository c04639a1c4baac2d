"""Looking ahead and telling, behind ``snaporch plan``."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from datetime import UTC, datetime, tzinfo

from snaporch.context import Context
from snaporch.errors import ExitCode, one_line
from snaporch.model import iso
from snaporch.output.terminal import print_error, print_result
from snaporch.schedule.forecast import Forecast, NextSnapshot, look
from snaporch.schedule.recurrence import zone_of
from snaporch.schedule.replication_due import PendingReplication
from snaporch.schedule.verification_due import DueVerification


def plan_and_tell(context: Context, domain: str | None, *, verbose: bool, json: bool) -> int:
    """Print what is in store; 3 when a domain is given a policy that there is not."""
    now = datetime.now(UTC)
    outlooks = look(context, now, domain)
    if json:
        document = _document(outlooks, now)
        print_result(json_format.dumps(document, indent=2, ensure_ascii=False))
    else:
        _tell(context, outlooks, now, verbose=verbose)
    return tell_unknown(outlooks)


def tell_unknown(outlooks: Sequence[Forecast]) -> int:
    """A line for every policy that is named and does not exist; the exit code for it."""
    strange = [(each, name) for each in outlooks for name in each.assignment.unknown]
    for each, name in strange:
        reason = f"{each.assignment.source} names the policy {name!r}, which does not exist"
        print_error(f"{each.domain.name}: {reason}; add [policy.{name}] to the configuration")
    return ExitCode.CONFIG if strange else ExitCode.OK


def _document(outlooks: Sequence[Forecast], now: datetime) -> dict[str, object]:
    return {
        "now": iso(now),
        "runs": [
            {
                "domain": each.domain.name,
                "uuid": each.domain.uuid,
                "policy": coming.policy,
                "at": iso(coming.at),
                "due": coming.due(now),
                "reason": coming.reason,
                "assigned_by": each.assignment.source,
            }
            for each in outlooks
            for coming in each.nexts
        ],
        "verifications": [
            {
                "domain": each.domain.name,
                "uuid": each.domain.uuid,
                "policy": check.policy,
                "snapshot": check.record.snapshot,
                "at": iso(check.at),
                "due": check.due(now),
                "reason": check.reason,
            }
            for each in outlooks
            for check in each.checks
        ],
        "replications": [
            {
                "domain": each.domain.name,
                "uuid": each.domain.uuid,
                "replica": shipment.replica,
                "at": iso(shipment.at),
                "due": shipment.due(now),
                "reason": shipment.reason,
            }
            for each in outlooks
            for shipment in each.shipments
        ],
        "retention": [
            {
                "domain": each.domain.name,
                "uuid": each.domain.uuid,
                "snapshot": verdict.taken.snapshot,
                "policy": verdict.taken.policy,
                "created": iso(verdict.taken.created),
                "action": "delete" if verdict.delete else "keep",
                "reason": verdict.reason,
            }
            for each in outlooks
            for verdict in each.verdicts
            if verdict.taken.policy is not None
        ],
    }


def _tell(context: Context, outlooks: Sequence[Forecast], now: datetime, *, verbose: bool) -> None:
    zone = zone_of(context.config)
    for each in outlooks:
        name = one_line(each.domain.name)
        for coming in each.nexts:
            print_result(f"{name}  {coming.policy}  {_when(coming, now, zone)}  ({coming.reason})")
        if not each.nexts:
            print_result(f"{name}  nothing is taken by itself")
        for check in each.checks:
            when, reason = _when(check, now, zone), one_line(check.reason)
            print_result(f"{name}  {check.policy}  verify {when}  ({reason})")
        for shipment in each.shipments:
            when, reason = _when(shipment, now, zone), one_line(shipment.reason)
            print_result(f"{name}  {shipment.replica}  replicate {when}  ({reason})")
        for verdict in each.verdicts:
            if verdict.delete or (verbose and verdict.taken.policy is not None):
                word = "would go" if verdict.delete else "stays"
                print_result(f"{name}@{verdict.taken.snapshot}  {word}: {one_line(verdict.reason)}")
        if each.verdicts:
            print_result(f"{name}  {_sum(each)}")


def _when(
    coming: NextSnapshot | DueVerification | PendingReplication, now: datetime, zone: tzinfo
) -> str:
    if coming.due(now):
        return "due now"
    return f"next {coming.at.astimezone(zone):%Y-%m-%d %H:%M:%S %Z}"


def _sum(each: Forecast) -> str:
    own = [verdict for verdict in each.verdicts if verdict.taken.policy is not None]
    doomed = len(each.doomed)
    text = f"{len(own)} snapshot{'' if len(own) == 1 else 's'} of policies, {doomed} would go"
    others = len(each.verdicts) - len(own)
    return f"{text}; {others} not of policies" if others else text
