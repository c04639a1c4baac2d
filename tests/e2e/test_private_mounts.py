"""A host whose mounts are private: a mount that exists when a guest starts stays in its namespace.

As it is without systemd, or below a container. Where mounts are shared nothing can be held so; what
snaporch reads must not make the difference.
"""

import os
from pathlib import Path

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import config, must, one_line_error, snaporch, snapshot

pytestmark = pytest.mark.timeout(240)

POLICY = """
[policy.hourly]
every = "1h"
level = "crash"
keep = { last = 1 }
domains = ["private"]
"""


@pytest.fixture(scope="module", autouse=True)
def _private():
    must("mount", "--make-rprivate", "/")
    yield
    must("mount", "--make-rshared", "/")


@pytest.fixture(scope="module")
def guest(_private):
    made = Guest.create("private", disks=[Disk("file", "tank/private")])
    yield made
    made.remove()


@pytest.fixture
def other(_private):
    """Another guest; it is off until a test starts it."""
    made = Guest.create("other", disks=[Disk("file", "tank/other")], start=False)
    yield made
    made.remove()


def namespace(guest):
    pid = Path(f"/run/libvirt/qemu/{guest.name}.pid").read_text().strip()
    return Path(f"/proc/{pid}/mountinfo").read_text()


def look_into(name):
    dataset, _, snapshot_name = name.partition("@")
    os.listdir(f"/{dataset}/.zfs/snapshot/{snapshot_name}")


def snapshots(dataset):
    listing = must("zfs", "list", "-H", "-o", "name", "-t", "snapshot", "-r", dataset)
    return listing.split()


def test_what_snaporch_reads_no_guest_inherits(guest, other, tmp_path):
    """An image is copied out, RAM in pages is read back, and files of others are looked for."""
    stranger = Path("/tank/private/stranger")
    stranger.write_text("then")
    with config(
        tmp_path, '[defaults]\nram_store = "pages"\n[ram_pages]\ndataset = "tank/ram"\n'
    ) as environment:
        taken = snaporch("snapshot", "private", "--name", "read", env=environment)
        assert taken.status == 0, taken.err
        out = tmp_path / "vda.raw"
        read = snaporch("extract", "private@read", str(out), "--disk", "vda", env=environment)
        assert read.status == 0, read.err
        ram = snaporch("extract", "private@read", str(tmp_path / "ram"), "--ram", env=environment)
        assert ram.status == 0, ram.err
        stranger.write_text("now")
        refused = snaporch("restore", "private@read", "--yes", env=environment)
        one_line_error(refused, 5, "stranger")
    assert "@" not in Path("/proc/self/mountinfo").read_text()
    other.start()
    assert "tank/private " in namespace(other)
    assert "@" not in namespace(other)
    must("zfs", "destroy", "tank/private@read")


def test_who_holds_a_snapshot_is_said_and_it_goes_later(guest, other, tmp_path):
    with config(tmp_path, POLICY) as environment:
        for _ in range(2):
            words = ("snapshot", "private", "--policy", "hourly", "--quiet")
            taken = snaporch(*words, env=environment)
            assert taken.status == 0, taken.err
        first, second = snapshots("tank/private")[-2:]
        look_into(first)
        look_into(second)
        other.start()
        assert first in namespace(other)
        must("zfs", "snapshot", "tank/private@newest")

        due = snaporch("run-due", "--json", env=environment)
        assert due.status == 0, due.err
        (line,) = due.json["mounted"]
        assert f"{first} is mounted by the guest other" in line
        assert first in snapshots("tank/private")

        standing = snaporch("status", "--json", env=environment)
        assert {"snapshot": first, "by": "the guest other"} in standing.json["mounted"]
        refused = snaporch(
            "restore", first.removeprefix("tank/"), "--cold", "--discard-newer", "--yes"
        )
        one_line_error(refused, 5, f"{second} is mounted by the guest other")

        other.destroy()
        assert snaporch("run-due", "--json", env=environment).json["mounted"] == []
    assert first not in snapshots("tank/private")
    must("zfs", "destroy", "-r", "tank/private@newest")


def test_a_clone_that_another_guest_has_mounted(guest, other):
    snapshot(guest, "--name", "cloned", "--level", "crash")
    made = snaporch("clone", "private@cloned", "copy")
    assert made.status == 0, made.err
    other.start()
    one_line_error(snaporch("clone", "--delete", "copy"), 5, "is mounted by the guest other")
    assert "copy" in must("virsh", "list", "--all", "--name")
    other.destroy()
    gone = snaporch("clone", "--delete", "copy")
    assert gone.status == 0, gone.err


def test_an_undo_looks_into_snapshots_by_a_mount_of_its_own(guest, other):
    note = Path("/tank/private/note")
    note.write_text("of an administrator")
    snapshot(guest, "--name", "undone")
    restored = snaporch("restore", "private@undone", "--yes", "--json")
    assert restored.status == 0, restored.err
    guest.destroy()
    undone = must("sh", restored.json["undo"])
    assert "rolled back" not in undone
    other.start()
    assert "@undone" not in namespace(other)
