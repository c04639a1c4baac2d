"""Properties of pruning for any store, any pools and any clock."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from snaporch.model import SnapshotListing
from snaporch.prune.decision import (
    GracePeriods,
    ItemKind,
    PruneAction,
    SnapshotReference,
    StoreItem,
    decide,
    existing_snapshot,
)

POOLS = ("tank", "flash", "backup")
RUNS = ("r1", "r2")
GUIDS = st.integers(1, 6)
BUNDLES = (ItemKind.BUNDLE, ItemKind.TRASHED)

moments = st.integers(0, 3650 * 24).map(
    lambda hours: datetime(2020, 1, 1, tzinfo=UTC) + timedelta(hours=hours)
)
references = st.builds(
    SnapshotReference,
    dataset=st.builds("{}/{}".format, st.sampled_from(POOLS), st.sampled_from("ab")),
    name=st.sampled_from(("s1", "s2")),
    guid=GUIDS,
)


@st.composite
def listings(draw):
    """Listings whose snapshots are of listed pools."""
    pools = draw(st.frozensets(st.sampled_from(POOLS), min_size=1))
    names = st.lists(
        st.builds("{}/x@s{}".format, st.sampled_from(sorted(pools)), st.integers(0, 9)),
        min_size=1,
        max_size=2,
    ).map(tuple)
    return SnapshotListing(pools, draw(st.dictionaries(GUIDS, names)))


things = st.builds(
    StoreItem,
    kind=st.sampled_from(ItemKind),
    path=st.just(Path("/store/x")),
    uuid=st.just("u"),
    name=st.sampled_from(RUNS),
    references=st.lists(references, max_size=3).map(tuple),
    age=st.integers(0, 40).map(lambda days: timedelta(days=days)),
    problem=st.sampled_from(("", "", "it is torn")),
    place_taken=st.booleans(),
)
graces = st.builds(
    GracePeriods,
    trash=st.integers(0, 30).map(lambda days: timedelta(days=days)),
    safety=st.integers(0, 30).map(lambda days: timedelta(days=days)),
)
journals = st.frozensets(st.sampled_from(RUNS))


def alive(found, listing):
    return any(reference.guid in listing.snapshots for reference in found.references)


def hidden(found, listing):
    return any(reference.pool not in listing.pools for reference in found.references)


@given(things, listings(), graces, moments)
def test_a_bundle_with_an_existing_snapshot_is_never_removed(found, listing, grace, now):
    verdict = decide(found, listing, (), grace, now)
    if found.kind in BUNDLES and alive(found, listing):
        assert verdict.action in (PruneAction.KEEP, PruneAction.PUT_BACK)
        assert existing_snapshot(found, listing) != ""


@given(things, listings(), graces, moments)
def test_a_bundle_with_a_snapshot_in_a_missing_pool_stays(found, listing, grace, now):
    verdict = decide(found, listing, (), grace, now)
    if found.kind in BUNDLES and hidden(found, listing) and not alive(found, listing):
        assert verdict.action is PruneAction.KEEP
        assert not verdict.usual


@given(things, listings(), graces, moments)
def test_a_bundle_is_removed_exactly_when_all_its_snapshots_are_known_to_be_destroyed(
    found, listing, grace, now
):
    found = replace(found, kind=ItemKind.BUNDLE)
    verdict = decide(found, listing, (), grace, now)
    lost = bool(found.references) and not alive(found, listing) and not hidden(found, listing)
    removed = verdict.action in (PruneAction.TRASH, PruneAction.DELETE)
    assert removed == (lost and not found.problem)
    if removed:
        assert (verdict.action is PruneAction.DELETE) == (grace.trash == timedelta())


@given(things, listings(), journals, graces, moments)
def test_an_item_of_a_run_under_way_and_an_unreadable_item_stay(found, listing, runs, grace, now):
    verdict = decide(found, listing, runs, grace, now)
    if found.problem or found.name in runs:
        assert verdict.action is PruneAction.KEEP
        assert not verdict.usual


@given(things, listings(), graces, moments)
def test_no_item_is_deleted_before_its_time(found, listing, grace, now):
    verdict = decide(found, listing, (), grace, now)
    stays = {ItemKind.TRASHED: grace.trash, ItemKind.SAFETY: grace.safety}
    if found.kind in stays and verdict.action is PruneAction.DELETE:
        assert found.age >= stays[found.kind]


around = st.sampled_from(
    [timedelta(days=-1), timedelta(microseconds=-1), timedelta(), timedelta(microseconds=1)]
)


@given(st.sampled_from([ItemKind.TRASHED, ItemKind.SAFETY]), moments, graces, around)
def test_an_item_is_deleted_from_the_moment_in_which_its_time_is_over(kind, now, grace, offset):
    lost = (SnapshotReference("tank/a", "s1", 1),)
    stays = grace.trash if kind is ItemKind.TRASHED else grace.safety
    found = StoreItem(kind, Path("/store/x"), "u", "r1", references=lost, age=stays + offset)
    listing = SnapshotListing(frozenset(POOLS), {})
    verdict = decide(found, listing, (), grace, now)
    assert verdict.action is (PruneAction.KEEP if offset < timedelta() else PruneAction.DELETE)


@given(things, listings(), listings(), graces, moments)
def test_two_listings_together_delete_no_item_that_either_would_keep(found, one, other, grace, now):
    both = decide(found, one.agreed(other), (), grace, now).action
    if found.kind in BUNDLES and both in (PruneAction.TRASH, PruneAction.DELETE):
        assert decide(found, one, (), grace, now).action is both
        assert decide(found, other, (), grace, now).action is both


@given(listings(), listings())
def test_the_order_of_two_listings_does_not_matter(one, other):
    first, second = one.agreed(other), other.agreed(one)
    assert first.pools == second.pools
    assert {guid: set(names) for guid, names in first.snapshots.items()} == {
        guid: set(names) for guid, names in second.snapshots.items()
    }


@given(things, listings(), graces, moments)
def test_every_decision_has_a_reason(found, listing, grace, now):
    assert decide(found, listing, (), grace, now).reason
