"""Volumes that something of the host uses, and devices that lie over a volume."""

import fcntl
import struct
from contextlib import contextmanager
from pathlib import Path

import pytest
from guests.disks import Disk, destroy
from guests.guest import Guest
from support import BUNDLES, assert_clean, must, one_line_error, restore, run, snaporch, snapshot

from snaporch.zfs import volume_use_by_host
from snaporch.zfs.resolver import HOST, NotOnZfsError

pytestmark = pytest.mark.timeout(300)
_SECTORS = 2048
_BLKRRPART = 0x125F


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("held", disks=[Disk("zvol", "flash/held")])
    yield made
    made.remove()


@pytest.fixture
def volume():
    """A volume that no guest uses, with a partition."""
    must("zfs", "create", "-V", "64m", "flash/parts")
    node = HOST.volume_node("flash/parts")
    entry = struct.pack("<B3xB3xII", 0, 0x83, _SECTORS, 16 * _SECTORS)
    with node.open("r+b", buffering=0) as device:
        device.write(bytes(446) + entry + bytes(48) + b"\x55\xaa")
        fcntl.ioctl(device, _BLKRRPART)
    must("udevadm", "settle")
    yield node
    destroy("flash/parts")


@contextmanager
def mapped(node: Path):
    """A device over a part of another."""
    table = f"0 {_SECTORS} linear {node.resolve()} {_SECTORS}"
    must("dmsetup", "create", "over", "--table", table)
    try:
        yield Path("/dev/mapper/over")
    finally:
        must("dmsetup", "remove", "--retry", "over")


@contextmanager
def looped(node: Path):
    """A loop device over another, which claims nothing."""
    loop = must("losetup", "--find", "--show", str(node)).strip()
    try:
        yield Path(loop)
    finally:
        must("losetup", "--detach", loop)


def part_of(node: Path) -> Path:
    return Path(f"{node.resolve()}p1")


def test_device_mapper_is_not_taken_for_the_volume_it_lies_over(volume):
    assert HOST.resolve(str(volume)).name == "flash/parts"
    with mapped(volume) as over:
        with pytest.raises(NotOnZfsError, match="a device over zd"):
            HOST.resolve(str(over))
        assert volume_use_by_host.volume_user("flash/parts").startswith("dm-")
    assert volume_use_by_host.volume_user("flash/parts") == ""


def test_a_partition_that_is_mounted_holds_the_volume(volume, tmp_path):
    part = part_of(volume)
    assert HOST.resolve(str(part)).name == "flash/parts"
    assert volume_use_by_host.partition_numbers("flash/parts") == {1}
    must("mkfs.ext4", "-q", str(part))
    assert volume_use_by_host.volume_user("flash/parts") == ""
    must("mount", str(part), str(tmp_path))
    try:
        assert volume_use_by_host.volume_user("flash/parts") == f"a mount at {tmp_path}"
    finally:
        must("umount", str(tmp_path))


def test_a_volume_beneath_device_mapper_is_not_rolled_back(guest):
    snapshot(guest, "--name", "s1")
    mark = guest.mark()
    with mapped(HOST.volume_node("flash/held")):
        refused = snaporch("restore", f"{guest.name}@s1", "--yes")
        one_line_error(refused, 5, "flash/held would be rolled back, and this host uses it", "dm-")
        assert guest.state() == "running"
        guest.wait_count(beyond=guest.snapshot_count("s1") + 5)
    guest.assert_undisturbed(mark)
    restore(guest, "s1")
    assert_clean(guest)


@pytest.mark.parametrize(("use", "name"), [(mapped, "dm-"), (looped, "loop")])
def test_nor_does_an_undo_or_its_script(guest, use, name):
    """Of the restore before."""
    guest.destroy()
    script = max(BUNDLES.glob("*/safety-*/undo.sh"))
    with use(HOST.volume_node("flash/held")):
        refused = run("sh", str(script))
        assert (refused.status, name in refused.err) == (5, True), refused
        one_line_error(snaporch("undo", guest.name, "--yes"), 5, "flash/held", name)


def test_the_script_does_when_nothing_uses_it(guest):
    outcome = run("sh", str(max(BUNDLES.glob("*/safety-*/undo.sh"))))
    assert outcome.status == 0, outcome
    assert_clean(guest, "shut off")
