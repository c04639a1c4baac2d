"""``list`` after things changed behind our back, and what restore then refuses."""

import re
import shutil
import sys

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import assert_restored, must, one_line_error, restore, run, snaporch, snapshot


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("listed", disks=[Disk("file", "tank/listed"), Disk("zvol", "flash/listed")])
    yield made
    made.remove()


def listed(name):
    return [e for e in snaporch("list", "listed", "--json").json if e["snapshot"] == name]


def test_nothing_yet(guest):
    assert snaporch("list", "--json").json == []
    assert snaporch("list", guest.name).status == 0


def test_the_same_object_as_snapshot_prints(guest):
    taken = snapshot(guest, "--name", "one")
    assert listed("one") == [taken]
    for key in ("domain", "snapshot", "run", "level", "datasets", "created", "ram_bytes"):
        assert key in taken
    for key in ("stored_bytes", "pause_ms", "bundle", "state"):
        assert key in taken


def test_one_snapshot_destroyed_makes_it_incomplete(guest):
    snapshot(guest, "--name", "half")
    must("zfs", "destroy", "flash/listed@half")
    (entry,) = listed("half")
    assert (entry["state"], entry["level"]) == ("incomplete", "crash")
    one_line_error(snaporch("restore", "listed@half", "--yes"), 5, "flash/listed@half")


def test_all_snapshots_destroyed_and_it_is_gone(guest):
    snapshot(guest, "--name", "gone")
    must("zfs", "destroy", "tank/listed@gone")
    must("zfs", "destroy", "flash/listed@gone")
    assert listed("gone") == []
    one_line_error(snaporch("restore", "listed@gone", "--yes"), 4, "listed@gone")


def test_a_name_that_came_back_is_another_snapshot(guest):
    snapshot(guest, "--name", "again")
    must("zfs", "destroy", "flash/listed@again")
    must("zfs", "snapshot", "flash/listed@again")
    (entry,) = listed("again")
    assert (entry["state"], entry["level"]) == ("incomplete", "crash")
    one_line_error(snaporch("restore", "listed@again", "--yes"), 5, "flash/listed@again")


def test_a_renamed_dataset_keeps_its_snapshots(guest):
    """Real ZFS keeps GUID and txg when it renames; a received copy has a txg of its own."""
    snapshot(guest, "--name", "moved")
    count = guest.snapshot_count("moved")
    guest.wait_count(beyond=count + 5)
    mark = guest.mark()
    guest.destroy()
    must("sh", "-c", "zfs send tank/listed@moved | zfs receive -u flash/copy")
    must("zfs", "rename", "tank/listed", "tank/listed2")
    try:
        (entry,) = listed("moved")
        assert (entry["state"], entry["level"]) == ("complete", "ram")
        assert entry["datasets"] == ["flash/listed", "tank/listed2"]
        assert "tank/listed2@moved" in snaporch("show", "listed@moved").out
        step = "zfs rename tank/listed2 tank/listed"
        one_line_error(snaporch("restore", "listed@moved", "--yes"), 5, "tank/listed2", step)
        one_line_error(snaporch("verify", "listed@moved"), 5, "tank/listed2", step)
        one_line_error(snaporch("clone", "listed@moved", "other"), 5, "tank/listed2", step)
        items = snaporch("prune", "--json").json["items"]
        assert [e["action"] for e in items if e["snapshot"] == "moved"] == ["keep"]
    finally:
        must("zfs", "rename", "tank/listed2", "tank/listed")
        must("zfs", "destroy", "-r", "flash/copy")
    restore(guest, "moved", "--discard-newer")
    assert_restored(guest, mark, count)


def test_a_bundle_that_is_gone(guest):
    taken = snapshot(guest, "--name", "bare")
    shutil.rmtree(taken["bundle"])
    (entry,) = listed("bare")
    assert (entry["state"], entry["level"], entry["bundle"]) == ("missing", "crash", None)
    one_line_error(snaporch("restore", "listed@bare", "--yes"), 5, "missing", "--cold")


def test_a_truncated_ram_image(guest):
    taken = snapshot(guest, "--name", "torn")
    with open(f"{taken['bundle']}/ram.save", "r+b") as image:
        image.truncate(1000)
    (entry,) = listed("torn")
    assert (entry["state"], entry["level"]) == ("incomplete", "crash")
    one_line_error(snaporch("restore", "listed@torn", "--yes"), 5, "incomplete", "--cold")


def test_a_flipped_byte_is_found_before_anything_is_touched(guest):
    taken = snapshot(guest, "--name", "flipped")
    with open(f"{taken['bundle']}/ram.save", "r+b") as image:
        image.seek(50_000)
        byte = image.read(1)[0]
        image.seek(50_000)
        image.write(bytes([byte ^ 1]))
    mark = guest.mark()
    one_line_error(snaporch("restore", "listed@flipped", "--yes"), 5, "ram.save", "SHA-256")
    guest.wait_count()
    guest.assert_undisturbed(mark)


def test_the_table_fits_a_terminal(guest):
    out = run("sh", "-c", "COLUMNS=80 script -qec 'snaporch list' /dev/null").out
    plain = re.sub(r"\x1b\[[0-9;]*m|\r", "", out)
    table = [line for line in plain.splitlines() if not line.startswith("snaporch: ")]
    assert any("listed" in line for line in table), plain
    assert max(map(len, table)) <= 80, plain


def test_json_is_one_document(guest):
    outcome = snaporch("snapshot", guest.name, "--name", "document", "--json")
    assert listed("document") == [outcome.json]


def test_documents_need_no_library_for_terminals(guest):
    """Importing rich takes longer than listing; typer does it, if nothing keeps it from that."""
    snapshot(guest, "--name", "quick")
    done = run(sys.executable, "-X", "importtime", "-m", "snaporch", "list", "listed", "--json")
    assert '"quick"' in done.out
    imported = {line.rpartition("|")[2].strip() for line in done.err.splitlines()}
    assert {"typer", "pydantic"} <= imported
    assert not {each for each in imported if each.startswith(("rich.", "pygments."))}
