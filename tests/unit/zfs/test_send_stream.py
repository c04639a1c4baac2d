"""The second record of a stream shows whether anything has changed."""

import io
import struct

import pytest

from snaporch.zfs.send_stream import END, second_record


def record(kind, payload=b""):
    return struct.pack("=II", kind, len(payload)).ljust(312, b"\0") + payload


@pytest.mark.parametrize("payload", [b"", b"keys of an encrypted dataset"])
@pytest.mark.parametrize("kind", [1, END])
def test_the_record_behind_the_first_and_its_payload(kind, payload):
    stream = io.BytesIO(record(0, payload) + record(kind) + record(END))
    assert second_record(stream) == kind


@pytest.mark.parametrize("length", [0, 100, 312, 400])
def test_a_stream_that_ends_before_has_none(length):
    assert second_record(io.BytesIO((record(0) + record(END))[:length])) is None
