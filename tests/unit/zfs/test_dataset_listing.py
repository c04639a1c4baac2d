"""What is newer than a snapshot, in a listing of several datasets."""

from datetime import UTC, datetime

import pytest

from snaporch.model import PoolSnapshot
from snaporch.zfs import Bookmark, DatasetListing, PoolError


def snapshot(full_name, createtxg):
    dataset, _, name = full_name.partition("@")
    return PoolSnapshot(dataset, name, createtxg, createtxg, datetime.now(UTC), {})


LISTING = DatasetListing(
    (
        snapshot("t/a@old", 5),
        snapshot("t/a@s", 6),
        snapshot("t/a b@s", 6),
        snapshot("t/a b@later", 9),
        snapshot("t/a@new one", 7),
    ),
    {"t/a#mark": Bookmark(1, 8), "t/a#same": Bookmark(2, 6), "t/a b#mark": Bookmark(3, 8)},
    {},
)


def test_newer_are_snapshots_and_bookmarks_that_were_made_later():
    assert LISTING.newer("t/a@s") == ["t/a@new one", "t/a#mark"]
    assert LISTING.newer("t/a b@s") == ["t/a b@later", "t/a b#mark"]
    assert LISTING.newer("t/a b@later") == []


def test_newer_than_an_absent_snapshot_is_an_error():
    with pytest.raises(PoolError, match="t/a@gone: no such snapshot"):
        LISTING.newer("t/a@gone")
