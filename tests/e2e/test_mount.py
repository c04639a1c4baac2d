"""``snaporch mount``, with the kernel's FUSE. guestfish is a small program in the lab.

With the real guestfish: tests/integration/test_guest_files.py.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from fakes import guestfish
from guests.disks import Disk
from guests.guest import Guest
from support import must, run, snapshot, started, wait_for


@pytest.fixture(scope="module")
def place():
    """The directory of guestfish and of the guest's files, which its user can pass through."""
    made = Path(tempfile.mkdtemp(dir="/var/tmp"))
    made.chmod(0o711)
    tree = made / "tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc" / "hosts").write_text("localhost")
    guestfish.put_in(made, tree)
    (made / "mnt").mkdir()
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def guest():
    """A running guest with the snapshots ``s1`` and ``s2``."""
    made = Guest.create("web", disks=[Disk("file", "tank/web"), Disk("zvol", "flash/web")])
    snapshot(made, "--name", "s1")
    snapshot(made, "--name", "s2")
    yield made
    made.remove()


@pytest.fixture
def mounted(place):
    """A snapshot that is mounted."""
    path = {"PATH": f"{place}:{os.environ['PATH']}"}
    with started("mount", "web@s1", str(place / "mnt"), env=path) as process:
        wait_for(lambda: os.path.ismount(place / "mnt") or None, "nothing is mounted")
        yield process


def clones():
    names = must("zfs", "list", "-H", "-o", "name", "-r", "tank", "flash").split()
    return [name for name in names if "-files-" in name]


def test_a_mount_shows_files_to_root_alone_and_keeps_the_snapshot(guest, place, mounted):
    mark = guest.mark()
    hosts = place / "mnt" / "etc" / "hosts"
    assert hosts.read_text() == "localhost"
    other = ["setpriv", "--reuid", "65534", "--clear-groups", "cat", hosts]
    assert subprocess.run(other, capture_output=True, check=False).returncode != 0
    assert len(clones()) == 2
    refused = run("snaporch", "delete", "web@s1", "--yes")
    assert refused.status == 5, refused.err
    assert f"delete them first: kill {mounted.pid}" in refused.err
    assert run("snaporch", "restore", "web@s2", "--yes").status == 6
    must("snaporch", "recover")
    assert hosts.read_text() == "localhost"
    mounted.terminate()
    assert mounted.wait(60) == 0
    assert not os.path.ismount(place / "mnt")
    assert clones() == []
    guest.assert_undisturbed(mark)
    must("snaporch", "delete", "web@s1", "--yes")
    snapshot(guest, "--name", "s1")


def test_a_killed_mount_leaves_neither_an_appliance_nor_after_recover_a_clone(
    guest, place, mounted
):
    mounted.kill()
    mounted.wait()
    refused = run("snaporch", "mount", "web@s1", str(place / "mnt"))
    assert refused.status == 5
    assert f"whose command has ended; umount {place}/mnt" in refused.err
    must("umount", str(place / "mnt"))
    must("snaporch", "recover")
    assert clones() == []
    assert list(Path("/var/lib/snaporch/clones").glob("*-*")) == []
