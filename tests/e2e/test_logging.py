"""The log of real commands: what a run does to ZFS and libvirt, in order and with durations."""

import re

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import assert_clean, snaporch

pytestmark = pytest.mark.usefixtures("by_overlay")


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("logged", disks=[Disk("file", "tank/logged"), Disk("zvol", "flash/logged")])
    yield made
    made.remove()


def test_a_run_logs_its_commands_and_libvirts_calls(guest):
    outcome = snaporch("--verbose", "snapshot", "logged", "--name", "s1", "--quiet")
    assert outcome.status == 0
    lines = [line for line in outcome.err.splitlines() if re.search(r": ok, \d+\.\d{3} s$", line)]
    commands = [line.removeprefix("logged  ").rpartition(": ok,")[0] for line in lines]
    steps = (
        ("zfs list ",),
        ("libvirt snapshotCreateXML",),
        ("libzfs_core snapshot flash/logged@s1", "libzfs_core snapshot tank/logged@s1"),
        ("libvirt blockCommit vda",),
        ("libvirt blockJobAbort vda",),
        ("zfs set snaporch:level=ram ",),
    )
    began = [
        number
        for starts in steps
        for number in sorted(
            next(number for number, text in enumerate(commands) if text.startswith(start))
            for start in starts  # at the same time
        )
    ]
    assert began == sorted(began)
    assert all(lines[number].startswith("logged  ") for number in began[1:])
    assert_clean(guest)


def test_without_verbose_there_is_no_log(guest):
    assert snaporch("snapshot", "logged", "--name", "s2", "--quiet").err == ""
