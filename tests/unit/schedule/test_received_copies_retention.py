"""Retention of copies, for any copies, marks and clocks that a host may send."""

import random
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from snaporch.config.policy import Keep
from snaporch.model import PoolSnapshot
from snaporch.schedule.received_copies_retention import (
    YOUNG,
    CopiedRun,
    decide_copies,
    newest_of_each,
)
from snaporch.schedule.retention import FUTURE, RetentionSnapshot, decide_retention

NOW = datetime(2026, 6, 10, 12, 30, tzinfo=UTC)
ROOT = "backup/kvm"
ZERO = timedelta()
DAY = timedelta(days=1)
WEEK = timedelta(days=7)


def snapshot(dataset, number, created, owner, *, txg=None, **marks):
    uuid, run = owner
    properties = {"uuid": uuid, "run": run, "copy": "nas", **marks}
    name = f"snaporch_{number}_hourly"
    return PoolSnapshot(f"{ROOT}/{dataset}", name, number * 10, txg or number, created, properties)


def copied(number, created, *, uuid="u1", datasets=("tank:web",), txg=None, **more):
    owner = uuid, f"r{number}"
    members = tuple(
        snapshot(each, number, created, owner, txg=(txg or number * 10) + place)
        for place, each in enumerate(datasets)
    )
    facts = {"is_whole": True, "by_policy": True, "received": created, **more}
    name = f"snaporch_{number}_hourly"
    return CopiedRun(uuid, owner[1], f"guest-{uuid}", name, members, **facts)


def hourly(count, **more):
    return [copied(n + 1, NOW - timedelta(hours=count - n), **more) for n in range(count)]


def decide(runs, keep, *, others=(), keep_all=ZERO, now=NOW):
    there = [*{m.full_name: m for each in runs for m in each.members}.values(), *others]
    return decide_copies(runs, there, Keep(**keep), keep_all, now, UTC)


def deleted(runs, keep, **more):
    return [each.run.run for each in decide(runs, keep, **more) if each.delete]


def reason(runs, keep, run, **more):
    return next(each.reason for each in decide(runs, keep, **more) if each.run.run == run)


def test_the_rules_of_all_policies_count_together():
    assert deleted(hourly(5), {"last": 2}) == ["r1", "r2", "r3"]


def test_nothing_younger_than_keep_all_is_deleted():
    """Which does not count, either."""
    assert deleted(hourly(5), {"last": 1}, keep_all=timedelta(hours=3.5)) == ["r1"]


def test_a_snapshot_that_no_policy_took_stays():
    runs = [copied(1, NOW - timedelta(hours=9), by_policy=False), *hourly(3)[1:]]
    assert deleted(runs, {"last": 1}) == ["r2"]


def test_what_is_incomplete_stays_and_represents_nothing():
    runs = hourly(4)
    runs[3] = copied(4, NOW, is_whole=False)
    assert deleted(runs, {"last": 1}) == ["r1", "r2"]
    assert reason(runs, {"last": 1}, "r3") == "last 1 of 1"
    assert "incomplete" in reason(runs, {"last": 1}, "r4")


def test_the_newest_snapshot_of_a_dataset_stays_although_its_guest_has_newer_ones():
    moved = copied(1, NOW - timedelta(days=9), datasets=("old:web",))
    assert deleted([moved, *hourly(4)[1:]], {"last": 1}) == ["r2", "r3"]
    assert "the next copy begins" in reason([moved, *hourly(4)[1:]], {"last": 1}, "r1")


def test_a_held_one_stays():
    runs = [copied(1, NOW - timedelta(hours=9), pinned="held"), *hourly(3)[1:]]
    assert deleted(runs, {"last": 1}) == ["r2"]


def test_the_newest_that_passed_its_verification_stays():
    runs = hourly(4)
    runs[1] = copied(2, runs[1].members[0].created, passed=True)
    assert deleted(runs, {"last": 1}) == ["r1", "r3"]


def test_a_time_in_the_future_lets_no_other_expire_and_is_named():
    runs = hourly(4)
    future = copied(9, NOW + timedelta(days=3650))
    assert deleted([*runs, future], {"last": 2}) == deleted(runs, {"last": 2})
    assert reason([*runs, future], {"last": 2}, "r9") == FUTURE


