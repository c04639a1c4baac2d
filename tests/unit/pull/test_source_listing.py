"""What a hostile source may say: refused in one copy, with a line, before anything is written."""

import json

import pytest
from fakes.pull_case import ROOT, UUID

from snaporch.errors import SnaporchError
from snaporch.pull.source_listing import MAX_SNAPSHOTS, parse_guest, parse_guests

NOW = 1_800_000_000.0


def snapshot(**changes):
    return {
        "name": "s1",
        "guid": 7,
        "createtxg": 5,
        "created": NOW,
        "properties": {},
    } | changes


def dataset(*snapshots, **changes):
    return {
        "name": "tank/web",
        "kind": "filesystem",
        "raw": False,
        "policy": "",
        "snapshots": [*snapshots],
        "bookmarks": [],
    } | changes


def parsed(*datasets):
    document = {"datasets": [*datasets], "waiting": [], "shared": [], "unmarked": []}
    return parse_guest(UUID.format(1), "web", json.loads(json.dumps(document)), ROOT, NOW)


def test_a_guest_is_read():
    own = {"run": "r", "uuid": UUID.format(1), "bundle": f"{UUID.format(1)}/r", "note": "ä"}
    found = parsed(dataset(snapshot(properties=own), bookmarks=[[9, 4]]))
    assert found.datasets[0].births == {9: 4, 7: 5}
    assert found.datasets[0].snapshots[0].properties == own


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "a/b"},
        {"name": "../x"},
        {"name": "a@b"},
        {"name": 5},
        {"guid": 0},
        {"guid": 1 << 64},
        {"guid": "7"},
        {"guid": True},
        {"created": 1 << 62},
        {"created": -1},
        {"created": float("inf")},
        {"created": float("nan")},
        {"created": NOW + 90_000},
        {"createtxg": -1},
        {"properties": 5},
    ],
    ids=str,
)
def test_a_snapshot_that_cannot_be_is_refused(changes):
    with pytest.raises((SnaporchError, ValueError, TypeError)):
        parsed(dataset(snapshot(**changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "/"},
        {"name": "tank/../x"},
        {"name": "-tank"},
        {"name": "t/" + "a" * 250},
        {"kind": "bookmark"},
        {"bookmarks": [[1, 2, 3]]},
        {"snapshots": {}},
    ],
    ids=str,
)
def test_a_dataset_that_cannot_be_is_refused(changes):
    with pytest.raises((SnaporchError, ValueError, TypeError)):
        parsed(dataset(**changes))


@pytest.mark.parametrize("key", ["name", "guid", "createtxg"])
def test_two_snapshots_with_the_same_identity_are_refused(key):
    other = {"name": "s2", "guid": 8, "createtxg": 6}
    del other[key]
    with pytest.raises(SnaporchError, match="two snapshots of the same"):
        parsed(dataset(snapshot(), snapshot(**other)))


def test_two_datasets_whose_copies_would_have_one_name_are_refused():
    with pytest.raises(SnaporchError, match="a copy of the same name"):
        parsed(dataset(name="tank/a:b"), dataset(name="tank/a/b"))


def test_too_many_snapshots_are_refused():
    with pytest.raises(SnaporchError, match="more than"):
        parsed(dataset(*[snapshot(name=f"s{n}") for n in range(MAX_SNAPSHOTS + 1)]))


def test_marks_that_cannot_be_are_left_out():
    marks = {
        "run": "../x",
        "uuid": UUID.format(1),
        "bundle": f"{UUID.format(2)}/r",
        "note": "\ud800",
        "domain": "a\nb",
        "level": "gold",
        "mountpoint": "/",
        "copy": "",
    }
    (found,) = parsed(dataset(snapshot(properties=marks))).datasets[0].snapshots
    assert found.properties == {"uuid": UUID.format(1)}


@pytest.mark.parametrize(
    "guest",
    [
        {"uuid": "../" * 12, "domain": "web"},
        {"uuid": UUID.format(1), "domain": "a\x1b[2J"},
        {"uuid": UUID.format(1), "domain": "\ud800"},
        {"uuid": UUID.format(1), "domain": ""},
        {"uuid": 5, "domain": "web"},
    ],
    ids=str,
)
def test_a_guest_whose_name_or_uuid_cannot_be_is_refused(guest):
    with pytest.raises(SnaporchError):
        parse_guests({"guests": [guest]})


def with_runs(*runs):
    document = {"datasets": [], "waiting": [], "shared": [], "unmarked": [*runs]}
    return parse_guest(UUID.format(1), "web", json.loads(json.dumps(document)), ROOT, NOW)


def test_runs_that_did_not_mark_their_snapshots_are_read():
    found = with_runs({"run": "r1", "snapshots": [["tank/web", 7]]})
    assert found.unmarked == {"r1": {("tank/web", 7)}}


@pytest.mark.parametrize(
    "run",
    [
        {"run": "../x", "snapshots": []},
        {"run": 5, "snapshots": []},
        {"run": "r1", "snapshots": [["tank/web", "7"]]},
        {"run": "r1", "snapshots": [[["tank/web"]]]},
        {"run": "r1", "snapshots": {}},
        {"run": "r1", "snapshots": [["tank/web", 7]] * (MAX_SNAPSHOTS + 1)},
    ],
    ids=lambda run: str(run)[:50],
)
def test_a_run_that_cannot_be_is_refused(run):
    with pytest.raises((SnaporchError, ValueError, TypeError)):
        with_runs(run)


def test_too_many_runs_are_refused():
    some = [["tank/web", 7]] * (MAX_SNAPSHOTS // 2 + 1)
    with pytest.raises(SnaporchError, match="more than"):
        with_runs({"run": "r1", "snapshots": some}, {"run": "r2", "snapshots": some})
