"""The process of the appliance: answers, data, errors and its end. guestfish is a small program."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from fakes import guestfish

from snaporch.errors import InterruptedRunError, NotFoundError, RefusedError, UnavailableError
from snaporch.extract import appliance as module
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
        directory.mkdir()
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
        odd, link = files.entries(b"/d")
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
        names = [each.name for each in GuestFiles(appliance, "web@s1").entries(b"/d")]
    assert names == [b"%03d" % number for number in range(100)]


def test_a_failure_has_the_reason(run):
    with run() as appliance, pytest.raises(ApplianceError, match="download: No such file"):
        appliance.data("download", b"/none", into=lambda _block: None)


def test_a_silent_appliance_is_given_up(run):
    with run() as appliance, pytest.raises(ApplianceError, match="is silent for 0 s"):
        appliance.ask("hang", limit=0.3)


def test_an_answer_without_end_is_given_up(run):
    with run() as appliance, pytest.raises(ApplianceError, match="answers too much"):
        appliance.ask("flood")


def test_a_signal_ends_it_with_all_its_processes(run):
    interrupt = Interrupt()
    threading.Timer(0.3, lambda: setattr(interrupt, "signum", signal.SIGTERM)).start()
    with run(interrupt) as appliance:
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
