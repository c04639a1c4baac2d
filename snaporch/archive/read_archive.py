"""Read an archive strictly: each byte is data of a member that the table lists, or is known before.

An archive may come from anywhere. So the reader follows no name, link or size in a header: it makes
the header that the next member of the table must have, and compares. It holds only one block of
data in memory, however much the file claims to unpack to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import BinaryIO

import zstandard

from snaporch.archive.contents import (
    CHECKSUMS_NAME,
    CONTENTS_NAME,
    MAX_CONTENTS_BYTES,
    ArchiveError,
    Contents,
    Member,
    check_order,
    parse_contents,
)
from snaporch.archive.tar_header import BLOCK, END, described, header, padding
from snaporch.archive.write_archive import END_MARK, checksums_bytes
from snaporch.zfs_names import quoted

_READ = 1 << 20
_MAX_WINDOW = 128 << 20
"""Memory that zstd may use; the command ``zstd`` has the same limit."""
_DAMAGED = "get it again from where it was exported"


class _Tail:
    """A file, and the last bytes that were read from it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.tail = b""

    def read(self, size: int) -> bytes:
        block = self._stream.read(size)
        self.tail = (self.tail + block[-len(END_MARK) :])[-len(END_MARK) :]
        return block


class ArchiveReader:
    """Reads the members in the order of the table.

    Args:
        stream: the file, or a pipe.
        thing: the name of the file, for errors.

    Raises:
        ArchiveError: from each method: the archive is damaged, ends early, or has another member
            than its table lists. Nothing after that is read.
        OSError: it cannot be read.
    """

    def __init__(self, stream: BinaryIO, thing: str) -> None:
        self._thing = thing
        self._file = _Tail(stream)
        engine = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        self._stream = engine.stream_reader(
            self._file,  # type: ignore[arg-type]
            read_size=_READ,
            read_across_frames=True,
        )
        self._sums: dict[str, str] = {}
        self.contents = self._table()
        self._members = iter(self.contents.members)

    def text(self) -> tuple[Member, bytes]:
        """The next member, which is small, and its content.

        The caller has checked its size: see :mod:`snaporch.archive.contents`.
        """
        member = next(self._members)
        self._expect_header(member)
        return member, b"".join(self._content(member))

    def blocks(self) -> tuple[Member, Iterator[bytes]]:
        """The next member, and its content in blocks, all of which must be read."""
        member = next(self._members)
        self._expect_header(member)
        return member, self._content(member)

    def checksum(self, name: str) -> str:
        """The SHA-256 of a member that was read."""
        return self._sums[name]

    def check_end(self) -> None:
        """Read the checksums and the end of the file, after all other members."""
        expected = checksums_bytes(self._sums)
        member, blocks = self.blocks()
        if member.name != CHECKSUMS_NAME:
            raise self._error(f"has the member {quoted(member.name)}, which it must not have")
        found = b"".join(blocks)
        if found != expected:
            name = _first_difference(found, self._sums)
            raise self._error(f"the checksum of its member {quoted(name)} differs: it is damaged")
        if self._read(len(END)) != END or self._some(1) or self._file.tail != END_MARK:
            raise self._error("does not end where it must: it is damaged, or something was added")

    def _table(self) -> Contents:
        block = self._read(BLOCK)
        first = described(block)
        if first is None or first[0] != CONTENTS_NAME:
            raise ArchiveError(self._thing, "is not an archive of `snaporch export`")
        if not 0 < first[1] <= MAX_CONTENTS_BYTES:
            raise self._error("its table of contents has no sensible size")
        member = Member(name=CONTENTS_NAME, bytes=first[1])
        data = b"".join(self._content(member))
        contents = parse_contents(data, self._thing)
        if block != header(member, contents.mtime):
            raise self._error(f"the header of its member {CONTENTS_NAME} is damaged")
        check_order(contents, self._thing)
        return contents

    def _expect_header(self, member: Member) -> None:
        expected = header(member, self.contents.mtime)
        found = self._read(len(expected))
        if found != expected:
            named = described(found[:BLOCK])
            other = f": its name is {quoted(named[0])}" if named else ""
            raise self._error(f"the header of its member {quoted(member.name)} is another{other}")

    def _content(self, member: Member) -> Iterator[bytes]:
        digest, left = hashlib.sha256(), member.bytes
        while left:
            block = self._read(min(left, _READ))
            digest.update(block)
            left -= len(block)
            yield block
        filler = padding(member)
        if self._read(len(filler)) != filler:
            raise self._error(f"its member {quoted(member.name)} is followed by other data")
        self._sums[member.name] = digest.hexdigest()

    def _read(self, size: int) -> bytes:
        blocks = []
        while size:
            block = self._some(size)
            if not block:
                raise self._error("ends too early: it is incomplete")
            blocks.append(block)
            size -= len(block)
        return b"".join(blocks)

    def _some(self, size: int) -> bytes:
        try:
            return self._stream.read(size)
        except zstandard.ZstdError as error:
            raise self._error(f"is damaged, or no zstd file ({error})") from error

    def _error(self, reason: str) -> ArchiveError:
        return ArchiveError(self._thing, reason, _DAMAGED)


def _first_difference(found: bytes, sums: dict[str, str]) -> str:
    """The first member whose checksum is not in the last member."""
    try:
        recorded = json.loads(found)["sha256"]
        return next(name for name, value in sums.items() if recorded.get(name) != value)
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration, RecursionError):
        return CHECKSUMS_NAME
