"""The process of the appliance: answers, data, errors and its end. guestfish is a small program."""

import os
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import guestfish

from snaporch.errors import (
    InterruptedRunError,
    NotFoundError,
    RefusedError,
    RunFailedError,
    UnavailableError,
)
from snaporch.extract import appliance as module
from snaporch.extract import guest_files
from snaporch.extract.appliance import (
    ApplianceError,
    check_can_run,
    reason_of,
    running_appliance,
)
from snaporch.extract.guest_files import GuestFiles
from snaporch.interrupt import Interrupt

TOP = Path(__file__).resolve().parents[3]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """The guest's files."""
    commands, made = tmp_path / "bin", tmp_path / "tree"
    commands.mkdir()
    made.mkdir()
    (made / "d").mkdir()
    guestfish.put_in(commands, made)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    return made


@pytest.fixture
def run(tree, tmp_path):
    """Run an appliance as this process's user."""

    def start(interrupt=None):
        directory = tmp_path / "appliance"
        directory.mkdir(exist_ok=True)
        return running_appliance(
            "web@s1",
            directory,
            [directory / "0.qcow2"],
            interrupt or Interrupt(),
            owner=None,
            cache=tmp_path / "cache",
        )

    return start


def test_files_are_listed_found_and_read(run, tree):
    (tree / "d" / 'it\'s\n\x1b "odd"').write_bytes(b"x" * 3_000_000)
    (tree / "d" / "link").symlink_to("a target\nof two lines")
    (tree / "way").symlink_to("d")
    (tree / "nowhere").symlink_to("none")
    got = bytearray()
    with run() as appliance:
        files = GuestFiles(appliance, "web@s1")
        assert [each.device for each in files.file_systems()] == ["/dev/sda1"]
        assert files.system_places() == []
        odd, link = files.listing(*files.find(b"/d"))
        files.read(b"/d/" + odd.name, got.extend)
        assert files.find(b"/way")[0] == b"/d"
        assert files.find(b"/")[1].kind == "directory"
        for path in (b"/none", b"/nowhere"):
            with pytest.raises(NotFoundError):
                files.find(path)
        assert files.find(b"/d")[1].kind == "directory"  # it goes on after such an error
    assert (odd.name, odd.size) == (b'it\'s\n\x1b "odd"', 3_000_000)
    assert (link.kind, link.link) == ("link", b"a target\nof two lines")
    assert bytes(got) == b"x" * 3_000_000


def test_many_names_come_in_turns(run, tree):
    for number in range(100):
        (tree / "d" / f"{number:03}").touch()
    with run() as appliance:
        files = GuestFiles(appliance, "web@s1")
        names = [each.name for each in files.entries(b"/d", files.names(b"/d"))]
    assert names == [b"%03d" % number for number in range(100)]


def test_a_failure_has_the_reason(run):
    with run() as appliance, pytest.raises(ApplianceError, match="download: No such file"):
        appliance.data("download", b"/none", into=lambda _block: None)


def test_a_silent_appliance_is_given_up(run):
    with run() as appliance, pytest.raises(ApplianceError, match="is silent for 0 s"):
        appliance.ask("hang", limit=0.3)


@pytest.mark.parametrize("command", ["hang", "deaf"])
def test_an_appliance_that_does_not_read_is_given_up(run, command):
    """What is sent to it fills the pipe; a signal ends that, and the limit of a silent one."""
    interrupt = Interrupt()
    with run(interrupt) as appliance:
        threading.Timer(0.5, lambda: setattr(interrupt, "signum", signal.SIGTERM)).start()
        with pytest.raises(InterruptedRunError):
            appliance.ask_all([(command,), *[("lstatns", b"\xff" * 4000)] * 16])


def test_a_path_that_no_kernel_opens_is_not_sent(run):
    with run() as appliance, pytest.raises(ApplianceError, match="longer than 4095 bytes"):
        appliance.ask("lstatns", b"/" + b"x" * 4095)


def test_what_it_writes_to_disk_is_bounded(run):
    with run() as appliance:
        assert appliance.ask("limits") == b"%d\n" % module.MAX_FILE


def test_a_full_disk_ends_it(run, tree, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_bavail=1000, f_frsize=4096))
    with pytest.raises(RefusedError, match="less than 1024 MiB are free"), run():
        pass
    monkeypatch.undo()
    monkeypatch.setenv("PATH", f"{tree.parent / 'bin'}:{os.environ['PATH']}")
    shutil.rmtree(tree.parent / "appliance")
    (tree.parent / "appliance.data").unlink(missing_ok=True)
    with run() as appliance:
        monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_bavail=0, f_frsize=1))
        with pytest.raises(ApplianceError, match="less than 1024 MiB are free"):
            appliance.ask("hang")


