"""What an image names: the file below it and the file with its data, read from its header.

No other program is asked: it would open what the header names. Reads a few KiB, whatever is in
them (QEMU's docs/interop/qcow2.txt).
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

SELF_CONTAINED = ("raw", "vdi")
"""Formats whose images name no other file."""
_MAGIC = b"QFI\xfb"
_HEAD = struct.Struct(">4sIQIIQIIQQIIQQQQII")
"""Up to and including ``header_length``; version 2 ends at :data:`_LENGTH_2`."""
_LENGTH_2 = 72
_EXTENSION = struct.Struct(">II")
_BACKING_FORMAT = 0xE2792ACA
_DATA_FILE = 0x44415441
_HAS_DATA_FILE = 1 << 2
_MAX_NAME = 1023
_MAX_EXTENSIONS = 64 << 10
_MAX_CLUSTER_BITS = 21


class HeaderError(ValueError):
    """It is not the image that it is said to be."""


@dataclass(frozen=True, slots=True)
class References:
    """The names in the header of an image, as they are written there."""

    backing: str | None = None
    backing_format: str | None = None
    data_file: str | None = None
    """Empty if it has one that it does not name."""


def is_qcow2(descriptor: int) -> bool:
    """Whether a file begins as a qcow2 image does."""
    return os.pread(descriptor, len(_MAGIC), 0) == _MAGIC


def read_qcow2(descriptor: int) -> References:
    """The names in the header of a qcow2 image.

    Raises:
        HeaderError: it is none, or its header is damaged.
        OSError: it cannot be read.
    """
    head = os.pread(descriptor, _HEAD.size, 0)
    if len(head) < _LENGTH_2 or not head.startswith(_MAGIC):
        raise HeaderError("is no qcow2 image")
    fields = _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))
    version, offset, size, cluster_bits = fields[1:5]
    is_old = version < 3  # noqa: PLR2004 - the version that has features
    features, length = (0, _LENGTH_2) if is_old else (fields[13], fields[17])
    end = offset or 1 << min(cluster_bits, _MAX_CLUSTER_BITS)
    room = max(min(end - length, _MAX_EXTENSIONS), 0)
    extensions = _extensions(os.pread(descriptor, room, length))
    backing = None
    if offset:
        name = os.pread(descriptor, min(size, _MAX_NAME), offset)
        if not name or size > _MAX_NAME or len(name) < size:
            raise HeaderError("the name of its backing file is damaged")
        backing = os.fsdecode(name)
    data_file = None
    if features & _HAS_DATA_FILE:
        data_file = extensions.get(_DATA_FILE, "")
    return References(backing, extensions.get(_BACKING_FORMAT), data_file)


def _extensions(area: bytes) -> dict[int, str]:
    found: dict[int, str] = {}
    position = 0
    while position + _EXTENSION.size <= len(area):
        kind, length = _EXTENSION.unpack_from(area, position)
        position += _EXTENSION.size
        if kind == 0:
            break
        if kind in (_BACKING_FORMAT, _DATA_FILE):
            if length > _MAX_NAME or position + length > len(area):
                raise HeaderError("a name in its header is damaged")
            found[kind] = os.fsdecode(area[position : position + length])
        position += (length + 7) & ~7
    return found
