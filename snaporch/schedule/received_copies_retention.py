"""Decides which received copies of other hosts' guests this machine destroys: a pure function.

Those in a repository of restic go only in chains: :mod:`snaporch.schedule.chain_retention`.

The rules are those of :mod:`snaporch.schedule.retention`. What a host sends is input, also the
times of its snapshots. What this machine received less than ``keep_all`` ago stays, and displaces
nothing. Of the rest, a run that does not claim a later time than all that arrived before it
displaces nothing, either: a clock was wrong, or is forged. It stays as long as it would beside
those that agree with it. So a wrong time lets copies stay longer, and none go earlier.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, tzinfo
from itertools import accumulate

from snaporch.config.policy import Keep
from snaporch.model import PoolSnapshot
from snaporch.schedule.retention import (
    LAST_PASSED,
    RetentionDecision,
    RetentionSnapshot,
    decide_retention,
    keep_together,
)

_ALL = "copies"
"""In the place of a policy: the copies of all policies count together."""
YOUNG = "received less than keep_all ago"


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
    received: datetime
    """When this machine received its bundle, by a time that no source can set."""
    good_ram: bool = False
    passed: bool | None = None
    """Whether its verification passed; ``None`` without one."""
    passed_here: bool = False
    """``passed`` is the result of this machine's own verification, and no mark of the source."""
    pinned: str = ""
    """Why it may not be destroyed, such as a hold or a clone; empty if nothing is known."""
    group_run: str = ""

    @property
    def key(self) -> str:
        """``UUID/RUN``, which also names its bundle."""
        return f"{self.uuid}/{self.run}"

    @property
    def first(self) -> int:
        """The ``createtxg`` of the member that arrived first; 0 without any."""
        return min((each.createtxg for each in self.members), default=0)

    @property
    def last(self) -> int:
        """The ``createtxg`` of the member that arrived last; 0 without any."""
        return max((each.createtxg for each in self.members), default=0)

    @property
    def created(self) -> datetime:
        """The time that it claims: the earliest of its members; it has at least one."""
        return min(each.created for each in self.members)


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
        keep_all: one that was received less long ago is not destroyed, and displaces none.
        now: the time, with a time zone.
        zone: the time zone of hours, days, weeks, months and years.

    Returns:
        The decisions, by guest, the oldest first. Runs without any copy are left out.
    """
    newest = newest_of_each(there)
    found = [each for each in runs if each.members]
    by_title = {f"{own[0].domain} ({uuid})": own for uuid, own in _by_guest(found).items()}
    judged = {
        title: _judge(own, newest, keep, keep_all, now, zone) for title, own in by_title.items()
    }
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
    found: dict[str, list[CopiedRun]] = defaultdict(list)
    for each in sorted(runs, key=lambda each: (each.domain, each.uuid, each.run)):
        found[each.uuid].append(each)
    return found


def _judge(
    own: Sequence[CopiedRun],
    newest: Collection[str],
    keep: Keep,
    keep_all: timedelta,
    now: datetime,
    zone: tzinfo,
) -> list[RetentionDecision]:
    """Judge the runs of one guest; the oldest first."""
    rules = {_ALL: keep}
    found: list[RetentionDecision] = []
    in_order: list[CopiedRun] = []
    others: list[CopiedRun] = []
    is_late = _late(own, now)
    for run in own:
        if run.created > now:
            found += decide_retention([_fact(run, newest)], rules, now, zone)
        elif now - run.received < keep_all:
            found.append(RetentionDecision(_fact(run, newest), delete=False, reason=YOUNG))
        else:
            (others if is_late(run) else in_order).append(run)
    facts = {each.run: _fact(each, newest) for each in in_order}
    last = _last_passed(in_order)
    for verdict in decide_retention(facts.values(), rules, now, zone):
        reason = last.get(verdict.taken.run, "") if verdict.delete else ""
        found.append(replace(verdict, delete=False, reason=reason) if reason else verdict)
    for run in others:
        # Those that arrived before it and claim a later time contradict it: which one is wrong?
        agreeing = [
            facts[each.run]
            for each in in_order
            if each.created > run.created and each.last >= run.first
        ]
        verdicts = decide_retention([*agreeing, _fact(run, newest)], rules, now, zone)
        found += [each for each in verdicts if each.taken.run == run.run]
    return sorted(found, key=lambda each: (each.taken.created, each.taken.run))


def _late(own: Iterable[CopiedRun], now: datetime) -> Callable[[CopiedRun], bool]:
    """A function: whether a run arrived after all of another one, and claims no later time.

    Datasets arrive one after another, so runs can arrive at the same time: that says nothing.
    """
    past = sorted((each.last, each.created) for each in own if each.created <= now)
    arrivals = [last for last, _ in past]
    latest = list(accumulate((created for _, created in past), max))

    def is_late(run: CopiedRun) -> bool:
        before = bisect_left(arrivals, run.first)
        return before > 0 and latest[before - 1] >= run.created

    return is_late


def _last_passed(in_order: Sequence[CopiedRun]) -> dict[str, str]:
    """The last run that passed here, and the last that passed there, by its mark.

    The mark is the source's word, so it takes no other's place.
    """
    found: dict[str, str] = {}
    passed = [each for each in in_order if each.is_whole and each.passed]
    for here, where in ((True, "here"), (False, "there")):
        own = [each for each in passed if each.passed_here is here]
        if own:
            last = max(own, key=lambda each: (each.created, each.run))
            found[last.run] = f"{LAST_PASSED} {where}"
    return found


def _fact(run: CopiedRun, newest: Collection[str]) -> RetentionSnapshot:
    is_newest = any(member.full_name in newest for member in run.members)
    return RetentionSnapshot(
        run=run.run,
        snapshot=run.snapshot,
        created=run.created,
        policy=_ALL if run.by_policy else None,
        good_ram=run.good_ram,
        incomplete=not run.is_whole,
        pinned="the next copy begins at it" if is_newest else run.pinned,
        passed=run.passed,
        group_run=run.group_run,
    )


def _without_shared(decisions: Sequence[CopyDecision]) -> list[CopyDecision]:
    """Keep what a run that is kept needs, too: guests can share datasets, and so snapshots."""
    left = {each.run.key: each for each in decisions}
    with_member: dict[str, list[str]] = defaultdict(list)
    with_owner: dict[str, list[str]] = defaultdict(list)
    for key, each in left.items():
        for member in each.run.members:
            with_member[member.full_name].append(key)
            with_owner[owner_of(member)].append(key)
    kept = [key for key, each in left.items() if not each.delete]
    for owner, keys in with_owner.items():
        if owner not in left:
            reason = "has a snapshot of a run whose bundle is not here"
            kept += _keep_too(left, keys, reason)
    while kept:
        run = left[kept.pop()].run
        names = {each.full_name for each in run.members}
        needing = [key for name in names for key in with_member[name]] + with_owner[run.key]
        kept += _keep_too(left, needing, f"has a snapshot of {run.domain}@{run.snapshot}, too")
    return list(left.values())


def _keep_too(left: dict[str, CopyDecision], keys: Iterable[str], reason: str) -> list[str]:
    """Keep those of the runs that would be destroyed.

    Returns:
        Their keys.
    """
    changed = []
    for key in keys:
        if left[key].delete:
            left[key] = replace(left[key], delete=False, reason=reason)
            changed.append(key)
    return changed


def owner_of(member: PoolSnapshot) -> str:
    """The run that a copy is marked with, ``UUID/RUN``; of pages of RAM, that of its bundle."""
    marks = member.properties
    return marks.get("ram") or f"{marks.get('uuid', '')}/{marks.get('run', '')}"
