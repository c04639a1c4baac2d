"""The directory of a mount, and the mount of the real kernel, if there is one for this user."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from snaporch.errors import RefusedError, RunFailedError, UnavailableError
from snaporch.extract import mount_point
from snaporch.extract.guestfish_text import Entry
from snaporch.extract.mount_point import DEVICE, check_mount_point, mounted
from snaporch.extract.mounted_files import MountedFiles

CAN_MOUNT = os.geteuid() == 0 and os.access(DEVICE, os.W_OK)
needs_fuse = pytest.mark.skipif(not CAN_MOUNT, reason="only root mounts, by /dev/fuse")


@pytest.fixture
def place(tmp_path):
    made = tmp_path / "a dir"
    made.mkdir()
    return made


@needs_fuse
def test_an_empty_directory_is_taken(place):
    check_mount_point(place)


def test_other_places_are_refused(tmp_path, place):
    (place / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for path, text in (
        (tmp_path / "no ne", f"does not exist; mkdir '{tmp_path}/no ne'"),
        (tmp_path / "link", "is not a directory, or is a link"),
        (place / "file", "is not a directory, or is a link"),
        (place, "is not empty"),
    ):
        with pytest.raises(RefusedError, match=text):
            check_mount_point(path)


def test_a_kernel_without_fuse_is_said(place, tmp_path, monkeypatch):
    monkeypatch.setattr(mount_point, "DEVICE", tmp_path / "none")
    with pytest.raises(UnavailableError, match=r"cannot be opened .* modprobe fuse"):
        check_mount_point(place)


def options(place):
    """The options of the mount on a directory; none without a mount."""
    lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    name = str(place).replace(" ", "\\040")
    return [set(words[3].split(",")) for words in lines if words[1] == name]


class NoFiles:
    """A guest whose root directory is empty."""

    def names(self, directory):
        return []


ROOT = Entry(b"", stat.S_IFDIR | 0o755, 0, 0, 0, 0)


@needs_fuse
@pytest.mark.parametrize("follow", [False, True])
def test_what_is_mounted_does_nothing_here(place, follow):
    with mounted("web@s1", place, follow_links=follow):
        (found,) = options(place)
        assert {"ro", "nosuid", "nodev", "noexec", "user_id=0"} <= found
        assert ("nosymfollow" in found) is not follow
        assert "allow_other" not in found
    assert options(place) == []


@needs_fuse
def test_a_kernel_that_follows_links_is_refused_and_nothing_stays_mounted(
    place, tmp_path, monkeypatch
):
    """It ignores the flag, whatever version of FUSE it has."""
    known = tmp_path / "mountinfo"
    known.write_text("")
    monkeypatch.setattr(mount_point, "MOUNTS", known)
    with (
        pytest.raises(UnavailableError, match="cannot forbid that links"),
        mounted("web@s1", place, follow_links=False),
    ):
        pytest.fail("it was mounted")
    assert options(place) == []
    with mounted("web@s1", place, follow_links=True):
        assert len(options(place)) == 1


def test_only_the_options_of_a_mount_itself_forbid_links():
    """Not those of its file system, or of another mount."""
    mounts = (
        "20 1 0:50 / /mnt ro,nosuid,nosymfollow shared:1 - fuse.snaporch x ro\n"
        "21 1 0:51 / /nosymfollow ro - fuse.snaporch nosymfollow ro,nosymfollow\n"
    )
    assert mount_point._forbids_links(mounts, "20")
    assert not mount_point._forbids_links(mounts, "21")
    assert not mount_point._forbids_links(mounts, "2")


@needs_fuse
def test_two_mounts_on_one_directory_are_refused(place):
    ready, write = os.pipe()
    server = os.fork()
    if server == 0:
        try:
            with mounted("web@s1", place, follow_links=False) as mount:
                os.write(write, b"x")
                mount.serve(MountedFiles(NoFiles(), ROOT).answer, lambda: None)
        finally:
            os._exit(0)
    try:
        assert os.read(ready, 1) == b"x"
        with pytest.raises(RefusedError, match="is a mount point already"):
            check_mount_point(place)
        assert len(options(place)) == 1
    finally:
        subprocess.run(["umount", place], check=False)
        os.waitpid(server, 0)


@needs_fuse
def test_the_mount_is_served_until_it_is_unmounted(place):
    with mounted("web@s1", place, follow_links=False) as mount:
        umount = subprocess.Popen(["umount", place])
        mount.serve(MountedFiles(NoFiles(), ROOT).answer, lambda: None)
        assert umount.wait() == 0
        # another one that is there by now stays
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
    assert len(options(place)) == 1
    subprocess.run(["umount", place], check=True)


@needs_fuse
def test_a_mount_of_another_program_on_top_stays(place):
    with (
        pytest.raises(RunFailedError, match=r"mounted over it; after .*: umount '/.*/a dir'"),
        mounted("web@s1", place, follow_links=False),
    ):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
    assert len(options(place)) == 2
    subprocess.run(["umount", place], check=True)
    subprocess.run(["umount", place], check=True)
    assert options(place) == []


@needs_fuse
def test_a_mount_whose_process_was_killed_is_named(place):
    child = os.fork()
    if child == 0:
        try:
            with mounted("web@s1", place, follow_links=False):
                os._exit(0)  # as if killed
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    try:
        with pytest.raises(RefusedError, match="whose command has ended; umount '"):
            check_mount_point(place)
    finally:
        subprocess.run(["umount", place], check=True)
    assert options(place) == []
