"""Streams of ``zfs send``, as far as snaporch reads them."""

from __future__ import annotations

import struct


def zfs_stream(snapshot: str, guid: int, content: bytes, base: int = 0) -> bytes:
    """A stream of one snapshot; the content is not that of a real one."""
    name = f"tank/any@{snapshot}".encode()
    return struct.pack("<IIQQQIIQQ256s", 0, 0, 0x2F5BACBAC, 1, 99, 2, 0, guid, base, name) + content
