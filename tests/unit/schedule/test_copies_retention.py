"""Retention of copies, for any copies, marks and clocks that a host may send."""

import random
from datetime import UTC, datetime, timedelta

import pytest

from snaporch.config.policy import Keep
from snaporch.model import PoolSnapshot
from snaporch.schedule.copies_retention import CopiedRun, decide_copies, newest_of_each
from snaporch.schedule.retention import FUTURE

NOW = datetime(2026, 6, 10, 12, 30, tzinfo=UTC)
ROOT = "backup/kvm"
ZERO = timedelta()


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
    facts = {"is_whole": True, "by_policy": True, **more}
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
    assert deleted(hourly(5), {"last": 1}, keep_all=timedelta(hours=3.5)) == ["r1", "r2"]


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
            txg=each.arrived + 5,
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
        "u2", "x", "db", "snaporch_1_manual", shared[0].members, is_whole=True, by_policy=False
    )
    assert deleted([*shared, other], {"last": 1}) == ["r2", "r3"]
    assert reason([*shared, other], {"last": 1}, "r1").startswith("has a snapshot of db@")


def test_a_snapshot_of_a_run_without_a_bundle_here_stays():
    found = snapshot("tank:web", 1, NOW - timedelta(hours=9), ("u9", "elsewhere"))
    run = CopiedRun("u1", "r1", "web", found.name, (found,), is_whole=True, by_policy=True)
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
        assert all(member.created <= NOW - keep_all for member in run.members)
    for uuid in {run.uuid for run in runs}:
        own = sorted((r for r in runs if r.uuid == uuid), key=lambda r: (r.arrived, r.run))
        whole = [run for run in own if run.is_whole]
        assert not whole or whole[-1] in stays
        after = own[own.index(whole[-1]) :] if whole else own
        assert not {run.key for run in after} & {run.key for run in gone}
    for group in ("g1", "g2"):
        together = [run for run in runs if run.group_run == group]
        if any(run in stays and run.is_whole for run in together):
            assert not {run.key for run in together} & {run.key for run in gone}
