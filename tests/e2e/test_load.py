"""Snapshots in a loop of a guest that never stops writing to three disks on two pools.

By `overlay` and `manual` in turns. Three each day, a hundred by `make test-all`.
"""

import os

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import assert_clean, assert_restored, config, restore, snaporch

TAKE = ("snapshot", "busy", "--json", "--name")
ROUNDS = 100 if os.environ.get("LONG") else 3


@pytest.mark.timeout(2300)  # a hundred runs take minutes, and the machine may be busy
def test_snapshots_in_a_loop_under_write_load(tmp_path):
    guest = Guest.create(
        "busy",
        kind="busy",
        disks=[
            Disk("file", "tank/busy"),
            Disk("zvol", "flash/busy-1"),
            Disk("zvol", "tank/busy-2"),
        ],
    )
    mark = guest.mark()
    last = 0
    for round_number in range(ROUNDS):
        strategy = ("overlay", "manual")[round_number % 2]
        with config(tmp_path, f'[defaults]\nram_strategy = "{strategy}"\n') as environment:
            taken = snaporch(*TAKE, f"load-{round_number}", env=environment).json
        count = guest.snapshot_count(taken["snapshot"])  # all three counters of one instant
        assert count > last
        last = count
    assert_clean(guest)
    assert not guest.cold_boots_since(mark)
    assert not guest.bad_since(mark)
    before = guest.mark()
    restore(guest, f"load-{ROUNDS - 1}")
    assert_restored(guest, before, last)
    guest.remove()
