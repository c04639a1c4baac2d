"""``snaporch plan``: prints what :mod:`snaporch.schedule.forecast` foresees for each guest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption
from snaporch.errors import ExitCode, one_line

if TYPE_CHECKING:
    from datetime import datetime, tzinfo

    from snaporch.context import Context
    from snaporch.pull.pull import NextPull
    from snaporch.schedule.forecast import Forecast, NextSnapshot
    from snaporch.schedule.replication_due import PendingReplication
    from snaporch.schedule.verification_due import DueVerification


def plan_command(
    context: typer.Context,
    domain: Annotated[
        str | None,
        typer.Argument(
            metavar="[DOMAIN]", help="Only this domain, by name or UUID.", show_default=False
        ),
    ] = None,
    kept: Annotated[
        bool, typer.Option("--kept", help="Also list the snapshots that are kept.")
    ] = False,
    json: JsonOption = False,
    config: ConfigOption = None,
) -> int:
    """Preview the next snapshots, deletions and pulls.

    Changes nothing.
    """
    from datetime import UTC, datetime

    from snaporch.cli.session import session
    from snaporch.pull.pull import next_pulls
    from snaporch.schedule.forecast import make_forecasts

    now = datetime.now(UTC)
    with session(context, config, quiet=True, read_only=True) as opened:
        forecasts = make_forecasts(opened, now, domain)
        pulls = next_pulls(opened.config, now) if domain is None else []
        if json:
            _print_json(forecasts, pulls, now)
        else:
            _print(opened, forecasts, now, kept=kept)
            _print_pulls(opened, pulls, now)
        return print_unknown_policies(forecasts)


def print_unknown_policies(forecasts: Sequence[Forecast]) -> int:
    """Print a line for every assigned policy that does not exist; return 3 if there is one."""
    from snaporch.output.terminal import print_error

    unknown = [(each, name) for each in forecasts for name in each.assignment.unknown]
    for each, name in unknown:
        reason = f"{each.assignment.source} names the policy {name!r}, which does not exist"
        print_error(f"{each.domain.name}: {reason}; add [policy.{name}] to the configuration")
    return ExitCode.CONFIG if unknown else ExitCode.OK


def _print_json(forecasts: Sequence[Forecast], pulls: Sequence[NextPull], now: datetime) -> None:
    from snaporch.output.terminal import print_json

    print_json(_document(forecasts, pulls, now))


def _document(
    forecasts: Sequence[Forecast], pulls: Sequence[NextPull], now: datetime
) -> dict[str, object]:
    from snaporch.model import iso

    return {
        "now": iso(now),
        "runs": [
            {
                "domain": each.domain.name,
                "uuid": each.domain.uuid,
                "policy": run.policy,
                "at": iso(run.at),
                "due": run.due(now),
                "reason": run.reason,
                "assigned_by": each.assignment.source,
            }
            for each in forecasts
            for run in each.next_snapshots
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
            for each in forecasts
            for check in each.verifications
        ],
        "replications": [
            {
                "domain": each.domain.name,
                "uuid": each.domain.uuid,
                "replica": copy.replica,
                "at": iso(copy.at),
                "due": copy.due(now),
                "reason": copy.reason,
            }
            for each in forecasts
            for copy in each.replications
        ],
        "pulls": [
            {
                "source": each.source,
                "at": iso(each.at),
                "due": each.due(now),
                "reason": each.reason,
            }
            for each in pulls
        ],
        "retention": [
            {
                "domain": each.domain.name,
                "uuid": each.domain.uuid,
                "snapshot": decision.taken.snapshot,
                "policy": decision.taken.policy,
                "created": iso(decision.taken.created),
                "action": "delete" if decision.delete else "keep",
                "reason": decision.reason,
            }
            for each in forecasts
            for decision in each.retention
            if decision.taken.policy is not None
        ],
    }


def _print(context: Context, forecasts: Sequence[Forecast], now: datetime, *, kept: bool) -> None:
    from snaporch.output.terminal import print_result
    from snaporch.schedule.recurrence import zone_of

    zone = zone_of(context.config)
    for each in forecasts:
        name = one_line(each.domain.name)
        for run in each.next_snapshots:
            print_result(f"{name}  {run.policy}  {_when(run, now, zone)}  ({run.reason})")
        if not each.next_snapshots:
            print_result(f"{name}  no policy takes snapshots of it")
        for check in each.verifications:
            when, reason = _when(check, now, zone), one_line(check.reason)
            print_result(f"{name}  {check.policy}  verify {when}  ({reason})")
        for copy in each.replications:
            when, reason = _when(copy, now, zone), one_line(copy.reason)
            print_result(f"{name}  {copy.replica}  replicate {when}  ({reason})")
        for decision in each.retention:
            if decision.delete or (kept and decision.taken.policy is not None):
                word = "would be deleted" if decision.delete else "stays"
                print_result(
                    f"{name}@{decision.taken.snapshot}  {word}: {one_line(decision.reason)}"
                )
        if each.retention:
            print_result(f"{name}  {_sum(each)}")


def _print_pulls(context: Context, pulls: Sequence[NextPull], now: datetime) -> None:
    from snaporch.output.terminal import print_result
    from snaporch.schedule.recurrence import zone_of

    for each in pulls:
        when = _when(each, now, zone_of(context.config))
        print_result(f"{each.source}  pull {when}  ({each.reason})")


def _when(
    item: NextSnapshot | DueVerification | PendingReplication | NextPull,
    now: datetime,
    zone: tzinfo,
) -> str:
    if item.due(now):
        return "due now"
    return f"next {item.at.astimezone(zone):%Y-%m-%d %H:%M:%S %Z}"


def _sum(each: Forecast) -> str:
    own = [decision for decision in each.retention if decision.taken.policy is not None]
    to_delete = len(each.to_delete)
    count = f"{len(own)} snapshot{'' if len(own) == 1 else 's'}"
    text = f"{count} of policies, {to_delete} would be deleted"
    others = len(each.retention) - len(own)
    return f"{text}; {others} of no policy" if others else text
