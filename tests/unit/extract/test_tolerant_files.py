"""A guest's files of which some cannot be read; guestfish is a small program."""

import errno
import os

import pytest
from fakes import guestfish

from snaporch.errors import InterruptedRunError
from snaporch.extract.appliance import ApplianceError, running_appliance
from snaporch.extract.tolerant_files import TolerantFiles
from snaporch.interrupt import Interrupt


@pytest.fixture
def tree(tmp_path):
    made = tmp_path / "tree"
    (made / "d").mkdir(parents=True)
    return made


@pytest.fixture
def run(tree, tmp_path, monkeypatch):
    """Run an appliance that has certain answers."""
    commands = tmp_path / "bin"
    commands.mkdir()
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")

    def start(answers=None, interrupt=None):
        guestfish.put_in(commands, tree, answers)
        directory = tmp_path / "appliance"
        directory.mkdir(exist_ok=True)
        return running_appliance(
            "web@s1",
            directory,
            [],
            interrupt or Interrupt(),
            owner=None,
            cache=tmp_path / "cache",
        )

    return start


def test_files_are_read(run, tree):
    (tree / "d" / "a\nb").write_bytes(bytes(range(256)) * 5000)
    (tree / "d" / "link").symlink_to("/a\nb")
    with run() as appliance:
        files = TolerantFiles(appliance)
        assert files.names(b"/d") == [b"a\nb", b"link"]
        odd, link = files.entries(b"/d", [b"a\nb", b"link"])
        assert (odd.size, odd.kind, link.kind) == (1_280_000, "file", "link")
        assert files.link(b"/d/link") == b"/a\nb"
        data = files.part(b"/d/a\nb", 256, 1 << 20)
    assert data == (bytes(range(256)) * 5000)[256 : 256 + (1 << 20)]


def test_what_cannot_be_read_is_an_error_of_it_alone(run, tree):
    (tree / "d" / "good").write_text("x")
    with run() as appliance:
        files = TolerantFiles(appliance)
        for fail in (
            lambda: files.names(b"/none"),
            lambda: files.entries(b"/d", [b"none", b"good"]),
            lambda: files.link(b"/d/good"),
            lambda: files.part(b"/none", 0, 10),
        ):
            with pytest.raises(OSError, match="cannot be read") as caught:
                fail()
            assert caught.value.errno == errno.EIO
        assert [each.name for each in files.entries(b"/d", [b"good", b"none"])] == [b"good"]
        assert files.part(b"/d/good", 0, 10) == b"x"


def test_an_answer_that_is_none_of_a_file_is_an_error(run):
    answers = {"lstatns /d": "st_mode: 99999999", "readlink /d": ""}
    with run(answers) as appliance:
        files = TolerantFiles(appliance)
        with pytest.raises(OSError, match="cannot be read"):
            files.entries(b"/", [b"d"])
        with pytest.raises(OSError, match="cannot be read"):
            files.link(b"/d")


def test_an_appliance_that_has_ended_is_no_damaged_file(run):
    with run() as appliance:
        files = TolerantFiles(appliance)
        appliance.check()
        with pytest.raises(ApplianceError):
            appliance.ask("end")
        with pytest.raises(ApplianceError):
            files.names(b"/d")
        os.waitid(os.P_PID, appliance.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ApplianceError):
            appliance.check()


def test_a_virtual_machine_that_has_ended_is_no_damaged_file(run, tree):
    """guestfish goes on then, and each of its commands fails."""
    with run() as appliance:
        files = TolerantFiles(appliance)
        (tree / "d").rmdir()
        with pytest.raises(OSError, match="cannot be read"):
            files.names(b"/d")
        tree.rmdir()
        with pytest.raises(ApplianceError, match="ping-daemon"):
            files.names(b"/d")


def test_a_signal_is_seen_between_two_commands(run):
    interrupt = Interrupt()
    with run(interrupt=interrupt) as appliance:
        interrupt.signum = 15
        with pytest.raises(InterruptedRunError):
            appliance.check()
