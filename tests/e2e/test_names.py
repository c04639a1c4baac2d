"""Names with spaces, unicode and shell characters; names that exist; names that are none."""

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import (
    assert_restored,
    one_line_error,
    restore,
    snaporch,
    snapshot,
    zfs_snapshots,
)

pytestmark = pytest.mark.usefixtures("by_overlay")

NAME = "Büro $(reboot) `x` @ 'größe' \U0001f431 & <b>"


@pytest.fixture(scope="module")
def guest():
    made = Guest.create(
        NAME, disks=[Disk("file", "tank/odd name/a b"), Disk("zvol", "flash/odd v")]
    )
    yield made
    made.remove()


def test_an_odd_name_all_the_way(guest):
    taken = snapshot(guest)
    assert taken["domain"] == NAME
    listed = snaporch("list", NAME, "--json").json
    assert [entry["snapshot"] for entry in listed] == [taken["snapshot"]]
    assert listed[0] == taken
    count = guest.snapshot_count(taken["snapshot"])
    guest.wait_count(beyond=count + 5)
    mark = guest.mark()
    restore(guest, taken["snapshot"])
    assert_restored(guest, mark, count)


def test_by_uuid(guest):
    uuid = guest.domain().UUIDString() if callable(guest.domain) else guest.domain.UUIDString()
    outcome = snaporch("snapshot", uuid, "--json")
    assert outcome.status == 0, outcome.err
    assert outcome.json["domain"] == NAME


def test_a_name_of_ones_own(guest):
    assert snapshot(guest, "--name", "before upgrade")["snapshot"] == "before upgrade"


def test_an_existing_name_is_refused_before_anything_is_frozen(guest):
    mark = guest.mark()
    before = zfs_snapshots()
    outcome = snaporch("snapshot", NAME, "--name", "before upgrade")
    one_line_error(outcome, 5, "before upgrade", "exists")
    assert zfs_snapshots() == before
    guest.wait_count()
    guest.assert_undisturbed(mark)


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("a/b", 2),
        ("a@b", 2),
        ("", 2),
        (" x", 2),
        ("ä", 2),
        ("a%recv", 2),
        ("x" * 300, 2),
        ("x" * 250, 5),
    ],
)
def test_what_zfs_would_not_take_is_refused(guest, name, status):
    before = zfs_snapshots()
    one_line_error(snaporch("snapshot", NAME, "--name", name), status)
    assert zfs_snapshots() == before
