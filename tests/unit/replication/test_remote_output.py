"""The output of a script, as a stream."""

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
