import hashlib
import os
import subprocess
import threading

import pytest
from fakes.zfs_stream import zfs_stream

from snaporch.errors import RefusedError
from snaporch.replication.restic_stream import Digest, Wanted, command, pass_on, read_report

STREAM = zfs_stream("s1", 7, os.urandom(1 << 20))
RIGHT = Digest(len(STREAM), hashlib.sha256(STREAM).hexdigest())


def passed(data, expected=None, name="s1", guid=7, base=0):
    """What comes through, and the result or the error."""
    (source, feed), (drain, target) = os.pipe(), os.pipe()
    got = []

    def write():
        with os.fdopen(feed, "wb") as stream:
            stream.write(data)

    def read():
        with os.fdopen(drain, "rb") as stream:
            got.append(stream.read())

    threads = [threading.Thread(target=each) for each in (write, read)]
    for each in threads:
        each.start()
    try:
        result = pass_on(source, target, Wanted(name, guid, base), expected)
    except RefusedError as error:
        while os.read(source, 1 << 20):
            pass
        result = error
    os.close(source)
    os.close(target)
    for each in threads:
        each.join()
    return got[0], result


def test_a_stream_is_counted_and_hashed():
    assert passed(STREAM) == (STREAM, RIGHT)


def test_a_stream_as_it_was_recorded_comes_through():
    assert passed(STREAM, RIGHT) == (STREAM, RIGHT)


@pytest.mark.parametrize("length", [400, 1 << 18, len(STREAM) - 1])
def test_the_end_of_a_stream_that_was_cut_is_withheld(length):
    data, error = passed(STREAM[:length], RIGHT)
    assert len(data) < length
    assert f"{length} bytes instead of {len(STREAM)}" in str(error)


def test_the_end_of_another_stream_is_withheld():
    other = STREAM[:-1] + bytes([STREAM[-1] ^ 1])
    data, error = passed(other, RIGHT)
    assert len(data) < len(STREAM)
    assert "another SHA-256" in str(error)


def test_nothing_comes_through_beyond_the_expected_size():
    """So that a hostile stream cannot fill a pool."""
    data, error = passed(STREAM, RIGHT._replace(bytes=1 << 19))
    assert len(data) <= 1 << 19
    assert "has over 524288 bytes" in str(error)


@pytest.mark.parametrize("other", [("s2", 7), ("s1", 8)])
def test_nothing_of_another_snapshot_comes_through(other):
    """The name may have been used again since the list was made."""
    data, error = passed(STREAM, None, *other)
    assert data == b""
    assert "another snapshot" in str(error)


@pytest.mark.parametrize(("base", "wanted"), [(5, 6), (5, 0), (0, 5)])
def test_nothing_that_follows_another_snapshot_comes_through(base, wanted):
    """ZFS would refuse it, or receive other data, after all before it was received."""
    stream = zfs_stream("s1", 7, b"x" * 1000, base)
    data, error = passed(stream, base=wanted)
    assert data == b""
    assert "follows another snapshot" in str(error)
    assert passed(stream, base=base)[0] == stream


def test_what_is_no_stream_does_not_come_through():
    for data in (b"", b"x" * 1000):
        assert passed(data)[0] == b""


def test_the_command_reports_what_it_passed_on(tmp_path):
    report = tmp_path / "report"
    words = command(Wanted("s1", 7, 0), "--report", str(report))
    done = subprocess.run(words, input=STREAM, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, STREAM, b"")
    assert read_report(report) == RIGHT


@pytest.mark.parametrize("size", [RIGHT.bytes, 1])
def test_the_command_checks_and_passes_nothing_on(size):
    words = command(Wanted("s1", 7, 0), "--check", str(size), RIGHT.sha256)
    done = subprocess.run(words, input=STREAM, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (int(size != RIGHT.bytes), b"")


def test_a_reader_that_ends_says_why_itself(tmp_path):
    words = command(Wanted("s1", 7, 0), "--report", str(tmp_path / "report"))
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(words, input=STREAM, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")
    assert not (tmp_path / "report").exists()


def test_the_command_fails_in_one_line():
    words = command(Wanted("s1", 7, 0), "--expect", "1", RIGHT.sha256)
    done = subprocess.run(words, input=STREAM, capture_output=True, check=False, text=False)
    assert done.returncode == 1
    assert done.stderr.startswith(b"snaporch: the stream: has ")
    assert done.stderr.count(b"\n") == 1
