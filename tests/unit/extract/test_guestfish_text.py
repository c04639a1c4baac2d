"""Words for guestfish, and its answers."""

import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snaporch.extract.guestfish_text import (
    AnswerError,
    FileSystem,
    disk_of,
    mount_order,
    parse_entry,
    parse_file_systems,
    parse_names,
    quoted,
)

STAT = """\
st_dev: 2049
st_ino: 12
st_mode: 33188
st_nlink: 1
st_uid: 1000
st_gid: 100
st_size: 11
st_mtime_sec: 1700000000
st_mtime_nsec: 5
"""


def as_guestfish_reads_it(text):
    """``parse_quoted_string`` of its fish.c, for a whole word."""
    assert text[0] == text[-1] == '"'
    data, found = text[1:-1].encode("ascii"), b""
    while data:
        if data.startswith(b"\\x"):
            found, data = found + bytes((int(data[2:4], 16),)), data[4:]
        else:
            assert data[0] not in b'"\\\n'
            found, data = found + data[:1], data[1:]
    return found


@given(st.binary(max_size=50).filter(lambda word: b"\0" not in word))
def test_a_word_of_any_bytes_is_one_word_on_one_line(word):
    assert as_guestfish_reads_it(quoted(word)) == word
    assert quoted(word).isprintable()


def test_a_word_cannot_have_a_nul():
    with pytest.raises(ValueError, match="NUL"):
        quoted("a\0b")


@pytest.mark.parametrize(
    "answer",
    [
        b"..\0",
        b".\0",
        b"\0",
        b"a/b\0",
        b"../../etc/passwd\0",
        b"a\0a\0",
        b"a\0b",
        b"x" * 256 + b"\0",
    ],
)
def test_what_is_no_name_in_a_directory_is_refused(answer):
    with pytest.raises(AnswerError):
        parse_names(answer, 10)


def test_names_are_sorted_and_bounded():
    assert parse_names(b"b\0a\nb\0", 2) == [b"a\nb", b"b"]
    assert parse_names(b"", 2) == []
    with pytest.raises(AnswerError, match="more than 2"):
        parse_names(b"a\0b\0c\0", 2)


def test_an_entry():
    entry = parse_entry(b"hello", STAT.encode())
    assert (entry.kind, entry.size, entry.uid, entry.gid) == ("file", 11, 1000, 100)
    assert entry.mtime_ns == 1_700_000_000 * 10**9 + 5
    assert stat.S_IMODE(entry.mode) == 0o644


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("st_size: 11", "st_size: -1"),
        ("st_mode: 33188", "st_mode: 99999999"),
        ("st_size: 11\n", ""),
        ("st_size: 11", "st_size: 1" + "0" * 30),
    ],
)
def test_numbers_out_of_range_are_refused(old, new):
    with pytest.raises(AnswerError):
        parse_entry(b"x", STAT.replace(old, new).encode())


@pytest.mark.parametrize(
    "moment", ["st_mtime_sec: 9000000000000000000", "st_mtime_sec: -99999999999"]
)
def test_a_time_that_no_host_can_set_is_none(moment):
    entry = parse_entry(b"x", STAT.replace("st_mtime_sec: 1700000000", moment).encode())
    assert entry.mtime_ns == 0


def test_file_systems_and_where_they_are_mounted():
    found = parse_file_systems(b"/dev/vg/root: ext4\n/dev/sda1: crypto_LUKS\nnonsense\n")
    assert found == [FileSystem("/dev/sda1", "crypto_LUKS"), FileSystem("/dev/vg/root", "ext4")]
    assert [each.is_encrypted for each in found] == [True, False]
    assert [each.is_mountable for each in found] == [False, True]
    answer = b"/boot/efi: /dev/sda1\n/: /dev/vg/root\n/boot: /dev/sda2\nswap: /dev/sda3\n"
    assert mount_order(answer) == [
        ("/", "/dev/vg/root"),
        ("/boot", "/dev/sda2"),
        ("/boot/efi", "/dev/sda1"),
    ]


def test_the_disk_of_a_device():
    targets = [f"vd{number}" for number in range(30)]
    assert disk_of("/dev/sda1", targets) == "vd0"
    assert disk_of("/dev/sdb", targets) == "vd1"
    assert disk_of("/dev/sdab3", targets) == "vd27"
    assert disk_of("/dev/sdb", targets[:1]) is None
    assert disk_of("/dev/vg/root", targets) is None
