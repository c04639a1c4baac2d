"""Reads guest bytes of a qcow2 image without asking QEMU.

Enough for the images of test guests: no compression, no encryption, no
backing file looked at. Works beside a QEMU holding the image's lock.
Layout: docs/interop/qcow2.txt in QEMU's source.
"""

import struct
from pathlib import Path
from typing import BinaryIO

_OFFSET = 0x00FFFFFFFFFFFE00
_COMPRESSED = 1 << 62
_ZERO = 1


def read(path: Path, offset: int, length: int) -> bytes:
    """``length`` guest bytes at ``offset``; both within one cluster.

    Unallocated clusters read as zeros. Raises ValueError for an image of
    another format, for compressed clusters and for a range across clusters.
    """
    with path.open("rb", buffering=0) as image:
        header = image.read(48)
        if header[:4] != b"QFI\xfb":
            raise ValueError(f"{path} is no qcow2 image")
        (bits,) = struct.unpack_from(">I", header, 20)
        (l1_table,) = struct.unpack_from(">Q", header, 40)
        cluster, within = offset >> bits, offset & ((1 << bits) - 1)
        if within + length > 1 << bits:
            raise ValueError("range crosses a cluster")
        l1_index, l2_index = divmod(cluster, 1 << (bits - 3))
        l2_table = _entry(image, l1_table, l1_index) & _OFFSET
        entry = _entry(image, l2_table, l2_index) if l2_table else 0
        if entry & _COMPRESSED:
            raise ValueError(f"{path} has compressed clusters")
        if entry & _ZERO or not entry & _OFFSET:
            return bytes(length)
        image.seek((entry & _OFFSET) + within)
        return image.read(length)


def _entry(image: BinaryIO, table: int, index: int) -> int:
    image.seek(table + 8 * index)
    (entry,) = struct.unpack(">Q", image.read(8))
    return int(entry)
