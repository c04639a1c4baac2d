"""The main job on every kind of disk: snapshot, and back to the very instant."""

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import assert_clean, assert_restored, restore, snapshot

pytestmark = pytest.mark.usefixtures("by_overlay")

LAYOUTS = {
    "file": [Disk("file", "tank/file")],
    "zvol": [Disk("zvol", "tank/volume")],
    "three disks over two pools": [
        Disk("file", "tank/three/system"),
        Disk("zvol", "flash/three-data"),
        Disk("file", "flash/three/more"),
    ],
}


@pytest.fixture(params=LAYOUTS, ids=lambda name: name.replace(" ", "-"), scope="module")
def guest(request):
    made = Guest.create(f"guest of {request.param}", disks=LAYOUTS[request.param])
    yield made
    made.remove()


def test_snapshot_disturbs_nothing(guest):
    mark = guest.mark()
    taken = snapshot(guest)
    guest.wait_count()
    guest.assert_undisturbed(mark)
    assert_clean(guest)
    assert taken["level"] == "ram"
    assert taken["state"] == "complete"
    assert taken["datasets"] == sorted(disk.where for disk in layout_of(guest))
    assert taken["pause_ms"] > 0
    assert taken["ram_bytes"] > 0
    assert taken["stored_bytes"] > 0


def test_all_disks_are_of_one_instant(guest):
    taken = snapshot(guest)
    assert guest.snapshot_count(taken["snapshot"]) > 0


def test_the_running_guest_goes_back_to_the_instant(guest):
    taken = snapshot(guest)
    count = guest.snapshot_count(taken["snapshot"])
    guest.wait_count(beyond=count + 20)
    mark = guest.mark()
    restored = restore(guest, taken["snapshot"])
    assert restored["resumed"]
    assert_restored(guest, mark, count)
    assert_clean(guest)


@pytest.mark.daily(1)
def test_a_second_restore_of_the_same_snapshot(guest):
    taken = snapshot(guest)
    count = guest.snapshot_count(taken["snapshot"])
    for _ in range(2):
        guest.wait_count(beyond=count + 5)
        mark = guest.mark()
        restore(guest, taken["snapshot"])
        assert_restored(guest, mark, count)


def layout_of(guest):
    return LAYOUTS[guest.name.removeprefix("guest of ")]
