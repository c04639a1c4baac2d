"""The bundle without snaporch: plain zfs and virsh; and the proof that the oracle can fail."""

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import config, must, snaporch, snapshot


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("by hand", disks=[Disk("file", "tank/hand"), Disk("zvol", "flash/hand")])
    yield made
    made.remove()


@pytest.mark.parametrize("compression", ["zstd", "gzip", "none"])
@pytest.mark.parametrize(
    "capture",
    [pytest.param(each, marks=pytest.mark.daily(1, each)) for each in ("stream", "file")],
)
def test_virsh_restores_the_ram_image_as_it_lies_in_the_bundle(
    guest, tmp_path, compression, capture
):
    text = f'[defaults]\ncompression = "{compression}"\nram_capture = "{capture}"\n'
    with config(tmp_path, text) as environment:
        outcome = snaporch("snapshot", guest.name, "--json", env=environment)
    assert outcome.status == 0, outcome.err
    taken = outcome.json
    count = guest.snapshot_count(taken["snapshot"])
    guest.wait_count(beyond=count + 10)
    guest.destroy()
    for dataset in taken["datasets"]:
        must("zfs", "rollback", f"{dataset}@{taken['snapshot']}")
    mark = fresh_mark(guest)
    must("virsh", "restore", f"{taken['bundle']}/ram.save", "--running")
    guest.assert_continues(mark, count)


def test_ram_without_the_rollback_makes_the_guest_complain(guest):
    taken = snapshot(guest)
    guest.wait_count(beyond=guest.snapshot_count(taken["snapshot"]) + 10)
    guest.destroy()
    mark = fresh_mark(guest)
    must("virsh", "restore", f"{taken['bundle']}/ram.save", "--running")
    assert guest.wait_bad(mark)


def fresh_mark(guest):
    """End a line that was torn when the guest was destroyed; the guest is off."""
    with guest.log.path.open("a") as log:
        log.write("\n")
    return guest.mark()
