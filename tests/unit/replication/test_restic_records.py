import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from snaporch.bundle.store import COPY_NAME
from snaporch.model import DatasetKind, PoolSnapshot
from snaporch.replication.needed_streams import Originals
from snaporch.replication.restic_records import (
    BundleRecord,
    Kind,
    StreamRecord,
    bundle_tags,
    chain_tag,
    marks_tags,
    next_streams,
    ordered,
    parse_listing,
    stream_tags,
    upload_tags,
)
from snaporch.zfs import Bookmark

WHEN = datetime(2026, 11, 26, tzinfo=UTC)
UUID = "4b1d2f0e-0000-4000-8000-000000000001"
WEB = "tank/vm/my web"


def snapshot(guid, dataset=WEB, **properties):
    return PoolSnapshot(dataset, f"s{guid}", guid, guid * 10, WHEN, properties)


def stream(guid, base=0, **more):
    given = {"bytes": 5, "sha256": "a" * 64, "raw": False, "kind": DatasetKind.VOLUME}
    given |= {"referenced": 99, "upload": f"{guid:032x}", **more}
    return StreamRecord(snapshot(guid), base, **given)


class Listing:
    """What ``restic snapshots --json`` prints."""

    def __init__(self):
        self.entries = []

    def add(self, tags):
        number = len(self.entries) + 1
        time = f"2026-11-26T01:{number:02}:15.094960762Z"
        self.entries.append({"time": time, "id": f"{number:064x}", "tags": tags})
        return self.entries[-1]["id"]

    def put(self, record):
        """A stream with its record; its ID."""
        stored = self.add(upload_tags(Kind.STREAM, record.upload, {"dataset": WEB}))
        self.add(stream_tags(record))
        return stored

    def contents(self, now=WHEN + timedelta(days=1)):
        return parse_listing(json.dumps(self.entries), now)


@pytest.fixture
def listing():
    return Listing()


def guids(contents):
    return [guid for _, guid in contents.streams]


def test_a_stream_comes_back_as_it_was_recorded(listing):
    mark = {"run": "r-1", "note": 'a, "b" = ü%', "level": "ram"}
    record = replace(stream(7), snapshot=snapshot(7, **mark))
    stored = listing.put(record)
    contents = listing.contents()
    assert contents.streams == {(WEB, 7): replace(record, stream=stored)}


def test_no_tag_has_a_comma_or_a_space():
    """restic would take it for two tags, or remove it."""
    marked = replace(stream(7), snapshot=snapshot(7, note="a,b\nc "))
    tags = [*stream_tags(marked), *marks_tags({7: {"note": ","}}, {"tank/a": "x,y"})]
    assert not any({",", " "} & {*tag} or not tag.isprintable() for tag in tags)


def test_a_stream_without_its_record_does_not_count(listing):
    listing.add(upload_tags(Kind.STREAM, "1" * 32, {}))
    assert listing.contents().streams == {}


def test_a_record_whose_stream_was_forgotten_does_not_count(listing):
    listing.add(stream_tags(stream(7)))
    assert listing.contents().streams == {}


def test_an_increment_counts_only_with_all_before_it(listing):
    listing.put(stream(1))
    listing.put(stream(3, base=2))
    listing.put(stream(4, base=3))
    assert guids(listing.contents()) == [1]
    listing.put(stream(2, base=1))
    assert guids(listing.contents()) == [1, 3, 4, 2]
    chain = listing.contents().chain((WEB, 4))
    assert [each.snapshot.guid for each in chain] == [1, 2, 3, 4]


def test_records_in_a_circle_do_not_count(listing):
    listing.put(stream(1, base=2))
    listing.put(stream(2, base=1))
    assert listing.contents().streams == {}


def test_the_newest_record_of_a_snapshot_counts(listing):
    listing.put(stream(1, upload="1" * 32))
    stored = listing.put(stream(1, upload="2" * 32))
    assert [each.stream for each in listing.contents().streams.values()] == [stored]


@pytest.mark.parametrize("tag", ["repaired", "rewrite"])
def test_what_restic_has_changed_does_not_count(listing, tag):
    listing.put(stream(1))
    listing.entries[0]["tags"].append(tag)
    assert listing.contents().streams == {}


