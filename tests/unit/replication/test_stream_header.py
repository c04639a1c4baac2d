import struct

import pytest

from snaporch.errors import RefusedError
from snaporch.replication.stream_header import HEADER_BYTES, sent_snapshot

MAGIC = 0x2F5BACBAC


RAW = 1 << 24


def header(name=b"tank/web@s1", *, kind=0, magic=MAGIC, version=1, flags=0, order="<", features=0):
    given = kind, 0, magic, version | features << 2, 99, 2, flags, 7, 5, name
    return struct.pack(order + "IIQQQIIQQ256s", *given)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("features", [0, 0x1000, 0x3FFFFFFF])
@pytest.mark.parametrize("flags", [0, 2, 4, 14])
def test_a_stream_of_one_snapshot_is_named(order, features, flags):
    found = sent_snapshot(header(order=order, features=features, flags=flags))
    assert found == ("s1", 7, 99, bool(features & RAW), 5)


def test_an_encrypted_stream_is_recognized():
    assert sent_snapshot(header(features=RAW)).is_raw
    assert not sent_snapshot(header(features=~RAW & 0x3FFFFFFF)).is_raw


def test_a_dataset_with_a_blank_is_no_obstacle():
    assert sent_snapshot(header(b"tank/my web@a b")).name == "a b"


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_a_header_has_its_length(length):
    with pytest.raises(RefusedError, match="too short"):
        sent_snapshot((header() + b"x")[:length])


@pytest.mark.parametrize("more", [{"kind": 1}, {"magic": 7}, {"magic": 0}])
def test_other_data_is_refused(more):
    with pytest.raises(RefusedError, match="no stream of zfs send"):
        sent_snapshot(header(**more))


@pytest.mark.parametrize("version", [0, 2, 3])
@pytest.mark.parametrize("order", ["<", ">"])
def test_a_package_is_refused(version, order):
    with pytest.raises(RefusedError, match="a package"):
        sent_snapshot(header(version=version, order=order))


@pytest.mark.parametrize("flags", [1, 3, 15])
def test_a_clone_is_refused(flags):
    with pytest.raises(RefusedError, match="a clone"):
        sent_snapshot(header(flags=flags))


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b"tank/web",
        b"tank/web@",
        b"tank/web@a/b",
        b"tank/web@a@b",
        b"tank/web@%recv",
        b"tank/web@..",
        b"tank/web@a\nb",
        b"tank/web@\xff",
        b"tank/web@a\0b",
        b"tank/web@" + b"a" * 247,
    ],
)
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(RefusedError, match="no name of a snapshot"):
        sent_snapshot(header(name))
