"""Snapshots are deleted by name, in every pool, and kept ones by no program."""

import subprocess
import sys
from pathlib import Path

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import BUNDLES, must, one_line_error, run, snaporch, snapshot, zfs_snapshots

pytestmark = pytest.mark.timeout(180)

KILLED_AFTER_THE_FIRST_POOL = """
import os, signal
from snaporch.cli import main
from snaporch.zfs.cli import ZfsCommand
destroy = ZfsCommand.destroy_snapshots
def kill(self, names):
    destroy(self, names)
    os.kill(os.getpid(), signal.SIGKILL)
ZfsCommand.destroy_snapshots = kill
main.run(["delete", "deleted@killed", "--yes"])
"""


@pytest.fixture(scope="module")
def guest():
    """A guest that is off, on two pools."""
    disks = [Disk("file", "tank/deleted"), Disk("zvol", "flash/deleted")]
    made = Guest.create("deleted", disks=disks, start=False)
    snapshot(made, "--name", "last")
    yield made
    made.remove()


def delete(*words):
    outcome = snaporch("delete", *words, "--yes", "--json")
    assert outcome.status == 0, outcome.err
    return outcome.json


def take(guest, name):
    """A snapshot that is not the newest good one."""
    bundle = Path(snapshot(guest, "--name", name)["bundle"])
    snapshot(guest, "--name", f"{name}-later")
    return bundle


def test_it_frees_what_it_foresees(guest):
    bundle = take(guest, "one")
    foreseen = snaporch("delete", "deleted@one", "--dry-run", "--json").json
    assert bundle.is_dir()
    done = delete("deleted@one")
    assert done | {"dry_run": True} == foreseen
    assert done["freed_bytes"] >= 0
    assert zfs_snapshots("@one") == []
    assert not bundle.exists()
    assert [*BUNDLES.glob(f".trash/*.{bundle.name}")]
    one_line_error(snaporch("delete", "deleted@one", "--yes"), 4, "deleted@one")


def test_a_kept_snapshot_cannot_be_destroyed_by_any_program(guest):
    take(guest, "kept")
    assert snaporch("keep", "deleted@kept").status == 0
    assert run("zfs", "destroy", "tank/deleted@kept").status != 0
    assert run("zfs", "destroy", "flash/deleted@kept").status != 0
    one_line_error(snaporch("delete", "deleted@kept", "--yes"), 5, "unkeep deleted@kept")
    must("zfs", "release", "snaporch-keep", "tank/deleted@kept", "flash/deleted@kept")
    one_line_error(snaporch("delete", "deleted@kept", "--yes"), 5, "unkeep deleted@kept")
    (entry,) = [e for e in snaporch("list", "--json").json if e["snapshot"] == "kept"]
    assert entry["kept"]
    assert snaporch("unkeep", "deleted@kept").status == 0
    delete("deleted@kept")


def test_what_zfs_would_refuse_is_refused_before_anything_is_destroyed(guest):
    take(guest, "held")
    must("zfs", "hold", "mine", "tank/deleted@held")
    one_line_error(snaporch("delete", "deleted@held", "--yes"), 5, "zfs release mine")
    must("zfs", "release", "mine", "tank/deleted@held")
    must("zfs", "clone", "tank/deleted@held", "tank/its-clone")
    one_line_error(snaporch("delete", "deleted@held", "--yes"), 5, "has clones: tank/its-clone")
    must("zfs", "destroy", "tank/its-clone")
    assert len(zfs_snapshots("@held")) == 2
    delete("deleted@held")


def test_a_killed_delete_is_repeated(guest):
    take(guest, "killed")
    killed = subprocess.run([sys.executable, "-c", KILLED_AFTER_THE_FIRST_POOL], check=False)
    assert killed.returncode == -9
    assert len(zfs_snapshots("@killed")) == 1
    delete("deleted@killed")
    assert zfs_snapshots("@killed") == []
    assert "killed" not in [e["snapshot"] for e in snaporch("list", "--json").json]


def test_notes_survive_as_they_were_written(guest):
    note = "ask “Ann”: a=b, 100 % — $HOME `x` 'y'"
    taken = snapshot(guest, "--name", "noted", "--note", note)
    assert taken["note"] == note
    assert snaporch("note", "deleted@noted", f"{note}!", "--json").json[0]["note"] == f"{note}!"
    assert snaporch("note", "deleted@noted", "", "--json").json[0]["note"] is None


def test_of_an_undefined_guest_everything_can_be_deleted(guest):
    must("virsh", "undefine", "deleted")
    names = [e["snapshot"] for e in snaporch("list", "--json").json if e["domain"] == "deleted"]
    one_line_error(snaporch("delete", f"deleted@{names[-1]}", "--yes"), 5, "--also-newest")
    done = delete(*(f"deleted@{name}" for name in names), "--also-newest")
    assert len(done["snapshots"]) == len(names)
    assert not [name for name in zfs_snapshots() if "/deleted@" in name]
