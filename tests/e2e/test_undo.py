"""``snaporch undo``: what a restore discarded comes back, whatever step is the last."""

import os
from pathlib import Path

import pytest
from faults.process import Run
from guests.disks import Disk
from guests.guest import Guest
from support import (
    assert_clean,
    must,
    one_line_error,
    restore,
    run,
    snaporch,
    snapshot,
)

from snaporch.restore.journal import HOLD

pytestmark = pytest.mark.timeout(600)

DATASETS = ("flash/undo", "tank/undo")
PLACES = ("safety", "stop", *DATASETS, "files", "define")
POINTS = [f"{moment}:{place}" for place in PLACES for moment in ("before", "after")]
UNTOUCHED = ("before:safety", "after:safety", "before:stop")


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("undo", disks=[Disk("file", "tank/undo"), Disk("zvol", "flash/undo")])
    snapshot(made, "--name", "s1")
    yield made
    made.remove()


@pytest.fixture
def restored(guest):
    """Restore the guest some counts after its snapshot; return the count it had reached by then."""
    if guest.state() == "shut off":
        guest.start()
    reached = guest.wait_count(beyond=guest.snapshot_count("s1") + 3)
    restore(guest, "s1", "--discard-newer")
    guest.wait_count()
    return reached


def undo(guest, *options):
    outcome = snaporch("undo", guest.name, "--yes", "--json", *options)
    assert outcome.status == 0, outcome.err
    return outcome.json


def held():
    """Snapshots that snaporch still holds."""
    names = must("zfs", "list", "-Hro", "name", "-t", "snapshot", *DATASETS).split()
    return [name for name in names if HOLD in must("zfs", "holds", "-H", name)]


def assert_undone(guest, reached):
    assert guest.state() == "shut off"
    counts = guest.disk_counts()
    assert max(counts) - min(counts) <= 1
    assert min(counts) >= reached
    assert held() == []
    assert_clean(guest, "shut off")


def test_the_last_words_of_a_restore_bring_it_back(guest, restored):
    said = snaporch("restore", "undo@s1", "--yes", "--no-safety").err
    assert "snaporch undo" not in said
    dry = snaporch("undo", "undo", "--dry-run")
    assert dry.status == 0, dry.err
    assert "undoing the restore of undo to @s1" in dry.out
    assert undo(guest)["domain_state"] == "off"
    assert_undone(guest, restored)
    guest.start()


def test_snapshots_properties_and_bookmarks_come_back(guest):
    if guest.state() == "shut off":
        guest.start()
    snapshot(guest, "--name", "s2")
    must("zfs", "set", "org:note=two words", "tank/undo@s2")
    for name in ("s2", "s1"):
        must("zfs", "snapshot", f"tank/undo@of-{name}")
        must("zfs", "bookmark", f"tank/undo@of-{name}", f"tank/undo#of-{name}")
    must("zfs", "destroy", "tank/undo@of-s1")
    guids = must("zfs", "get", "-Hpo", "value", "guid", "tank/undo@s2", "flash/undo@s2")
    asked = snaporch("restore", "undo@s1", "--discard-newer")
    assert "tank/undo#of-s1 for good: its snapshot does not exist any more" in asked.err
    assert "tank/undo#of-s2 for good" not in asked.err
    said = snaporch("restore", "undo@s1", "--yes", "--discard-newer")
    assert said.status == 0, said.err
    assert said.err.rstrip().endswith("undo it with: snaporch undo undo")
    undone = snaporch("undo", "undo", "--yes")
    for options in (" --discard-newer", ""):  # s2 is there after each second one
        assert undone.status == 0, undone.err
        printed = undone.err.rstrip().rpartition("undo it with: ")[2]
        assert printed == f"snaporch undo undo{options}"
        undone = snaporch(*printed.split()[1:], "--yes")
    found = must("zfs", "get", "-Hpo", "value", "guid", "tank/undo@s2", "flash/undo@s2")
    assert found == guids
    assert must("zfs", "get", "-Hpo", "value", "org:note", "tank/undo@s2") == "two words\n"
    marks = must("zfs", "list", "-Hro", "name", "-t", "bookmark", "tank/undo").split()
    assert marks == ["tank/undo#of-s2"]
    listed = {each["snapshot"] for each in snaporch("list", "undo", "--json").json}
    assert {"s1", "s2"} <= listed
    must("zfs", "destroy", "tank/undo#of-s2")
    must("zfs", "destroy", "tank/undo@of-s2")
    for dataset in DATASETS:
        must("zfs", "destroy", f"{dataset}@s2")


