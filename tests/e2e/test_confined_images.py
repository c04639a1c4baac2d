"""Images with odd names in odd places, of a guest that is confined: the main jobs, again and again.

Each disk has another kind of name: libvirt's helper reads only images with usual suffixes, and
quotes the others in the profile unread.
"""

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import (
    assert_clean,
    assert_confined,
    assert_restored,
    config,
    must,
    restore,
    snaporch,
    snapshot,
)

PLACE = "/srv/Büro, A & B"
DISKS = [
    Disk("file", "tank/place", file_name="größe, 1 & 2.img"),
    Disk("file", "tank/place", format="qcow2", file_name="ohne, ü & Endung"),
    Disk("zvol", "flash/a volume"),
]


@pytest.fixture(scope="module")
def guest():
    must("zfs", "create", "-o", f"mountpoint={PLACE}", "tank/place")
    made = Guest.create("images", disks=DISKS)
    yield made
    made.remove()


@pytest.mark.parametrize("way", ["overlay", "manual"])
def test_three_snapshots_in_a_row(guest, tmp_path, way):
    assert_confined(guest)
    mark = guest.mark()
    with config(tmp_path, f'[defaults]\nram_strategy = "{way}"\n') as environment:
        for _ in range(3):
            outcome = snaporch("snapshot", guest.name, "--json", env=environment)
            assert outcome.status == 0, outcome.err
            assert outcome.json["level"] == "ram"
            assert_clean(guest)
            guest.wait_count()
    guest.assert_undisturbed(mark)


def test_restored_verified_and_cloned(guest):
    snapshot(guest, "--name", "s1")
    count = guest.snapshot_count("s1")
    guest.wait_count(beyond=count + 5)
    mark = guest.mark()
    restore(guest, "s1")
    assert_restored(guest, mark, count)
    verified = snaporch("verify", "images@s1", "--json", "--quiet")
    assert (verified.status, verified.json["reached"]) == (0, "resumed"), verified.err
    outcome = snaporch("clone", "images@s1", "twin", "--running")
    assert outcome.status == 0, outcome.err
    twin = Guest.existing("twin")
    assert_confined(twin)
    twin.assert_continues(0, count)
    assert snaporch("clone", "--delete", "twin").status == 0
