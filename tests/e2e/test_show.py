"""What ``show`` prints is what one can do; what ``extract`` copies is what was on the disk."""

import hashlib
from pathlib import Path

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import assert_restored, must, one_line_error, run, snaporch, snapshot

DISKS = [Disk("file", "tank/by hand"), Disk("zvol", "flash/by hand"), Disk("file", "tank/more")]


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("by hand", disks=DISKS)
    yield made
    made.remove()


def commands(name):
    """The block that ``show`` prints, as it is."""
    out = snaporch("show", name).out
    return out.split("by hand, with zfs and virsh alone:\n", 1)[1]


def follow(guest, printed, count):
    """Run the printed lines as they are, while the guest runs: it goes on from ``count``."""
    mark = guest.mark()
    must("sh", "-c", printed)
    assert_restored(guest, mark, count)


def test_the_printed_commands_restore_it(guest):
    snapshot(guest, "--name", "s one")
    count = guest.snapshot_count("s one")
    guest.wait_count(beyond=count + 10)
    follow(guest, commands("by hand@s one"), count)


def test_they_touch_nothing_when_they_are_out_of_date(guest):
    snapshot(guest, "--name", "then")
    printed = commands("by hand@then")
    must("zfs", "snapshot", "tank/more@since")
    mark = guest.mark()
    outcome = run("sh", "-c", printed)
    assert outcome.status == 1
    assert "newer than tank/more@then is now tank/more@since; nothing was touched" in outcome.err
    must("zfs", "destroy", "tank/more@since")
    must("zfs", "destroy", "tank/more@then")
    must("zfs", "snapshot", "tank/more@then")
    outcome = run("sh", "-c", printed)
    assert outcome.status == 1
    assert "tank/more@then is another of that name; nothing was touched" in outcome.err
    guest.wait_count()
    guest.assert_undisturbed(mark)


def test_they_touch_nothing_if_a_newer_snapshot_cannot_be_destroyed(guest):
    """The first rollback would destroy snapshots, and the last one would fail."""
    snapshot(guest, "--name", "before")
    snapshot(guest, "--name", "later")
    printed = commands("by hand@before")
    mark = guest.mark()
    for do, release in (
        (("hold", "backup", "tank/more@later"), ("release", "backup", "tank/more@later")),
        (("clone", "tank/more@later", "tank/copy"), ("destroy", "tank/copy")),
    ):
        must("zfs", *do)
        outcome = run("sh", "-c", printed)
        must("zfs", *release)
        assert outcome.status == 1
        assert "tank/more@later is held or cloned" in outcome.err
        assert outcome.err.endswith("; nothing was touched\n")
    assert snaporch("show", "by hand@later", "--json").json["state"] == "complete"
    guest.wait_count()
    guest.assert_undisturbed(mark)


def test_they_say_what_they_destroy(guest):
    snapshot(guest, "--name", "old")
    snapshot(guest, "--name", "new")
    count = guest.snapshot_count("old")
    printed = commands("by hand@old")
    assert "echo destroying tank/more@new" in printed
    follow(guest, printed, count)


def test_as_json_they_are_the_same(guest):
    snapshot(guest, "--name", "json")
    document = snaporch("show", "by hand@json", "--json").json
    assert "\n".join(document["by_hand"]) + "\n" == commands("by hand@json")
    (listed,) = [e for e in snaporch("list", "--json").json if e["snapshot"] == "json"]
    assert {key: document[key] for key in listed} == listed
    for shown in document["snapshots"]:
        guid = must("zfs", "get", "-H", "-o", "value", "guid", shown["name"]).strip()
        assert shown["guid"] == guid
        assert shown["referenced_bytes"] > 0


def test_what_is_gone_is_shown_as_gone(guest):
    snapshot(guest, "--name", "torn")
    must("zfs", "destroy", "tank/more@torn")
    out = snaporch("show", "by hand@torn").out
    (line,) = [line for line in out.splitlines() if "tank/more@torn" in line]
    assert line.endswith("MISSING")
    assert "virsh" not in out.split("virsh alone:", 1)[1]


def test_a_guest_with_uefi_variables():
    guest = Guest.create("efi", firmware="uefi", disks=[Disk("zvol", "tank/efi")])
    try:
        snapshot(guest, "--name", "s")
        count = guest.snapshot_count("s")
        guest.wait_count(beyond=count + 3)
        printed = commands("efi@s")
        assert "install" in printed
        follow(guest, printed, count)
    finally:
        guest.remove()


def digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def test_extracted_disks_are_what_was_on_them(guest, tmp_path):
    taken = snapshot(guest, "--name", "out")
    mark = guest.mark()
    outcome = snaporch("extract", "by hand@out", str(tmp_path), "--json")
    assert outcome.status == 0, outcome.err
    found = {document["disk"]: document for document in outcome.json}
    assert sorted(found) == ["vda", "vdb", "vdc"]
    inside = "/tank/more/.zfs/snapshot/out"
    (original,) = Path(inside).iterdir()
    assert digest(found["vdc"]["path"]) == digest(original)
    must("zfs", "clone", "-o", "readonly=on", "flash/by hand@out", "flash/seen")
    must("udevadm", "settle")
    assert digest(found["vdb"]["path"]) == digest("/dev/zvol/flash/seen")
    must("zfs", "destroy", "flash/seen")
    assert found["vdb"]["stored_bytes"] < found["vdb"]["bytes"]
    assert must("zfs", "list", "-H", "-o", "name").count("extract") == 0
    assert taken["datasets"]
    guest.wait_count()
    guest.assert_undisturbed(mark)


def test_one_disk_into_a_file(guest, tmp_path):
    target = tmp_path / "disk.raw"
    one_line_error(snaporch("extract", "by hand@out", str(target), "--quiet"), 5, "--disk")
    one_line_error(snaporch("extract", "by hand@out", str(target), "--disk", "vdz", "-q"), 4, "vdb")
    outcome = snaporch("extract", "by hand@out", str(target), "--disk", "vda")
    assert outcome.status == 0, outcome.err
    assert str(target) in outcome.out
    one_line_error(snaporch("extract", "by hand@out", str(target), "--disk", "vda", "-q"), 5)
    assert [path.name for path in tmp_path.iterdir()] == ["disk.raw"]


def test_no_room_leaves_nothing(guest, tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    must("mount", "-t", "tmpfs", "-o", "size=16k", "none", str(place))
    try:
        outcome = snaporch("extract", "by hand@out", str(place / "x"), "--disk", "vdb", "--quiet")
        one_line_error(outcome, 8, "No space left")
        assert list(place.iterdir()) == []
    finally:
        must("umount", str(place))
    assert "extract" not in must("zfs", "list", "-H", "-o", "name")


def test_extracting_does_not_need_the_ram(guest, tmp_path):
    taken = snapshot(guest, "--name", "lame")
    (Path(taken["bundle"]) / "ram.save").unlink()
    outcome = snaporch("extract", "by hand@lame", str(tmp_path / "x"), "--disk", "vda")
    assert outcome.status == 0, outcome.err
    assert run("snaporch", "clone", "by hand@lame", "cold").status == 0
    assert run("snaporch", "clone", "--delete", "cold").status == 0
