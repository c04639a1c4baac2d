"""Decides which copies of other guests' snapshots this machine destroys: a pure function.

The rules are those of :mod:`snaporch.schedule.retention`. What a host sends is input, also the
times: copies count in the order in which they arrived (``createtxg`` of this pool), and no later
one counts as older than an earlier one. So a host that was taken over cannot displace old copies
by new ones that claim to be of that time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, tzinfo

from snaporch.config.policy import Keep
from snaporch.model import PoolSnapshot
from snaporch.schedule.retention import (
    RetentionDecision,
    RetentionSnapshot,
    decide_retention,
    keep_together,
)

_ALL = "copies"
"""In the place of a policy: the copies of all policies count together."""
_STEP = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class CopiedRun:
    """The copies of the snapshots of one run, and of its pages of RAM."""

    uuid: str
    run: str
    domain: str
    snapshot: str
    members: tuple[PoolSnapshot, ...]
    """Those that exist, in all datasets of the run."""
    is_whole: bool
    """All members and the whole bundle are here, and it is not torn."""
    by_policy: bool
    """A policy of snaporch took all of its snapshots."""
    good_ram: bool = False
    passed: bool | None = None
    """Whether its verification passed; ``None`` without one."""
    pinned: str = ""
    """Why it may not be destroyed, such as a hold or a clone; empty if nothing is known."""
    group_run: str = ""

    @property
    def key(self) -> str:
        """``UUID/RUN``, which also names its bundle."""
        return f"{self.uuid}/{self.run}"

    @property
    def arrived(self) -> int:
        """The ``createtxg`` of its first member; 0 without any."""
        return min((each.createtxg for each in self.members), default=0)


@dataclass(frozen=True, slots=True)
class CopyDecision:
    """Whether the copies of a run are destroyed, and why."""

    run: CopiedRun
    delete: bool
    reason: str


def decide_copies(
    runs: Iterable[CopiedRun],
    there: Iterable[PoolSnapshot],
    keep: Keep,
    keep_all: timedelta,
    now: datetime,
    zone: tzinfo,
) -> list[CopyDecision]:
    """Decide which runs are destroyed, each with all of its copies.

    Never one with the newest snapshot of a dataset, from which the next copy begins. Each rule
    keeps the newest whole one of a guest.

    Args:
        runs: all runs whose bundles are here, in any order.
        there: all snapshots below the dataset of the copies, those of other programs too.
        keep: the rules.
        keep_all: a younger one is never destroyed.
        now: the time, with a time zone.
        zone: the time zone of hours, days, weeks, months and years.

    Returns:
        The decisions, by guest, the oldest first. Runs without any copy are left out.
    """
    newest = newest_of_each(there)
    found = [each for each in runs if each.members]
    judged: dict[str, list[RetentionDecision]] = {}
    by_title = {f"{own[0].domain} ({uuid})": own for uuid, own in _by_guest(found).items()}
    for title, own in by_title.items():
        facts = _facts(own, newest, keep_all, now)
        judged[title] = decide_retention(facts, {_ALL: keep}, now, zone)
    decisions = []
    for title, verdicts in keep_together(judged).items():
        runs_of_guest = {each.run: each for each in by_title[title]}
        for verdict in verdicts:
            run = runs_of_guest[verdict.taken.run]
            decisions.append(CopyDecision(run, verdict.delete, verdict.reason))
    return _without_shared(decisions)


def newest_of_each(there: Iterable[PoolSnapshot]) -> frozenset[str]:
    """The full names of the newest snapshot of each dataset."""
    newest: dict[str, PoolSnapshot] = {}
    for each in there:
        first = newest.setdefault(each.dataset, each)
        if each.createtxg > first.createtxg:
            newest[each.dataset] = each
    return frozenset(each.full_name for each in newest.values())


def _by_guest(runs: Iterable[CopiedRun]) -> Mapping[str, list[CopiedRun]]:
    """The runs of each guest, in the order of arrival."""
    found: dict[str, list[CopiedRun]] = defaultdict(list)
    for each in sorted(runs, key=lambda each: (each.domain, each.uuid, each.arrived, each.run)):
        found[each.uuid].append(each)
    return found


def _facts(
    own: Sequence[CopiedRun], newest: Collection[str], keep_all: timedelta, now: datetime
) -> list[RetentionSnapshot]:
    """What the rules of retention need, of the runs of one guest in the order of arrival."""
    latest: datetime | None = None
    found = []
    for each in own:
        first = min(each.members, key=lambda member: member.createtxg)
        created = first.created
        if created <= now:
            if latest is not None and created <= latest:
                created = min(latest + _STEP, now)
            latest = created
        pinned = each.pinned
        if any(member.full_name in newest for member in each.members):
            pinned = "the next copy begins at it"
        elif now - created < keep_all:
            pinned = pinned or "younger than keep_all"
        found.append(
            RetentionSnapshot(
                run=each.run,
                snapshot=each.snapshot,
                created=created,
                policy=_ALL if each.by_policy else None,
                good_ram=each.good_ram,
                incomplete=not each.is_whole,
                pinned=pinned,
                passed=each.passed,
                group_run=each.group_run,
            )
        )
    return found


def _without_shared(decisions: Sequence[CopyDecision]) -> list[CopyDecision]:
    """Keep what a run that is kept needs, too: guests can share datasets, and so snapshots."""
    left = list(decisions)
    while True:
        needed = {
            member.full_name: f"has a snapshot of {each.run.domain}@{each.run.snapshot}, too"
            for each in left
            if not each.delete
            for member in each.run.members
        }
        gone = {each.run.key for each in left if each.delete}
        before, left = left, [_unless_shared(each, needed, gone) for each in left]
        if left == before:
            return left


def _unless_shared(
    decision: CopyDecision, needed: Mapping[str, str], gone: Collection[str]
) -> CopyDecision:
    """Keep a run if a member is one of another run that is kept, or that is not known here."""
    if not decision.delete:
        return decision
    for member in decision.run.members:
        if reason := needed.get(member.full_name):
            return replace(decision, delete=False, reason=reason)
        if _owner(member) not in gone:
            reason = "has a snapshot of a run whose bundle is not here"
            return replace(decision, delete=False, reason=reason)
    return decision


def _owner(member: PoolSnapshot) -> str:
    """The run that a copy is marked with, ``UUID/RUN``; of pages of RAM, that of its bundle."""
    marks = member.properties
    return marks.get("ram") or f"{marks.get('uuid', '')}/{marks.get('run', '')}"
