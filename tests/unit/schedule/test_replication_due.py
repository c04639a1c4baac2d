from dataclasses import replace
from datetime import timedelta

import pytest
from fakes.schedule import NOW
from fakes.status_example import RECORD

from snaporch.model import BundleState, Level
from snaporch.schedule.failed_attempts import FailedAttempt
from snaporch.schedule.replication_due import last_arrived, next_replication

RETRY = timedelta(minutes=10)


def taken(hours, *replicated, policy="hourly"):
    created = NOW - timedelta(hours=hours)
    return replace(RECORD, created=created, policy=policy, replicated=replicated)


def wanted(records, failed=None, policies=("hourly",)):
    return next_replication("nas", policies, records, failed or {}, RETRY, NOW)


def test_nothing_is_due_without_snapshots():
    assert wanted([]) is None
    assert wanted([taken(1, policy="other"), taken(0, policy=None)]) is None


def test_replication_is_due_at_once_when_nothing_has_arrived():
    found = wanted([taken(3), taken(2, "usb")])
    assert (found.at, found.last, found.since) == (NOW, None, NOW - timedelta(hours=3))
    assert found.reason == "nothing copied yet"
    assert found.due(NOW)


def test_nothing_is_due_when_all_snapshots_have_arrived():
    assert wanted([taken(3, "nas"), taken(2, "nas", "usb")]) is None


def test_an_older_snapshot_that_did_not_arrive_is_still_due():
    found = wanted([taken(4), taken(3, "nas"), taken(2), taken(1, policy="other"), taken(1)])
    assert found.reason == "3 not copied yet"
    assert found.last == NOW - timedelta(hours=3)
    assert found.since == NOW - timedelta(hours=4)
    found = wanted([taken(3), taken(2, "nas")])
    assert (found.reason, found.since) == ("1 not copied yet", NOW - timedelta(hours=3))


def test_an_older_snapshot_without_its_bundle_is_not_due():
    torn = replace(taken(3), state=BundleState.MISSING)
    assert wanted([torn, taken(2, "nas")]) is None
    assert wanted([taken(3, "nas"), replace(taken(2), state=BundleState.MISSING)]) is not None


def test_a_snapshot_that_the_replica_cannot_get_any_more_is_not_due():
    dropped = replace(taken(3), dropped=("nas",))
    assert wanted([dropped, taken(2, "nas")]) is None
    assert wanted([replace(taken(2), dropped=("nas",))]) is None
    assert wanted([replace(taken(3), dropped=("usb",)), taken(2, "nas")]) is not None


def test_a_torn_snapshot_is_not_due():
    torn = replace(taken(2), level=Level.TORN, state=BundleState.INCOMPLETE)
    assert wanted([torn]) is None
    assert wanted([taken(3, "nas"), torn]) is None
    assert wanted([taken(3), torn]).reason == "nothing copied yet"


def test_the_newest_snapshot_of_another_policy_is_not_due():
    assert wanted([taken(3, "nas"), taken(1, policy="other")]) is None


def test_snapshots_of_all_given_policies_count():
    records = [taken(3, "nas"), taken(1, policy="other")]
    assert wanted(records, policies=("hourly", "other")).reason == "1 not copied yet"


@pytest.mark.parametrize(
    ("ago", "at"),
    [
        (timedelta(minutes=4), NOW + timedelta(minutes=6)),
        (timedelta(minutes=10), NOW),
        (timedelta(days=1), NOW),
    ],
)
def test_a_failed_replication_is_retried_later(ago, at):
    records = [taken(3, "nas"), taken(2)]
    failed = {f"{RECORD.uuid}/nas": FailedAttempt(NOW - ago, "nas: away")}
    found = wanted(records, failed)
    assert (found.at, found.failed.reason) == (at, "nas: away")
    assert found.due(NOW) == (at == NOW)


def test_a_failure_from_the_future_or_of_another_replica_is_ignored():
    failed = {
        f"{RECORD.uuid}/nas": FailedAttempt(NOW + timedelta(hours=1), "the clock went back"),
        f"{RECORD.uuid}/usb": FailedAttempt(NOW, "away"),
    }
    found = wanted([taken(1)], failed)
    assert (found.at, found.failed) == (NOW, None)


def test_the_newest_that_has_arrived():
    records = [taken(3, "nas"), taken(2, "nas", "usb"), taken(1)]
    assert last_arrived("nas", records) == NOW - timedelta(hours=2)
    assert last_arrived("away", records) is None
