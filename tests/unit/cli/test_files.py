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


def test_a_part_of_the_tree_that_is_not_shown_is_said(guest_files, snaporch, tmp_path):
    (guest_files / "etc" / "fstab").write_text("/dev/a / ext4\n/dev/b /srv ext4\n")
    (guest_files / "srv").mkdir()
    answers = {"list-filesystems": "/dev/sda1: ext4\n/dev/sdb: xfs", "inspect-os": "/dev/sda1"}
    answers["inspect-get-mountpoints /dev/sda1"] = "/: /dev/a"
    guestfish.put_in(tmp_path / "bin", guest_files, answers)
    answer = snaporch("files", "web@s1", "/srv")
    assert answer.code == ExitCode.WARNINGS
    assert "its fstab mounts something at /srv, which is not shown" in answer.err
    assert "/dev/sdb (xfs) is mounted nowhere" in answer.err
    answer = snaporch("files", "web@s1", "/srv", "--device", "/dev/sda1")
    assert answer.code == 0, answer.err


GPT = {
    "sda1": ("vfat", "C12A7328-F81F-11D2-BA4B-00A0C93EC93B"),
    "sda3": ("ntfs", "EBD0A0A2-B9E5-4433-87C0-68B6B72699C7"),
    "sda4": ("ntfs", "ebd0a0a2-b9e5-4433-87c0-68b6b72699c7"),
    "sda5": ("ntfs", "de94bba4-06d1-4d40-a16a-bfd50179d6ac"),
}
MBR = {"sdc1": ("ntfs", "true", "0x7")}
MBR |= {"sdb1": ("ntfs", "true", "0x7"), "sdb2": ("ntfs", "false", "0x27")}
MBR |= {"sdb3": ("ntfs", "false", "0x7"), "vg/d": ("ntfs", "", "")}
MAPPINGS = "inspect-get-drive-mappings /dev/sda3"


@pytest.fixture
def windows(guest_files, tmp_path):
    """A guest with Windows on /dev/sda3, whose drive D: is on /dev/sda4."""
    every = [*GPT.items(), *MBR.items()]
    answers = {
        "list-filesystems": "\n".join(f"/dev/{name}: {kind}" for name, (kind, *_) in every),
        "inspect-os": "/dev/sda3",
        "inspect-get-mountpoints /dev/sda3": "/: /dev/sda3",
        "inspect-get-type /dev/sda3": "windows",
        MAPPINGS: "C: /dev/sda3\nD: /dev/sda4\nE: /dev/sdc1\n?: /dev/sdb3",
        "part-get-parttype /dev/sda": "gpt",
        "part-get-parttype /dev/sdb": "msdos",
        "part-get-parttype /dev/sdc": "msdos",
    }
    answers |= {f"part-get-gpt-type /dev/sda {name[3]}": kind for name, (_, kind) in GPT.items()}
    for name, (_, active, kind) in MBR.items():
        answers[f"part-get-bootable /dev/{name[:3]} {name[-1]}"] = active
        answers[f"part-get-mbr-id /dev/{name[:3]} {name[-1]}"] = kind
    guestfish.put_in(tmp_path / "bin", guest_files, answers)
    return answers


def test_drives_of_windows_are_named_and_its_own_parts_are_not(windows, snaporch):
    answer = snaporch("files", "web@s1", "/etc")
    assert answer.code == ExitCode.WARNINGS
    notes = [line.partition("note: ")[2] for line in answer.err.splitlines()]
    assert [note for note in notes if "drive" in note or "nowhere" in note] == [
        "its drive D: is not shown: open it with --device /dev/sda4",
        "/dev/sdb3 (ntfs) is mounted nowhere",
        "its drive E: is not shown: open it with --device /dev/sdc1",
        "/dev/vg/d (ntfs) is mounted nowhere",
    ]


def test_without_letters_an_active_partition_may_be_a_drive(
    windows, guest_files, snaporch, tmp_path
):
    guestfish.put_in(tmp_path / "bin", guest_files, windows | {MAPPINGS: ""})
    answer = snaporch("files", "web@s1", "/etc")
    named = {f"/dev/{name}" for name in (*GPT, *MBR) if f"/dev/{name} (" in answer.err}
    assert named == {"/dev/sda4", "/dev/sdb1", "/dev/sdb3", "/dev/sdc1", "/dev/vg/d"}


@pytest.mark.parametrize(
    ("start", "is_said"), [(b"hibr", True), (b"HIBR", True), (b"\0\0\0\0", False), (b"", False)]
)
def test_windows_that_was_hibernated_is_said(windows, guest_files, snaporch, start, is_said):
    (guest_files / "hiberfil.sys").write_bytes(start + b"x" * 100 if start else start)
    answer = snaporch("files", "web@s1", "/etc")
    assert ("its last changes may be missing" in answer.err) is is_said


def test_an_encrypted_disk_beside_boot_is_refused(guest_files, snaporch, tmp_path):
    answers = {"list-devices": "/dev/sda\n/dev/sdb", "vfs-type /dev/sdb": "crypto_LUKS"}
    guestfish.put_in(tmp_path / "bin", guest_files, answers)
    answer = snaporch("files", "web@s1", "/etc")
    assert (answer.code, answer.out) == (ExitCode.REFUSED, "")
    assert "/dev/sdb: is encrypted (crypto_LUKS)" in answer.err


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
        (["--device", "/dev/sda1"], ExitCode.USAGE, "--device needs a PATH"),
        (["/etc", "--keep-owner"], ExitCode.USAGE, "--keep-owner needs --to"),
        (["/a/x", "/b/x", "--to", str(tmp_path)], ExitCode.USAGE, "the same last name"),
        (["/etc/hosts", "--to", str(tmp_path)], ExitCode.REFUSED, "exists already"),
        (["/none"], ExitCode.NOT_FOUND, "has no /none"),
    ):
        answer = snaporch("files", "web@s1", *arguments)
        assert (answer.code, answer.out) == (code, "")
        assert text in answer.err