def test_after_a_time_in_the_future_the_others_have_their_own_times():
    """The host's clock was wrong for one snapshot."""
    runs = hourly(12)
    wrong = copied(100, NOW + timedelta(days=3650), txg=35)  # between the third and the fourth
    assert deleted([*runs, wrong], {"hourly": 6}) == deleted(runs, {"hourly": 6})
    assert len(deleted(runs, {"hourly": 6})) == 6


def test_later_copies_that_claim_to_be_old_displace_no_older_one():
    days = [copied(n, NOW - timedelta(days=40 - n)) for n in range(1, 31)]
    false = [
        copied(
            100 + n, NOW - timedelta(days=40 - n, hours=-1), datasets=("tank:new",), txg=5000 + n
        )
        for n in range(1, 31)
    ]
    gone = deleted([*days, *false], {"daily": 30})
    assert not {each.run for each in days} & {*gone}
    # The same, sent when they were taken, are the newest of their days.
    early = [
        copied(
            100 + n,
            each.members[0].created + timedelta(hours=1),
            datasets=("tank:new",),
            txg=each.last + 5,
        )
        for n, each in enumerate(days)
    ]
    assert deleted([*days, *early], {"daily": 30})


def test_a_clock_that_is_set_back_deletes_nothing():
    assert deleted(hourly(9), {"last": 1}, now=NOW - timedelta(days=30)) == []


def test_snapshots_that_a_group_took_together_stay_together():
    one = hourly(3)
    one[0] = copied(1, one[0].members[0].created, group_run="g")
    other = copied(7, NOW, uuid="u2", datasets=("tank:db",), group_run="g")
    assert deleted(one, {"last": 1}) == ["r1", "r2"]
    assert deleted([*one, other], {"last": 1}) == ["r2"]


def test_a_snapshot_that_another_run_needs_stays_whole():
    shared = hourly(4)
    other = CopiedRun(
        "u2",
        "x",
        "db",
        "snaporch_1_manual",
        shared[0].members,
        is_whole=True,
        by_policy=False,
        received=NOW,
    )
    assert deleted([*shared, other], {"last": 1}) == ["r2", "r3"]
    assert reason([*shared, other], {"last": 1}, "r1").startswith("has a snapshot of db@")


def test_a_snapshot_of_a_run_without_a_bundle_here_stays():
    found = snapshot("tank:web", 1, NOW - timedelta(hours=9), ("u9", "elsewhere"))
    run = CopiedRun(
        "u1", "r1", "web", found.name, (found,), is_whole=True, by_policy=True, received=NOW
    )
    assert deleted([run, *hourly(3)[1:]], {"last": 1}) == ["r2"]


@pytest.mark.parametrize("seed", range(300))
def test_never_destroys_what_is_needed(seed):
    """Any runs of a few guests, with gaps, forged times, shared datasets and other snapshots."""
    dice = random.Random(seed)
    runs, others = [], []
    for number in range(1, dice.randint(2, 40)):
        created = NOW - timedelta(hours=dice.choice([number, 40 - number, dice.randint(-50, 900)]))
        runs.append(
            copied(
                number,
                created,
                uuid=f"u{dice.randint(1, 3)}",
                datasets=dice.sample(["tank:a", "tank:b", "flash:a"], dice.randint(1, 3)),
                txg=dice.randint(1, 500) * 10,
                received=NOW - timedelta(hours=dice.choice([number, dice.randint(-5, 900)])),
                passed_here=dice.random() < 0.5,
                is_whole=dice.random() < 0.8,
                by_policy=dice.random() < 0.9,
                passed=dice.choice([None, None, True, False]),
                pinned=dice.choice(["", "", "", "held", "cloned as x"]),
                group_run=dice.choice(["", "", "g1", "g2"]),
            )
        )
        if dice.random() < 0.2:
            others.append(
                snapshot("tank:a", 1000 + number, NOW, ("", ""), txg=dice.randint(1, 9000))
            )
    rule = dice.choice(["last", "hourly", "daily", "monthly"])
    keep_all = timedelta(hours=dice.choice([0, 0, 100]))
    decisions = decide(runs, {rule: dice.randint(1, 5)}, others=others, keep_all=keep_all)
    assert {each.run.key for each in decisions} == {each.key for each in runs}
    gone = [each.run for each in decisions if each.delete]
    stays = [each.run for each in decisions if not each.delete]
    destroyed = {member.full_name for run in gone for member in run.members}
    there = [*others, *(member for run in runs for member in run.members)]
    assert not destroyed & newest_of_each(there)
    assert not destroyed & {each.full_name for each in others}
    assert not destroyed & {member.full_name for run in stays for member in run.members}
    for run in gone:
        assert run.is_whole
        assert run.by_policy
        assert not run.pinned
        assert run.received <= NOW - keep_all
    for uuid in {run.uuid for run in runs}:
        whole = [run for run in runs if run.uuid == uuid and run.is_whole]
        last = max((run.last for run in whole), default=0)
        assert not whole or any(run.last == last for run in whole if run in stays)
    for group in ("g1", "g2"):
        together = [run for run in runs if run.group_run == group]
        if any(run in stays and run.is_whole for run in together):
            assert not {run.key for run in together} & {run.key for run in gone}


