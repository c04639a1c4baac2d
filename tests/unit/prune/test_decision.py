"""The decision for each item of the store, and its reason."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from snaporch.model import SnapshotListing
from snaporch.prune.decision import (
    GracePeriods,
    ItemKind,
    PruneAction,
    PruneDecision,
    SnapshotReference,
    StoreItem,
    decide,
)

NOW = datetime(2026, 5, 10, 12, tzinfo=UTC)
GRACE = GracePeriods(trash=timedelta(days=3), safety=timedelta(days=7))
OWN = SnapshotReference("tank/web", "s1", 7)


def found(kind=ItemKind.BUNDLE, **known):
    return StoreItem(kind, Path("/store/u/r"), "u", "r", references=(OWN,), **known)


def verdict(thing, under_way=(), **snapshots):
    listing = SnapshotListing(frozenset({"tank", "backup"}), {7: tuple(snapshots.get("names", ()))})
    return decide(thing, listing, under_way, GRACE, NOW)


def test_the_kinds_are_those_of_the_page():
    page = (Path(__file__).parents[3] / "docs/reference/json.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| `kind` | string | `bundle`"))
    assert set(re.findall(r"`([a-z-]+)`[:;]", row)) == set(ItemKind)
    assert verdict(found()).found.kind == "bundle"


def test_its_own_snapshot_comes_before_copies_of_it():
    names = ("backup/web@s1", "tank/web@s1")
    assert verdict(found(), names=names).reason == "tank/web@s1 exists"
    assert "exists as backup/web@s1" in verdict(found(), names=names[:1]).reason


def test_a_safety_copy_of_an_unfinished_restore_stays():
    old = timedelta(days=9)
    assert verdict(found(ItemKind.SAFETY, age=old), ["u"]).action is PruneAction.KEEP
    assert verdict(found(ItemKind.SAFETY, age=old), ["u"]).reason
    assert verdict(found(ItemKind.SAFETY, age=old)).action is PruneAction.DELETE


@pytest.mark.parametrize("kind", [ItemKind.BUNDLE, ItemKind.PARTIAL])
def test_a_bundle_is_not_needed_for_an_unfinished_restore(kind):
    assert verdict(found(kind), ["u"]).action in (PruneAction.TRASH, PruneAction.DELETE)


@pytest.mark.parametrize(
    ("age", "until"), [(1, "2026-05-12"), (3, "2026-05-10"), (5, "2026-05-08")]
)
def test_the_reason_names_the_time_until_which_an_item_stays(age, until):
    trashed = found(ItemKind.TRASHED, age=timedelta(days=age))
    assert until in verdict(trashed).reason


def test_an_item_without_further_facts_has_the_defaults():
    """It is not needed by an undo, its place is free, and it has no size yet."""
    old = timedelta(days=9)
    assert verdict(found(ItemKind.TRASHED, age=old)).action is PruneAction.DELETE
    assert verdict(found(ItemKind.TRASHED, age=old, wanted=True)).action is PruneAction.KEEP
    assert verdict(found(ItemKind.TRASHED), names=["tank/web@s1"]).action is PruneAction.PUT_BACK
    assert found().bytes == 0


def test_an_item_that_stays_for_the_usual_reason_is_not_printed():
    """An item that needs the admin is."""
    assert verdict(found(), names=["tank/web@s1"]).usual
    assert verdict(found(ItemKind.TRASHED)).usual
    assert verdict(found(ItemKind.TRASHED, wanted=True)).usual
    assert verdict(found(ItemKind.SAFETY)).usual
    assert not verdict(found(problem="torn")).usual
    assert not verdict(found(ItemKind.SAFETY), ["u"]).usual
    back = found(ItemKind.TRASHED, place_taken=True)
    assert not verdict(back, names=["tank/web@s1"]).usual


@pytest.mark.parametrize(
    ("known", "title"),
    [
        ({"domain": "web", "snapshot": "s1"}, "web@s1"),
        ({"domain": "web"}, "web/r"),
        ({"snapshot": "s1"}, "u/r"),
        ({}, "u/r"),
        ({"kind": ItemKind.PAGES, "domain": "web", "snapshot": "s1"}, "/store/u/r"),
    ],
)
def test_an_items_title_has_what_is_known_of_it(known, title):
    assert found(**known).title == title


def test_each_action_has_a_word_of_its_own_for_when_it_is_done():
    words = {action.done for action in PruneAction}
    assert len(words) == len(PruneAction)
    assert not words & {action.value for action in PruneAction}


def test_actions_that_were_done_have_plain_words():
    assert [action.done for action in PruneAction] == ["kept", "trashed", "deleted", "put back"]


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        (PruneAction.KEEP, ItemKind.PARTIAL),
        (PruneAction.TRASH, ItemKind.TRASHED),
        (PruneAction.PUT_BACK, ItemKind.BUNDLE),
        (PruneAction.DELETE, None),
    ],
)
def test_the_kind_of_an_item_after_the_decision(action, kind):
    assert PruneDecision(found(ItemKind.PARTIAL), action, "").kind_now is kind


def test_the_json_object_of_a_decision():
    known = found(domain="web", snapshot="s1", bytes=5)
    decision = PruneDecision(known, PruneAction.TRASH, "no snapshot has it")
    assert not decision.usual
    assert decision.as_json() == {
        "kind": "bundle",
        "domain": "web",
        "uuid": "u",
        "snapshot": "s1",
        "path": "/store/u/r",
        "bytes": 5,
        "action": PruneAction.TRASH.value,
        "reason": "no snapshot has it",
    }
    unnamed = PruneDecision(found(), PruneAction.KEEP, "").as_json()
    assert (unnamed["domain"], unnamed["snapshot"]) == (None, None)
