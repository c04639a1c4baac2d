"""Disks of a snapshot, as the appliance of ``snaporch files`` gets them.

The lab has no libguestfs: guestfish is a small program here, which reads whole disks with the real
qemu-img. With the real guestfish: tests/integration/test_guest_files.py.
"""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import must, run, snapshot, started, wait_for

DISKS = [
    Disk("file", "tank/web"),
    Disk("file", "tank/web", format="qcow2"),
    Disk("zvol", "flash/web"),
]
GUESTFISH = """#!/usr/bin/python3
import hashlib, os, pathlib, subprocess, sys, time

place, disks = pathlib.Path(sys.argv[0]).parent, []
for line in sys.stdin:
    command, *words = [word.strip('"') for word in line.split()]
    if command == "echo":
        print(*words, flush=True)
    elif command == "add-drive":
        disks.append(words[0])
    elif command == "run" and (place / "hang").exists():
        (place / "pids" / str(os.getpid())).touch()
        time.sleep(1000)
    elif command == "list-filesystems":
        print(f"user: {os.getuid()}")
        for number, disk in enumerate(disks):
            raw = f"{number}.raw"
            subprocess.run(["qemu-img", "convert", "-O", "raw", disk, raw], check=True)
            print(f"/dev/{number}: {hashlib.sha256(pathlib.Path(raw).read_bytes()).hexdigest()}")
            subprocess.run(["qemu-io", "-c", "write -P 7 0 1M", disk], check=True, stdout=2)
        sys.stdout.flush()
"""


@pytest.fixture(scope="module")
def place():
    """The directory of guestfish, which its user can pass through."""
    made = Path(tempfile.mkdtemp(dir="/var/tmp"))
    made.chmod(0o711)
    (made / "pids").mkdir(mode=0o777)
    (made / "pids").chmod(0o777)
    program = made / "guestfish"
    program.write_text(GUESTFISH)
    program.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def guest():
    """A running guest with a snapshot ``s1``."""
    made = Guest.create("web", disks=DISKS)
    snapshot(made, "--name", "s1")
    yield made
    made.remove()


@pytest.fixture
def env(place):
    return {"PATH": f"{place}:{os.environ['PATH']}"}


def clones():
    names = must("zfs", "list", "-H", "-o", "name", "-r", "tank", "flash").split()
    return [name for name in names if "-files-" in name]


def disks_of(snapshot_name, place):
    """The SHA-256 of each disk, of copies that ``extract`` makes."""
    found = []
    to = place / "copies"
    to.mkdir()
    must("snaporch", "extract", snapshot_name, str(to))
    for copy in sorted(to.iterdir()):
        raw = to / "raw"
        must("qemu-img", "convert", "-f", copy.suffix[1:], "-O", "raw", str(copy), str(raw))
        found.append(hashlib.sha256(raw.read_bytes()).hexdigest())
        raw.unlink()
    shutil.rmtree(to)
    return found


def test_the_appliance_reads_each_disk_and_changes_none(guest, env, place):
    expected = disks_of("web@s1", place)
    mark = guest.mark()
    for _ in range(2):  # what the first one wrote is gone
        outcome = run("snaporch", "files", "web@s1", "--json", env=env)
        assert outcome.status == 0, outcome.err
        found = {each["device"]: each["type"] for each in outcome.json}
        assert found.pop("user") == "65534"
        assert [found[name] for name in sorted(found)] == expected
        assert clones() == []
        assert list(Path("/var/lib/snaporch/clones").glob("*-*")) == []
    assert disks_of("web@s1", place) == expected
    guest.assert_undisturbed(mark)


def test_a_killed_command_leaves_neither_a_process_nor_after_recover_a_clone(guest, env, place):
    (place / "hang").touch()
    with started("files", "web@s1", env=env) as process:
        (pid,) = wait_for(lambda: list((place / "pids").iterdir()), "no guestfish was started")
        assert len(clones()) == 2
        process.kill()
        process.wait()
        gone = Path("/proc", pid.name, "fd")  # a zombie of a parent that is gone has none
        wait_for(lambda: not gone.exists() or None, "guestfish is still there")
    must("snaporch", "recover")
    assert clones() == []
    assert list(Path("/var/lib/snaporch/clones").glob("*-*")) == []
    (place / "hang").unlink()
