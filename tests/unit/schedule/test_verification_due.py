from dataclasses import replace
from datetime import timedelta

import pytest
from fakes.schedule import HOURLY, NOW

from snaporch.journal import Journal
from snaporch.model import VerificationResult, VerifyDepth
from snaporch.restore.source import find_records
from snaporch.schedule import run_verifications
from snaporch.schedule.failed_attempts import (
    VERIFICATIONS,
    FailedAttempt,
    read_failed,
    write_failed,
)
from snaporch.schedule.forecast import make_forecasts
from snaporch.snapshot.plan import make_plan

DAY = timedelta(days=1)
NEXT_MONDAY = NOW.replace(day=15, hour=0, minute=0)


@pytest.fixture(autouse=True)
def weekly(scheduled):
    policy = HOURLY | {"verify": "weekly", "keep": {"last": 9}}
    scheduled.configure(policy={"hourly": policy}, defaults={"policies": ["hourly"]})
    return scheduled


def write_verified(scheduled, record, at, *, passed=True, disks=False):
    """Write the result of a verification of a snapshot."""
    names = [f"{dataset}@{record.snapshot}" for dataset in record.datasets]
    text = VerificationResult(at, passed, VerifyDepth.RESUMED, disks).as_text()
    scheduled.world.pool.set_properties(names, {"snaporch:verified": text})


def the_check(scheduled, now=NOW):
    ((found,),) = [each.verifications for each in make_forecasts(scheduled.context, now)]
    return found


def test_without_a_snapshot_there_is_nothing_to_verify(weekly):
    ((found),) = [each.verifications for each in make_forecasts(weekly.context, NOW)]
    assert found == ()


def test_the_newest_is_due_when_none_was_verified(weekly):
    _, newest = weekly.hours_ago(2, 1)
    found = the_check(weekly)
    assert (found.record.snapshot, found.due(NOW)) == (newest.snapshot, True)


def test_an_older_snapshot_that_passed_counts_until_its_time_is_over(weekly):
    old, newest = weekly.hours_ago(2, 1)
    write_verified(weekly, old, NOW - timedelta(hours=1))
    found = the_check(weekly)
    assert (found.at, found.record.snapshot) == (NEXT_MONDAY, newest.snapshot)
    assert the_check(weekly, NEXT_MONDAY).due(NEXT_MONDAY)


def test_where_disks_must_be_read_only_a_verification_of_disks_counts(scheduled):
    policy = HOURLY | {"verify": "weekly", "verify_disks": True}
    scheduled.configure(policy={"hourly": policy}, defaults={"policies": ["hourly"]})
    old, _ = scheduled.hours_ago(2, 1)
    write_verified(scheduled, old, NOW - timedelta(hours=1))
    found = the_check(scheduled)
    assert (found.at, found.disks) == (NOW, True)
    write_verified(scheduled, old, NOW - timedelta(hours=1), disks=True)
    assert the_check(scheduled).at == NEXT_MONDAY


def test_the_time_at_which_disks_were_read_counts_where_they_must_be_read(scheduled):
    """A later verification has not read them."""
    policy = HOURLY | {"verify": "weekly", "verify_disks": True}
    scheduled.configure(policy={"hourly": policy}, defaults={"policies": ["hourly"]})
    old, _ = scheduled.hours_ago(2, 1)
    read = VerificationResult(NOW - 7 * DAY, True, VerifyDepth.CHECKED, disks=True)
    found = VerificationResult(NOW - timedelta(hours=1), True, VerifyDepth.RESUMED).after(read)
    names = [f"{dataset}@{old.snapshot}" for dataset in old.datasets]
    text = {"snaporch:verified": found.as_text()}
    scheduled.world.pool.set_properties(names, text)
    assert the_check(scheduled).at == NEXT_MONDAY - 7 * DAY


def test_after_a_failed_verification_the_next_is_of_a_newer_snapshot_or_at_its_time(weekly):
    (old,) = weekly.hours_ago(2)
    write_verified(weekly, old, NOW - timedelta(hours=1), passed=False)
    assert the_check(weekly).at == NEXT_MONDAY
    (newer,) = weekly.hours_ago(0)
    found = the_check(weekly)
    assert (found.record.snapshot, found.due(NOW)) == (newer.snapshot, True)