def days(count, *, ago=0, **more):
    """A run each day, the last one ``ago + 1`` days ago."""
    return [copied(n, NOW - DAY * (count + ago + 1 - n), **more) for n in range(1, count + 1)]


def late(number, created, *, received=NOW, **more):
    """A run that arrives after all others, whatever time it claims."""
    return copied(number, created, txg=more.pop("txg", 50_000 + number * 10), received=received)


def plain(honest, keep, now=NOW):
    """What retention of these copies alone destroys."""
    facts = [
        RetentionSnapshot(each.run, each.snapshot, each.created, "copies", good_ram=False)
        for each in honest
    ]
    verdicts = decide_retention(facts, {"copies": Keep(**keep)}, now, UTC)
    return {each.taken.run for each in verdicts if each.delete}


def test_what_was_received_less_than_keep_all_ago_stays_and_displaces_nothing():
    old = days(20, ago=7)
    young = [late(100 + n, NOW - DAY + timedelta(minutes=n)) for n in range(50)]
    assert deleted([*old, *young], {"last": 20, "daily": 20}, keep_all=WEEK) == []
    assert reason([*old, *young], {"last": 20}, "r100", keep_all=WEEK) == YOUNG


def test_keep_all_counts_from_the_receipt_and_not_from_the_time_that_is_claimed():
    runs = days(20)
    runs[18] = late(19, NOW - DAY * 900, received=NOW - DAY)
    assert "r19" not in deleted(runs, {"last": 1}, keep_all=WEEK)
    assert "r19" not in deleted([*runs, late(20, NOW - DAY)], {"last": 1}, keep_all=WEEK)


def test_many_false_ones_in_the_gap_of_a_guest_that_was_off_displace_nothing_for_keep_all():
    good = days(90, ago=100)
    false = [late(1000 + n, NOW - DAY * (100 - n)) for n in range(1, 100)]
    assert deleted([*good, *false], {"daily": 90}, keep_all=WEEK) == []


def test_a_later_one_that_claims_to_be_older_displaces_none_even_after_keep_all():
    """Also not in a dataset that is new, and where it is the first."""
    good = [copied(n, NOW - DAY * (40 - n)) for n in range(1, 31)]
    moved = copied(31, NOW - DAY * 10 + timedelta(hours=1), is_whole=False)
    false = [
        copied(
            900 + n,
            NOW - DAY * (40 - n) + timedelta(hours=1),
            datasets=("tank:new",),
            txg=99_000 + n,
            received=NOW - DAY * 9,
        )
        for n in range(1, 31)
    ]
    assert deleted([*good, moved, *false], {"daily": 30}, keep_all=WEEK) == []


