"""A save image for another domain: the same RAM with other XML.

libvirt (11.3, ``virDomainDefCheckABIStability``) refuses to change the name or UUID of a saved
domain, by ``virDomainSaveImageDefineXML`` and by the XML given to ``virDomainRestoreFlags`` alike.
But the XML lies in the clear behind the header, so a copy of the image can have other XML. QEMU's
stream contains neither name nor UUID nor paths.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path

from snaporch.bundle.save_image import (
    HEADER_SIZE,
    MAGIC,
    PARTIAL_MAGIC,
    SaveImageError,
    SaveImageHeader,
)
from snaporch.private_files import write_at

_COOKIE_OFFSET = struct.Struct("<I")  # behind the compression field, the first of Header.rest
_COPY = 16 << 20
_NO_COPY_RANGE = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


@dataclass(frozen=True, slots=True)
class SaveImagePreface:
    """The part of a save image before its payload."""

    header: SaveImageHeader
    xml: str
    cookie: bytes

    @property
    def end(self) -> int:
        """Offset of the payload in the file, in bytes."""
        return HEADER_SIZE + self.header.data_length


def read_preface(path: Path) -> SaveImagePreface:
    """Read header, XML and cookie of a finished image.

    Raises:
        SaveImageError: it is not a finished image, or its XML or cookie is damaged.
        OSError: it cannot be read.
    """
    with path.open("rb") as stream:
        header = SaveImageHeader.parse(stream.read(HEADER_SIZE), str(path))
        if header.magic != MAGIC:
            raise SaveImageError(str(path), "is an unfinished save image")
        block = stream.read(header.data_length)
    offset = _COOKIE_OFFSET.unpack_from(header.rest)[0]
    if len(block) < header.data_length or offset > len(block):
        raise SaveImageError(str(path), "ends inside its XML")
    xml, closed, _ = block.partition(b"\0")
    if not closed:
        raise SaveImageError(str(path), "its XML has no end")
    cookie = block[offset:].rstrip(b"\0") if offset else b""
    try:
        return SaveImagePreface(header, xml.decode("utf-8"), cookie)
    except UnicodeDecodeError as error:
        raise SaveImageError(str(path), "its XML is not UTF-8") from error


def copy_with_xml(source: Path, target: Path, xml: str) -> None:
    """Write ``target`` (0600): a copy of the image ``source`` with other XML.

    The payload keeps its offset where the XML fits, so that a file system with block sharing can
    share it. ``target`` is marked as unfinished until it is complete.

    Raises:
        SaveImageError: ``source`` is not a finished save image.
        OSError: the copy cannot be written.
    """
    old = read_preface(source)
    header, data = with_xml(old, xml)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with source.open("rb") as origin, os.fdopen(os.open(target, flags, 0o600), "wb") as made:
        shift = header.data_length - old.header.data_length
        _copy(origin.fileno(), made.fileno(), old.end if shift else 0, shift)
        unfinished = replace(header, magic=PARTIAL_MAGIC).pack()
        os.pwrite(made.fileno(), unfinished + data, 0)
        os.pwrite(made.fileno(), header.pack(), 0)


def with_xml(old: SaveImagePreface, xml: str) -> tuple[SaveImageHeader, bytes]:
    """The header, and XML with cookie, of an image with other XML; they never become shorter."""
    text = xml.encode() + b"\0"
    data = text + (old.cookie + b"\0" if old.cookie else b"")
    length = max(old.header.data_length, len(data))
    offset = _COOKIE_OFFSET.pack(len(text) if old.cookie else 0)
    rest = offset + old.header.rest[_COOKIE_OFFSET.size :]
    return replace(old.header, data_length=length, rest=rest), data.ljust(length, b"\0")


def _copy(source: int, target: int, start: int, shift: int) -> None:
    """Copy from ``start`` to the end, ``shift`` bytes further on. Share blocks if possible."""
    end = os.fstat(source).st_size
    share = True
    while start < end:
        if share:
            try:
                start += os.copy_file_range(source, target, end - start, start, start + shift)
                continue
            except OSError as error:
                if error.errno not in _NO_COPY_RANGE:
                    raise
                share = False
        block = os.pread(source, _COPY, start)
        if not block:
            raise OSError(errno.EIO, "the image became shorter while it was copied")
        write_at(target, block, start + shift)
        start += len(block)