def test_a_result_from_the_future_is_ignored(weekly):
    (old,) = weekly.hours_ago(2)
    write_verified(weekly, old, NOW + DAY)
    assert the_check(weekly).due(NOW)


def test_snapshots_by_hand_are_not_verified(weekly):
    weekly.hours_ago(1, policy=None)
    assert [each.verifications for each in make_forecasts(weekly.context, NOW)] == [()]


def test_a_snapshot_of_a_run_under_way_is_not_verified(weekly):
    (record,) = weekly.hours_ago(1)
    plan = make_plan(weekly.context, weekly.context.hypervisor.domain("web"))
    Journal(weekly.world.paths.journal, replace(plan.facts, run=record.run))
    assert [each.verifications for each in make_forecasts(weekly.context, NOW)] == [()]


def test_a_verification_without_a_result_is_retried_later(weekly):
    weekly.hours_ago(1)
    key = the_check(weekly).key
    place = weekly.context.config.paths.schedule
    write_failed(place, {key: FailedAttempt(NOW, "no memory")}, VERIFICATIONS)
    found = the_check(weekly)
    assert (found.at, found.reason) == (
        NOW + timedelta(minutes=10),
        "retry after a failure: no memory",
    )
    assert read_failed(place) == {}


# -- carrying it out ----------------------------------------------------------------------------


def all_due(scheduled):
    return [
        (checked.check.record.snapshot, checked.outcome)
        for checked in run_verifications.verify_due(scheduled.context)
    ]


def test_a_due_verification_is_done_once(weekly):
    weekly.world.add_guest("mail")
    _, web = weekly.hours_ago(2, 1)
    (mail,) = weekly.hours_ago(3, guest="mail")
    done = all_due(weekly)
    assert sorted(name for name, _ in done) == sorted([web.snapshot, mail.snapshot])
    assert all(outcome.passed for _, outcome in done)
    assert all_due(weekly) == []


def test_disks_are_read_where_the_policy_requires_it(scheduled):
    """The fakes show no files in a snapshot."""
    policy = HOURLY | {"verify": "weekly", "verify_disks": True}
    scheduled.configure(policy={"hourly": policy}, defaults={"policies": ["hourly"]})
    scheduled.hours_ago(1)
    ((_, outcome),) = all_due(scheduled)
    assert "the image is not in the snapshot" in outcome.failure.reason


def test_a_failed_verification_is_recorded_and_stops_no_other(weekly):
    weekly.world.add_guest("mail")
    (web,) = weekly.hours_ago(1)
    weekly.hours_ago(3, guest="mail")
    (weekly.world.paths.bundles / web.uuid / web.run / "ram.save").write_bytes(b"")
    assert [outcome.passed for _, outcome in all_due(weekly)] in ([False, True], [True, False])
    assert not find_records(weekly.context, f"web@{web.snapshot}")[0].verified.passed
    assert all_due(weekly) == []


def test_a_lack_of_memory_is_remembered_until_a_verification_succeeds(weekly):
    weekly.hours_ago(1)
    weekly.world.set_memory(0)
    ((_, error),) = all_due(weekly)
    assert "MiB of memory" in error.reason
    place = weekly.context.config.paths.schedule
    (failed,) = read_failed(place, VERIFICATIONS).values()
    assert "MiB of memory" in failed.reason
    assert all_due(weekly) == []
    write_failed(place, {k: FailedAttempt(f.at - DAY, f.reason) for k, f in
                         read_failed(place, VERIFICATIONS).items()}, VERIFICATIONS)  # fmt: skip
    weekly.world.set_memory(1 << 40)
    ((_, outcome),) = all_due(weekly)
    assert outcome.passed
    assert read_failed(place, VERIFICATIONS) == {}


def test_a_newer_snapshot_that_is_taken_meanwhile_is_not_verified_too(weekly):
    weekly.hours_ago(5)
    hooks = weekly.world.hooks

    def take_another():
        del hooks.at["pool.set_properties"]  # of the result
        weekly.hours_ago(0)

    hooks.at["pool.set_properties"] = take_another
    assert len(all_due(weekly)) == 1
    assert hooks.at == {}
    assert all_due(weekly) == []