@pytest.mark.parametrize("split", [1, 31, 60])
@pytest.mark.parametrize("new", ["flash:db", "zoo:db"])
@pytest.mark.parametrize("is_added", [True, False])
def test_datasets_that_arrive_one_after_another_destroy_nothing(split, new, is_added):
    """At a first replication, after a catch-up, or after the pool of copies was moved."""
    runs = []
    for number in range(1, 61):
        created = NOW - DAY * (70 - number)
        names = [new, "tank:web"] if (number >= split) is is_added else ["tank:web"]
        members = tuple(
            snapshot(each, number, created, ("u1", f"r{number}"), txg=base + number)
            for each in names
            for base in [sorted(["tank:web", new]).index(each) * 1000]
        )
        runs.append(
            CopiedRun(
                "u1",
                f"r{number}",
                "web",
                members[0].name,
                members,
                is_whole=True,
                by_policy=True,
                received=NOW - WEEK,
            )
        )
    assert deleted(runs, {"daily": 90}, keep_all=WEEK) == []
    newest = newest_of_each(member for each in runs for member in each.members)
    pinned = {e.run for e in runs if any(m.full_name in newest for m in e.members)}
    gone = {*deleted(runs, {"daily": 20}, keep_all=WEEK)}
    assert gone == plain(runs, {"daily": 20}) - pinned


def test_a_guest_that_was_moved_and_whose_newer_dataset_arrives_first():
    old = [copied(n, NOW - DAY * (70 - n), txg=5000 + n * 10) for n in range(1, 31)]
    new = [copied(n, NOW - DAY * (70 - n), datasets=("flash:web",)) for n in range(31, 61)]
    assert deleted([*old, *new], {"daily": 60}, keep_all=WEEK) == []


@pytest.mark.parametrize("ahead", [0.5, 1, 3, 10, 40, 60, 69, 71])
def test_one_snapshot_with_the_clock_ahead_destroys_nothing(ahead):
    runs = days(100)
    wrong = copied(900, NOW - DAY * 70 + DAY * ahead, txg=315, received=NOW - DAY * 69.5)
    assert {*deleted([*runs, wrong], {"daily": 101}, keep_all=WEEK)} <= {"r900"}
    gone = {*deleted([*runs, wrong], {"daily": 30}, keep_all=WEEK)}
    assert gone - {"r900"} <= plain(runs, {"daily": 30})
    assert ahead > 40 or len(gone) > 10


@pytest.mark.parametrize("until", [50, 61])
def test_a_clock_that_is_a_year_behind_destroys_nothing(until):
    runs = [
        copied(
            n,
            NOW - DAY * (61 - n) - (DAY * 365 if 30 < n < until else ZERO),
            received=NOW - DAY * (61 - n),
        )
        for n in range(1, 61)
    ]
    assert deleted(runs, {"daily": 90}, keep_all=WEEK) == []
    # Also of a rule that keeps few: what is wrong is not judged by what it contradicts.
    gone = {*deleted(runs, {"daily": 20}, keep_all=WEEK)}
    assert gone <= {f"r{n}" for n in range(1, until)}
    assert not {f"r{n}" for n in range(41, 61)} & gone


def test_after_a_clock_was_wrong_retention_goes_on():
    """Once enough agree again, what was wrong expires, too."""
    runs = [
        copied(n, NOW - DAY * (91 - n) - (DAY * 365 if 30 < n < 50 else ZERO)) for n in range(1, 91)
    ]
    assert len(deleted(runs, {"daily": 20}, keep_all=ZERO)) == 70


def test_the_newest_that_passed_here_and_the_newest_that_passed_there_stay():
    runs = days(50)
    runs[2] = copied(3, runs[2].created, passed=True, passed_here=True)
    runs[4] = copied(5, runs[4].created, passed=True)
    runs[39] = copied(40, runs[39].created, passed=True)  # says the host that was taken over
    gone = deleted(runs, {"daily": 5})
    assert "r3" not in gone
    assert "r5" in gone
    assert "r40" not in gone
    assert reason(runs, {"daily": 5}, "r3").endswith("here")


