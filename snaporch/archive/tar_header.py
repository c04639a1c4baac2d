"""The header of a member: exactly one form, so that a reader compares bytes instead of parsing.

It is the POSIX format (pax), which any tar reads. A disk is a sparse member as GNU tar writes it
(format 1.0).
"""

from __future__ import annotations

import tarfile

from snaporch.archive.contents import Member

BLOCK = 512
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
    return info.tobuf(tarfile.PAX_FORMAT)


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
