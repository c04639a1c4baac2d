"""What of a guest's tree is not shown."""

from types import SimpleNamespace

from snaporch.extract.guestfish_text import FileSystem
from snaporch.extract.unseen_parts import (
    left_out_disks,
    missing_of_windows,
    missing_points,
    not_mounted,
)
from snaporch.extract.windows_parts import WindowsParts
from snaporch.model import LeftOutCode

FSTAB = """\
# a comment /x ext4
UUID=1 / ext4 defaults 0 1
UUID=2 /srv/ xfs defaults 0 2
/dev/mapper/home /home/a\\040b ext4 defaults
server:/export /mnt/nfs nfs
server:/other /mnt/auto nfs noauto,x-systemd.automount 0 0
UUID=5 /mnt/old ext4 comment=systemd.automount,noauto 0 0
/srv/www /var/www none bind
/dev/sr0 /media/cdrom0 udf,iso9660 user,noauto 0 0
UUID=3 none swap sw 0 0
tmpfs /tmp tmpfs defaults 0 0
broken
"""


def test_mount_points_of_an_fstab_at_which_nothing_is_mounted():
    found = missing_points(FSTAB, [("/", "/dev/sda1"), ("/srv", "/dev/sdb")])
    assert found == ["/home/a b", "/mnt/auto", "/mnt/nfs", "/mnt/old", "/var/www"]
    assert missing_points("", []) == []


def test_file_systems_that_are_mounted_nowhere():
    found = [
        FileSystem("/dev/sda1", "ext4"),
        FileSystem("/dev/sda2", "swap"),
        FileSystem("/dev/sda14", "unknown"),
        FileSystem("/dev/sdb", "zfs_member"),
        FileSystem("/dev/sdc1", "xfs"),
        FileSystem("/dev/vg/data", "unknown"),
        FileSystem("/dev/vg/swap", "swap"),
    ]
    assert not_mounted(found, [("/", "/dev/sda1")]) == [
        "/dev/sdb (zfs_member) is mounted nowhere",
        "/dev/sdc1 (xfs) is mounted nowhere",
        "/dev/vg/data (unknown) is mounted nowhere",
    ]


def test_the_parts_of_windows():
    names = ("/dev/sda1", "/dev/sda3", "/dev/sda4", "/dev/sda5", "/dev/sdb1")
    found = [FileSystem(name, "ntfs") for name in names]
    letters = {"/dev/sda3": "C", "/dev/sda4": "D"}
    windows = WindowsParts(letters, of_system={"/dev/sda1", "/dev/sda5"})
    assert not_mounted(found, [("/", "/dev/sda3")], windows) == [
        "its drive D: is not shown: open it with --device /dev/sda4",
        "/dev/sdb1 (ntfs) is mounted nowhere",
    ]
    assert missing_of_windows(windows) == []
    (text,) = missing_of_windows(WindowsParts(hibernated=True))
    assert "fast startup" in text


def test_a_btrfs_is_mounted_if_one_of_its_subvolumes_is():
    names = ("/dev/vg/a", "btrfsvol:/dev/vg/a/root", "btrfsvol:/dev/vg/a/home", "/dev/vg/b")
    found = [FileSystem(name, "btrfs") for name in names]
    said = not_mounted(found, [("/", "btrfsvol:/dev/vg/a/root")])
    assert said == ["/dev/vg/b (btrfs) is mounted nowhere"]
    assert len(not_mounted(found, [("/", "/dev/vg/b")])) == 3


def test_disks_that_are_not_in_the_snapshot():
    def disk(target, code):
        return SimpleNamespace(target=target, left_out=code, left_out_reason="the reason")

    disks = [
        disk("vda", None),
        disk("vdb", LeftOutCode.EXCLUDED),
        disk("sda", LeftOutCode.REMOVABLE),
    ]
    assert left_out_disks(disks) == ["the disk vdb is not in the snapshot: the reason"]
