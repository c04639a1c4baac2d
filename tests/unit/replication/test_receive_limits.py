import os
import subprocess
import sys

import pytest

from snaporch.errors import BusyError, UnavailableError
from snaporch.replication.interface import ReplicaError
from snaporch.replication.receive_limits import LimitedStream, limited_requests


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as reader, open(writing, "wb", buffering=0) as writer:
        yield reader, writer


def test_a_stream_is_read_to_its_end(pipe):
    reader, writer = pipe
    seen = []
    stream = LimitedStream(reader, on_read=seen.append)
    writer.write(b"abc")
    assert stream.read(2) == b"ab"
    writer.write(b"defg")
    assert stream.exactly(4) == b"cdef"
    writer.close()
    assert stream.exactly(9) == b"g"
    assert stream.read(1) == b""
    assert seen[-1] == 7


def test_a_silent_sender_is_given_up(pipe):
    with pytest.raises(ReplicaError, match="no data came for 0 s"):
        LimitedStream(pipe[0], seconds=0.01).read(1)


def test_a_signal_ends_a_read_that_waits(pipe):
    def check():
        raise InterruptedError

    with pytest.raises(InterruptedError):
        LimitedStream(pipe[0], check).read(1)


def test_bytes_that_come_too_slowly_on_average_end_it():
    words = ["sh", "-c", "while printf x; do sleep 0.1; done"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, bufsize=0) as process:
        with pytest.raises(ReplicaError, match="too slowly"):
            LimitedStream(process.stdout, seconds=3, slowest=100).exactly(600)
        process.kill()


HOLD = """
import sys
from pathlib import Path
from snaporch.replication.receive_limits import limited_requests
with limited_requests(Path(sys.argv[1]), 2):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_only_so_many_requests_are_carried_out(tmp_path):
    """Each in a process of its own, as sshd starts them."""
    others = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]  # fmt: skip
    assert [each.stdout.readline() for each in others] == [b"held\n"] * 2
    with pytest.raises(BusyError, match="2 requests"), limited_requests(tmp_path, 2):
        pass
    for each in others:
        each.communicate()
    with limited_requests(tmp_path, 2):
        pass


def test_the_locks_are_not_behind_a_link(tmp_path):
    (tmp_path / ".requests").symlink_to("/etc/passwd")
    with pytest.raises(UnavailableError), limited_requests(tmp_path):
        pass
