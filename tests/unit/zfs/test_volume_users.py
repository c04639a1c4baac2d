import errno
import os

import pytest

from snaporch.zfs import resolver, volume_users
from snaporch.zfs.resolver import Mount, NotOnZfsError


@pytest.fixture
def volume(monkeypatch, tmp_path):
    """``tank/vol``, with two partitions, in sysfs; its directory there."""
    node = tmp_path / "vol"
    node.touch()
    place = tmp_path / "230:16"
    for part, number in ((1, "230:17"), (2, "230:18")):
        (place / f"zd16p{part}" / "holders").mkdir(parents=True)
        (place / f"zd16p{part}" / "partition").write_text(f"{part}\n")
        (place / f"zd16p{part}" / "dev").write_text(f"{number}\n")
    (place / "holders").mkdir()
    (place / "slaves").mkdir()
    (place / "dev").write_text("230:16\n")
    monkeypatch.setattr(volume_users, "_device", lambda _link: place)
    monkeypatch.setattr(volume_users.resolver, "volume_link", lambda _volume: node)
    monkeypatch.setattr(volume_users.resolver, "read_mounts", list)
    return place


@pytest.fixture
def claimed(monkeypatch):
    """Make the kernel refuse an exclusive open."""
    real = os.open

    def refuse(path, flags, *more, **how):
        if flags & os.O_EXCL:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        return real(path, flags, *more, **how)

    monkeypatch.setattr(volume_users.os, "open", refuse)


def test_an_unused_volume_has_no_users(volume):
    assert volume_users.holder_of("tank/vol") == ""


def test_a_volume_without_a_device_is_used_by_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(volume_users.resolver, "volume_link", lambda _volume: tmp_path / "none")
    assert volume_users.holder_of("tank/vol") == ""
    assert volume_users.partition_numbers("tank/vol") == frozenset()


def test_users_of_the_volume_or_a_partition_are_named(volume, claimed, monkeypatch):
    assert volume_users.holder_of("tank/vol") == "this host"
    (volume / "zd16p2" / "holders" / "dm-3").touch()
    mounts = [Mount("230:17", "/srv", "ext4", "/dev/zd16p1"), Mount("8:1", "/", "ext4", "x")]
    monkeypatch.setattr(volume_users.resolver, "read_mounts", lambda: mounts)
    assert volume_users.holder_of("tank/vol") == "a mount at /srv, dm-3"


def test_the_partitions_of_a_volume(volume):
    assert volume_users.partition_numbers("tank/vol") == {1, 2}


def test_the_numbers_of_a_volume_and_its_partitions(volume):
    assert volume_users.numbers("tank/vol") == {0, os.makedev(230, 17), os.makedev(230, 18)}


def test_loop_devices_are_found_with_their_backing_file(monkeypatch, tmp_path):
    """Backing files on no dataset, missing ones and unreadable ones are ignored."""
    monkeypatch.setattr(volume_users, "_LOOPS", tmp_path)
    for loop, path in (("loop0", "/tank/vm/a.img"), ("loop1", "/elsewhere"), ("loop2", "/gone")):
        (tmp_path / loop / "loop").mkdir(parents=True)
        (tmp_path / loop / "loop" / "backing_file").write_text(f"{path}\n")
    (tmp_path / "loop3").mkdir()

    def resolve(path):
        if path == "/elsewhere":
            raise NotOnZfsError(path, "not on ZFS but on ext4")
        if path == "/gone":
            raise FileNotFoundError(path)
        return resolver.Dataset("tank/vm", resolver.DatasetKind.FILESYSTEM)

    monkeypatch.setattr(resolver, "resolve", resolve)
    assert list(volume_users.loop_devices()) == [("loop0", "tank/vm")]


def test_a_device_over_a_volume_is_not_the_volume(monkeypatch, tmp_path):
    """Device mapper passes on the request for the volume."""
    (tmp_path / "254:0" / "slaves" / "zd16").mkdir(parents=True)
    path = tmp_path / "mapped"
    path.touch()
    monkeypatch.setattr(resolver, "_SYS", tmp_path)
    monkeypatch.setattr(
        resolver.fcntl, "ioctl", lambda *_: pytest.fail("was asked, and would answer")
    )
    with pytest.raises(NotOnZfsError, match="a device over zd16, not a ZFS volume or a partition"):
        resolver._volume_name(str(path), os.makedev(254, 0))
