"""Decides which snapshots of a domain to keep: a pure function of snapshots, policies and time.

Received copies of other hosts' guests are decided by
:mod:`snaporch.schedule.received_copies_retention`, and bundles without snapshots by
:mod:`snaporch.prune.decision`.

The newest snapshot of an hour, day, week, month or year represents it, and a rule such as
``daily = 7`` keeps the newest 7 representatives. Periods without snapshots do not count: snapshots
of a guest that was off for a month do not expire because of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo

from snaporch.config.policy import Keep

NEWEST = "the newest good snapshot"
LAST_RAM = "the last good RAM snapshot"
LAST_PASSED = "the last that passed its verification"
FUTURE = "from the future: the clock was set back"


@dataclass(frozen=True, slots=True)
class RetentionSnapshot:
    """The facts about a snapshot that retention needs."""

    run: str
    snapshot: str
    created: datetime
    """When the guest was frozen; with a time zone."""
    policy: str | None
    """The policy it was taken for; ``None`` if it was not taken for one."""
    good_ram: bool
    """The guest can be resumed from it."""
    incomplete: bool = False
    """A part is missing: it represents no period, and only the admin deletes it."""
    pinned: str = ""
    """Why no rule may delete it, such as ``snaporch keep``, a hold, a clone or its return from a
    replica; or empty."""
    passed: bool | None = None
    """Whether its verification passed; ``None`` without one. A failed one represents no period."""
    group_run: str = ""
    """Identifies the run of a group, equal for all its domains; empty without a group."""


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """Whether a snapshot is deleted, and why."""

    taken: RetentionSnapshot
    delete: bool
    reason: str


Period = Callable[[datetime], object]
_PERIODS: Mapping[str, Period] = {
    # An hour that the clock shows twice counts as two: the offsets from UTC differ.
    "hourly": lambda local: (local.date(), local.hour, local.utcoffset()),
    "daily": lambda local: local.date(),
    "weekly": lambda local: local.isocalendar()[:2],
    "monthly": lambda local: (local.year, local.month),
    "yearly": lambda local: local.year,
}


def decide_retention(
    snapshots: Iterable[RetentionSnapshot],
    policies: Mapping[str, Keep],
    now: datetime,
    zone: tzinfo,
) -> list[RetentionDecision]:
    """Decide for each snapshot of one domain whether it is deleted.

    Args:
        snapshots: all snapshots of the domain, in any order.
        policies: what each policy keeps. A policy that is missing here keeps all its snapshots.
        now: the time, with a time zone.
        zone: the time zone of hours, days, weeks, months and years.

    Returns:
        The decisions, the oldest snapshot first.
    """
    ordered = sorted(snapshots, key=lambda taken: (taken.created, taken.run))
    past = [taken for taken in reversed(ordered) if taken.created <= now]
    whole = [taken for taken in past if not taken.incomplete]
    good = [taken for taken in whole if taken.passed is not False]
    kept: dict[str, list[str]] = {}
    for name, keep in policies.items():
        # One that failed its verification displaces no other, and is not deleted earlier.
        for found in (good, whole):
            own = [taken for taken in found if taken.policy == name]
            reasons = _kept(own, keep, zone)
            judged = own if found is good else [each for each in own if each.passed is False]
            for taken in judged:
                kept.setdefault(taken.run, []).extend(reasons.get(taken.run, ()))
    _keep_last(good, kept)
    return [_verdict(taken, policies, now, kept) for taken in ordered]


def last_good(snapshots: Iterable[RetentionSnapshot], now: datetime) -> dict[str, list[str]]:
    """What snapshots of one domain are the last of, by run; most are in none of these places.

    Args:
        snapshots: all snapshots of the domain, in any order.
        now: the time, with a time zone.
    """
    ordered = sorted(snapshots, key=lambda taken: (taken.created, taken.run), reverse=True)
    past = [taken for taken in ordered if taken.created <= now]
    good = [taken for taken in past if not taken.incomplete and taken.passed is not False]
    found: dict[str, list[str]] = {}
    _keep_first(good, NEWEST, found)
    _keep_last(good, found)
    return found


def keep_together(
    judged: Mapping[str, Sequence[RetentionDecision]],
) -> dict[str, list[RetentionDecision]]:
    """Change decisions so that snapshots that a group took together are kept together.

    If the snapshot of one domain is kept, those of the other domains are kept too. An incomplete
    snapshot keeps no other one.

    Args:
        judged: the decisions for each domain, by the domain's name.
    """
    stays: dict[str, str] = {}
    for domain, verdicts in judged.items():
        for verdict in verdicts:
            if verdict.taken.group_run and not (verdict.delete or verdict.taken.incomplete):
                stays.setdefault(verdict.taken.group_run, domain)
    return {domain: [_with_others(each, stays) for each in own] for domain, own in judged.items()}


def _with_others(verdict: RetentionDecision, stays: Mapping[str, str]) -> RetentionDecision:
    other = stays.get(verdict.taken.group_run) if verdict.delete else None
    if other is None:
        return verdict
    reason = f"taken together with {other}'s, which is kept"
    return RetentionDecision(verdict.taken, delete=False, reason=reason)


def _keep_last(good: Sequence[RetentionSnapshot], kept: dict[str, list[str]]) -> None:
    """Add the last good RAM snapshot and the last that passed; ``good`` is newest first."""
    _keep_first((taken for taken in good if taken.good_ram), LAST_RAM, kept)
    _keep_first((taken for taken in good if taken.passed), LAST_PASSED, kept)


def _keep_first(
    newest_first: Iterable[RetentionSnapshot], reason: str, kept: dict[str, list[str]]
) -> None:
    for taken in newest_first:
        kept.setdefault(taken.run, []).append(reason)
        return


def _kept(
    newest_first: Sequence[RetentionSnapshot], keep: Keep, zone: tzinfo
) -> dict[str, list[str]]:
    """The rules that keep each run, by run."""
    found: dict[str, list[str]] = {}
    for place, taken in enumerate(newest_first[: keep.last], 1):
        found.setdefault(taken.run, []).append(f"last {place} of {keep.last}")
    for rule, period in _PERIODS.items():
        count = getattr(keep, rule)
        seen: set[object] = set()
        for taken in newest_first:
            key = period(taken.created.astimezone(zone))
            if key in seen:
                continue
            if len(seen) == count:
                break
            seen.add(key)
            found.setdefault(taken.run, []).append(f"{rule} {len(seen)} of {count}")
    return found


def _verdict(
    taken: RetentionSnapshot,
    policies: Mapping[str, Keep],
    now: datetime,
    kept: Mapping[str, Sequence[str]],
) -> RetentionDecision:
    if taken.policy is None:
        return RetentionDecision(taken, delete=False, reason="not taken by a policy")
    if taken.policy not in policies:
        return RetentionDecision(
            taken, delete=False, reason=f"policy {taken.policy} deletes nothing"
        )
    if taken.incomplete:
        return RetentionDecision(taken, delete=False, reason="incomplete: check it by hand")
    if taken.created > now:
        return RetentionDecision(taken, delete=False, reason=FUTURE)
    if reasons := kept.get(taken.run, ()):
        failed = ["its verification failed"] if taken.passed is False else []
        return RetentionDecision(taken, delete=False, reason=", ".join([*failed, *reasons]))
    rules = policies[taken.policy].describe()
    if taken.pinned:
        return RetentionDecision(
            taken, delete=False, reason=f"{taken.pinned}, though not in {rules}"
        )
    return RetentionDecision(taken, delete=True, reason=f"not in {rules}")
