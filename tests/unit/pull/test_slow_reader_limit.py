"""A reader that reads nothing does not hold a source for ever."""

import os
import threading

import pytest

from snaporch.pull.slow_reader_limit import LimitedOutput
from snaporch.replication.interface import ReplicaError


def test_all_is_written_however_slowly_it_is_read():
    reader, writer = os.pipe()
    data = os.urandom(1 << 20)
    found = []

    def read():
        with os.fdopen(reader, "rb") as stream:
            found.append(stream.read())

    thread = threading.Thread(target=read)
    thread.start()
    with os.fdopen(writer, "wb", buffering=0) as stream:
        LimitedOutput(stream).write(data)
    thread.join()
    assert found == [data]


def test_a_reader_that_reads_nothing_ends_it():
    reader, writer = os.pipe()
    with (
        os.fdopen(reader, "rb"),
        os.fdopen(writer, "wb", buffering=0) as stream,
        pytest.raises(ReplicaError, match="nothing was read"),
    ):
        LimitedOutput(stream, seconds=0.01).write(bytes(1 << 20))


def test_a_reader_that_has_gone_is_an_error():
    reader, writer = os.pipe()
    os.close(reader)
    with (
        os.fdopen(writer, "wb", buffering=0) as stream,
        pytest.raises(ReplicaError, match="has gone"),
    ):
        LimitedOutput(stream).write(b"x")


def test_a_reader_that_reads_too_slowly_on_average_ends_it():
    reader, writer = os.pipe()
    end = threading.Event()

    def read():
        while not end.wait(0.05):
            os.read(reader, 1 << 12)

    thread = threading.Thread(target=read)
    thread.start()
    with os.fdopen(writer, "wb", buffering=0) as stream:
        with pytest.raises(ReplicaError, match="too slowly"):
            LimitedOutput(stream, seconds=0.4, slowest=1 << 30).write(bytes(1 << 21))
        end.set()
        os.set_blocking(writer, False)
    thread.join()
    os.close(reader)
