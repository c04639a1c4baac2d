from dataclasses import replace
from datetime import UTC, datetime

import pytest

from snaporch.bundle.manifest import Manifest
from snaporch.model import PoolSnapshot
from snaporch.replication.interface import BundleCopy
from snaporch.verify.copy_decision import (
    Copy,
    CopyFacts,
    KnownManifest,
    PassedBefore,
    Seen,
    Source,
    find_faults,
    is_gone,
    passed_now,
    reason_to_skip,
    seen,
)

NOW = datetime(2026, 6, 10, 12, 30, tzinfo=UTC)
COPY = Copy("web", "u", "r", "hourly", has_bundle=True)
FILES = {"ram.save": 10, "copy.json": 2, "manifest.json": 5}


def known(sha256="a" * 64, level="ram", **changes):
    document = {
        "run": "r",
        "domain": "web",
        "uuid": "u",
        "snapshot": "hourly",
        "level": level,
        "was_running": True,
        "started": NOW,
        "created": NOW,
        "finished": NOW,
        "snapshots": [
            {"dataset": "tank/a", "name": "hourly", "guid": 1, "createtxg": 5},
            {"dataset": "tank/a", "name": "daily", "guid": 2, "createtxg": 6},
            {"dataset": "tank/b", "name": "hourly", "guid": 3, "createtxg": 5},
            {"dataset": "tank/b", "name": "daily", "guid": 4, "createtxg": 6},
        ],
        "disks": [],
        "parts": [{"name": "ram.save", "role": "ram", "bytes": 10, "sha256": "b" * 64}],
        "versions": {"snaporch": "", "libvirt": "", "emulator": "", "machine": ""},
    }
    return KnownManifest(Manifest.model_validate(document | changes), sha256)


def shot(dataset, name, guid, **properties):
    return PoolSnapshot(dataset, name, guid, 7, NOW, properties)


HOURLY = {"tank:a": [shot("tank:a", "hourly", 1)], "tank:b": [shot("tank:b", "hourly", 3)]}


def facts(copies=HOURLY, here=True, there=True, bundle=True, **more):
    """What is known of a copy that is whole."""
    return CopyFacts(
        copies,
        BundleCopy(FILES, 0) if bundle else None,
        known() if here else None,
        known() if there else None,
        **more,
    )


@pytest.mark.parametrize("here", [True, False])
def test_a_whole_copy_has_no_fault(here):
    assert find_faults(COPY, facts(here=here)) == []
    assert reason_to_skip(COPY, facts(here=here)) == ""


def test_another_name_of_the_same_instant_will_do():
    mixed = HOURLY | {"tank:b": [shot("tank:b", "daily", 4)]}
    assert find_faults(COPY, facts(mixed)) == []
    crash = replace(facts(mixed), here=None, there=known(level="crash"))
    assert find_faults(COPY, crash) == ["the ZFS snapshot tank:b@hourly is missing"]


@pytest.mark.parametrize(
    ("copies", "fault"),
    [
        ({"tank:a": HOURLY["tank:a"]}, "the ZFS snapshot tank:b@hourly is missing"),
        (
            HOURLY | {"tank:b": [shot("tank:b", "hourly", 9)]},
            "tank:b@hourly is another snapshot of this name (its GUID is 9, and not 3)",
        ),
        (
            HOURLY | {"tank:b": [], "tank:c": HOURLY["tank:b"]},
            "the ZFS snapshot tank:b@hourly is missing",
        ),
    ],
)
def test_a_snapshot_counts_by_its_guid_in_its_place(copies, fault):
    assert find_faults(COPY, facts(copies)) == [fault]


def test_without_manifests_the_snapshots_of_this_host_count():
    own = (shot("tank/a", "hourly", 1), shot("tank/b", "hourly", 8))
    bare = facts(here=False, there=False, bundle=False, own=own)
    copy = replace(COPY, has_bundle=False)
    assert bare.source is Source.HERE
    (fault,) = find_faults(copy, bare)
    assert fault.startswith("tank:b@hourly is another snapshot")
    assert find_faults(copy, replace(bare, own=own[:1])) == []


