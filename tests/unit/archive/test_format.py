"""The format: bytes that must not change, since archives are kept for years."""

import hashlib
import io
import subprocess
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snaporch.archive.contents import (
    ArchiveError,
    Member,
    SparseEntry,
    pack_map,
    parse_map,
)
from snaporch.archive.tar_header import described, header
from snaporch.archive.unpack import placed
from snaporch.archive.used_extents import merged, written_runs

PLAIN = Member(name="manifest.json", bytes=1234)
LARGE = Member(name="ram.save", bytes=9 << 30)
DISK = Member(
    name="disks/vda.raw",
    bytes=10 << 30,
    disk=SparseEntry(size=1 << 40, map_bytes=512, target="vda", format="raw"),
)


@pytest.mark.parametrize(
    ("member", "blocks", "digest"),
    [(PLAIN, 1, "d75b1e4a7f6653cf"), (LARGE, 1, "7721743ca4f788ca"), (DISK, 3, "3ccca75970b126c4")],
)
def test_a_header_has_the_same_bytes_with_every_python(member, blocks, digest):
    made = header(member, 1_795_674_535)
    assert len(made) == 512 * blocks
    assert hashlib.sha256(made).hexdigest()[:16] == digest


@pytest.mark.parametrize("member", [PLAIN, LARGE, DISK])
def test_pythons_tarfile_reads_a_header(member):
    data = header(member, 77) + (pack_map([], 1 << 40) if member.disk else b"")
    with tarfile.open(fileobj=io.BytesIO(data)) as read:
        found = read.next()
    assert (found.name, found.mtime, found.isreg()) == (member.name, 77, True)
    assert found.size == (member.disk.size if member.disk else member.bytes)


def test_what_is_no_header_has_no_name():
    assert described(b"x" * 512) is None
    assert described(header(PLAIN, 1)) == ("manifest.json", 1234)


def test_a_map_is_read_as_it_was_written():
    for extents, size in (([], 0), ([], 100), ([(0, 100)], 100), ([(0, 5), (9, 20)], 100)):
        packed = pack_map(extents, size)
        data = sum(end - start for start, end in extents)
        entry = SparseEntry(size=size, map_bytes=len(packed), target="vda", format="raw")
        member = Member(name="disks/vda.raw", bytes=len(packed) + data, disk=entry)
        assert parse_map(packed, member, "x") == extents


@given(data=st.binary(max_size=1024))
def test_no_map_is_a_crash(data):
    entry = SparseEntry(size=1 << 20, map_bytes=1024, target="vda", format="raw")
    member = Member(name="disks/vda.raw", bytes=1024 + 10, disk=entry)
    try:
        runs = parse_map(data.ljust(1024, b"\0"), member, "x")
    except ArchiveError:
        return
    assert sum(end - start for start, end in runs) == 10


@given(
    gaps=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=8),
    cuts=st.lists(st.integers(1, 12), min_size=1),
)
def test_data_come_back_to_their_places(gaps, cuts):
    runs, at = [], 0
    for gap, length in gaps:
        runs.append((at + gap, at + gap + length))
        at += gap + length
    image = bytearray(at)
    for number, (start, end) in enumerate(runs, 1):
        image[start:end] = bytes([number]) * (end - start)
    data = b"".join(image[start:end] for start, end in runs)
    blocks, position = [], 0
    while position < len(data):
        blocks.append(data[position : position + cuts[len(blocks) % len(cuts)]])
        position += len(blocks[-1])
    found = bytearray(at)
    for offset, piece in placed(runs, blocks):
        found[offset : offset + len(piece)] = piece
    assert found == image


def test_runs_that_are_near_each_other_are_one():
    assert merged([(0, 5), (6, 9), (20, 30)], gap=2) == [(0, 9), (20, 30)]
    assert merged([(0, 1), (4, 5), (100, 101)], gap=1, limit=2) == [(0, 5), (100, 101)]
    assert merged([]) == []


def test_blocks_of_zeros_are_holes():
    found = [(0, b"x" * 8), (8, bytes(8)), (16, bytes(7) + b"x"), (24, bytes(3))]
    assert list(written_runs(found)) == [(0, 8), (16, 24)]


def test_tar_lists_a_large_disk_and_what_follows(tmp_path):
    path = tmp_path / "x.tar"
    first = header(DISK, 77) + pack_map([(0, DISK.bytes - 512)], 1 << 40)
    second = len(first) + DISK.bytes - 512
    with path.open("wb") as stream:
        stream.write(first)
        stream.seek(second)
        stream.write(header(PLAIN, 77))
        stream.truncate(second + 4 * 512 + 1024)
    listed = subprocess.run(["tar", "-tvf", path], check=True, capture_output=True, text=True)
    assert [line.split()[2] for line in listed.stdout.splitlines()] == [str(1 << 40), "1234"]
    with tarfile.open(path) as read:
        assert [each.size for each in read.getmembers()] == [1 << 40, 1234]