def test_a_file_in_the_place_of_its_pipe_is_an_error_and_starts_nothing(run, tmp_path):
    (tmp_path / "appliance.data").symlink_to("/dev/null")
    with pytest.raises(RunFailedError, match="cannot be started"), run():
        pass


def test_its_pipe_is_not_in_its_own_directory(run, tmp_path):
    with run():
        assert (tmp_path / "appliance.data").is_fifo()
        assert list((tmp_path / "appliance").iterdir()) == []


def test_links_are_bounded(run, tree, monkeypatch):
    monkeypatch.setattr(guest_files, "MAX_TEXT", 1000)
    for number in range(10):
        (tree / "d" / str(number)).symlink_to("x" * 200)
    with run() as appliance:
        files = GuestFiles(appliance, "web@s1")
        with pytest.raises(RefusedError, match="names and links"):
            files.listing(*files.find(b"/d"))
        assert all(e.link is None for e in files.entries(b"/d", files.names(b"/d")))


@pytest.mark.parametrize("has_volumes", [True, False])
def test_what_libguestfs_does_not_list_is_found(run, tmp_path, tree, has_volumes):
    """Without a volume of it the group was not activated: two disks have groups of one name."""
    answers = {
        **({"lvs": "/dev/vg/swap", "vfs-type /dev/vg/swap": "swap"} if has_volumes else {}),
        "list-devices": "/dev/sda\n/dev/sdb",
        "list-partitions": "/dev/sda1\n/dev/sda2\n/dev/sda3",
        "vfs-type /dev/sda2": "crypto_LUKS",
        "vfs-type /dev/sda3": "LVM2_member",
        "vfs-type /dev/sdb": "zfs_member",
        "inspect-os": "/dev/sda1",
        "inspect-get-mountpoints /dev/sda1": "/srv: /dev/vdb1\n/: /dev/vda",
    }
    guestfish.put_in(tmp_path / "bin", tree, answers)
    with run() as appliance:
        files = GuestFiles(appliance, "web@s1")
        assert [(each.device, each.kind) for each in files.file_systems()] == [
            ("/dev/sda1", "ext4"),
            ("/dev/sda2", "crypto_LUKS"),
            *([] if has_volumes else [("/dev/sda3", "LVM2_member")]),
            ("/dev/sdb", "zfs_member"),
            *([("/dev/vg/swap", "swap")] if has_volumes else []),
        ]
        # the fstab names the root as a device that the appliance does not have
        assert files.system_places() == [("/", "/dev/sda1"), ("/srv", "/dev/vdb1")]


def test_an_answer_without_end_is_given_up(run):
    with run() as appliance, pytest.raises(ApplianceError, match="answers too much"):
        appliance.ask("flood")


def test_a_signal_ends_it_with_all_its_processes(run):
    interrupt = Interrupt()
    with run(interrupt) as appliance:
        threading.Timer(0.3, lambda: setattr(interrupt, "signum", signal.SIGTERM)).start()
        group = appliance.pid
        with pytest.raises(InterruptedRunError):
            appliance.ask("hang")
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def test_it_is_killed_with_its_parent(tree, tmp_path):
    """As by ``kill -9``: nothing of snaporch's runs any more then."""
    (tmp_path / "appliance").mkdir()
    program = textwrap.dedent(
        f"""
        from pathlib import Path
        from snaporch.extract.appliance import running_appliance
        from snaporch.interrupt import Interrupt

        place = Path({str(tmp_path)!r})
        with running_appliance(
            "x", place / "appliance", [], Interrupt(), owner=None, cache=place / "cache"
        ) as appliance:
            print(appliance.pid, flush=True)
            appliance.ask("hang")
        """
    )
    words = [sys.executable, "-c", program]
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd=TOP
    ) as parent:
        descriptor = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    assert select.select([descriptor], [], [], 20)[0], "guestfish is still there"
    os.close(descriptor)


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(UnavailableError, match="apt install guestfish"):
        check_can_run("web@s1", module.MEMORY_BYTES)


def test_too_little_memory_is_refused(tree):
    with pytest.raises(RefusedError, match="767 MiB are free"):
        check_can_run("web@s1", module.MEMORY_BYTES - (1 << 20))


def test_the_reason_is_the_last_line_of_libguestfs():
    text = "warning: x\nlibguestfs: error: mount: bad superblock\n  see dmesg\n"
    assert reason_of(text) == "mount: bad superblock"
    assert reason_of("*stdin*:25: libguestfs: error: mkfs: no\n") == "mkfs: no"
    assert reason_of("one\ntwo\n") == "two"
    assert reason_of("") == "the appliance ended without a reason"
