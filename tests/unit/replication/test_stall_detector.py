import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from snaporch.replication.stall_detector import StallDetector, moved_bytes, passed_bytes

BLOCK = 1 << 16


@pytest.fixture
def clock():
    """Seconds on the monotonic clock, and bytes moved so far."""

    class Clock:
        now, moved, looks = 1000.0, 1 << 30, 0

        def look(self, _group):
            self.looks += 1
            return self.moved

        def passes(self, seconds, moving=0):
            """Half a minute at a time."""
            for _ in range(seconds // 30):
                self.now += 30
                self.moved += moving

        def transfer(self):
            return StallDetector(1, self.look, lambda: self.now)

    return Clock()


def begun(clock):
    """A transfer that moved something half a minute after its start, and not since."""
    transfer = clock.transfer()
    clock.passes(30)
    assert not transfer.is_stalled()
    return transfer


def test_a_transfer_that_moves_nothing_for_an_hour_is_stalled(clock):
    transfer = begun(clock)
    clock.passes(3570)
    assert not transfer.is_stalled()
    clock.passes(30)
    assert transfer.is_stalled()


def test_counters_are_read_at_intervals(clock):
    """However often ``is_stalled`` is called: a reading looks at all processes of the host."""
    transfer = clock.transfer()
    for _ in range(600):
        clock.now += 0.1
        assert not transfer.is_stalled()
    assert clock.looks in (1, 2)


def test_a_connection_that_is_only_kept_alive_is_stalled(clock):
    transfer = begun(clock)
    for _ in range(119):
        clock.passes(30, moving=100)
        assert not transfer.is_stalled()
    clock.passes(30, moving=100)
    assert transfer.is_stalled()


@pytest.mark.parametrize("moved", [1 << 20, -(1 << 20)])
def test_a_transfer_that_moves_now_and_then_is_not_stalled(clock, moved):
    """The count also falls: the bytes of processes that ended are no longer counted."""
    transfer = begun(clock)
    for _ in range(5):
        clock.passes(3600)
        clock.moved += moved
        assert not transfer.is_stalled()


def test_without_counters_a_transfer_never_counts_as_stalled(clock):
    transfer = clock.transfer()
    clock.moved = None
    clock.now += 7200
    assert not transfer.is_stalled()


def put(proc, name, group, read=None, written=0):
    """A process as in proc(5); without its counters if it ends before they are read."""
    process = proc / name
    process.mkdir()
    (process / "stat").write_text(f"7 (a (b) c) S 1 {group} 99 0\n")
    if read is not None:
        (process / "io").write_text(f"rchar: {read}\nwchar: {written}\nsyscr: 5\n")


def test_a_kernel_without_counters(tmp_path):
    put(tmp_path, "11", 10, 0, 0)
    put(tmp_path, "12", 10)
    assert moved_bytes(10, tmp_path) is None


def test_members_come_and_go_while_they_are_counted(tmp_path):
    put(tmp_path, "11", 10, 300, 20)
    put(tmp_path, "12", 10, 0, 0)  # has only just begun
    put(tmp_path, "13", 10)
    put(tmp_path, "14", 99, 7, 7)
    put(tmp_path, "self", 10, 300, 20)
    (tmp_path / "15").mkdir()
    assert moved_bytes(10, tmp_path) == 320
    assert moved_bytes(15, tmp_path) == 0, "all of its processes have exited"


@pytest.mark.parametrize("error", [ProcessLookupError, PermissionError, FileNotFoundError])
def test_counters_that_cannot_be_read_count_as_nothing(tmp_path, monkeypatch, error):
    """The process may end after its file is opened and before it is read."""
    for name in ("11", "12", "13"):
        put(tmp_path, name, 10, 300, 20)
    away, real = (tmp_path / "12" / "stat", tmp_path / "13" / "io"), Path.read_text

    def read_text(path):
        if path in away:
            raise error
        return real(path)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert moved_bytes(10, tmp_path) == 320


def test_all_of_a_group_counts_and_nothing_else():
    process = subprocess.Popen(
        ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
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


def test_the_bytes_that_a_process_passes_on_are_counted_once():
    size = 8 << 20
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as cat:
        begun = passed_bytes(cat.pid)
        writer = threading.Thread(target=cat.stdin.write, args=(bytes(size),))
        writer.start()
        assert len(cat.stdout.read(size)) == size
        writer.join()
        assert passed_bytes(cat.pid) - begun == pytest.approx(size, rel=0.01)
    assert passed_bytes(cat.pid) == 0