def test_a_bundle_that_should_be_there_is_missed():
    lost = facts(here=False, there=False, bundle=False)
    assert find_faults(COPY, lost) == ["its bundle is missing"]
    assert "nothing to compare it with" in reason_to_skip(replace(COPY, has_bundle=False), lost)


def test_the_manifest_of_this_host_counts():
    other = replace(facts(), there=known("c" * 64))
    assert find_faults(COPY, other) == ["the bundle's manifest.json is not the one of this host"]


@pytest.mark.parametrize(
    ("before", "source", "fails"),
    [
        (None, Source.REPLICA, False),
        (PassedBefore(NOW, "", False), Source.REPLICA, False),
        (PassedBefore(NOW, "a" * 64, False), Source.LAST, False),
        (PassedBefore(NOW, "c" * 64, False), Source.REPLICA, True),
    ],
)
def test_else_the_manifest_that_was_verified_last_counts(before, source, fails):
    given = facts(here=False, before=before)
    assert given.source is source
    assert bool(find_faults(COPY, given)) == fails


@pytest.mark.parametrize("is_promised", [True, False])
def test_what_has_not_arrived_is_no_failure(is_promised):
    copy = replace(COPY, is_here=True, is_promised=is_promised)
    reason = reason_to_skip(copy, facts(bundle=False, there=False))
    assert bool(reason) != is_promised
    assert reason_to_skip(copy, facts()) == ""


@pytest.mark.parametrize(
    ("files", "copies", "fails"),
    [
        (FILES | {"ram.save": 0}, HOURLY, True),
        ({"ram.save": 0, "manifest.json": 5}, HOURLY, False),
        (FILES | {"ram.save": 0}, {}, False),
    ],
)
def test_what_was_damaged_after_it_was_copied_fails(files, copies, fails):
    damaged = replace(facts(copies), bundle=BundleCopy(files, 0))
    assert bool(reason_to_skip(replace(COPY, is_here=True), damaged)) != fails
    assert find_faults(COPY, damaged)


HALF = {"tank:a": HOURLY["tank:a"]}
OWN = (shot("tank/a", "hourly", 1), shot("tank/b", "hourly", 3))


@pytest.mark.parametrize(
    ("given", "fails"),
    [
        (facts({}, bundle=False, there=False), False),
        (facts({}, bundle=False, there=False, was_verified=True), True),
        (facts({}), True),
        (facts(HALF, bundle=False, there=False), True),
        (facts(HALF, bundle=False, there=False, here=False, own=OWN), True),
        (facts({}, bundle=False, there=False, here=False, own=OWN), False),
    ],
)
def test_a_part_of_what_cannot_arrive_any_more_fails(given, fails):
    reason = reason_to_skip(replace(COPY, is_here=True, is_dropped=True), given)
    assert reason == ("" if fails else "the replica has nothing of it, and cannot get it any more")


def test_a_torn_copy_is_skipped():
    marks = {"run": "r", "uuid": "u", "torn": "yes"}
    torn = HOURLY | {"tank:b": [shot("tank:b", "hourly", 3, **marks)]}
    assert reason_to_skip(COPY, facts(torn)).startswith("it is torn")
    assert reason_to_skip(replace(COPY, snapshot="daily"), facts(torn)) == ""


def test_a_copy_is_gone_when_a_part_was_removed_between_two_listings():
    manifest = known().manifest
    whole = seen(COPY, manifest, HOURLY, BundleCopy(FILES, 0))
    half = seen(COPY, manifest, {"tank:a": HOURLY["tank:a"]}, BundleCopy(FILES, 0))
    assert is_gone(whole, half)
    assert not is_gone(half, whole)
    assert not is_gone(whole, whole)
    assert is_gone(whole, Seen(whole.snapshots, has_bundle=False))
    assert not is_gone(Seen(whole.snapshots, has_bundle=False), whole)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("web", True), ("u", True), ("web@hourly", True), ("u@r", True), ("web@r", True),
     ("web@daily", False), ("db", False), ("web@", False), ("", False)],
)  # fmt: skip
def test_names_of_a_copy(name, expected):
    assert COPY.is_named(name) == expected


