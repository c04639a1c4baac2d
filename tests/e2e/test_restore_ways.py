"""Kinds of restores: to a paused guest, to one that is off, by time, by another bundle, undone."""

import itertools
import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from guests import sector
from guests.disks import Disk
from guests.guest import Guest
from support import (
    assert_clean,
    assert_restored,
    must,
    one_line_error,
    restore,
    run,
    snaporch,
    snapshot,
    wait_for,
)

_COUNT = re.compile(r"N ([0-9a-f]{8})")


@pytest.fixture(scope="module")
def guest():
    """Three disks over two pools."""
    disks = [Disk("file", "tank/ways"), Disk("zvol", "flash/ways"), Disk("file", "flash/ways2")]
    made = Guest.create("ways", disks=disks)
    yield made
    made.remove()


@pytest.fixture(scope="module")
def taken(guest):
    return snapshot(guest, "--name", "s1")


def test_paused_until_it_is_resumed(guest, taken):
    count = guest.snapshot_count("s1")
    guest.wait_count(beyond=count + 5)
    mark = guest.mark()
    restored = restore(guest, "s1", "--paused")
    assert (restored["domain_state"], restored["resumed"]) == ("paused", True)
    assert guest.state() == "paused"
    assert guest.disk_counts() == guest.disk_counts("s1")
    must("virsh", "resume", guest.name)
    assert_restored(guest, mark, count)
    assert_clean(guest)


def test_a_second_restore_on_top_of_a_restore(guest, taken):
    count = guest.snapshot_count("s1")
    for _ in range(2):
        guest.wait_count(beyond=count + 5)
        mark = guest.mark()
        restore(guest, "s1")
        assert_restored(guest, mark, count)


def test_only_the_disks(guest, taken):
    guest.wait_count(beyond=guest.snapshot_count("s1") + 5)
    before = must("virsh", "dumpxml", "--inactive", "--security-info", guest.name)
    restored = restore(guest, "s1", "--disks-only")
    assert (restored["domain_state"], restored["resumed"]) == ("off", False)
    assert guest.disk_counts() == guest.disk_counts("s1")
    assert must("virsh", "dumpxml", "--inactive", "--security-info", guest.name) == before
    assert_clean(guest, "shut off")
    guest.start()


def test_by_time(guest, taken):
    guest.wait_count(beyond=guest.snapshot_count("s1") + 5)  # it may still boot
    moment = datetime.fromisoformat(taken["created"]) + timedelta(seconds=1)
    wait_for(lambda: datetime.now(UTC) > moment + timedelta(seconds=1), "a later second")
    later = snapshot(guest, "--name", "s2")
    assert datetime.fromisoformat(later["created"]) > moment
    outcome = snaporch("restore", guest.name, "--to-time", "2001-01-01T00:00", "--yes")
    one_line_error(outcome, 4, "oldest snapshot", "s1")
    mark = guest.mark()
    local = moment.astimezone().replace(tzinfo=None).isoformat()
    outcome = snaporch("restore", guest.name, "--to-time", local, "--yes", "--discard-newer")
    assert outcome.status == 0, outcome.err
    assert "chose @s1" in outcome.err
    assert_restored(guest, mark, guest.snapshot_count("s1"))


def test_from_a_bundle_elsewhere(guest, taken, tmp_path_factory):
    other = snapshot(guest, "--name", "s3")
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "bundle"
    shutil.move(other["bundle"], elsewhere)
    count = guest.snapshot_count("s3")
    one_line_error(snaporch("restore", "ways@s3", "--yes"), 5, "bundle is missing")
    outcome = snaporch("restore", "ways@s3", "--yes", "--bundle", taken["bundle"])
    one_line_error(outcome, 5, "is the bundle of ways@s1")
    guest.wait_count(beyond=count + 5)
    mark = guest.mark()
    restore(guest, "s3", "--bundle", str(elsewhere))
    assert_restored(guest, mark, count)
    with (elsewhere / "ram.save").open("r+b") as ram:
        ram.seek(-5, 2)
        ram.write(b"\xff\x00\xff\x00\xff")
    mark = guest.mark()
    outcome = snaporch("restore", "ways@s3", "--yes", "--bundle", str(elsewhere))
    one_line_error(outcome, 5, "damaged", "--cold")
    guest.wait_count()
    guest.assert_undisturbed(mark)


