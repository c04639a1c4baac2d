"""Which snapshots of a domain stay: a pure function from what exists, the policies and the time.

Of every hour, day, week, month and year that has snapshots the newest one stands for it, and a rule
keeps as many of these as it says, newest first. Only what exists counts: a guest that was off for a
month, or a clock that ran ahead, makes nothing old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo

from snaporch.config.policy import Keep

LAST_RAM = "the last good RAM snapshot"
LAST_PASSED = "the last that passed its verification"
_FUTURE = "from the future: the clock went back"


@dataclass(frozen=True, slots=True)
class RetentionSnapshot:
    """A snapshot of a domain, as far as retention must know it."""

    run: str
    snapshot: str
    created: datetime
    """The frozen instant; with a time zone."""
    policy: str | None
    """The policy it was taken for; ``None`` for everybody else's."""
    good_ram: bool
    """It can be resumed from."""
    incomplete: bool = False
    """A part of it is gone: it stands for nothing, and is left to whoever finds out why."""
    pinned: str = ""
    """What keeps it from being destroyed: a hold or a clone."""
    passed: bool | None = None
    """What its verification said. One that failed stands for nothing."""
    group_run: str = ""
    """The same for those of several domains that are of one instant; empty for one alone."""


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """What becomes of a snapshot, and why."""

    taken: RetentionSnapshot
    delete: bool
    reason: str


Period = Callable[[datetime], object]
_PERIODS: Mapping[str, Period] = {
    # An hour that the clock shows twice is two hours: they differ in their offset.
    "hourly": lambda local: (local.date(), local.hour, local.utcoffset()),
    "daily": lambda local: local.date(),
    "weekly": lambda local: local.isocalendar()[:2],
    "monthly": lambda local: (local.year, local.month),
    "yearly": lambda local: local.year,
}


def judge(
    snapshots: Iterable[RetentionSnapshot],
    policies: Mapping[str, Keep],
    now: datetime,
    zone: tzinfo,
) -> list[RetentionDecision]:
    """Decide about all snapshots of one domain, oldest first.

    Args:
        snapshots: all there are of the domain, whoever took them.
        policies: what each policy keeps. Of a policy that is not named here everything stays.
        now: the time, with a time zone.
        zone: whose days, weeks, months and years count.
    """
    ordered = sorted(snapshots, key=lambda taken: (taken.created, taken.run))
    past = [taken for taken in reversed(ordered) if taken.created <= now]
    whole = [taken for taken in past if not taken.incomplete]
    good = [taken for taken in whole if taken.passed is not False]
    kept: dict[str, list[str]] = {}
    for name, keep in policies.items():
        # One that failed takes nobody's place, and goes no sooner than if it had not.
        for found in (good, whole):
            own = [taken for taken in found if taken.policy == name]
            reasons = _kept(own, keep, zone)
            judged = own if found is good else [each for each in own if each.passed is False]
            for taken in judged:
                kept.setdefault(taken.run, []).extend(reasons.get(taken.run, ()))
    _keep_first((taken for taken in good if taken.good_ram), LAST_RAM, kept)
    _keep_first((taken for taken in good if taken.passed), LAST_PASSED, kept)
    return [_verdict(taken, policies, now, kept) for taken in ordered]


def keep_together(
    judged: Mapping[str, Sequence[RetentionDecision]],
) -> dict[str, list[RetentionDecision]]:
    """Verdicts of several domains, by name, changed so that no instant of a group is torn apart.

    What stays of one member stays of all; one that is incomplete keeps nobody else's.
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
    reason = f"of one instant with {other}'s, which stays"
    return RetentionDecision(verdict.taken, delete=False, reason=reason)


def _keep_first(
    newest_first: Iterable[RetentionSnapshot], reason: str, kept: dict[str, list[str]]
) -> None:
    for taken in newest_first:
        kept.setdefault(taken.run, []).append(reason)
        return


def _kept(
    newest_first: Sequence[RetentionSnapshot], keep: Keep, zone: tzinfo
) -> dict[str, list[str]]:
    """Which rules keep which run."""
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
        return RetentionDecision(taken, delete=False, reason="incomplete: look at it yourself")
    if taken.created > now:
        return RetentionDecision(taken, delete=False, reason=_FUTURE)
    if reasons := kept.get(taken.run, ()):
        failed = ["its verification failed"] if taken.passed is False else []
        return RetentionDecision(taken, delete=False, reason=", ".join([*failed, *reasons]))
    rules = policies[taken.policy].describe()
    if taken.pinned:
        return RetentionDecision(
            taken, delete=False, reason=f"{taken.pinned}, though not in {rules}"
        )
    return RetentionDecision(taken, delete=True, reason=f"not in {rules}")
