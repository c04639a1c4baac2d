"""``mount`` as a user sees it, with the kernel of this machine; guestfish is a small program."""

import os
import subprocess

import pytest
from fakes import guestfish

from snaporch.errors import ExitCode
from snaporch.extract.mount_point import DEVICE

CAN_MOUNT = os.geteuid() == 0 and os.access(DEVICE, os.W_OK)
needs_fuse = pytest.mark.skipif(not CAN_MOUNT, reason="only root mounts, by /dev/fuse")


@pytest.fixture
def guest_files(host, snaporch, tmp_path, monkeypatch):
    """What the appliance finds in a guest."""
    host.add_guest(disks={"vda": "tank/web"})
    assert snaporch("snapshot", "web", "--name", "s1", "--quiet").code == 0
    commands, tree = tmp_path / "bin", tmp_path / "tree"
    commands.mkdir()
    (tree / "etc").mkdir(parents=True)
    (tree / "etc" / "hosts").write_text("localhost")
    (tree / "etc" / "abs").symlink_to("/etc/hostname")
    guestfish.put_in(commands, tree)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    # the appliance of root has another user, who cannot enter the directories of tests
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    return tree


@pytest.fixture
def place(tmp_path):
    made = tmp_path / "mnt"
    made.mkdir()
    return made


@pytest.fixture
def mount(snaporch, place, tmp_path):
    """Mount, let a script look, and end; the answer of snaporch and what the script printed."""
    marks = tmp_path / "marks"
    marks.mkdir()

    def run(script, *arguments):
        wait = f"until mountpoint -q {place}; do test ! -e {marks}/end || exit; sleep 0.1; done"
        end = f"! mountpoint -q {place} || kill -TERM {os.getpid()}"
        text = f"cd /; {wait}; {{ {script}; }} 2>&1; {end}"
        looking = subprocess.Popen(["sh", "-c", text], stdout=subprocess.PIPE, text=True)
        answer = snaporch("mount", "web@s1", str(place), *arguments)
        (marks / "end").touch()
        return answer, looking.communicate(timeout=60)[0]

    return run


@needs_fuse
def test_a_snapshot_is_shown_in_a_directory(guest_files, mount, place, host):
    link = place / "etc" / "abs"
    script = (
        f"ls {place}; cat {place}/etc/hosts; echo; readlink {link}; cat {link}; "
        f"echo x >{place}/new; umount {place}"
    )
    answer, seen = mount(script)
    assert answer.code == 0, answer.err
    assert answer.out == f"{place}  web@s1, until Ctrl-C or umount {place}\n"
    etc, hosts, leads, followed, written = seen.splitlines()
    assert (etc, hosts, leads) == ("etc", "localhost", "/etc/hostname")
    assert "Too many levels of symbolic links" in followed
    assert "Read-only file system" in written
    assert not os.path.ismount(place)
    assert not [each for each in host.pool.datasets() if "-files-" in each.name]


@needs_fuse
def test_a_signal_ends_the_mount_also_while_a_file_is_open(guest_files, mount, place):
    answer, seen = mount(f"exec 3<{place}/etc/hosts; cat <&3; cd {place}")
    assert (answer.code, seen) == (0, "localhost"), answer.err
    assert not os.path.ismount(place)


@needs_fuse
def test_links_are_followed_on_request(guest_files, mount, place):
    (guest_files / "etc" / "way").symlink_to("hosts")
    _, seen = mount(f"cat {place}/etc/way", "--follow-links", "--device", "/dev/sda1")
    assert seen == "localhost"


@needs_fuse
def test_a_damaged_file_is_an_error_of_it_alone(guest_files, mount, place, tmp_path):
    (guest_files / "etc" / "zone").write_text("UTC")
    guestfish.put_in(tmp_path / "bin", guest_files, {"lstatns /etc/hosts": "damaged"})
    answer, seen = mount(f"cat {place}/etc/hosts; cat {place}/etc/zone")
    assert answer.code == 0, answer.err
    assert seen.endswith("Input/output error\nUTC")


@needs_fuse
def test_an_appliance_that_fails_ends_the_mount(guest_files, mount, place, tmp_path):
    tool, pid = guestfish.put_in(tmp_path / "bin", guest_files), tmp_path / "pid"
    first, *rest = tool.read_text().splitlines()
    note = f"import os; open({str(pid)!r}, 'w').write(str(os.getpid()))"
    tool.write_text("\n".join([first, note, *rest]))
    end = f"kill $(cat {pid}); until ! mountpoint -q {place}; do sleep 0.1; done"
    answer, _ = mount(end)
    assert answer.code == ExitCode.FAILED
    assert "the appliance ended without a reason" in answer.err
    assert not os.path.ismount(place)


@needs_fuse
def test_what_is_not_shown_is_said(guest_files, mount, tmp_path, place):
    answers = {"list-filesystems": "/dev/sda1: ext4\n/dev/sdb: xfs", "inspect-os": "/dev/sda1"}
    answers["inspect-get-mountpoints /dev/sda1"] = "/: /dev/sda1"
    guestfish.put_in(tmp_path / "bin", guest_files, answers)
    answer, _ = mount(":")
    assert answer.code == ExitCode.WARNINGS
    assert "/dev/sdb (xfs) is mounted nowhere" in answer.err


@needs_fuse
def test_a_wrong_request_for_a_mount_starts_nothing(guest_files, snaporch, place, tmp_path):
    for directory, arguments, code, text in (
        (tmp_path, [], ExitCode.REFUSED, "is not empty"),
        (tmp_path / "none", [], ExitCode.REFUSED, "does not exist; mkdir "),
        (place, ["--device", "/dev/sdz"], ExitCode.NOT_FOUND, "there are: /dev/sda1"),
    ):
        answer = snaporch("mount", "web@s1", str(directory), *arguments)
        assert (answer.code, answer.out) == (code, "")
        assert text in answer.err
        assert not os.path.ismount(place)