def test_the_state_that_ran_comes_back_to_the_instant(guest, taken):
    """The guest ran until the restore stopped it; the undo resumes it exactly there."""
    count = guest.snapshot_count("s1")
    guest.wait_count(beyond=count + 20)
    mark = guest.mark()
    restored = restore(guest, "s1", "--keep-running-state", "--discard-newer")
    assert_restored(guest, mark, count)
    last = last_before_drop(guest.serial()[max(mark - 100, 0) :])
    guest.destroy()
    mark = guest.mark()
    outcome = run("sh", restored["undo"])
    assert outcome.status == 0, outcome.err
    first = guest.first_count_since(mark)
    assert first in (last + 1, last + 2), f"stopped at {last:#x}, went on at {first:#x}"
    guest.wait_count()
    guest.wait_count()
    guest.assert_undisturbed(mark)
    assert_clean(guest)
    assert "s3" in names(guest)


def test_a_managed_save_is_kept_and_can_be_resumed(guest, taken):
    guest.wait_count()
    must("virsh", "managedsave", guest.name)
    expected = sector.agreed_count(guest.disk_counts())
    restored = restore(guest, "s1", "--disks-only", "--discard-newer")
    assert "no" in must("virsh", "dominfo", guest.name).partition("Managed save:")[2].split()[0]
    outcome = run("sh", restored["undo"])
    assert outcome.status == 0, outcome.err
    (line,) = [x for x in outcome.out.splitlines() if "managed save image" in x]
    mark = guest.mark()
    must(*line.partition(": ")[2].split())
    guest.assert_continues(mark, expected)


def test_a_machine_that_this_host_does_not_have_is_refused(guest, tmp_path):
    """The bundle records what the guest needs, and libvirt reports whether this host has it."""
    taken = snapshot(guest, "--name", "future")
    path = Path(taken["bundle"]) / "domain.live.xml"
    text = path.read_text()
    machine = re.search(r"machine=['\"](pc-[^'\"]+)", text)[1]
    path.write_text(text.replace(machine, machine[:-1] + "9"))
    mark = guest.mark()
    outcome = snaporch("restore", "ways@future", "--yes")
    one_line_error(outcome, 5, "this host cannot run it", machine[:-1] + "9", "--cold")
    path.write_text(text.replace("lahf_lm", "avx512f"))  # of one length: the bundle is whole
    outcome = snaporch("restore", "ways@future", "--yes")
    one_line_error(outcome, 5, "this host cannot run it", "CPU", "--cold")
    guest.wait_count()
    guest.assert_undisturbed(mark)


def names(guest):
    listing = must("zfs", "list", "-H", "-t", "snapshot", "-o", "name", *guest.datasets())
    return {line.partition("@")[2] for line in listing.split()}


def last_before_drop(text):
    """The last count of the run that a restore ended."""
    counts = [int(digits, 16) for digits in _COUNT.findall(text)]
    return next(before for before, after in itertools.pairwise(counts) if after <= before)


def test_what_others_wrote_is_not_rolled_back_unasked(guest):
    """A real file system shows which files are unchanged, and the script checks them, too."""
    place = Path(must("zfs", "get", "-Ho", "value", "mountpoint", "tank/ways").strip())
    guest.start() if guest.state() == "shut off" else None
    (place / "letters").mkdir()
    (place / "letters" / "old").write_text("old")
    (place / "drivers.iso").write_text("as it was")
    snapshot(guest, "--name", "shared")
    shutil.chown(place / "drivers.iso", "libvirt-qemu")  # as libvirt leaves it
    guest.wait_count()
    restore(guest, "shared")
    (place / "letters" / "old").write_text("newer")
    (place / "letters" / "new one").write_text("new")
    mark = guest.mark()
    outcome = snaporch("restore", "ways@shared", "--yes", "--disks-only")
    one_line_error(outcome, 5, "2 other files: letters/new one, letters/old;")
    guest.wait_count()
    guest.assert_undisturbed(mark)
    restored = restore(guest, "shared", "--disks-only", "--also-roll-back")
    assert (place / "letters" / "old").read_text() == "old"
    (place / "letters" / "last").write_text("last")
    outcome = run("sh", restored["undo"])
    assert outcome.status == 5
    assert "1 files that are not the guest's: letters/last;" in outcome.err
    (place / "letters" / "last").unlink()
    outcome = run("sh", restored["undo"])
    assert outcome.status == 0, outcome.err
    assert (place / "letters" / "old").read_text() == "newer"
    assert (place / "letters" / "new one").read_text() == "new"