def test_an_undo_is_undone(guest, restored):
    guest.destroy()
    since = guest.disk_counts()
    undo(guest)
    assert min(guest.disk_counts()) >= restored
    undo(guest, "--discard-newer")
    assert guest.disk_counts() == since


@pytest.mark.daily(1)
@pytest.mark.parametrize("by", ["script", "command"])
def test_the_script_discards_nothing_that_was_written_since_the_restore_was_undone(
    guest, restored, by
):
    guest.destroy()
    script = max(Path("/var/lib/snaporch/bundles").glob("*/safety-*/undo.sh"))
    if by == "script":
        done = run("sh", str(script))
        assert done.status == 0, done.err
        for dataset in DATASETS:  # the mark is enough
            for name in must("zfs", "list", "-Hro", "name", "-t", "snapshot", dataset).split():
                if "@snaporch-safety" in name:
                    must("zfs", "destroy", name)
    else:
        undo(guest)
    assert_undone(guest, restored)
    undone = guest.disk_counts()
    guest.start()
    guest.wait_count()
    guest.destroy()
    since = guest.disk_counts()
    assert since != undone
    refused = run("sh", str(script))
    assert (refused.status, refused.out, refused.err.count("\n")) == (5, "", 1), refused
    assert "was undone already" in refused.err
    assert f"sh {script} --again" in refused.err
    assert guest.disk_counts() == since
    assert_clean(guest, "shut off")
    again = run("sh", str(script), "--again")
    assert again.status == 0, again.err
    assert guest.disk_counts() == undone
    assert_undone(guest, restored)


@pytest.mark.daily(2)
@pytest.mark.parametrize("point", POINTS)
def test_killed_and_recovered(guest, restored, point):
    mark = guest.mark()
    under_way = Run("undo", "undo", "--yes", point=point)
    try:
        under_way.wait_stopped()
    finally:
        under_way.kill()
        under_way.close()
    if point not in UNTOUCHED:
        assert run("virsh", "start", guest.name).status != 0 or point == "after:define"
    outcome = snaporch("recover")
    assert outcome.status == 0, outcome.err
    if point in UNTOUCHED:
        assert "undid the undo of its restore" in outcome.out
        guest.wait_count()
        guest.assert_undisturbed(mark)
        assert held() == []
        assert_clean(guest)
    elif point != "after:define":
        assert "finished the undo of its restore" in outcome.out
        assert_undone(guest, restored)


@pytest.mark.daily(1)
@pytest.mark.parametrize("point", ["after:stop", "after:flash/undo", "before:tank/undo"])
def test_an_interrupted_restore_is_undone(guest, restored, point):
    under_way = Run("restore", "undo@s1", "--yes", "--discard-newer", point=point)
    try:
        under_way.wait_stopped()
        outcome = run("zfs", "destroy", "tank/undo@s1")
        assert outcome.status != 0
        assert "busy" in outcome.err or "hold" in outcome.err
    finally:
        under_way.kill()
        under_way.close()
    undo(guest, "--no-safety")
    assert guest.state() == "shut off"
    counts = guest.disk_counts()
    assert max(counts) - min(counts) <= 1
    assert held() == []
    assert_clean(guest, "shut off")


def test_what_is_in_use_is_left_alone(guest, restored):
    """A snapshot that one process reads, and a disk that another process has open."""
    must("zfs", "snapshot", "tank/undo@newer")
    root = Path(must("zfs", "get", "-Ho", "value", "mountpoint", "tank/undo").strip())
    inside = root / ".zfs" / "snapshot" / "newer"
    mark = guest.mark()
    with next(path for path in inside.iterdir() if path.is_file()).open("rb"):
        for words in (("restore", "undo@s1"), ("undo", "undo")):
            outcome = snaporch(*words, "--yes", "--discard-newer")
            one_line_error(outcome, 5, "tank/undo@newer, which has to be destroyed, is in use")
    with open("/dev/zvol/flash/undo", "rb"):
        outcome = snaporch("undo", "undo", "--yes", "--discard-newer")
        one_line_error(outcome, 5, f"flash/undo is in use by process {os.getpid()}")
    guest.wait_count()
    guest.assert_undisturbed(mark)
    undo(guest, "--discard-newer")
    assert_undone(guest, restored)
