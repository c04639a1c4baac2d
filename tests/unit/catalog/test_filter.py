from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from snaporch.catalog.filter import RecordFilter, SortKey
from snaporch.errors import UsageError
from snaporch.model import BundleState, Level, SnapshotRecord
from snaporch.restore.select import parse_since

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
OLD = SnapshotRecord(
    domain="web",
    uuid="u",
    snapshot="old",
    run="r1",
    level=Level.RAM,
    datasets=("tank/web",),
    created=NOW - timedelta(days=2),
    ram_bytes=10,
    stored_bytes=5,
    pause_ms=1.0,
    bundle="/b",
    state=BundleState.COMPLETE,
    policy="daily",
)
BIG = replace(OLD, snapshot="big", run="r2", created=NOW, stored_bytes=9, policy=None)
CRASH = replace(OLD, domain="db", snapshot="crash", created=NOW, level=Level.CRASH, stored_bytes=1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["old", "big", "crash"]),
        ({"level": Level.CRASH}, ["crash"]),
        ({"since": NOW}, ["big", "crash"]),
        ({"policy": "daily"}, ["old", "crash"]),
        ({"policy": ""}, ["big"]),
        ({"level": Level.RAM, "policy": "daily"}, ["old"]),
        ({"sort": SortKey.STORED}, ["big", "old", "crash"]),
        ({"sort": SortKey.NAME}, ["crash", "big", "old"]),
    ],
)
def test_what_is_listed_in_which_order(options, expected):
    found = RecordFilter(**options).apply([OLD, BIG, CRASH])
    assert [record.snapshot for record in found] == expected


def test_since_is_a_duration_or_a_time():
    assert parse_since("2d", NOW) == NOW - timedelta(days=2)
    assert parse_since("2026-11-21T10:00Z", NOW) == datetime(2026, 11, 21, 10, tzinfo=UTC)
    with pytest.raises(UsageError, match="or as 7d"):
        parse_since("yesterday", NOW)
