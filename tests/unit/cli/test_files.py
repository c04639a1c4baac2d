"""``files`` as a user sees it."""

import os

import pytest
from fakes import guestfish

from snaporch.errors import ExitCode


@pytest.fixture
def guest_files(host, snaporch, tmp_path, monkeypatch):
    """What the appliance finds in a guest; guestfish is a small program."""
    host.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"})
    assert snaporch("snapshot", "web", "--name", "s1", "--quiet").code == 0
    commands, tree = tmp_path / "bin", tmp_path / "tree"
    commands.mkdir()
    (tree / "etc").mkdir(parents=True)
    guestfish.put_in(commands, tree)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    # the appliance of root has another user, who cannot enter the directories of tests
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    return tree


def test_the_files_of_a_guest(guest_files, snaporch):
    (guest_files / "etc" / "a\x1b[31m\nb").write_bytes(b"x" * 2048)
    (guest_files / "etc" / "link").symlink_to("/etc/shadow")
    answer = snaporch("files", "web@s1", "--quiet")
    assert answer.code == 0, answer.err
    assert answer.out.splitlines()[1].split()[:2] == ["/dev/sda1", "ext4"]
    answer = snaporch("files", "web@s1", "/etc", "--quiet")
    assert answer.code == 0, answer.err
    header, odd, link = answer.out.splitlines()
    assert header.split() == ["MODE", "OWNER", "SIZE", "MODIFIED", "NAME"]
    assert odd.endswith(r"  a\x1b[31m\x0ab")
    assert " 2.0K " in odd
    assert link.endswith("  link -> /etc/shadow")
    assert all(len(line) <= 80 for line in answer.out.splitlines())
    entries = snaporch("files", "web@s1", "/etc", "--json").json
    assert [each["name"] for each in entries] == ["a\x1b[31m\nb", "link"]
    assert (entries[0]["type"], entries[0]["bytes"], entries[0]["link"]) == ("file", 2048, None)
    assert entries[1]["link"] == "/etc/shadow"
    systems = snaporch("files", "web@s1", "--json").json
    assert systems == [{"device": "/dev/sda1", "type": "ext4", "disk": "vda", "mounted_at": None}]


def test_files_are_copied_out_of_a_guest(guest_files, snaporch, tmp_path):
    (guest_files / "etc" / "hosts").write_text("127.0.0.1")
    os.mkfifo(guest_files / "etc" / "pipe")
    to = tmp_path / "to"
    to.mkdir()
    answer = snaporch("files", "web@s1", "/etc/hosts", "--to", str(to), "--quiet")
    assert (answer.code, answer.out) == (0, f"{to}/hosts  1 file, 9 B\n")
    assert (to / "hosts").read_text() == "127.0.0.1"
    answer = snaporch("files", "web@s1", "/etc", "--to", str(to), "--json")
    assert answer.code == ExitCode.WARNINGS
    assert answer.json == [{"path": f"{to}/etc", "files": 1, "bytes": 9, "left_out": ["/etc/pipe"]}]
    assert (to / "etc" / "hosts").read_text() == "127.0.0.1"


def test_a_wrong_request_for_files_starts_nothing(guest_files, snaporch, tmp_path):
    (tmp_path / "hosts").touch()
    for arguments, code, text in (
        (["etc"], ExitCode.USAGE, "is not absolute"),
        (["--to", "."], ExitCode.USAGE, "--to needs a PATH"),
        (["/etc", "--keep-owner"], ExitCode.USAGE, "--keep-owner needs --to"),
        (["/a/x", "/b/x", "--to", str(tmp_path)], ExitCode.USAGE, "the same last name"),
        (["/etc/hosts", "--to", str(tmp_path)], ExitCode.REFUSED, "exists already"),
        (["/none"], ExitCode.NOT_FOUND, "has no /none"),
    ):
        answer = snaporch("files", "web@s1", *arguments)
        assert (answer.code, answer.out) == (code, "")
        assert text in answer.err
