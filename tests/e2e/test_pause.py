"""What a pause is made of, and the limits that keep it short and the host free."""

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import assert_clean, assert_restored, config, must, restore, snaporch, snapshot

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


@pytest.mark.parametrize("way", ["overlay", "manual"])
def test_a_pause_is_told_in_its_parts(guest, tmp_path, way):
    own = limit(guest)
    text = f'[defaults]\nram_strategy = "{way}"\ndowntime_ms = {own // 3}\n'
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
