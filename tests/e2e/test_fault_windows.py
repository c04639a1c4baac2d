"""Faults in the middle of a step: while RAM is saved, while a commit runs, while recovery does."""

import os
import time
from contextlib import contextmanager

import pytest
from faults.matrix import Case, Fault, Moment
from faults.oracle import assert_boots_with, assert_no_loss, assert_well, look
from faults.process import Run, snaporch_here
from faults.run_case import EMULATOR, UNGUARDED, strike
from faults.stopping import WHILE_RAM_IS_SAVED
from guests.disks import Disk, zfs
from guests.guest import Guest
from other_program import judge, other_program
from support import RUNTIME, wait_for
from support import run as command

from snaporch.journal import Note
from snaporch.model import Strategy

IN_LAB = [fault for fault in Fault if fault is not Fault.POWER_LOST]
RAM = ["overlay", "manual"]


@pytest.fixture(scope="module")
def large():
    """A UEFI guest: its firmware alone is more RAM than a pipe can hold."""
    disks = [Disk("file", "tank/large"), Disk("zvol", "flash/large")]
    made = Guest.create("large", firmware="uefi", disks=disks)
    yield made
    made.remove()


@pytest.fixture(scope="module")
def busy():
    disks = [Disk("file", "tank/busy"), Disk("zvol", "flash/busy", size_mib=64)]
    made = Guest.create("busy", kind="busy", disks=disks)
    yield made
    made.remove()


@contextmanager
def configured(tmp_path, **options):
    """A configuration file with these defaults."""
    path = tmp_path / "snaporch.toml"
    values = "\n".join(
        f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value}"
        for name, value in options.items()
    )
    path.write_text(f"[defaults]\n{values}\n")
    yield ["--config", str(path)]


@contextmanager
def under_way(guest, options, **how):
    """A snapshot under way, killed at the end if it still runs."""
    run = Run(*options, "snapshot", guest.name, **how)
    try:
        yield run
    finally:
        run.kill()
        run.close()


def running(guest):
    """Start a guest that an earlier fault has ended, and wait until it counts."""
    if guest.state() == "shut off":
        guest.start()
    guest.wait_count(beyond=3)
    return guest.mark()


def examine(guest, fault, before, *, load=False):
    assert_well(guest, "shut off" if fault in EMULATOR else "running", busy=load)
    assert_no_loss(guest, before)
    if fault in EMULATOR:
        assert_boots_with(guest, before)


def wait_for_libvirt_to_save_ram(guest):
    """libvirt's job shows it, or libvirt does not answer, because QEMU waits for the full pipe."""

    def saving():
        answer = command("timeout", "5", "virsh", "domjobinfo", guest.name)
        return answer.status == 124 or "Snapshot" in answer.out

    wait_for(saving, "the RAM phase")


def is_paused(guest):
    """Whether the guest prints no count for some seconds, by its log alone."""
    mark = guest.mark()
    time.sleep(3)
    return guest.mark() == mark


@pytest.mark.daily(2)
@pytest.mark.parametrize("fault", IN_LAB)
@pytest.mark.parametrize("way", RAM)
def test_while_ram_is_saved(large, tmp_path, way, fault):
    mark = running(large)
    with (
        configured(tmp_path, ram_strategy=way) as options,
        under_way(large, options, point=WHILE_RAM_IS_SAVED, guarded=fault not in UNGUARDED) as run,
    ):
        run.wait_stopped()
        wait_for_libvirt_to_save_ram(large)
        large.wait_count()
        before = look(large, mark)
        strike(fault, large, run)
    examine(large, fault, before)


@pytest.mark.daily(1)
@pytest.mark.parametrize("way", RAM)
def test_killed_before_libvirt_opens_the_ram_pipe_again(large, tmp_path, way):
    """libvirt writes RAM, closes the pipe, and opens its path once more for the header.

    A snaporch that is killed in between leaves libvirt waiting for a reader, with the guest paused.
    """
    mark = running(large)
    with (
        configured(tmp_path, ram_strategy=way) as options,
        under_way(large, options, point=WHILE_RAM_IS_SAVED, guarded=False) as run,
    ):
        run.wait_stopped()
        wait_for_libvirt_to_save_ram(large)
        (pipe,) = [path for path in RUNTIME.iterdir() if path.is_fifo()]
        before = look(large, mark)
        pipe.rename(pipe.with_suffix(".first"))
        os.mkfifo(pipe, 0o600)  # the same path, without a reader
        run.go_on()
        wait_for(lambda: is_paused(large), "the end of RAM", 300)  # libvirt does not answer now
        run.kill()
    pipe.with_suffix(".first").unlink()
    outcome = snaporch_here("recover")
    assert outcome.status == 0, outcome
    examine(large, Fault.RUN_KILLED, before)


COMMITTING = "before:release,ahead:pivoting"
"""Before the commit, and when all jobs of it run."""


@pytest.mark.daily(2)
@pytest.mark.parametrize("fault", IN_LAB)
def test_while_overlays_are_committed(busy, tmp_path, fault):
    """The guest has written to its overlays for a while, and continues to write.

    Meanwhile another program takes snapshots: each is judged, and some are torn.
    """
    mark = running(busy)
    with (
        configured(tmp_path, ram_strategy="overlay") as options,
        under_way(busy, options, point=COMMITTING, guarded=fault not in UNGUARDED) as run,
    ):
        run.wait_stopped()
        busy.wait_count(beyond=busy.wait_count() + 40)
        with other_program(busy):
            run.go_on()
            run.wait_stopped()
            assert busy.xml().count("<mirror") == len(busy.images)
            before = look(busy, mark)
            # without its emulator, a run may not be able to find out which image is the newer one
            strike(fault, busy, run, Case(Strategy.OVERLAY, Note.PIVOTING, Moment.AHEAD, fault))
    examine(busy, fault, before, load=True)
    assert any(each.torn for each in judge(busy))
    for dataset in busy.datasets():
        zfs("destroy", f"{dataset}@%")
    busy.destroy()
    busy.assert_load_whole()


def test_recover_is_killed_while_it_commits(busy, tmp_path):
    """And so is the next; the third ends."""
    mark = running(busy)
    with (
        configured(tmp_path, ram_strategy="overlay") as options,
        under_way(busy, options, point="after:freeze", guarded=False) as run,
    ):
        run.wait_stopped()
        busy.wait_count(beyond=busy.wait_count() + 20)
    for _ in range(2):
        recovery = Run("recover")
        wait_for(lambda: "<mirror" in busy.xml(), "the commit")
        recovery.kill()
        recovery.close()
    before = look(busy, mark)
    outcome = snaporch_here("recover")
    assert outcome.status == 0, outcome
    examine(busy, Fault.RUN_KILLED, before)


def test_two_recoveries_at_once(busy, tmp_path):
    mark = running(busy)
    with (
        configured(tmp_path, ram_strategy="overlay") as options,
        under_way(busy, options, point="after:freeze", guarded=False) as run,
    ):
        run.wait_stopped()
        before = look(busy, mark)
    first, second = Run("recover"), Run("recover")
    for recovery in (first, second):
        assert recovery.wait().status == 0, recovery.outcome()
        recovery.close()
    examine(busy, Fault.RUN_KILLED, before)
