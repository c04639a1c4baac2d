"""Restores that are killed at every step, then recovered; the points come from ``Step`` itself."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from faults import machine
from faults.process import Run, snaporch_here
from guests.disks import Disk
from guests.guest import Guest
from support import (
    BUNDLES,
    JOURNAL,
    assert_clean,
    assert_restored,
    must,
    one_line_error,
    run,
    snaporch,
    snapshot,
    wait_for,
)

from snaporch.restore.journal import RestoreStep

DATASETS = ("flash/cut", "tank/cut")


def places(without):
    """Every step of one kind of restore, each rollback separately."""
    for step in RestoreStep:
        if step is RestoreStep.ROLLBACK:
            yield from DATASETS
        elif step is not without:
            yield step.value


WARM = [f"{moment}:{place}" for place in places(RestoreStep.BOOT) for moment in ("before", "after")]
COLD = [f"{moment}:{place}" for place in ("define", "boot") for moment in ("before", "after")]
TWO_INSTANTS = ("after:flash/cut", "before:tank/cut")
UNTOUCHED = ("before:safety", "after:safety", "before:stop")


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("cut", disks=[Disk("file", "tank/cut"), Disk("zvol", "flash/cut")])
    snapshot(made, "--name", "s1")
    yield made
    made.remove()


@pytest.fixture
def running(guest):
    """The guest, some counts after its snapshot."""
    if guest.state() == "shut off":
        guest.start()
    guest.wait_count(beyond=guest.snapshot_count("s1") + 3)
    return guest


def killed(guest, point, *options):
    """A restore that ends at a point; the mark of the guest's log before it."""
    mark = guest.mark()
    under_way = Run("restore", "cut@s1", "--yes", *options, point=point)
    try:
        under_way.wait_stopped()
    finally:
        under_way.kill()
        under_way.close()
    return mark


def recover(*words):
    outcome = snaporch_here("recover", *words)
    assert outcome.status == 0, outcome
    return outcome.out


def are_of_two_instants(guest):
    """Further apart than in any instant of a guest, which writes one disk after the other."""
    if guest.state() != "shut off":
        return False
    counts = guest.disk_counts()
    return max(counts) - min(counts) > 1


def assert_cannot_be_started(guest):
    outcome = run("virsh", "start", guest.name)
    assert outcome.status != 0
    assert "run-snaporch-recover-first" in outcome.err


@pytest.mark.daily(4)
@pytest.mark.parametrize("point", [*WARM, "past:define"])
def test_killed_and_recovered(running, point):
    count = running.snapshot_count("s1")
    mark = killed(running, point)
    assert are_of_two_instants(running) is (point in TWO_INSTANTS)
    if point in TWO_INSTANTS:
        assert_cannot_be_started(running)
    said = recover()
    if point in UNTOUCHED:
        assert "undid the restore of @s1" in said
        running.wait_count()
        running.assert_undisturbed(mark)
    else:
        assert "finished the restore of @s1" in said
        assert_restored(running, mark, count)
    assert_clean(running)
    assert recover() == ""


@pytest.mark.daily(1)
@pytest.mark.parametrize("point", COLD)
def test_a_cold_one_is_killed_and_recovered(running, point):
    count = running.snapshot_count("s1")
    mark = killed(running, point, "--cold", "--no-safety")
    assert "finished the restore of @s1" in recover()
    running.wait_count()
    found = running.cold_boots_since(mark)
    assert len(found) == 1
    assert set(found[0].values()) <= {count, count - 1}
    assert_clean(running)


def test_killed_while_libvirt_loads_the_ram(running):
    """libvirt continues to load the RAM, and then the guest runs."""
    count, mark = running.snapshot_count("s1"), running.mark()
    under_way = Run("restore", "cut@s1", "--yes", "--no-safety")
    wait_for(lambda: '"begin", "step": "resume"' in _journal(), "the resume")
    wait_for(lambda: running.state() != "shut off", "QEMU")
    under_way.kill()
    under_way.close()
    recover()
    assert_restored(running, mark, count)
    assert_clean(running)


def _journal():
    """The text of all journals; one may be deleted before it is read."""
    with suppress(FileNotFoundError):
        return "".join(path.read_text() for path in JOURNAL.glob("*.jsonl"))
    return ""


def test_nothing_starts_it_on_disks_of_two_instants(running):
    """Neither ``virsh start`` nor autostart starts it; a snapshot finishes the restore first."""
    count = running.snapshot_count("s1")
    must("virsh", "autostart", running.name)
    try:
        mark = killed(running, "after:flash/cut")
        assert are_of_two_instants(running)
        assert_cannot_be_started(running)
        machine.restart_libvirtd()
        assert running.state() == "shut off"
        assert "finish it" in recover("--dry-run")
        assert running.state() == "shut off"
        taken = snaporch("snapshot", "cut", "--name", "s2")
        assert taken.status == 0, taken.err
        assert "finished the restore of @s1" in taken.err
        assert_restored(running, mark, count)
        assert "Autostart:      enable" in must("virsh", "dominfo", running.name)
        must("zfs", "destroy", "tank/cut@s2")
        must("zfs", "destroy", "flash/cut@s2")
    finally:
        must("virsh", "autostart", "--disable", running.name)


def test_an_unfinished_one_can_be_undone_by_its_script(running):
    mark = killed(running, "after:flash/cut")
    reported = running.counts_since(mark)[-1]
    (directory,) = sorted(BUNDLES.glob("*/safety-*"))[-1:]
    outcome = run("sh", str(directory / "undo.sh"))
    assert outcome.status == 0, outcome.err
    assert outcome.out.endswith("was undone; state of the guest: shut off\n")
    assert (directory / "undone").exists()
    assert not are_of_two_instants(running)
    assert min(running.disk_counts()) >= reported
    assert recover() == ""
    assert_clean(running, "shut off")


def test_what_cannot_be_resumed_says_so_and_is_booted_instead(running):
    """Its RAM was deleted while the restore was interrupted."""
    (taken,) = [e for e in snaporch("list", "cut", "--json").json if e["snapshot"] == "s1"]
    ram, count = Path(taken["bundle"]) / "ram.save", running.snapshot_count("s1")
    killed(running, "after:tank/cut")
    ram.rename(ram.with_suffix(".away"))
    (plain,) = BUNDLES.glob("*/.*.partial/ram.save")
    plain.unlink()
    try:
        one_line_error(snaporch("recover"), 9, "stopped half way", "restore --cold cut@s1")
        assert_cannot_be_started(running)
        mark = running.mark()
        outcome = snaporch("restore", "cut@s1", "--yes", "--cold")
        assert outcome.status == 0, outcome.err
    finally:
        ram.with_suffix(".away").rename(ram)
    running.wait_count()
    (found,) = running.cold_boots_since(mark)
    assert set(found.values()) <= {count, count - 1}
    assert not running.bad_since(mark)
    assert_clean(running)


def test_a_signal_while_the_copy_is_written_leaves_the_guest_alone(running):
    mark = running.mark()
    under_way = Run("restore", "cut@s1", "--yes", point="after:safety")
    under_way.wait_stopped()
    os.kill(under_way.pid, signal.SIGTERM)
    under_way.go_on()
    outcome = under_way.wait()
    under_way.close()
    assert outcome.status == 143, outcome
    running.wait_count()
    running.assert_undisturbed(mark)
    assert_clean(running)
    assert "safety_" not in must("zfs", "list", "-H", "-t", "snapshot", "-o", "name", "tank/cut")
