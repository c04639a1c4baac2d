"""The output of a script, as a stream."""

import os
import time
from contextlib import suppress

import pytest

from snaporch.interrupt import Interrupt
from snaporch.remote_host import Host
from snaporch.replication.interface import ReplicaError
from snaporch.replication.remote_output import remote_output


def output(script):
    return remote_output(Host(""), script, "nas: web", Interrupt())


def test_it_is_read_while_the_script_runs():
    with output("echo one; read -r line || echo two") as stream:
        assert stream.read(99) + stream.read(99) == b"one\ntwo\n"


def test_a_script_that_fails_is_an_error_with_its_last_line():
    with (
        pytest.raises(ReplicaError, match="nas: web: no such pool; try again"),
        output("echo first >&2; echo no such pool >&2; exit 3") as stream,
    ):
        stream.read(1)


def test_a_script_that_had_more_to_send_is_no_error():
    with output("yes") as stream:
        assert stream.read(2) == b"y\n"


def test_an_error_of_the_reader_ends_the_script_and_has_what_it_printed():
    def read():
        with output("echo the cause >&2; echo; sleep 600") as stream:
            stream.read(1)
            raise ReplicaError("the stream", "too short")

    with pytest.raises(ReplicaError, match=r"nas: web: too short \(the cause\)"):
        read()


def test_a_script_that_does_not_end_after_the_block_is_ended(monkeypatch):
    monkeypatch.setattr("snaporch.replication.remote_output._END_SECONDS", 0.2)
    start = time.monotonic()
    with output("echo one; exec sleep 600 >&-") as stream:
        assert stream.read(99) == b"one\n"
    assert time.monotonic() - start < 60


def test_only_the_last_of_endless_errors_is_kept():
    def read():
        script = "head -c 9000000 /dev/zero >&2; echo >&2; echo the cause >&2; echo; exit 3"
        with output(script) as stream:
            assert stream.read(1) == b"\n"
            assert _largest_deleted() < 1 << 20

    with pytest.raises(ReplicaError, match=r"web: the cause; try"):
        read()


def _largest_deleted():
    """The size of the largest file that is open and has no name."""
    sizes = [0]
    for each in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            path = f"/proc/self/fd/{each}"
            if "(deleted)" in os.readlink(path):
                sizes.append(os.stat(path).st_size)
    return max(sizes)
