"""Write an archive: tar, compressed by zstd on all cores."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from snaporch.archive.contents import CONTENTS_NAME, Contents, Member, contents_bytes
from snaporch.archive.tar_header import END, header, padding
from snaporch.bundle.async_writer import AsyncWriter
from snaporch.bundle.compress import (
    Block,
    Compression,
    CompressionSettings,
    Sink,
    start_compressor,
)

END_MARK = struct.pack("<II", 0x184D2A50, 8) + b"snaporch"
"""A frame that zstd skips. It is the end of the file, so that a file that lost its end shows it."""
_LEVEL = 3
"""The default of the command ``zstd``."""


class ArchiveWriter:
    """Writes members in the order of a table of contents.

    Checksums and compression run in a thread of their own.

    Args:
        contents: the table.
        write: takes the bytes of the file, in order.
    """

    def __init__(self, contents: Contents, write: Sink) -> None:
        self._contents = contents
        self._write = write
        self._members = iter(contents.members)
        self._compressor = start_compressor(CompressionSettings(Compression.ZSTD, _LEVEL), write)
        self._digest = hashlib.sha256()
        self._sums: dict[str, str] = {}
        table = contents_bytes(contents)
        self._begin(Member(name=CONTENTS_NAME, bytes=len(table)))
        self.data(table)
        self._end()

    def begin(self) -> None:
        """Begin the next member of the table."""
        self._begin(next(self._members))

    def data(self, block: bytes) -> None:
        """Write the next bytes of the member.

        Raises:
            OSError: the file cannot be written.
        """
        assert len(block) <= self._left
        self._left -= len(block)
        self._thread.put(block)

    def end(self) -> str:
        """End the member. Return its SHA-256.

        Raises:
            OSError: the file cannot be written.
        """
        return self._end()

    def finish(self) -> None:
        """Write the last member, the checksums, and end the file.

        Raises:
            OSError: the file cannot be written.
        """
        sums = checksums_bytes(self._sums)
        self.begin()
        self.data(sums)
        self._end()
        assert next(self._members, None) is None
        self._compressor.write(END)
        self._compressor.finish()
        self._write(END_MARK)

    def abandon(self) -> None:
        """Stop the thread."""
        self._thread.stop()
        self._compressor.abandon()

    def _begin(self, member: Member) -> None:
        self._member, self._left = member, member.bytes
        self._digest = hashlib.sha256()
        self._compressor.write(header(member, self._contents.mtime))
        self._thread = AsyncWriter(self._take)

    def _end(self) -> str:
        assert self._left == 0
        self._thread.finish()
        self._compressor.write(padding(self._member))
        self._sums[self._member.name] = self._digest.hexdigest()
        return self._sums[self._member.name]

    def _take(self, block: Block) -> None:
        self._digest.update(block)
        self._compressor.write(block)


@contextmanager
def archive_writer(contents: Contents, write: Sink) -> Iterator[ArchiveWriter]:
    """Write an archive: the caller writes all members but the last inside the block.

    Raises:
        OSError: the file cannot be written.
    """
    writer = ArchiveWriter(contents, write)
    try:
        yield writer
        writer.finish()
    except BaseException:
        writer.abandon()
        raise


def checksums_bytes(sums: dict[str, str]) -> bytes:
    """The content of the last member: the SHA-256 of every other, by its name."""
    return json.dumps({"sha256": sums}, indent=2).encode() + b"\n"
