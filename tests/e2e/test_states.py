"""Guests that do not run: off, paused; and what a restore makes of them."""

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import assert_clean, assert_restored, must, one_line_error, restore, snaporch, snapshot


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("states", disks=[Disk("file", "tank/states"), Disk("zvol", "flash/states")])
    yield made
    made.remove()


def test_a_guest_that_is_off_gets_a_plain_snapshot_and_stays_off(guest):
    guest.destroy()
    before = guest.disk_counts()
    taken = snapshot(guest, "--name", "off")
    assert (taken["level"], taken["state"], taken["ram_bytes"]) == ("off", "complete", None)
    assert guest.disk_counts("off") == before
    assert_clean(guest, "shut off")
    restored = restore(guest, "off")
    assert restored["domain_state"] == "off"
    assert guest.state() == "shut off"


def test_cold_boots_a_guest_that_was_off(guest):
    mark = guest.mark()
    restored = restore(guest, "off", "--cold")
    assert restored["domain_state"] == "running"
    guest.wait_count()
    assert guest.cold_boots_since(mark)


def test_a_paused_guest_stays_paused(guest):
    must("virsh", "suspend", guest.name)
    taken = snapshot(guest)
    assert taken["level"] == "ram"
    assert taken["pause_ms"] == 0
    assert_clean(guest, "paused")
    count = guest.snapshot_count(taken["snapshot"])
    must("virsh", "resume", guest.name)
    guest.wait_count(beyond=count + 10)
    mark = guest.mark()
    assert restore(guest, taken["snapshot"])["domain_state"] == "paused"
    must("virsh", "resume", guest.name)
    assert_restored(guest, mark, count)


def test_cold_boots_from_the_disks_of_a_ram_snapshot(guest):
    taken = snapshot(guest)
    count = guest.snapshot_count(taken["snapshot"])
    mark = guest.mark()
    restored = restore(guest, taken["snapshot"], "--cold")
    assert not restored["resumed"]
    guest.wait_count()
    found = guest.cold_boots_since(mark)
    assert len(found) == 1
    assert set(found[0].values()) <= {count, count - 1}  # one may have been in flight


def test_a_guest_that_was_off_and_runs_now(guest):
    """`--discard-newer` is asked for by name, and the guest ends off."""
    outcome = snaporch("restore", "states@off", "--yes")
    one_line_error(outcome, 5, "newer snapshots", "--discard-newer")
    assert guest.state() == "running"
    assert restore(guest, "off", "--discard-newer")["domain_state"] == "off"
    assert guest.state() == "shut off"
