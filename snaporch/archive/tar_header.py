"""The header of a member: exactly one form, so that a reader compares bytes instead of parsing.

It is the POSIX format (pax), which any tar reads. A disk is a sparse member as GNU tar writes it
(format 1.0).
"""

from __future__ import annotations

import tarfile

from snaporch.archive.contents import Member

BLOCK = 512
_LARGE = 8 << 30
"""A length in octal digits is smaller."""
_SIZE, _SUM = 124, 148
"""Offsets in a header block, of the length and the checksum."""
END = bytes(2 * BLOCK)
"""Two empty blocks end a tar file."""


def header(member: Member, mtime: int) -> bytes:
    """The header of a member.

    Args:
        member: from the table of contents.
        mtime: seconds since 1970.
    """
    info = tarfile.TarInfo(member.name)
    info.size, info.mtime, info.mode = member.bytes, mtime, 0o600
    if member.disk is not None:
        info.name = f"GNUSparseFile.0/{member.name}"
        info.pax_headers = {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": member.name,
            "GNU.sparse.realsize": str(member.disk.size),
        }
    if member.bytes < _LARGE:
        return info.tobuf(tarfile.PAX_FORMAT)
    info.size = 0
    made = info.tobuf(tarfile.PAX_FORMAT)
    return made[:-BLOCK] + _with_large_size(made[-BLOCK:], member.bytes)


def _with_large_size(block: bytes, size: int) -> bytes:
    """Put a length into a header block in base 256, which all common programs read.

    A ``size`` in the extended header would do for GNU tar. Python's tarfile (3.13) takes that of a
    sparse member for the length of the file.
    """
    block = block[:_SIZE] + b"\x80" + size.to_bytes(11, "big") + block[_SIZE + 12 :]
    blank = block[:_SUM] + b" " * 8 + block[_SUM + 8 :]
    return block[:_SUM] + b"%06o\0 " % sum(blank) + block[_SUM + 8 :]


def padding(member: Member) -> bytes:
    """The bytes between a member's data and the next header."""
    return bytes(-member.bytes % BLOCK)


def described(block: bytes) -> tuple[str, int] | None:
    """The name and size in a header block, for messages and the first member; else ``None``."""
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
    return info.name, info.size