def test_an_older_record_counts_if_the_chain_of_a_newer_one_is_not_whole(listing):
    first = listing.put(stream(1, upload="1" * 32))
    second = listing.put(stream(2, base=1, upload="2" * 32))
    listing.put(stream(1, base=8, upload="3" * 32))
    listing.put(stream(2, base=9, upload="4" * 32))
    assert [each.stream for each in listing.contents().streams.values()] == [first, second]


def test_an_older_record_counts_if_newer_ones_go_in_a_circle(listing):
    first = listing.put(stream(1, upload="1" * 32))
    listing.put(stream(2, base=1, upload="2" * 32))
    listing.put(stream(1, base=2, upload="3" * 32))
    contents = listing.contents()
    assert contents.streams[WEB, 1].stream == first
    assert [each.snapshot.guid for each in contents.chain((WEB, 2))] == [1, 2]


def test_what_is_dated_ahead_does_not_replace_anything(listing):
    """A clock was wrong, or someone uses ``restic backup --time``."""
    for number, level in enumerate(("torn", "ram")):
        stored = listing.put(replace(stream(1, upload=f"{number:032}"), raw=bool(number)))
        listing.add(marks_tags({1: {"level": level}}, {WEB: level}))
    for each in listing.entries[:3]:
        each["time"] = "2099" + each["time"][4:]
    contents = listing.contents()
    (record,) = contents.streams.values()
    assert (record.stream, record.raw) == (stored, True)
    assert (record.snapshot.properties["level"], contents.policies) == ("ram", {WEB: "ram"})


def test_with_a_clock_that_is_behind_the_newest_record_counts(listing):
    listing.put(stream(1, upload="1" * 32))
    stored = listing.put(stream(1, upload="2" * 32))
    contents = listing.contents(datetime(1970, 1, 1, tzinfo=UTC))
    assert [each.stream for each in contents.streams.values()] == [stored]


def test_later_marks_replace_earlier_ones(listing):
    listing.put(replace(stream(7), snapshot=snapshot(7, level="ram")))
    listing.add(marks_tags({7: {"level": "disks", "note": "x"}}, {WEB: "hourly"}))
    listing.add(marks_tags({7: {"note": ""}}, {WEB: "nightly,hourly"}))
    contents = listing.contents()
    (record,) = contents.streams.values()
    assert record.snapshot.properties.get("note") is None
    assert contents.policies == {WEB: "nightly,hourly"}


def test_a_bundle_comes_back_as_it_was_recorded(listing):
    record = BundleRecord(
        f"{UUID}/r-1", "/store/it's", {"ram.save": (5, "b" * 64)}, upload="3" * 32
    )
    stored = listing.add(upload_tags(Kind.BUNDLE, record.upload, {"bundle": record.reference}))
    assert listing.contents().bundles == {}
    listing.add(bundle_tags(record))
    (found,) = listing.contents().bundles.values()
    assert found == replace(record, directory=stored)
    assert found.copy.sizes == {"ram.save": 5, COPY_NAME: 0}


@pytest.mark.parametrize(
    "wrong",
    [
        "dataset=-x",
        "dataset=tank",
        "snapshot=a/b",
        "guid=-1",
        "guid=" + "9" * 21,
        "created=" + "9" * 20,
        "sha256=" + "A" * 64,
        "bytes=",
        "type=link",
    ],
)
def test_a_record_of_another_form_does_not_count(listing, wrong):
    record = stream(7)
    listing.add(upload_tags(Kind.STREAM, record.upload, {}))
    key = wrong.partition("=")[0]
    tags = [wrong if tag.startswith(f"{key}=") else tag for tag in stream_tags(record)]
    listing.add(tags)
    assert (WEB, 7) not in listing.contents().streams


@pytest.mark.parametrize("file", ["file.../x=5:", "file.a/b=5:", "file.-x=5:", "file.x=-5:"])
def test_a_bundle_with_an_impossible_file_does_not_count(listing, file):
    listing.add(upload_tags(Kind.BUNDLE, "3" * 32, {}))
    record = BundleRecord(f"{UUID}/r-1", "/store", {}, upload="3" * 32)
    listing.add([*bundle_tags(record), file + "b" * 64])
    assert listing.contents().bundles == {}


