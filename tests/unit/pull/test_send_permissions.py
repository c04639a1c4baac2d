"""Which guests a machine may copy."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from fakes.pull_case import UUID

from snaporch.model import PoolSnapshot
from snaporch.pull.send_permissions import UnmarkedRun, make_offers


def snapshot(dataset, txg, number, run="", domain="", **more):
    marks = {"uuid": UUID.format(number), "run": run or f"r{txg}", "domain": domain or f"g{number}"}
    return PoolSnapshot(
        dataset, f"s{txg}", txg + 70, txg, datetime(2026, 1, 1, tzinfo=UTC), marks | more
    )


def names(offers):
    return {each.domain: sorted(each.snapshots) for each in offers}


def test_without_a_list_all_guests_are_offered():
    found = make_offers([snapshot("t/a", 1, 1), snapshot("t/b", 2, 2)], None, ())
    assert names(found) == {"g1": ["t/a"], "g2": ["t/b"]}


@pytest.mark.parametrize("allowed", [{"g1"}, {UUID.format(1)}])
def test_only_a_guest_that_is_named_is_offered(allowed):
    found = make_offers([snapshot("t/a", 1, 1), snapshot("t/b", 2, 2)], allowed, ())
    assert names(found) == {"g1": ["t/a"]}


def test_the_name_of_the_newest_snapshot_counts():
    own = [snapshot("t/a", 1, 1, domain="web"), snapshot("t/a", 2, 1, domain="secret")]
    assert make_offers(own, {"web"}, ()) == []
    assert names(make_offers(own, {"secret"}, ())) == {"secret": ["t/a"]}


def test_a_dataset_of_a_guest_that_may_not_be_copied_is_not_sent():
    own = [snapshot("t/a", 1, 1), snapshot("t/ab", 2, 1), snapshot("t/ab", 3, 2)]
    (found,) = make_offers(own, {"g1"}, ())
    assert sorted(found.snapshots) == ["t/a"]
    assert found.shared == ("t/ab",)
    both = make_offers(own, {"g1", "g2"}, ())
    assert names(both) == {"g1": ["t/a", "t/ab"], "g2": ["t/ab"]}


def test_snapshots_without_marks_are_not_sent():
    other = PoolSnapshot("t/a", "autosnap", 5, 5, datetime(2026, 1, 1, tzinfo=UTC), {})
    (found,) = make_offers([snapshot("t/a", 1, 1), other], None, ())
    assert [each.name for each in found.snapshots["t/a"]] == ["s1"]


def test_snapshots_wait_for_the_run_before_them():
    own = [snapshot("t/a", n, 1) for n in (1, 2, 3)]
    (found,) = make_offers(own, None, {"r2"})
    assert [each.name for each in found.snapshots["t/a"]] == ["s1"]
    assert found.waiting == ("t/a@s2", "t/a@s3")
    assert found.runs == {"r1"}


def test_pages_of_ram_belong_to_their_guest():
    pages = PoolSnapshot(
        "t/pages/u",
        "r1",
        5,
        5,
        datetime(2026, 1, 1, tzinfo=UTC),
        {"ram": f"{UUID.format(1)}/r1"},
    )
    (found,) = make_offers([snapshot("t/a", 1, 1), pages], {"g1"}, ())
    assert sorted(found.snapshots) == ["t/a", "t/pages/u"]


def sharing(*snapshots, run="q1", name="db"):
    return UnmarkedRun(UUID.format(2), name, run, snapshots)


def test_a_guest_whose_snapshots_have_the_marks_of_another_is_offered():
    own = [snapshot("t/a", 1, 1), snapshot("t/a", 2, 1)]
    web, db = make_offers(own, None, (), (), [sharing(own[1])])
    assert (db.domain, db.unmarked, db.runs) == ("db", {"q1": [own[1]]}, {"r1", "r2", "q1"})
    assert [each.name for each in db.snapshots["t/a"]] == ["s1", "s2"]
    assert web.unmarked == {}


def test_a_dataset_of_a_guest_without_marks_that_may_not_be_copied_is_not_sent():
    own = [snapshot("t/a", 1, 1), snapshot("t/ab", 2, 1)]
    (found,) = make_offers(own, {"g1"}, (), (), [sharing(own[1])])
    assert (sorted(found.snapshots), found.shared) == (["t/a"], ("t/ab",))


@pytest.mark.parametrize(("number", "expected"), [(1, ["secret"]), (3, ["db"])])
def test_the_name_of_the_newest_snapshot_counts_also_without_marks(number, expected):
    days = [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2, 3)]
    own = [
        replace(snapshot("t/a", n, owner, domain="secret"), created=day)
        for n, owner, day in zip((1, 2, 3), (1, 2, 1), days, strict=True)
    ]
    found = make_offers(own, None, (), (), [sharing(own[number - 1])])
    assert [each.domain for each in found if each.uuid == UUID.format(2)] == expected


def test_a_run_without_marks_that_has_not_ended_waits():
    own = [snapshot("t/a", 1, 1), snapshot("t/a", 2, 1)]
    _, found = make_offers(own, None, {"q1"}, (), [sharing(own[1])])
    assert (found.waiting, found.unmarked) == (("t/a@s2",), {})
