import errno
import os
from types import SimpleNamespace

import pytest

from snaporch.default_paths import HostPaths
from snaporch.model import Dataset, DatasetKind
from snaporch.zfs import volume_use_by_host
from snaporch.zfs.resolver import NotOnZfsError, Resolver


@pytest.fixture
def host(tmp_path):
    """A host without mounts and devices, as directories."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").touch()
    return HostPaths(proc=tmp_path / "proc", sys=tmp_path / "sys", dev=tmp_path / "dev")


@pytest.fixture
def volume(host):
    """``tank/vol``, with two partitions, in sysfs; its directory there."""
    node = host.dev / "zvol/tank/vol"
    node.parent.mkdir(parents=True)
    node.touch()
    place = host.sys / "dev/block/230:16"
    for part, number in ((1, "230:17"), (2, "230:18")):
        (place / f"zd16p{part}" / "holders").mkdir(parents=True)
        (place / f"zd16p{part}" / "partition").write_text(f"{part}\n")
        (place / f"zd16p{part}" / "dev").write_text(f"{number}\n")
    (place / "holders").mkdir()
    (place / "slaves").mkdir()
    (place / "dev").write_text("230:16\n")
    return place


@pytest.fixture
def resolver(host):
    """A resolver to which each file is the device 230:16."""

    def stat(path):
        os.stat(path)
        return SimpleNamespace(st_rdev=os.makedev(230, 16))

    return Resolver(host, stat=stat)


@pytest.fixture
def claimed(monkeypatch):
    """Make the kernel refuse an exclusive open."""
    real = os.open

    def refuse(path, flags, *more, **how):
        if flags & os.O_EXCL:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        return real(path, flags, *more, **how)

    monkeypatch.setattr(os, "open", refuse)


def test_an_unused_volume_has_no_users(volume, resolver):
    assert volume_use_by_host.volume_user("tank/vol", resolver) == ""


def test_a_volume_without_a_device_is_used_by_nothing(resolver):
    assert volume_use_by_host.volume_user("tank/vol", resolver) == ""
    assert volume_use_by_host.partition_numbers("tank/vol", resolver) == frozenset()


def test_users_of_the_volume_or_a_partition_are_named(volume, host, resolver, claimed):
    assert volume_use_by_host.volume_user("tank/vol", resolver) == "this host"
    (volume / "zd16p2" / "holders" / "dm-3").touch()
    (host.proc / "self/mountinfo").write_text(
        "40 1 230:17 / /srv rw - ext4 /dev/zd16p1 rw\n41 1 8:1 / / rw - ext4 x rw\n"
    )
    assert volume_use_by_host.volume_user("tank/vol", resolver) == "a mount at /srv, dm-3"


def test_the_partitions_of_a_volume(volume, resolver):
    assert volume_use_by_host.partition_numbers("tank/vol", resolver) == {1, 2}


def test_the_numbers_of_a_volume_and_its_partitions(volume, resolver):
    numbers = {os.makedev(230, minor) for minor in (16, 17, 18)}
    assert volume_use_by_host.numbers("tank/vol", resolver) == numbers


def test_loop_devices_are_found_with_their_backing_file(host):
    """Backing files on no dataset, missing ones and unreadable ones are ignored."""
    loops = host.sys / "block"
    for loop, path in (("loop0", "/tank/vm/a.img"), ("loop1", "/elsewhere"), ("loop2", "/gone")):
        (loops / loop / "loop").mkdir(parents=True)
        (loops / loop / "loop" / "backing_file").write_text(f"{path}\n")
    (loops / "loop3").mkdir()

    class Known(Resolver):
        def resolve(self, path, mounts=None):
            if path == "/elsewhere":
                raise NotOnZfsError(path, "not on ZFS but on ext4")
            if path == "/gone":
                raise FileNotFoundError(path)
            return Dataset("tank/vm", DatasetKind.FILESYSTEM)

    assert list(volume_use_by_host.loop_devices(Known(host))) == [("loop0", "tank/vm")]