@pytest.mark.parametrize("seed", range(300))
def test_honest_copies_go_no_earlier_than_without_false_ones(seed):
    """Whatever a host sends after it was taken over, for the time of ``keep_all``."""
    dice = random.Random(seed)
    keep = {
        rule: dice.randint(1, 12)
        for rule in dice.sample(["last", "hourly", "daily", "weekly", "monthly"], 2)
    }
    keep_all = timedelta(hours=dice.randint(0, 200))
    groups = [("tank:web",), ("tank:web", "flash:db"), ("flash:db",)]
    honest, step = [], 10
    created = NOW - timedelta(hours=1500)
    for number in range(1, dice.randint(5, 60)):
        created += timedelta(hours=dice.choice([1, 1, 5, 24, 60]))
        if created > NOW:
            break
        delay = timedelta(hours=dice.choice([0, 0, 1, 30]))
        received = min(NOW, max(created + delay, honest[-1].received if honest else created))
        honest.append(
            copied(
                number,
                created,
                datasets=dice.choice(groups),
                txg=number * step,
                received=received,
            )
        )
    if dice.random() < 0.3:  # all datasets arrived one after another, as at a first replication
        honest = [_by_dataset(each) for each in honest]
    false = [
        copied(
            1000 + n,
            NOW - timedelta(hours=dice.uniform(-100, 2000)),
            datasets=dice.choice([*groups, ("tank:new",)]),
            txg=dice.randint(1, 1000) * step if dice.random() < 0.2 else 50_000 + n * step,
            received=NOW - keep_all * dice.random() * 0.999,
            is_whole=dice.random() < 0.9,
            passed=dice.choice([None, True, False]),
            passed_here=dice.random() < 0.3,
            good_ram=dice.random() < 0.3,
            group_run=dice.choice(["", "g1"]),
        )
        for n in range(dice.randint(0, 60) if keep_all else 0)
    ]
    for at in (NOW, NOW + DAY * dice.randint(0, 5)):
        grown = keep_all + (at - NOW)  # they are still younger than that
        gone = {*deleted([*honest, *false], keep, keep_all=grown, now=at)}
        assert gone <= plain(honest, keep, at)
    # And what is honest alone is thinned, if its datasets arrived in order.
    if all(each.first == index * step + step for index, each in enumerate(honest)):
        old = [each for each in honest if NOW - each.received >= keep_all]
        newest = newest_of_each(m for each in honest for m in each.members)
        pins = {e.run for e in honest if any(m.full_name in newest for m in e.members)}
        assert {*deleted(honest, keep, keep_all=keep_all)} == plain(old, keep) - pins


def _by_dataset(run):
    base = {"flash:db": 0, "tank:web": 10_000}
    members = tuple(
        replace(each, createtxg=each.createtxg + base[each.dataset.rpartition("/")[2]])
        for each in run.members
    )
    return replace(run, members=members)


@pytest.mark.parametrize("seed", range(200))
def test_wrong_times_of_honest_copies_let_none_of_the_right_ones_go_early(seed):
    """Old ones too: a wrong clock costs at most the place of its own copy."""
    dice = random.Random(seed)
    runs = days(dice.randint(20, 60))
    wrong = {dice.randrange(1, len(runs)) for _ in range(dice.randint(1, 3))}
    changed = [
        copied(each.members[0].guid // 10, NOW - DAY * dice.uniform(0, 400), received=each.received)
        if number in wrong
        else each
        for number, each in enumerate(runs)
    ]
    right = [each for number, each in enumerate(runs) if number not in wrong]
    keep = dice.randint(5, 30)
    gone = {*deleted(changed, {"daily": keep}, keep_all=WEEK)}
    names = {each.run for each in right}
    assert gone & names <= plain(right, {"daily": keep - len(wrong)})


def test_runs_that_share_snapshots_are_judged_in_linear_time():
    count = 20_000
    members = [
        snapshot("tank:web", n, NOW - DAY * 20 + timedelta(seconds=n), ("u1", f"r{n}"))
        for n in range(1, count + 2)
    ]
    runs = [
        CopiedRun(
            "u1",
            f"r{n}",
            "web",
            members[n - 1].name,
            (members[n - 1], members[n]),
            is_whole=True,
            by_policy=True,
            received=NOW - DAY * 20,
        )
        for n in range(1, count + 1)
    ]
    begun = time.monotonic()
    assert deleted(runs, {"last": 1}) == []
    assert time.monotonic() - begun < 20
