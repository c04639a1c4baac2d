"""A UEFI guest: its variables are of the snapshot, after a resume and after a cold boot."""

from pathlib import Path

import pytest
from guests.disks import Disk
from guests.guest import Guest
from guests.nvram import probe_value
from support import assert_clean, assert_restored, restore, snapshot, wait_for


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("uefi", firmware="uefi", disks=[Disk("zvol", "tank/uefi")])
    yield made
    made.remove()


def test_resume(guest):
    taken = snapshot(guest)
    assert taken["level"] == "ram"
    count = guest.snapshot_count(taken["snapshot"])
    mark = guest.mark()
    restore(guest, taken["snapshot"])
    assert_restored(guest, mark, count)
    assert_clean(guest)


def test_the_variable_of_the_snapshot_is_there_after_a_cold_boot(guest):
    """The guest writes a new value every 64 counts; the boot prints what it finds."""
    guest.wait_nvram_set(guest.mark(), 300)
    taken = snapshot(guest)
    then = probe_value(Path(taken["bundle"]) / "nvram.fd")
    assert then in guest.log.report().nvset
    guest.wait_nvram_set(guest.mark(), 300)
    mark = guest.mark()
    restore(guest, taken["snapshot"], "--cold")
    found = wait_for(lambda: guest.log.report(mark).nvram, "the guest boots", 300)
    assert found == [then]