PAGES = {
    "dataset": "tank/ram",
    "name": "hourly",
    "guid": 8,
    "createtxg": 9,
    "bytes": 1,
    "sha256": "d" * 64,
    "split": 1,
    "stored_bytes": 1,
}
IN_PAGES = [{"name": "ram.save", "role": "ram", "bytes": 10, "sha256": "b" * 64, "pages": PAGES}]
WITH_PAGES = HOURLY | {"tank:ram": [shot("tank:ram", "hourly", 8)]}


def test_the_manifest_of_this_host_is_compared_also_if_the_other_is_damaged():
    half = replace(facts({"tank:a": HOURLY["tank:a"]}, there=False), here=known())
    assert find_faults(replace(COPY, has_bundle=False), half) == [
        "the ZFS snapshot tank:b@hourly is missing",
        "the bundle's manifest.json is missing or damaged",
    ]
    assert half.source is Source.HERE


def test_the_snapshots_of_this_host_count_beside_a_manifest_there():
    own = (shot("tank/a", "hourly", 1), shot("tank/b", "hourly", 9))
    (fault,) = find_faults(COPY, facts(here=False, own=own))
    assert fault.startswith("tank:b@hourly is another snapshot of this name (its GUID is 3,")
    assert find_faults(COPY, facts(own=own)) == []
    more = HOURLY | {"tank:c": [shot("tank:c", "hourly", 8)]}
    assert find_faults(COPY, facts(more, here=False, own=(shot("tank/c", "hourly", 8),))) == []
    daily = HOURLY | {"tank:b": [shot("tank:b", "daily", 4)]}
    assert find_faults(COPY, facts(daily, here=False, own=(shot("tank/b", "hourly", 3),))) == []


def test_with_a_manifest_there_the_snapshots_of_this_host_are_no_source():
    own = (shot("tank/a", "hourly", 1),)
    assert facts(here=False, own=own).source is Source.REPLICA
    assert facts(here=False, there=False).source is Source.REPLICA


def test_a_missing_snapshot_has_the_name_of_the_copy():
    daily = replace(COPY, snapshot="daily")
    assert find_faults(daily, facts({})) == [
        "the ZFS snapshot tank:a@daily is missing",
        "the ZFS snapshot tank:b@daily is missing",
    ]


def test_pages_of_ram_need_their_snapshot():
    paged = replace(facts(WITH_PAGES), here=known(parts=IN_PAGES), there=known(parts=IN_PAGES))
    assert find_faults(COPY, paged) == []
    (fault,) = find_faults(COPY, replace(paged, copies=HOURLY))
    assert fault == "of the pages of its RAM: the ZFS snapshot tank:ram@hourly is missing"
    manifest = known(parts=IN_PAGES).manifest
    before, after = (seen(COPY, manifest, each, None) for each in (WITH_PAGES, HOURLY))
    assert ("tank:ram", 8) in before.snapshots
    assert is_gone(before, after)


def test_only_ram_that_is_not_in_pages_there_is_copied_again():
    copy = replace(COPY, is_here=True, is_promised=True)
    moved = replace(facts(WITH_PAGES), here=known(parts=IN_PAGES), there=known("c" * 64))
    assert reason_to_skip(copy, moved).startswith("its RAM was moved into pages")
    assert reason_to_skip(copy, replace(moved, there=None)) == ""
    assert reason_to_skip(copy, replace(moved, there=known(parts=IN_PAGES))) == ""
    lost = replace(moved, copies={"tank:a": HOURLY["tank:a"]})
    assert reason_to_skip(copy, lost) == ""
    assert find_faults(copy, lost) == ["the ZFS snapshot tank:b@hourly is missing"]
    other = replace(moved, there=known("c" * 64, domain="db"))
    assert reason_to_skip(copy, other) == ""
    assert "the bundle's manifest.json is not the one of this host" in find_faults(copy, other)


