"""Save images as libvirt writes them: header, XML and QEMU's stream."""

from __future__ import annotations

import struct

HEADER_SIZE = 92
FINISHED = b"LibvirtQemudSave"
UNFINISHED = b"LibvirtQemudPart"
_SPARE = bytes(4) + bytes(range(HEADER_SIZE - 36))
"""No cookie; and what lies behind the known fields: kept as it is, whatever it says."""
_SQUARES = bytes(i * i % 251 for i in range(251))


def header(
    magic: bytes = FINISHED,
    *,
    data_length: int = 0,
    version: int = 2,
    running: int = 1,
    compression: int = 0,
) -> bytes:
    """``virQEMUSaveHeader``: the known fields, and recognizable bytes in the rest."""
    return struct.pack("<16sIIII", magic, version, data_length, running, compression) + _SPARE


def qemu_stream(size: int = 5000) -> bytes:
    """A QEMU migration stream: its magic, and bytes that compress a little."""
    return (b"QEVM\0\0\0\3" + _SQUARES * (size // len(_SQUARES) + 1))[:size]


def image(
    xml: bytes = b"<domain/>\0",
    payload: bytes | None = None,
    *,
    compression: int = 0,
    running: int = 1,
    magic: bytes = FINISHED,
) -> bytes:
    """A complete image, as libvirt leaves it in a regular file."""
    stream = qemu_stream() if payload is None else payload
    start = header(magic, data_length=len(xml), compression=compression, running=running)
    return start + xml + stream


def piped(
    xml: bytes = b"<domain/>\0",
    payload: bytes | None = None,
    *,
    compression: int = 0,
    running: int = 1,
) -> bytes:
    """A complete image as it comes from a pipe: unfinished header first, finished header last."""
    body = image(xml, payload, compression=compression, running=running, magic=UNFINISHED)
    return body + header(data_length=len(xml), compression=compression, running=running)


def qcow2(
    backing: str = "", backing_format: str = "", data_file: str | None = None, more: bytes = b""
) -> bytes:
    """The beginning of a qcow2 image of version 3, as ``qemu-img create`` writes it."""
    extensions = b""
    for kind, name in ((0xE2792ACA, backing_format), (0x44415441, data_file or "")):
        if name:
            data = name.encode()
            padded = data + bytes(-len(data) % 8)
            extensions += struct.pack(">II", kind, len(data)) + padded
    extensions += bytes(8)
    features = 0 if data_file is None else 4
    offset = 104 + len(extensions) if backing else 0
    head = struct.pack(">4sIQIIQ", b"QFI\xfb", 3, offset, len(backing), 16, 1 << 20)
    head += bytes(40) + struct.pack(">QQQII", features, 0, 0, 4, 104)
    return (head + extensions + backing.encode() + more).ljust(1024, b"\0")
