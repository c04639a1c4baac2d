"""A UEFI guest: its variables are of the snapshot, after a resume and after a cold boot."""

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import assert_clean, assert_restored, restore, snapshot, wait_for


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("uefi", firmware="uefi", disks=[Disk("zvol", "tank/uefi")])
    yield made
    made.remove()


def variable_writes(text):
    return [line.split()[1] for line in text.splitlines() if line.startswith("NVSET ")]


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
    mark = guest.mark()
    wait_for(lambda: variable_writes(guest.serial()[mark:]), "a variable written", 300)
    taken = snapshot(guest)
    then = variable_writes(guest.serial())[-1]
    mark = guest.mark()
    wait_for(lambda: variable_writes(guest.serial()[mark:]), "a later value", 300)
    mark = guest.mark()
    restore(guest, taken["snapshot"], "--cold")
    line = wait_for(
        lambda: [x for x in guest.serial()[mark:].splitlines() if x.startswith("NVRAM ")],
        "the guest boots",
        300,
    )
    assert line[0].split()[1] == then