@pytest.mark.parametrize("place", ["store", "/store/../etc"])
def test_a_bundle_of_an_impossible_directory_does_not_count(listing, place):
    listing.add(upload_tags(Kind.BUNDLE, "3" * 32, {}))
    listing.add(bundle_tags(BundleRecord(f"{UUID}/r-1", place, {}, upload="3" * 32)))
    assert listing.contents().bundles == {}


def test_other_snapshots_of_the_repository_do_not_count(listing):
    listing.add(["home"])
    listing.entries += [{"id": "x", "tags": ["snaporch"], "time": ""}, 5]
    listing.entries.append({"id": "a" * 64, "time": "2026-11-26T01:00:00Z", "tags": None})
    assert listing.contents().streams == {}


@pytest.mark.parametrize("text", ["", "{}", "null", "[", '"x"'])
def test_what_is_no_listing_is_an_error(text):
    with pytest.raises((ValueError, TypeError)):
        parse_listing(text)


def ours(*snapshots, bookmarks=()):
    marks = {f"{WEB}#m{guid}": Bookmark(guid, guid * 10) for guid in bookmarks}
    return Originals(WEB, [snapshot(guid) for guid in snapshots], marks)


def planned(have, newest=None, chain=(), *, raw=False, limit=30):
    found = next_streams(have, newest, chain, raw=raw, limit=limit)
    return [(each.snapshot.guid, each.base_guid, each.first) for each in found]


def test_the_first_stream_is_full_and_increments_follow():
    assert planned(ours(1, 2, 3)) == [(1, 0, 1), (2, 1, 1), (3, 2, 1)]


def test_increments_follow_the_newest_snapshot_of_the_repository():
    chain = [stream(1), stream(2, base=1)]
    assert planned(ours(1, 2, 3), 2, chain) == [(3, 2, 1)]
    assert planned(ours(1, 2), 2, chain) == []


def test_an_increment_can_follow_a_bookmark():
    (found,) = next_streams(ours(3, bookmarks=[2]), 2, [stream(2)], raw=False, limit=30)
    assert (found.base, found.base_guid) == (f"{WEB}#m2", 2)


def test_a_chain_ends_after_its_increments():
    assert planned(ours(1, 2, 3, 4, 5), limit=2) == [
        (1, 0, 1), (2, 1, 1), (3, 2, 1), (4, 0, 4), (5, 4, 4),
    ]  # fmt: skip
    chain = [stream(1), stream(2, base=1), stream(3, base=2)]
    assert planned(ours(3, 4), 3, chain, limit=2) == [(4, 0, 4)]
    assert planned(ours(1, 2), limit=0) == [(1, 0, 1), (2, 0, 2)]


def test_a_name_that_the_chain_has_begins_another():
    """ZFS could not receive both."""
    again = replace(snapshot(2), name="s1")
    have = Originals(WEB, [again], {f"{WEB}#m": Bookmark(1, 10)})
    assert planned(have, 1, [stream(1)]) == [(2, 0, 2)]


def test_raw_streams_do_not_follow_others():
    assert planned(ours(1, 2), 1, [stream(1)], raw=True) == [(2, 0, 2)]


def listed(streams, births):
    return [each.guid for each in ordered(streams, births)]


def test_the_newest_snapshot_that_this_host_knows_is_the_last():
    there = [stream(1), stream(2, base=1), stream(3, base=2)]
    assert listed(there, {1: 10, 2: 20, 3: 30}) == [1, 2, 3]
    assert listed(there, {2: 20}) == [1, 3, 2]
    assert listed(there, {3: 10, 2: 20}) == [1, 3, 2]


def test_what_this_host_does_not_know_is_never_followed():
    """After a restore, or on a host whose datasets are others'."""
    assert listed([stream(1)], {9: 90}) == []


def test_a_chain_is_named_by_its_full_stream():
    assert chain_tag("tank/a,b", 7) == "chain=tank/a%2Cb@7"
