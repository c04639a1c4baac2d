"""Several guests at once: `snapshot --all --jobs`."""

import signal

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import (
    PATIENCE_SECONDS,
    assert_clean,
    open_gate,
    snaporch,
    stalled_compressor,
    started,
    wait_for_ram_phase,
    zfs_snapshots,
)

pytestmark = pytest.mark.usefixtures("by_overlay")


@pytest.fixture(scope="module")
def guests():
    made = [
        Guest.create("first", disks=[Disk("file", "tank/first")]),
        Guest.create("second", disks=[Disk("zvol", "flash/second")]),
        Guest.create("third", disks=[Disk("file", "tank/third")], start=False),
        Guest.create("elsewhere", disks=[Disk("plain", "/var/tmp/elsewhere")], start=False),
    ]
    yield made[:3]
    for guest in made:
        guest.remove()


def check(guests, marks):
    for guest, mark in zip(guests[:2], marks, strict=True):
        guest.wait_count()
        guest.assert_undisturbed(mark)
        assert_clean(guest)


def test_all_are_taken_two_at_once(guests):
    marks = [guest.mark() for guest in guests[:2]]
    outcome = snaporch("snapshot", "--all", "--jobs", "2", "--name", "all")
    assert outcome.status == 0, outcome.err
    rows = {line.split()[0]: line.split() for line in outcome.out.splitlines()[1:]}
    assert {name: (row[1], row[2], row[-1]) for name, row in rows.items()} == {
        "first": ("all", "ram", "complete"),
        "second": ("all", "ram", "complete"),
        "third": ("all", "off", "complete"),
    }
    assert "elsewhere  left out: no disk of it is on ZFS" in outcome.err
    check(guests, marks)


def test_a_failure_stops_no_other(guests):
    outcome = snaporch("snapshot", "first", "third", "--jobs", "2", "--level", "quiesced", "--json")
    assert outcome.status == 5, outcome.err
    assert [record["domain"] for record in outcome.json] == ["third"]
    assert "snaporch: first: no quiesced snapshot is possible" in outcome.err


def test_sigterm_lets_those_under_way_undo_or_finish_themselves(guests, tmp_path):
    before = set(zfs_snapshots())
    marks = [guest.mark() for guest in guests[:2]]
    with (
        stalled_compressor(tmp_path) as env,
        started("snapshot", "--all", "--jobs", "1", env=env) as running,
    ):
        wait_for_ram_phase()
        running.send_signal(signal.SIGTERM)
        open_gate(tmp_path)
        _, err = running.communicate(timeout=PATIENCE_SECONDS)
        assert running.returncode == 128 + signal.SIGTERM, err
    assert "second: not started: stopped by a signal" in err
    assert "third: not started: stopped by a signal" in err
    assert not {name for name in set(zfs_snapshots()) - before if "/first@" not in name}
    check(guests, marks)
