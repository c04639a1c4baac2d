"""A UEFI guest: its variables are of the snapshot, after a resume and after a cold boot."""

import hashlib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from fakes import manifests
from guests.disks import Disk
from guests.guest import Guest
from guests.nvram import probe_value
from support import assert_clean, assert_restored, must, restore, snaporch, snapshot, wait_for


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
    assert guest.wait_nvram(mark) == [then]


VOLUME = Path("/dev/zvol/tank/variables")


@pytest.fixture
def volume():
    must("zfs", "create", "-V", "1M", "tank/variables")
    wait_for(VOLUME.exists, "the volume's device")
    yield VOLUME
    must("zfs", "destroy", "tank/variables")


def test_variables_on_a_volume_are_refused(volume):
    def on_volume(domain):
        nvram = domain.find("os/nvram")
        nvram.set("type", "block")
        ET.SubElement(nvram, "source", dev=str(volume))

    made = Guest.create(
        "volume", firmware="uefi", disks=[Disk("zvol", "tank/v")], mutate=on_volume, start=False
    )
    outcome = snaporch("snapshot", "volume", "--name", "s1")
    assert outcome.status == 5
    assert "its UEFI variables (<nvram type='block'>) are not in a regular file" in outcome.err
    assert "have its <nvram> name a file" in outcome.err
    made.remove()


def test_the_disks_come_back_from_a_bundle_with_variables_of_a_volume(guest, volume):
    """An earlier snaporch took such, and could restore nothing of them."""
    taken = snapshot(guest)
    manifest, before = Path(taken["bundle"]) / "manifest.json", volume.read_bytes()
    manifests.replace_text(manifest, str(guest.nvram()), str(volume))
    refused = snaporch("restore", f"uefi@{taken['snapshot']}", "--yes")
    assert refused.status == 5
    assert "or restore with --disks-only, which leaves it as it is" in refused.err
    variables, count = guest.nvram(), guest.snapshot_count(taken["snapshot"])
    guest.wait_count(beyond=count + 5)
    guest.destroy()
    known = hashlib.sha256(variables.read_bytes()).hexdigest()
    restore(guest, taken["snapshot"], "--disks-only")
    assert set(guest.disk_counts()) == {count}
    assert hashlib.sha256(variables.read_bytes()).hexdigest() == known
    assert volume.read_bytes() == before
