"""Several guests for which sanoid calls its hook once: the order in which they are frozen."""

import fcntl
import os
import signal

import pytest
from guests.disks import Disk
from guests.guest import Guest
from sanoid_here import PATIENT, Sanoid, autosnaps, forget, records
from support import (
    JOURNAL,
    assert_clean,
    config,
    must,
    snaporch,
    stalled_compressor,
    wait_for,
    wait_for_ram_phase,
)

from snaporch.default_paths import LOCKS

pytestmark = pytest.mark.timeout(180)
NAMES = {"first": "bios", "second": "uefi"}
"""The RAM of the second is more than the pipes between us can hold."""


@pytest.fixture(scope="module")
def guests():
    """Two guests below one parent, which sanoid snapshots in one go."""
    must("zfs", "create", "tank/both")
    made = [
        Guest.create(name, disks=[Disk("file", f"tank/both/{name}")], firmware=firmware)
        for name, firmware in NAMES.items()
    ]
    yield made
    for guest in made:
        guest.remove()
    must("zfs", "destroy", "-r", "tank/both")


@pytest.fixture(autouse=True)
def undisturbed(guests):
    marks = [guest.mark() for guest in guests]
    yield
    for guest, mark in zip(guests, marks, strict=True):
        guest.wait_count()
        guest.assert_undisturbed(mark)
        assert_clean(guest)
    forget()


@pytest.fixture
def sanoid():
    return Sanoid.configured("both", {"tank/both": "zfs"})


def levels(guests):
    return sorted(record["level"] for guest in guests for record in records(guest))


def test_no_guest_is_paused_while_another_waits_for_its_lock(guests, sanoid, tmp_path):
    first, second = guests
    text = PATIENT + '[domain.first]\nlevel = "paused"\n'
    path = LOCKS / f"{must('virsh', 'domuuid', second.name).strip()}.lock"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with config(tmp_path, text) as environment, path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with sanoid.started(environment) as process:
            wait_for(lambda: list(JOURNAL.glob("*")), "the plan of the first")
            first.wait_count()
            first.wait_count()
            assert first.state() == "running"
            assert process.poll() is None
            fcntl.flock(lock, fcntl.LOCK_UN)
            out, _ = process.communicate()
    assert "WARN" not in out, out
    assert levels(guests) == ["paused", "ram"]


def test_no_guest_is_paused_while_ram_of_another_is_saved(guests, sanoid, tmp_path):
    first, _ = guests
    with stalled_compressor(tmp_path) as environment:
        with (tmp_path / "snaporch.toml").open("a") as stream:
            stream.write('[domain.first]\nlevel = "paused"\n')
        with sanoid.started(environment) as process:
            wait_for_ram_phase()
            first.wait_count()
            first.wait_count()
            assert first.state() == "running"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            wait_for(lambda: not list(JOURNAL.glob("*")), "the ends of the runs")
    assert autosnaps(*first.datasets()) == []


def test_guests_that_stay_paused_are_frozen_together(guests, sanoid, tmp_path):
    """All are frozen together, even with few jobs: in turn, the first would wait for all others."""
    text = "sanoid_hook_jobs = 1\n" + PATIENT + 'ram_strategy = "manual"\n'
    with config(tmp_path, text) as environment:
        outcome = sanoid.run("--take-snapshots", env=environment)
    assert "WARN" not in outcome.err
    assert levels(guests) == ["ram", "ram"]


def test_what_does_not_fit_is_refused_before_any_guest_is_frozen(guests, sanoid, tmp_path):
    """At one MiB a second the RAM of a guest takes longer than another may be paused."""
    text = '[defaults]\nram_strategy = "manual"\nram_rate = 1\nfreeze_deadline = "3s"\n'
    with config(tmp_path, text) as environment:
        outcome = sanoid.run("--take-snapshots", env=environment)
        checked = snaporch("check", "--configdir", str(sanoid.directory), "--json", env=environment)
    assert "it may be paused for" in outcome.err
    assert "1 s are allowed; raise freeze_deadline" in outcome.err
    assert levels(guests) == []
    assert "hook-deadline" in {finding["code"] for finding in checked.json}
