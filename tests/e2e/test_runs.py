"""Two runs at once, and runs that are stopped or killed while RAM is saved."""

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from faults.process import Run
from faults.stopping import WHILE_RAM_IS_SAVED
from guests.disks import Disk
from guests.guest import Guest
from support import (
    BUNDLES,
    JOURNAL,
    RUNTIME,
    assert_clean,
    config,
    must,
    one_line_error,
    snaporch,
    snapshot,
    stalled_compressor,
    started,
    wait_for,
    wait_for_ram_phase,
    zfs_snapshots,
)

pytestmark = pytest.mark.usefixtures("by_overlay")


@pytest.fixture(scope="module")
def guest():
    """A UEFI guest: its firmware alone is more RAM than the pipes between us can hold."""
    made = Guest.create(
        "runs", firmware="uefi", disks=[Disk("file", "tank/runs"), Disk("zvol", "flash/runs")]
    )
    yield made
    made.remove()


@pytest.fixture(autouse=True)
def undisturbed(guest):
    mark = guest.mark()
    yield
    guest.wait_count()
    guest.assert_undisturbed(mark)
    assert_clean(guest)


def test_the_second_run_reports_what_holds_the_domain(guest, tmp_path):
    with (
        stalled_compressor(tmp_path) as environment,
        started("snapshot", guest.name, env=environment) as first,
    ):
        wait_for_ram_phase()
        outcome = snaporch("snapshot", guest.name)
        one_line_error(outcome, 6, guest.name, "held by snapshot")
        one_line_error(snaporch("snapshot", guest.name, "--wait", "1s"), 6)
        first.send_signal(signal.SIGTERM)
        assert first.wait() == 128 + signal.SIGTERM


def test_the_second_run_waits_and_then_runs(guest, tmp_path):
    with (
        stalled_compressor(tmp_path) as environment,
        started("snapshot", guest.name, env=environment) as first,
    ):
        wait_for_ram_phase()
        options = ("--name", "second", "--wait", "300s", "--json")
        with started("snapshot", guest.name, *options, env={}) as second:
            wait_for(lambda: has_open(second.pid, lock_of(guest)), "the second at the lock")
            assert second.poll() is None
            first.send_signal(signal.SIGINT)
            assert first.wait() == 128 + signal.SIGINT
            out, _ = second.communicate()
    assert second.returncode == 0
    assert (json.loads(out)["level"], json.loads(out)["snapshot"]) == ("ram", "second")


def lock_of(guest):
    return RUNTIME / f"{must('virsh', 'domuuid', guest.name).strip()}.lock"


def has_open(pid, path):
    with suppress(OSError):
        return any(os.path.samefile(entry, path) for entry in Path(f"/proc/{pid}/fd").iterdir())
    return False


@pytest.mark.daily(1)
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_in_the_ram_phase_undoes_the_run(guest, tmp_path, signum):
    before = zfs_snapshots()
    with (
        stalled_compressor(tmp_path) as environment,
        started("snapshot", guest.name, env=environment) as process,
    ):
        wait_for_ram_phase()
        process.send_signal(signum)
        assert process.wait() == 128 + signum
        assert f"stopped by {signum.name}" in process.stderr.read()
    assert zfs_snapshots() == before
    assert_clean(guest)
    assert snapshot(guest)["level"] == "ram"


def test_a_run_killed_in_the_ram_phase_is_recovered_by_the_guardian(guest, tmp_path):
    before = zfs_snapshots()
    with (
        stalled_compressor(tmp_path) as environment,
        started("snapshot", guest.name, env=environment) as process,
    ):
        wait_for_ram_phase()
        process.kill()
        process.wait()
    wait_for(lambda: not list(JOURNAL.iterdir()), "the guardian to settle the run")
    assert snaporch("recover").out == ""
    assert zfs_snapshots() == before


def test_a_run_killed_in_the_ram_phase_is_recovered_by_the_next_run(guest, tmp_path):
    with stalled_compressor(tmp_path) as environment:
        process = Run("snapshot", guest.name, guarded=False, env=environment)
        try:
            wait_for_ram_phase()
        finally:
            process.kill()
            process.close()
    assert list(JOURNAL.iterdir())
    outcome = snaporch("snapshot", guest.name, "--json")
    assert "which had been interrupted" in outcome.err
    assert outcome.json["level"] == "ram"


def test_the_file_of_ram_of_a_killed_run_is_removed(guest, tmp_path):
    with config(tmp_path, '[defaults]\nram_capture = "file"\n') as environment:
        point = WHILE_RAM_IS_SAVED
        process = Run("snapshot", guest.name, point=point, guarded=False, env=environment)
        try:
            process.wait_stopped()
        finally:
            process.kill()
            process.close()
    assert len(list(BUNDLES.glob("*/.ram.raw"))) == 1
    assert snaporch("recover").status == 0
    assert_clean(guest)
