from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from snaporch.config.policy import Keep
from snaporch.schedule.retention import (
    LAST_PASSED,
    LAST_RAM,
    NEWEST,
    RetentionDecision,
    RetentionSnapshot,
    decide_retention,
    keep_together,
    last_good,
)

BERLIN = ZoneInfo("Europe/Berlin")
NOW = datetime(2026, 6, 10, 12, 30, tzinfo=UTC)


def at(text, zone=UTC):
    return datetime.fromisoformat(text).replace(tzinfo=zone)


def taken(moment, *, policy="p", ram=False, run=None, **more):
    return RetentionSnapshot(
        run or moment.astimezone(UTC).isoformat(), "s", moment, policy, good_ram=ram, **more
    )


def deleted(snapshots, keep, now=NOW, zone=UTC):
    verdicts = decide_retention(snapshots, {"p": Keep(**keep)}, now, zone)
    return [v.taken.created for v in verdicts if v.delete]


def kept(snapshots, keep, now=NOW, zone=UTC):
    verdicts = decide_retention(snapshots, {"p": Keep(**keep)}, now, zone)
    return [v.taken.created for v in verdicts if not v.delete]


def hourly(count, until=NOW):
    return [taken(until - timedelta(hours=n)) for n in range(count)]


def test_last_keeps_the_newest():
    moments = sorted(each.created for each in hourly(5))
    assert kept(hourly(5), {"last": 2}) == moments[-2:]


def test_the_newest_snapshot_of_an_hour_is_kept_for_it():
    early, late = taken(at("2026-06-10 10:05")), taken(at("2026-06-10 10:35"))
    assert kept([early, late], {"hourly": 5}) == [late.created]


@pytest.mark.parametrize(
    ("rule", "earlier"),
    [
        ("hourly", "2026-06-09 10:30"),
        ("daily", "2026-05-10 10:30"),
        ("monthly", "2025-06-10 10:30"),
    ],
)
def test_the_same_hour_day_or_month_of_another_period_counts_separately(rule, earlier):
    moments = [at(earlier), at("2026-06-10 10:30")]
    assert kept([taken(moment) for moment in moments], {rule: 2}) == moments


def test_days_without_snapshots_do_not_count():
    old, new = taken(at("2026-01-01 10:00")), taken(at("2026-06-09 10:00"))
    assert deleted([old, new], {"daily": 2}) == []


def test_rules_add_up():
    found = hourly(24 * 40)
    expected = {each.created for each in found[:3]}
    for day in range(1, 4):
        expected.add(at("2026-06-10 23:30") - timedelta(days=day))
    expected.add(at("2026-05-31 23:30"))
    assert set(kept(found, {"hourly": 3, "daily": 4, "monthly": 2})) == expected


def test_weeks_begin_on_monday_also_around_new_year():
    sunday, monday = taken(at("2025-12-28 12:00")), taken(at("2025-12-29 12:00"))
    friday = taken(at("2026-01-02 12:00"))
    assert kept([sunday, monday, friday], {"weekly": 9}) == [sunday.created, friday.created]


def test_days_are_those_of_the_zone():
    first, second = taken(at("2026-06-08 22:30")), taken(at("2026-06-09 21:30"))
    assert deleted([first, second], {"daily": 9}, zone=BERLIN) == [first.created]
    assert deleted([first, second], {"daily": 9}, zone=UTC) == []


def test_an_hour_that_the_clock_shows_twice_counts_as_two():
    first, second = taken(at("2025-10-26 00:30")), taken(at("2025-10-26 01:30"))
    assert first.created.astimezone(BERLIN).hour == second.created.astimezone(BERLIN).hour
    assert deleted([first, second], {"hourly": 9}, zone=BERLIN) == []


def test_an_hour_that_the_clock_skips_does_not_count():
    found = [taken(at("2026-03-29 00:30")), taken(at("2026-03-29 01:30"))]
    assert deleted(found, {"hourly": 2}, zone=BERLIN) == []


def test_of_two_snapshots_of_one_second_one_is_the_newest():
    moment = at("2016-12-31 23:59:59")
    pair = [taken(moment, run="b"), taken(moment, run="a")]
    (verdict,) = [v for v in decide_retention(pair, {"p": Keep(last=1)}, NOW, UTC) if v.delete]
    assert verdict.taken.run == "a"


def test_the_last_good_ram_snapshot_stays_however_old():
    ram = taken(at("2020-01-01 00:00"), ram=True)
    verdicts = decide_retention([ram, *hourly(9)], {"p": Keep(last=1)}, NOW, UTC)
    assert [v.reason for v in verdicts if v.taken is ram] == [LAST_RAM]


def test_an_older_ram_snapshot_may_go_if_any_policy_has_a_newer_one():
    old, manual = taken(at("2020-01-01 00:00"), ram=True), taken(NOW, policy=None, ram=True)
    crash = taken(at("2026-01-01 00:00"))
    assert deleted([old, manual, crash], {"last": 1}) == [old.created]


def test_a_snapshot_from_the_future_stays_and_displaces_no_other():
    future = [taken(NOW + timedelta(hours=n), ram=True) for n in range(1, 9)]
    present = [*hourly(3), taken(NOW, ram=True, run="z")]
    verdicts = decide_retention([*future, *present], {"p": Keep(last=4)}, NOW, UTC)
    assert not any(v.delete for v in verdicts)
    assert [v.reason for v in verdicts][-1] == "from the future: the clock was set back"


def test_a_policy_deletes_only_its_own_snapshots():
    found = [taken(NOW - timedelta(days=n), policy=None) for n in range(50)]
    found += [taken(NOW - timedelta(days=n), policy="other") for n in range(50)]
    assert deleted(found, {"last": 1}) == []


