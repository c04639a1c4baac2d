"""Which streams bring a copy up to date."""

from datetime import UTC, datetime

import pytest

from snaporch.model import PoolSnapshot
from snaporch.replication.needed_streams import Originals, Stream, streams
from snaporch.zfs import Bookmark

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
A, B, C = (PoolSnapshot("t/w", "abc"[each], each + 1, each + 1, NOON, {}) for each in range(3))
OURS = Originals("t/w", [A, B, C], {"t/w#old": Bookmark(9, 0), "t/w#a": Bookmark(1, 1)})


@pytest.mark.parametrize(
    ("snapshots", "newest", "expected"),
    [
        ([A], None, [("", "t/w@a")]),
        ([A, B, C], None, [("", "t/w@a"), ("t/w@a", "t/w@c")]),
        ([A, B, C], 1, [("t/w@a", "t/w@c")]),
        ([A, B, C], 3, []),
        ([B, C], 1, [("t/w#a", "t/w@b"), ("t/w@b", "t/w@c")]),
        ([C], 1, [("t/w#a", "t/w@c")]),
        ([A, C], 9, [("t/w#old", "t/w@a"), ("t/w@a", "t/w@c")]),
    ],
)
def test_streams_bring_a_copy_up_to_date(snapshots, newest, expected):
    ours = OURS._replace(snapshots=snapshots)
    assert streams(ours, newest) == [Stream(*each) for each in expected]


@pytest.mark.parametrize(
    ("snapshots", "newest", "expected"),
    [
        ([A], None, [("", "t/w@a")]),
        ([A, B, C], None, [("", "t/w@a"), ("t/w@a", "t/w@b"), ("t/w@b", "t/w@c")]),
        ([A, B, C], 3, []),
        ([B, C], 1, [("t/w#a", "t/w@b"), ("t/w@b", "t/w@c")]),
    ],
)
def test_each_snapshot_can_have_a_stream_of_its_own(snapshots, newest, expected):
    ours = OURS._replace(snapshots=snapshots)
    assert streams(ours, newest, one_by_one=True) == [Stream(*each) for each in expected]
