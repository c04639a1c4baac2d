"""The files that an emulator may have open: only those of the clone."""

import os
import socket

import pytest

from snaporch.clone.open_file_check import check_open_files
from snaporch.hypervisor import OpenFile
from snaporch.hypervisor.clone_xml import SharedError
from snaporch.model import DomainState


@pytest.fixture
def check(world, tmp_path):
    """Checks a clone that has these paths open; returns the reason why it may not run."""
    world.add_guest("test", {}, state=DomainState.RUNNING)
    uuid = world.guest("test").uuid
    directory = tmp_path / "clones" / uuid
    (directory / "disk0").mkdir(parents=True)

    def look(*opened, nodes=()):
        world.hypervisor.open_files = lambda _uuid: list(opened)
        try:
            check_open_files(world.context, "web@s1", uuid, directory, nodes)
        except SharedError as error:
            assert uuid not in {g.uuid for g in world.hypervisor.guests.values() if g.live}
            return error.reason
        return ""

    look.directory = directory
    return look


def opened(path, *, writable=True, said=None):
    return OpenFile(str(said or path), os.stat(path), writable)


def test_its_own_files_may_be_open(check):
    image, log = check.directory / "disk0" / "a.img", check.directory / "serial.log"
    for path in (image, log):
        path.touch()
    assert not check(opened(image), opened(log))


def test_a_path_that_is_another_file_here(check, tmp_path):
    """An emulator has mounts of its own, so its path alone says nothing."""
    image = check.directory / "disk0" / "a.img"
    for path in (image, tmp_path / "other.img"):
        path.touch()
    assert "not the clone's" in check(opened(tmp_path / "other.img", said=image))
    assert "not the clone's" in check(opened(tmp_path / "other.img", said=f"{image} (gone)"))


def test_files_without_data_are_harmless(check):
    reading, writing = os.pipe()
    with socket.socket() as line:
        numbers = [reading, writing, line.fileno(), os.memfd_create("memory")]
        some = [OpenFile(os.readlink(f"/proc/self/fd/{n}"), os.fstat(n), True) for n in numbers]
        assert not check(*some, opened("/dev/null"), opened("/dev/urandom"), opened("/dev/ptmx"))
    for number in (reading, writing, numbers[-1]):
        os.close(number)


@pytest.mark.parametrize("device", ["/dev/kmsg", "/dev/mem", "/dev/loop-control"])
def test_other_devices_are_refused(check, device):
    if os.path.exists(device):
        assert device in check(opened(device))


def test_a_file_of_the_host_is_refused(check, tmp_path):
    (tmp_path / "vars.fd").touch()
    assert "vars.fd" in check(opened(tmp_path / "vars.fd"))
    assert not check(opened(tmp_path / "vars.fd", writable=False))


def test_a_disk_that_another_writes_to_is_not_even_read(check, world):
    world.add_guest("web", {"vda": "tank/web"})
    path = world.hypervisor.domain("web").disks[0].source
    assert path in check(opened(path, writable=False))


def test_its_own_volumes_may_be_open(check, tmp_path):
    (tmp_path / "node").touch()
    assert not check(opened(tmp_path / "node"), nodes=[tmp_path / "node"])
