"""What restore discards, refuses and keeps."""

from pathlib import Path

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import (
    assert_restored,
    config,
    must,
    one_line_error,
    restore,
    run,
    snaporch,
    snapshot,
    zfs_snapshots,
)


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("back", disks=[Disk("file", "tank/back"), Disk("zvol", "flash/back")])
    yield made
    made.remove()


def test_newer_snapshots_are_named_and_kept(guest):
    snapshot(guest, "--name", "old")
    snapshot(guest, "--name", "new")
    mark = guest.mark()
    outcome = snaporch("restore", "back@old", "--yes")
    one_line_error(outcome, 5, "tank/back@new", "flash/back@new", "--discard-newer")
    assert len(zfs_snapshots("@new")) == 2
    assert not [name for name in zfs_snapshots() if "safety" in name]
    guest.wait_count()
    guest.assert_undisturbed(mark)


def test_discard_newer_and_undo(guest):
    count = guest.snapshot_count("old")
    newer = guest.snapshot_count("new")
    mark = guest.mark()
    restored = restore(guest, "old", "--discard-newer")
    assert_restored(guest, mark, count)
    assert zfs_snapshots("@new") == []
    guest.destroy()
    outcome = run("sh", restored["undo"])
    assert outcome.status == 0, outcome.err
    assert guest.snapshot_count("new") == newer
    assert min(guest.disk_counts()) >= newer
    guest.start()


def test_bookmarks_are_newer_too(guest):
    snapshot(guest, "--name", "marked")
    must("zfs", "snapshot", "tank/back@later")
    must("zfs", "bookmark", "tank/back@later", "tank/back#later")
    must("zfs", "destroy", "tank/back@later")
    one_line_error(snaporch("restore", "back@marked", "--yes"), 5, "tank/back#later")
    restore(guest, "marked", "--discard-newer")
    assert "later" not in must("zfs", "list", "-H", "-t", "bookmark", "-o", "name")


def test_a_clone_of_a_newer_snapshot_is_in_the_way(guest):
    snapshot(guest, "--name", "base")
    must("zfs", "snapshot", "tank/back@cloned")
    must("zfs", "clone", "tank/back@cloned", "tank/offspring")
    mark = guest.mark()
    outcome = snaporch("restore", "back@base", "--yes", "--discard-newer")
    one_line_error(outcome, 5, "tank/offspring")
    guest.wait_count()
    guest.assert_undisturbed(mark)
    must("zfs", "destroy", "tank/offspring")


def test_a_held_newer_snapshot_is_in_the_way(guest):
    must("zfs", "hold", "keep", "tank/back@cloned")
    outcome = snaporch("restore", "back@base", "--yes", "--discard-newer")
    one_line_error(outcome, 5, "tank/back@cloned", "held")
    must("zfs", "release", "keep", "tank/back@cloned")
    must("zfs", "destroy", "tank/back@cloned")


def test_without_a_yes_nothing_happens(guest):
    mark = guest.mark()
    outcome = snaporch("restore", "back@base")
    assert outcome.status == 5
    assert "discards" in outcome.err
    assert "--yes" in outcome.err
    guest.wait_count()
    guest.assert_undisturbed(mark)


def test_a_dry_run_foresees_the_restore_and_changes_nothing(guest):
    snapshot(guest, "--name", "foreseen")
    snapshot(guest, "--name", "kept")
    assert snaporch("keep", "back@kept").status == 0
    newer = {"tank/back@kept", "flash/back@kept"}
    for name in newer:  # the property stays
        must("zfs", "release", "snaporch-keep", name)
    mark, before = guest.mark(), zfs_snapshots()
    dry = ("restore", "back@foreseen", "--dry-run", "--discard-newer", "--json")
    refused = snaporch(*dry)
    assert refused.status == 5
    (refusal,) = refused.json["refusals"]
    assert refusal["step"] == "release them first: snaporch unkeep back@kept"
    assert snaporch("unkeep", "back@kept").status == 0
    plan = snaporch(*dry)
    assert plan.status == 0, plan.err
    assert {each["snapshot"] for each in plan.json["rolled_back"]} == {
        "tank/back@foreseen",
        "flash/back@foreseen",
    }
    assert (set(plan.json["destroyed"]), plan.json["refusals"]) == (newer, [])
    assert (plan.json["ending"], plan.json["stops_guest"]) == ("resume", True)
    assert zfs_snapshots() == before
    guest.assert_undisturbed(mark)
    restore(guest, "foreseen", "--discard-newer")
    undo = snaporch("undo", "back", "--dry-run", "--json")
    assert (undo.status, undo.json["restored"]) == (0, "foreseen"), undo.err


def test_another_guest_on_the_same_dataset_is_in_the_way(guest):
    taken = snapshot(guest, "--name", "shared")
    other = Guest.create("other", disks=[Disk("file", "tank/back")], start=False)
    try:
        outcome = snaporch("restore", f"back@{taken['snapshot']}", "--yes")
        one_line_error(outcome, 5, "other", "tank/back")
    finally:
        other.undefine()


def test_a_guest_that_was_undefined_comes_back(guest):
    taken = snapshot(guest, "--name", "undefined")
    count = guest.snapshot_count("undefined")
    guest.wait_count(beyond=count + 5)
    mark = guest.mark()
    guest.destroy()
    must("virsh", "undefine", guest.name)
    restored = restore(guest, taken["snapshot"])
    assert restored["domain_state"] == "running"
    assert_restored(guest, mark, count)
    assert run("virsh", "dominfo", guest.name).out.count("Persistent:     yes") == 1


def test_no_safety_keeps_no_copy(guest):
    taken = snapshot(guest)
    store = Path(taken["bundle"]).parent
    before = sorted(store.glob("safety-*"))
    assert restore(guest, taken["snapshot"], "--no-safety")["undo"] is None
    assert sorted(store.glob("safety-*")) == before


def test_a_replica_is_not_the_guests_and_is_left_alone(guest):
    """Received with its properties, in another pool, with newer snapshots of its own."""
    taken = snapshot(guest)
    name = taken["snapshot"]
    must("sh", "-c", f"zfs send -p tank/back@{name} | zfs receive -u flash/replica")
    must("zfs", "snapshot", "flash/replica@weekly")
    (listed,) = [e for e in snaporch("list", "back", "--json").json if e["snapshot"] == name]
    assert listed == taken
    mark = guest.mark()
    restore(guest, name)
    assert_restored(guest, mark, guest.snapshot_count(name))
    assert "flash/replica@weekly" in zfs_snapshots()
    must("zfs", "destroy", "-r", "flash/replica")


def test_a_bundle_store_in_the_guests_own_dataset_is_refused(guest, tmp_path):
    with config(tmp_path, '[paths]\nbundles = "/tank/back/bundles"\n') as environment:
        outcome = snaporch("snapshot", guest.name, env=environment)
    one_line_error(outcome, 5, "bundle store", "tank/back")
