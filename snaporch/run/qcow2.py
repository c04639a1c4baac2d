"""What a qcow2 header says, read without believing it (QEMU's docs/interop/qcow2.txt).

The emulator owns the file, and may have written anything into it.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

_MAGIC = b"QFI\xfb"
_FIXED = struct.Struct(">4sIQIIQI")
"""Magic, version, backing name's offset and length, cluster bits, size, encryption."""
_V2_BYTES = 72
_FEATURES = struct.Struct(">QQQII")
"""Incompatible, compatible, autoclear; refcount order, header length: version 3 only."""
_EXTENSION = struct.Struct(">II")
_BACKING_FORMAT = 0xE2792ACA
_DATA_FILE = 0x44415441
_DATA_FILE_BIT = 1 << 2
_MAX_NAME = 1023
_READ_BYTES = 1 << 16
"""A header with its extensions; QEMU's own fit in one cluster."""


class HeaderError(ValueError):
    """It is no header that is worked with."""


@dataclass(frozen=True, slots=True)
class Header:
    """What matters of a header."""

    size: int
    """Of the guest's disk, in bytes."""
    backing: str | None
    backing_format: str | None
    data_file: bool
    encrypted: bool


def read_qcow2(descriptor: int) -> Header:
    """The header of an image that is open.

    Raises:
        HeaderError: it is none, or goes beyond its bounds.
        OSError: it cannot be read.
    """
    data = os.pread(descriptor, _READ_BYTES, 0)
    try:
        magic, version, offset, length, _bits, size, encryption = _FIXED.unpack_from(data)
        if magic != _MAGIC or version not in (2, 3):
            raise HeaderError("is no qcow2 image of version 2 or 3")
        features, begin = 0, _V2_BYTES
        if version == 3:  # noqa: PLR2004 - the format's own
            features, _, _, _, begin = _FEATURES.unpack_from(data, _V2_BYTES)
        extensions = _extensions(data, begin, offset or len(data))
    except struct.error as error:
        raise HeaderError("has a header that is cut short") from error
    backing = None
    if offset:
        if not 0 < length <= _MAX_NAME or offset + length > len(data):
            raise HeaderError("has a backing file's name out of bounds")
        backing = os.fsdecode(data[offset : offset + length])
    stated = extensions.get(_BACKING_FORMAT)
    return Header(
        size=size,
        backing=backing,
        backing_format=None if stated is None else os.fsdecode(stated),
        data_file=bool(features & _DATA_FILE_BIT) or _DATA_FILE in extensions,
        encrypted=encryption != 0,
    )


def _extensions(data: bytes, begin: int, end: int) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    while begin + _EXTENSION.size <= end:
        kind, length = _EXTENSION.unpack_from(data, begin)
        begin += _EXTENSION.size
        if kind == 0:
            break
        if begin + length > min(end, len(data)):
            raise HeaderError("has a header extension out of bounds")
        found[kind] = data[begin : begin + length]
        begin += (length + 7) & ~7
    return found
