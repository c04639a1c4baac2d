"""Read the header of a qcow2 image without trusting it.

An emulator owns the file and may have written anything into it. No other program is used, because
it would open the files that the header names. At most a few KiB are read, whatever they contain
(QEMU's docs/interop/qcow2.txt).
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Collection
from dataclasses import dataclass

from snaporch.zfs_names import quoted

SELF_CONTAINED = ("raw", "vdi")
"""Formats whose images refer to no other file."""
MAX_CHAIN = 64
"""More images than any real chain has."""
PROTOCOL = re.compile(r"[^/]*:")
"""What QEMU takes for a protocol, not a path (``path_has_protocol`` of its block.c)."""
_MAGIC = b"QFI\xfb"
_FIXED = struct.Struct(">4sIQIIQI")
"""Magic, version, the backing name's offset and length, cluster bits, size, encryption."""
_LENGTH_2 = 72
_FEATURES = struct.Struct(">QQQII")
"""Incompatible, compatible, autoclear; refcount order, header length: version 3 only."""
_HEAD_BYTES = _LENGTH_2 + _FEATURES.size
_EXTENSION = struct.Struct(">II")
_BACKING_FORMAT = 0xE2792ACA
_DATA_FILE = 0x44415441
_HAS_DATA_FILE = 1 << 2
_MAX_NAME = 1023
_MAX_EXTENSIONS = 64 << 10
_MAX_CLUSTER_BITS = 21


class HeaderError(ValueError):
    """The file is not a valid qcow2 image."""


@dataclass(frozen=True, slots=True)
class Qcow2Header:
    """The relevant fields of a header; names as they are written there."""

    size: int
    """Size of the guest's disk in bytes."""
    backing: str | None
    backing_format: str | None
    data_file: str | None
    """Empty if there is one whose name is not in the header."""
    encrypted: bool
    cluster: int
    """Bytes of a cluster."""


def is_qcow2(descriptor: int) -> bool:
    """Whether a file begins like a qcow2 image."""
    return os.pread(descriptor, len(_MAGIC), 0) == _MAGIC


def read_qcow2(descriptor: int) -> Qcow2Header:
    """Read the header of an open image.

    Raises:
        HeaderError: it is not a qcow2 image, or is damaged.
        OSError: it cannot be read.
    """
    head = os.pread(descriptor, _HEAD_BYTES, 0)
    if len(head) < _LENGTH_2 or not head.startswith(_MAGIC):
        raise HeaderError("is not a qcow2 image")
    head = head.ljust(_HEAD_BYTES, b"\0")
    _, version, offset, length, cluster_bits, size, encryption = _FIXED.unpack_from(head)
    if version not in (2, 3):
        raise HeaderError(f"is a qcow2 image of version {version}")
    features, begin = 0, _LENGTH_2
    if version == 3:  # noqa: PLR2004 - the format's own
        features, _, _, _, begin = _FEATURES.unpack_from(head, _LENGTH_2)
    cluster = 1 << min(cluster_bits, _MAX_CLUSTER_BITS)
    end = offset or cluster
    room = max(min(end - begin, _MAX_EXTENSIONS), 0)
    extensions = _extensions(os.pread(descriptor, room, begin))
    return Qcow2Header(
        size=size,
        backing=_name(descriptor, offset, length) if offset else None,
        backing_format=extensions.get(_BACKING_FORMAT),
        data_file=extensions.get(_DATA_FILE, "") if features & _HAS_DATA_FILE else None,
        encrypted=encryption != 0,
        cluster=cluster,
    )


def check_variables(data: bytes, formats: Collection[str]) -> None:
    """Check that a file of UEFI variables, which an emulator opens for writing, names no other.

    Args:
        data: the content of the file.
        formats: the formats that the definition has for it.

    Raises:
        HeaderError: it names another file, is damaged, or has a format that may name one.
    """
    if unknown := set(formats) - {"raw", "qcow2"}:
        raise HeaderError(f"has the format {quoted(min(unknown))}")
    if not data.startswith(_MAGIC):
        return
    with open(os.memfd_create("variables"), "wb", buffering=0) as stream:
        stream.write(data)
        header = read_qcow2(stream.fileno())
    if header.backing is not None or header.data_file is not None or header.encrypted:
        raise HeaderError("needs another file, or a key")


def _name(descriptor: int, offset: int, length: int) -> str:
    name = os.pread(descriptor, min(length, _MAX_NAME), offset) if offset < 1 << 63 else b""
    if not name or length > _MAX_NAME or len(name) < length:
        raise HeaderError("has a damaged name of a backing file")
    return os.fsdecode(name)


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
                raise HeaderError("has a damaged name in its header")
            found[kind] = os.fsdecode(area[position : position + length])
        position += (length + 7) & ~7
    return found
