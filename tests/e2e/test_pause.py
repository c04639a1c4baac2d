"""The parts of a pause, and the limits that keep it short and the host free."""

import os
from pathlib import Path

import pytest
from fakes import manifests
from faults.process import Run
from faults.stopping import STALL
from guests.disks import Disk
from guests.guest import Guest
from support import (
    assert_clean,
    assert_restored,
    config,
    must,
    restore,
    rewriting_guest,
    snaporch,
    snapshot,
    wait_for,
)

PARTS = {
    "overlay": ["downtime_ms", "switch_ms"],
    "manual": ["downtime_ms", "switch_ms", "snapshot_ms", "resume_ms"],
}


@pytest.fixture
def guest():
    made = Guest.create("pause", disks=[Disk("file", "tank/pause")])
    yield made
    made.remove()


def limit(guest):
    return int(must("virsh", "migrate-getmaxdowntime", guest.name).strip())


@pytest.mark.daily(1)
@pytest.mark.parametrize("way", ["overlay", "manual"])
def test_a_pause_is_reported_in_its_parts(guest, tmp_path, way):
    own = limit(guest)
    text = f'[defaults]\nram_strategy = "{way}"\ndowntime_limit = "{own // 3}ms"\n'
    with config(tmp_path, text) as environment:
        taken = snaporch("snapshot", guest.name, "--json", "--name", "s1", env=environment).json
    parts = taken["pause_parts"]
    assert [key for key, value in parts.items() if value is not None] == PARTS[way]
    assert sum(parts[key] for key in PARTS[way]) == pytest.approx(taken["pause_ms"], abs=1)
    assert limit(guest) == own
    assert_clean(guest)
    shown = must("snaporch", "show", f"{guest.name}@s1")
    assert f"(downtime {parts['downtime_ms']:.0f}, switch" in shown


def test_a_rate_does_not_keep_a_snapshot_from_being_whole(guest):
    mark = guest.mark()
    taken = snapshot(guest, "--rate", "1")
    assert (taken["level"], taken["state"]) == ("ram", "complete")
    assert_clean(guest)
    expected = guest.snapshot_count(taken["snapshot"])
    restore(guest, taken["snapshot"])
    assert_restored(guest, mark, expected)


def test_the_compressors_level_follows_the_snapshot_before(guest):
    manifest = Path(snapshot(guest, "--name", "s1")["bundle"]) / "manifest.json"
    said = manifests.load(manifest)
    pace = said["parts"][0]["pace"]
    assert pace["level"] == 1
    assert 0 <= pace["waited_for_ram"] <= pace["seconds"]
    pace |= {"seconds": 10.0, "waited_for_store": 9.0}  # a store as slow as the lab has none
    manifests.store(manifest, said)
    mark = guest.mark()
    snapshot(guest, "--name", "s2")
    assert "at level 3; held up by " in must("snaporch", "show", f"{guest.name}@s2")
    expected = guest.snapshot_count("s2")
    restore(guest, "s2")
    assert_restored(guest, mark, expected)


@pytest.fixture
def dirtying():
    made = rewriting_guest("dirtying", 160)
    yield made
    made.remove()


def test_a_dry_run_forecasts_how_saving_ram_ends(dirtying):
    unknown = snaporch("snapshot", dirtying.name, "--dry-run", "--json").json["ram"]
    assert unknown["changed_mib"] > 0
    assert (unknown["saved_mib"], unknown["outcome"]) == (None, None)
    snapshot(dirtying, "--name", "s1")
    known = snaporch("snapshot", dirtying.name, "--dry-run", "--json").json["ram"]
    assert known["saved_mib"] > 0
    assert known["outcome"] in ("fits", "slowed", "suspended")
    said = must("snaporch", "snapshot", dirtying.name, "--dry-run")
    assert f"{known['saved_mib']:.0f} MiB are saved" in said
    mark = dirtying.mark()
    expected = dirtying.snapshot_count("s1")
    restore(dirtying, "s1")
    assert_restored(dirtying, mark, expected)


@pytest.mark.daily(1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["overlay", "manual"])
def test_a_guest_does_not_wait_for_a_stalled_store(dirtying, tmp_path, way):
    """The rest of the guest's RAM, dirtied in a long downtime, is more than the pipe holds."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    text = f'[defaults]\nram_strategy = "{way}"\ncompression = "none"\ndowntime_limit = "3s"\n'
    with config(tmp_path, text) as environment:
        run = Run(
            "snapshot", dirtying.name, "--name", "s1", point=f"{STALL}:{gate}", env=environment
        )
        try:
            wait_for((tmp_path / "gate.stalled").exists, "QEMU to pause the guest", 300)
            dirtying.wait_count()  # and it goes on, though nothing was stored
            opened = os.open(gate, os.O_RDWR)
            ended = run.wait()
            os.close(opened)
        finally:
            run.kill()
            run.close()
    assert ended.status == 0, ended.err
    assert_clean(dirtying)
    expected = dirtying.snapshot_count("s1")
    mark = dirtying.mark()
    restore(dirtying, "s1")
    assert_restored(dirtying, mark, expected)


@pytest.mark.daily(1)
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", ["overlay", "manual"])
def test_a_guest_that_is_suspended_for_its_ram_is_released_at_the_deadline(dirtying, tmp_path, way):
    """The run itself is stopped, and cannot release it."""
    text = f'[defaults]\nram_strategy = "{way}"\nfreeze_deadline = "20s"\n'
    text += 'ram_budget_mib = 20\nram_rate = 10\nram_time_budget = "0s"\n'
    with config(tmp_path, text) as environment:
        run = Run("snapshot", dirtying.name, env=environment)
        try:
            wait_for(lambda: dirtying.state() == "paused", "the budget to be used up")
            run.stop()
            wait_for(lambda: dirtying.state() == "running", "the guardian", 100)
            run.go_on()
            ended = run.wait()
        finally:
            run.kill()
            run.close()
    assert "suspending the guest to finish it" in ended.err
    assert ended.status == 8, ended
    assert "the guest is as it was" in ended.err
    assert_clean(dirtying)
    dirtying.wait_count()
