"""Two runs at once, and runs that are stopped or killed while RAM is saved."""

import signal

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import (
    JOURNAL,
    assert_clean,
    one_line_error,
    snaporch,
    snapshot,
    stalled_compressor,
    started,
    wait_for,
    wait_for_ram_phase,
    zfs_snapshots,
)


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


def test_the_second_run_is_told_who_holds_the_domain(guest, tmp_path):
    with (
        stalled_compressor(tmp_path) as environment,
        started("snapshot", guest.name, env=environment) as first,
    ):
        wait_for_ram_phase()
        outcome = snaporch("snapshot", guest.name)
        one_line_error(outcome, 6, guest.name, f"pid {first.pid}", "snapshot")
        one_line_error(snaporch("snapshot", guest.name, "--wait", "1"), 6)
        first.send_signal(signal.SIGTERM)
        first.wait()


def test_the_second_run_waits_and_then_runs(guest, tmp_path):
    with (
        stalled_compressor(tmp_path) as environment,
        started("snapshot", guest.name, env=environment) as first,
    ):
        wait_for_ram_phase()
        with started("snapshot", guest.name, "--wait", "300", env={}) as second:
            first.send_signal(signal.SIGINT)
            assert first.wait() == 128 + signal.SIGINT
            assert second.wait() == 0


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


def test_kill_in_the_ram_phase_is_mended_by_the_guardian(guest, tmp_path):
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


def test_kill_in_the_ram_phase_is_mended_by_the_next_run(guest, tmp_path):
    with (
        stalled_compressor(tmp_path) as environment,
        started("snapshot", guest.name, env=environment) as process,
    ):
        wait_for_ram_phase()
        process.kill()
        process.wait()
    assert snapshot(guest)["level"] == "ram"
