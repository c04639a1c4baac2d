"""Files of a guest, by the real guestfish: ext4, XFS, NTFS and btrfs on LVM and partitions.

The guest was not shut down: its journals are to be replayed, and its disk must stay as it is.
"""

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from snaporch.errors import RefusedError
from snaporch.extract.appliance import (
    APPLIANCE_USER,
    ApplianceError,
    make_private,
    running_appliance,
)
from snaporch.extract.copy_guest_files import Copy, destination
from snaporch.extract.guest_files import GuestFiles, choose_places
from snaporch.extract.throw_away_disks import make_overlays
from snaporch.hypervisor.clone_xml import CloneDisk
from snaporch.interrupt import Interrupt

pytestmark = [
    pytest.mark.guestfish,
    pytest.mark.timeout(1200),  # without KVM each appliance takes a minute or more
]
OWNER = APPLIANCE_USER if os.geteuid() == 0 else None
GUEST = """
part-init /dev/sda gpt
part-add /dev/sda p 2048 800000
part-add /dev/sda p 802048 1500000
part-add /dev/sda p 1502048 1600000
part-add /dev/sda p 1602048 2090000
pvcreate /dev/sda1
vgcreate vg /dev/sda1
lvcreate root vg 300
mkfs ext4 /dev/vg/root
mkfs ntfs /dev/sda3
mkfs btrfs /dev/sda4
mkfs xfs /dev/sda2
mount /dev/vg/root /
mkdir /home
mount /dev/sda2 /home
mkdir /d
write /d/hello hello
write /home/hello xfs
ln-s /etc/shadow /d/abs
ln-s ../../../../../../etc /d/up
mknod 8576 1 3 /d/null
mkfifo 384 /d/fifo
chmod 2541 /d/hello
"""
ODD = [b"a\nb", b"esc\x1b[31m", b"it's", b'"q"', b"\xff\xfe", b"-rf", b"$(id)", b"b\\x41"]


@pytest.fixture(scope="module")
def place():
    """A directory that the appliance's user can pass through."""
    made = Path(tempfile.mkdtemp(dir="/var/tmp"))
    made.chmod(0o711)
    yield made
    shutil.rmtree(made)


def appliance(place, name, disk):
    directory = place / name
    make_private(directory, OWNER)
    overlays = make_overlays("web@s1", [CloneDisk(str(disk), "file", "qcow2")], directory, OWNER)
    return running_appliance(
        "web@s1", directory, overlays, Interrupt(), owner=OWNER, cache=place / "cache"
    )


@pytest.fixture(scope="module")
def disk(place):
    """The disk of a guest that lost its power while its file systems were in use."""
    directory = place / "make"
    make_private(directory, OWNER)
    image = directory / "disk.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", image, "1G"], check=True)
    if OWNER is not None:
        os.chown(image, OWNER.uid, OWNER.gid)
    with running_appliance(
        "web@s1", directory, [image], Interrupt(), owner=OWNER, cache=place / "cache"
    ) as made:
        for line in GUEST.strip().splitlines():
            made.ask(*line.split())
        for name in ODD:
            made.ask("write", b"/d/" + name, "odd")
        made.ask("sync")
    path = place / "disk.qcow2"
    image.rename(path)
    place.chmod(0o711)
    return path


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_a_guest_without_a_clean_shutdown_has(place, disk):
    before = digest(disk)
    to = place / "out"
    to.mkdir()
    with appliance(place, "read", disk) as running:
        files = GuestFiles(running, "web@s1")
        found = files.file_systems()
        kinds = {each.device: each.kind for each in found}
        assert kinds == {
            "/dev/sda2": "xfs",
            "/dev/sda3": "ntfs",
            "/dev/sda4": "btrfs",
            "/dev/vg/root": "ext4",
        }
        assert files.system_places() == []
        with pytest.raises(RefusedError, match="--device: /dev/sda2, /dev/sda3"):
            choose_places("web@s1", found, [], None)
        done = files.mount([("/", "/dev/vg/root"), ("/home", "/dev/sda2"), ("/none", "/dev/sda9")])
        assert done.failed == (("/none", "/dev/sda9"),)
        assert {each.name for each in files.entries(b"/home")} == {b"hello"}
        copy = Copy("web@s1", files, lambda: None, keep_owner=False)
        real, entry = files.find(b"/d")
        copied = copy.run(real, entry, destination(b"/d", to))
        with pytest.raises(ApplianceError):
            running.ask("write", "/d/hello", "changed")
    assert digest(disk) == before
    names = set(os.listdir(os.fsencode(to / "d")))
    assert names == {*ODD, b"hello", b"abs", b"up"}
    assert sorted(copied.left_out) == ["/d/fifo", "/d/null"]
    assert (to / "d" / "hello").read_bytes() == b"hello"
    assert stat.S_IMODE((to / "d" / "hello").stat().st_mode) == 0o755  # it was setuid
    assert os.readlink(to / "d" / "abs") == "/etc/shadow"
    assert (to / "d" / os.fsdecode(ODD[0])).read_bytes() == b"odd"


@pytest.mark.parametrize("device", ["/dev/sda3", "/dev/sda4"])
def test_a_file_system_alone(place, disk, device):
    with appliance(place, f"alone{device[-1]}", disk) as running:
        files = GuestFiles(running, "web@s1")
        files.mount([("/", device)])
        assert files.find(b"/")[1].kind == "directory"


def test_garbage_has_no_file_system(place):
    image = place / "garbage.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", image, "1M"], check=True)
    if OWNER is not None:
        os.chown(image, OWNER.uid, OWNER.gid)
    with appliance(place, "garbage", image) as running:
        files = GuestFiles(running, "web@s1")
        with pytest.raises(RefusedError, match="no file system was found"):
            choose_places("web@s1", files.file_systems(), files.system_places(), None)
