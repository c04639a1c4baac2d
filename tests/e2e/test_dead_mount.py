"""A FUSE mount that never answers holds up nothing, though another guest's image is on it."""

import ctypes
import os
import stat
import subprocess
from pathlib import Path

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import assert_clean, assert_restored, must

PLACE = Path("/run/dead")
DOMAIN = f"""<domain type='qemu'><name>neighbour</name><memory>16384</memory>
<os><type>hvm</type></os><devices>
<disk type='file'><source file='{PLACE}/vm/disk.img'/><target dev='vda'/></disk>
<disk type='file'><source file='/run/way/vm/disk.img'/><target dev='vdb'/></disk>
</devices></domain>"""
SECONDS = 240
"""Much longer than any command takes, much shorter than for ever."""


@pytest.fixture(scope="module", autouse=True)
def dead(tmp_path_factory):
    """A mount that never answers: a process that touches it waits until /dev/fuse is closed."""
    PLACE.mkdir()
    Path("/run/way").symlink_to(PLACE)
    xml = tmp_path_factory.mktemp("neighbour") / "domain.xml"
    xml.write_text(DOMAIN)
    must("virsh", "define", str(xml))
    program = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        options = f"fd={program},rootmode={stat.S_IFDIR:o},user_id=0,group_id=0"
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mount(b"dead", bytes(PLACE), b"fuse", 0, options.encode()) == 0, os.strerror(
            ctypes.get_errno()
        )
        with pytest.raises(subprocess.TimeoutExpired):
            command("ls", str(PLACE), seconds=3)
        yield
    finally:
        os.close(program)
        must("umount", str(PLACE))
        must("virsh", "undefine", "neighbour")
        Path("/run/way").unlink()
        PLACE.rmdir()


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("alive", disks=[Disk("file", "tank/alive"), Disk("zvol", "flash/alive")])
    yield made
    made.remove()


def command(*words, seconds=SECONDS):
    """Killed when it takes for ever, and the test fails."""
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=seconds,
    )


def test_a_guest_beside_it_is_served(guest):
    done = command("snaporch", "snapshot", guest.name, "--name", "s1", "--json")
    assert done.returncode == 0, done.stderr
    for words in (["list"], ["status", "--json"], ["plan"]):
        done = command("snaporch", *words)
        assert done.stdout, done.stderr
    done = command("snaporch", "check")
    assert "not on ZFS but on fuse" in done.stdout, done.stdout + done.stderr
    count = guest.snapshot_count("s1")
    guest.wait_count(beyond=count + 5)
    mark = guest.mark()
    done = command("snaporch", "restore", f"{guest.name}@s1", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    assert_restored(guest, mark, count)
    assert_clean(guest)


def test_its_restore_is_undone(guest):
    guest.destroy()
    (script,) = Path("/var/lib/snaporch/bundles").glob("*/safety-*/undo.sh")
    done = command("sh", str(script))
    assert done.returncode == 0, done.stderr


def test_sanoids_hook_is_not_held_up(guest):
    done = command("env", "SANOID_TARGET=tank/none", "snaporch", "hook", "sanoid", "pre")
    assert "Traceback" not in done.stderr