def test_an_incomplete_snapshot_stays_and_does_not_count():
    good = taken(at("2026-06-10 10:05"))
    torn = taken(at("2026-06-10 10:35"), incomplete=True)
    verdicts = decide_retention([good, torn], {"p": Keep(hourly=1)}, NOW, UTC)
    assert [(v.delete, v.reason) for v in verdicts] == [
        (False, "hourly 1 of 1"),
        (False, "incomplete: check it by hand"),
    ]


def test_a_held_snapshot_stays_and_has_that_reason():
    found = [*hourly(2), taken(at("2025-01-01 00:00"), pinned="held")]
    verdicts = decide_retention(found, {"p": Keep(last=1)}, NOW, UTC)
    assert verdicts[0].reason == "held, though not in last=1"
    assert [v.delete for v in verdicts] == [False, True, False]


def test_two_policies_do_not_count_snapshots_of_each_other():
    mine, theirs = taken(NOW), taken(NOW - timedelta(hours=1), policy="q")
    verdicts = decide_retention([mine, theirs], {"p": Keep(last=1), "q": Keep(last=1)}, NOW, UTC)
    assert not any(v.delete for v in verdicts)


def test_ten_thousand_are_judged_once_each():
    found = hourly(10_000)
    verdicts = decide_retention(found, {"p": Keep(hourly=24, daily=30, yearly=9)}, NOW, UTC)
    assert [v.taken.created for v in verdicts] == sorted(each.created for each in found)


def test_a_policy_must_keep_something():
    with pytest.raises(ValueError, match="must keep something"):
        Keep()


def test_a_snapshot_that_failed_its_verification_is_not_the_last_good_one():
    whole, failed = taken(at("2026-06-10 10:05"), ram=True), taken(NOW, ram=True, passed=False)
    for keep in ({"last": 1}, {"daily": 1}):
        assert deleted([whole, failed], keep) == []
    reasons = {
        v.taken.created: v.reason
        for v in decide_retention([whole, failed], {"p": Keep(last=1)}, NOW, UTC)
    }
    assert reasons[whole.created] == f"last 1 of 1, {LAST_RAM}"
    assert reasons[failed.created] == "its verification failed, last 1 of 1"


def test_a_snapshot_that_failed_its_verification_is_deleted_no_earlier():
    failed = taken(at("2026-06-08 10:05"), ram=True, passed=False)
    assert deleted([failed, *hourly(2)], {"last": 2}) == [failed.created]


def test_the_newest_snapshot_that_passed_its_verification_stays():
    passed = taken(at("2026-01-01 10:00"), ram=True, passed=True)
    older = taken(at("2025-12-31 10:00"), ram=True, passed=True)
    newer = taken(at("2026-06-09 10:00"), ram=True)
    assert deleted([older, passed, newer], {"last": 1}) == [older.created]
    (alone,) = decide_retention([passed], {"q": Keep(last=1), "p": Keep(yearly=1)}, NOW, UTC)
    assert alone.reason == f"yearly 1 of 1, {LAST_RAM}, {LAST_PASSED}"


# -- the last ones, which `delete` refuses --------------------------------------------------------


def test_the_last_good_ones_by_run():
    found = [
        taken(at("2026-05-31 10:00"), run="zzz: an older one", ram=True, passed=True),
        taken(at("2026-06-01 10:00"), run="passed", ram=True, passed=True),
        taken(at("2026-06-02 10:00"), run="ram", ram=True),
        taken(at("2026-06-03 10:00"), run="older"),
        taken(at("2026-06-03 10:00"), run="same-second"),
        taken(at("2026-06-04 10:00"), run="failed", ram=True, passed=False),
        taken(at("2026-06-05 10:00"), run="incomplete", ram=True, incomplete=True),
        taken(NOW + timedelta(hours=1), run="future", ram=True, passed=True),
    ]
    last = {"same-second": [NEWEST], "ram": [LAST_RAM], "passed": [LAST_PASSED]}
    assert last_good(found, NOW) == last_good(found[::-1], NOW) == last


def test_one_snapshot_of_this_second_is_the_last_of_all():
    found = [taken(NOW, run="r", ram=True, passed=True)]
    assert last_good(found, NOW) == {"r": [NEWEST, LAST_RAM, LAST_PASSED]}


# -- groups -------------------------------------------------------------------------------------


def judged(*, delete, group="g", **more):
    return RetentionDecision(taken(NOW, group_run=group, **more), delete, "by its own rules")


def deletions(**verdicts):
    """Whether each snapshot is deleted, of members with one snapshot each."""
    together = keep_together({name: [verdict] for name, verdict in verdicts.items()})
    return {name: verdict.delete for name, (verdict,) in together.items()}


def test_a_group_snapshot_that_one_member_keeps_stays_for_all():
    app, db = judged(delete=False), judged(delete=True)
    assert deletions(app=app, db=db) == deletions(db=db, app=app) == {"app": False, "db": False}
    together = keep_together({"app": [app], "db": [db]})
    assert together["app"] == [app]
    assert "app" in together["db"][0].reason


def test_a_group_snapshot_that_no_member_keeps_is_deleted_for_all():
    assert deletions(app=judged(delete=True), db=judged(delete=True)) == {"app": True, "db": True}


def test_an_incomplete_snapshot_keeps_no_other():
    broken = judged(delete=False, incomplete=True)
    assert deletions(app=broken, db=judged(delete=True)) == {"app": False, "db": True}


@pytest.mark.parametrize(("one", "other"), [("g", "h"), ("", ""), ("g", "")])
def test_a_snapshot_of_another_instant_keeps_no_other(one, other):
    app, db = judged(delete=False, group=one), judged(delete=True, group=other)
    assert deletions(app=app, db=db) == {"app": False, "db": True}