@pytest.mark.parametrize(("had_pages", "fails"), [(True, True), (False, False)])
def test_ram_may_have_moved_into_pages_since_the_last_verification(had_pages, fails):
    passed = passed_now(NOW, known("c" * 64))
    before = passed._replace(has_pages=had_pages)
    paged = replace(facts(WITH_PAGES, here=False, before=before), there=known(parts=IN_PAGES))
    assert bool(find_faults(COPY, paged)) == fails
    other = replace(paged, there=known(parts=IN_PAGES, domain="db"))
    assert find_faults(COPY, other)


def test_what_is_recorded_of_a_copy_that_passed():
    paged = passed_now(NOW, known(parts=IN_PAGES))
    assert paged == passed_now(NOW, known())._replace(has_pages=True)
    assert paged.manifest == "a" * 64
    assert passed_now(NOW, None) == PassedBefore(NOW, "", False)


def test_this_host_being_right_a_manifest_of_an_earlier_verification_does_not_count():
    assert find_faults(COPY, facts(before=PassedBefore(NOW, "c" * 64, False))) == []


def test_a_run_that_is_torn_is_skipped():
    torn = known(level="torn")
    assert reason_to_skip(COPY, replace(facts(), here=torn, there=torn)).startswith("it is torn")


@pytest.mark.parametrize("marks", [{"run": "x", "uuid": "u"}, {"run": "r", "uuid": "x"}])
def test_a_torn_snapshot_of_another_run_does_not_count(marks):
    torn = HOURLY | {"tank:c": [shot("tank:c", "hourly", 3, torn="yes", **marks)]}
    assert reason_to_skip(COPY, facts(torn)) == ""


def test_something_to_compare_with_is_enough():
    copy = replace(COPY, has_bundle=False)
    nothing = facts(here=False, there=False, bundle=False)
    assert reason_to_skip(copy, nothing).startswith("it has no bundle")
    own = (shot("tank/a", "hourly", 1),)
    assert reason_to_skip(copy, replace(nothing, own=own)) == ""
    assert reason_to_skip(copy, replace(nothing, there=known())) == ""


def test_a_copy_without_a_manifest_is_seen_by_its_marks():
    marked = {"tank:a": [shot("tank:a", "hourly", 1, run="r", uuid="u"), shot("tank:a", "x", 5)]}
    assert seen(COPY, None, marked, None) == Seen(frozenset({("tank:a", 1)}), has_bundle=False)
    by_guid = seen(COPY, known().manifest, HOURLY, None).snapshots
    assert by_guid == {("tank:a", 1), ("tank:b", 3)}


def test_a_copy_is_neither_here_nor_promised_by_itself():
    copy = Copy("web", "u", "r", "s")
    assert (copy.is_here, copy.is_promised, copy.has_bundle) == (False, False, False)
    assert (copy.full_name, copy.reference, copy.key) == ("web@s", "u/r", "u/r@s")


def test_the_words_of_what_a_copy_was_compared_with():
    assert [*Source] == ["here", "last-verification", "replica"]


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"own": (shot("tank/a", "hourly", 1, bundle="u/r"),)}, True),
        ({"own": (shot("tank/a", "hourly", 1, bundle="u/other"),)}, False),
        ({"own": (shot("tank/a", "hourly", 1),)}, False),
        ({"before": PassedBefore(NOW, "c" * 64, has_pages=False)}, True),
        ({"before": PassedBefore(NOW, "", has_pages=False), "own": (HOURLY["tank:a"][0],)}, False),
    ],
    ids=str,
)
def test_a_bundle_that_is_gone_on_both_sides_is_missed(given, fault):
    copy = replace(COPY, has_bundle=False, is_promised=True)
    own = tuple(replace(each, dataset="tank/a") for each in given.get("own", ()))
    found = facts(here=False, there=False, bundle=False, **given | {"own": own})
    assert find_faults(copy, found) == (["its bundle is missing"] if fault else [])
    assert reason_to_skip(copy, found) == ""


def test_in_object_storage_a_stream_is_missing_and_no_zfs_snapshot():
    found = facts({"tank:a": HOURLY["tank:a"]}, has_streams=True)
    dataset = next(each.dataset for each in known().manifest.snapshots if each.guid == 3)
    assert find_faults(COPY, found) == [
        f"a stream of the chain of {dataset}@hourly has no record",
    ]
