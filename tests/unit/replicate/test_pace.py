import os
import subprocess
import time

import pytest

from snaporch.replicate import pace
from snaporch.replicate.pace import Pace, moved_bytes

BLOCK = 1 << 16


@pytest.fixture
def clock(monkeypatch):
    """Seconds on the monotonic clock, and bytes moved so far."""

    class Clock:
        now, moved = 1000.0, 0

        def passes(self, seconds, moving=0):
            """Half a minute at a time."""
            for _ in range(seconds // 30):
                self.now += 30
                self.moved += moving

    clock = Clock()
    monkeypatch.setattr(pace.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(pace, "moved_bytes", lambda _group: clock.moved)
    return clock


def test_nothing_for_an_hour_is_standing_still(clock):
    transfer = Pace(1)
    clock.passes(3570)
    assert not transfer.stands_still()
    clock.passes(30)
    assert transfer.stands_still()


def test_a_connection_that_is_only_kept_alive_stands_still(clock):
    transfer = Pace(1)
    for _ in range(119):
        clock.passes(30, moving=100)
        assert not transfer.stands_still()
    clock.passes(30, moving=100)
    assert transfer.stands_still()


@pytest.mark.parametrize("moved", [1 << 20, -(1 << 20)])
def test_what_moves_now_and_then_does_not(clock, moved):
    """Of what has ended the bytes are not known any more."""
    transfer = Pace(1)
    clock.moved = 1 << 30
    for _ in range(5):
        clock.passes(3000)
        clock.moved += moved
        assert not transfer.stands_still()


def test_where_it_is_not_told_nothing_is_known(clock, monkeypatch):
    transfer = Pace(1)
    clock.moved = None
    clock.now += 7200
    assert not transfer.stands_still()


def test_a_host_that_does_not_tell(monkeypatch):
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        monkeypatch.setattr(pace, "_moved_by", lambda _path: 0)
        assert moved_bytes(process.pid) is None
    finally:
        process.kill()
        process.communicate()


def test_all_of_a_group_counts_and_nothing_else():
    process = subprocess.Popen(
        ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    moved = 2 * 30 * BLOCK
    try:
        for _ in range(30):
            process.stdin.write(bytes(BLOCK))
            process.stdin.flush()
            left = BLOCK
            while left:
                left -= len(os.read(process.stdout.fileno(), left))
        end = time.monotonic() + 60
        while moved_bytes(process.pid) < moved and time.monotonic() < end:
            pass  # what is written is counted after it has been read
        assert 0 <= moved_bytes(process.pid) - moved < BLOCK, "what it read to start is less"
    finally:
        process.kill()
        process.communicate()
    assert moved_bytes(process.pid) == 0
