"""libvirt's save image, written in one pass with a compressed payload.

Layout (``virQEMUSaveHeader`` in libvirt's qemu_saveimage.h, version 2; little endian as written on
x86): 92 bytes of header, then ``data_length`` bytes of domain XML and cookie in the clear, then the
QEMU stream, compressed as the header says. ``docs/reference/bundle-format.md`` describes each byte.

What libvirt writes into a pipe begins with an *unfinished* header (magic ``LibvirtQemudPart``) and
ends with the finished one, which libvirt intended for offset 0. The writer takes both kinds of
input, pipe and regular file.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from snaporch.bundle.async_writer import AsyncWriter
from snaporch.bundle.compress import (
    Block,
    Compression,
    CompressionSettings,
    Compressor,
    Sink,
    start_compressor,
)
from snaporch.errors import SnaporchError

HEADER_SIZE = 92
MAGIC = b"LibvirtQemudSave"
PARTIAL_MAGIC = b"LibvirtQemudPart"
QEMU_MAGIC = b"QEVM"
_FIELDS = struct.Struct("<16sIIII")  # magic, version, data_length, was_running, compression
_VERSION = 2
_SPARSE = 6
_MAX_XML = 64 << 20


class SaveImageError(SnaporchError):
    """The file or stream is not a complete save image of libvirt."""


@dataclass(frozen=True, slots=True)
class SaveImageHeader:
    """The header of a save image."""

    magic: bytes
    version: int
    data_length: int
    was_running: bool
    compression: int
    rest: bytes

    @classmethod
    def parse(cls, raw: bytes, thing: str) -> SaveImageHeader:
        """Parse the first 92 bytes of an image.

        Args:
            raw: these bytes, or more.
            thing: names the image in errors.

        Raises:
            SaveImageError: too short, or an unknown magic, byte order or version.
        """
        if len(raw) < HEADER_SIZE:
            raise SaveImageError(thing, f"ends after {len(raw)} bytes, inside its header")
        magic, version, length, running, compression = _FIELDS.unpack_from(raw)
        if magic not in (MAGIC, PARTIAL_MAGIC):
            raise SaveImageError(thing, f"is not a libvirt save image: it begins with {magic!r}")
        if version != _VERSION:
            raise SaveImageError(thing, f"has save image version {version}, expected {_VERSION}")
        if length > _MAX_XML:
            raise SaveImageError(thing, f"is damaged: its header claims {length} bytes of XML")
        rest = raw[_FIELDS.size : HEADER_SIZE]
        return cls(magic, version, length, bool(running), compression, rest)

    def pack(self) -> bytes:
        """The 92 bytes of the header."""
        return (
            _FIELDS.pack(
                self.magic, self.version, self.data_length, self.was_running, self.compression
            )
            + self.rest
        )


@dataclass(frozen=True, slots=True)
class SaveImage:
    """A written image: sizes in bytes, and the SHA-256 of the file on disk."""

    payload_bytes: int
    stored_bytes: int
    sha256: str
    image_format: int


class SaveImageWriter:
    """Takes a save image in blocks of any size and writes it compressed to ``path``.

    Until :meth:`finish` the file has libvirt's magic of an unfinished image. So an incomplete image
    cannot be restored by mistake.

    Args:
        how: the compressor, its level and threads.
        trailer: whether the input ends with the finished header, as from a pipe.
        start: starts the compressor.
        into: an open, empty file that is written instead of a new one at ``path``. It stays open,
            and is not removed.
    """

    def __init__(
        self,
        path: Path,
        how: CompressionSettings,
        *,
        trailer: bool,
        start: Callable[[CompressionSettings, Sink], Compressor] = start_compressor,
        into: int | None = None,
    ) -> None:
        self._path = path if into is None else None
        self._how = how
        self._trailer = trailer
        self._start_compressor = start
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600) if into is None else os.dup(into)
        self._file = os.fdopen(descriptor, "wb", buffering=0)
        self._digest = hashlib.sha256()
        self._stored = 0
        self._payload = 0
        self._head = bytearray()
        self._source_header: SaveImageHeader | None = None
        self._final_header: SaveImageHeader | None = None
        self._compressor: Compressor | None = None
        self._storing: AsyncWriter | None = None
        self._held = bytearray()
        self._aborted = self._enlarged = False
        self.syncing = False
        """Whether everything is written and only the sync is left."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of the QEMU stream taken so far."""
        return self._payload

    @property
    def moved_bytes(self) -> int:
        """Bytes taken plus bytes written so far. While the number grows, there is progress."""
        return self._payload + self._stored

    @property
    def level(self) -> int:
        """The compressor's level."""
        return self._how.level

    @property
    def waited_for_store(self) -> float:
        """Seconds in which the store blocked the compressor."""
        return self._storing.waited if self._storing else 0.0

    def write(self, block: Block) -> None:
        """Take the next block. The caller may reuse the block afterwards.

        Raises:
            SaveImageError: the input is not a save image.
            OSError: it cannot be stored (no space, read-only, quota).
        """
        if self._compressor is None:
            self._head += block
            self._begin()
            return
        self._take(block)

    def _begin(self) -> None:
        """Once header, XML and the payload's magic have arrived: write them, start compressing."""
        if len(self._head) < HEADER_SIZE:
            return
        header = SaveImageHeader.parse(bytes(self._head[:HEADER_SIZE]), "libvirt's RAM image")
        start = HEADER_SIZE + header.data_length
        if len(self._head) < start + len(QEMU_MAGIC):
            return
        self._source_header = header
        plain = self._head[start : start + len(QEMU_MAGIC)] == QEMU_MAGIC
        method = self._payload_method(header, plain=plain)
        self._final_header = replace(header, magic=MAGIC, compression=method)
        how = self._how if plain else CompressionSettings(Compression.NONE)
        # Another thread hashes and stores, so that RAM waits for neither.
        self._storing = AsyncWriter(self._store)
        if self._enlarged:
            self._storing.enlarge()
        self._storing.put(bytes(self._head[HEADER_SIZE:start]))
        self._compressor = self._start_compressor(how, self._storing.put)
        if self._aborted:  # aborted during the start: only this thread can stop it
            self.abort()
            raise SaveImageError("libvirt's RAM image", "was aborted")
        rest = memoryview(self._head[start:])
        self._head.clear()
        self._take(rest)

    def _payload_method(self, header: SaveImageHeader, *, plain: bool) -> int:
        """The compression field of the stored image's header.

        libvirt 11.3 labels a plain stream "sparse" by mistake with ``snapshot_image_format =
        "sparse"``, so the payload's magic decides, not the label. A payload without that magic was
        compressed by libvirt as labelled and is kept as it is.
        """
        if plain:
            return self._how.method.image_format
        if header.compression in (0, _SPARSE):
            raise SaveImageError(
                "libvirt's RAM image",
                f"its payload is not a QEMU stream (format {header.compression})",
                'set snapshot_image_format = "raw" in qemu.conf',
            )
        return header.compression

    def _take(self, block: Block) -> None:
        """Compress the block. With a trailer hold back the last bytes, which may be the trailer."""
        if not self._trailer:
            self._compress(block)
            return
        kept = max(len(block) - HEADER_SIZE, 0)
        self._held += block[kept:]
        over = max(len(self._held) - HEADER_SIZE, 0)
        before, self._held = self._held[:over], self._held[over:]
        self._compress(before)
        self._compress(block[:kept])

    def _compress(self, block: Block) -> None:
        assert self._compressor is not None
        if block:
            self._payload += len(block)
            self._compressor.write(block)

    def _store(self, data: Block) -> None:
        if not self._stored:
            assert self._final_header is not None
            self._digest.update(self._final_header.pack())
            self._raw_write(replace(self._final_header, magic=PARTIAL_MAGIC).pack())
        if data:
            self._digest.update(data)
            self._raw_write(data)

    def _raw_write(self, data: Block) -> None:
        view = memoryview(data)
        while view:
            written = self._file.write(view)
            self._stored += written
            view = view[written:]

    def finish(self) -> SaveImage:
        """Check the end of the input, make the file a finished image, and sync it.

        Raises:
            SaveImageError: libvirt did not finish its header.
            OSError: it cannot be stored.
        """
        if self._compressor is None:
            raise SaveImageError("libvirt's RAM image", f"ends after {len(self._head)} bytes")
        assert self._storing is not None
        assert self._final_header is not None
        self._check_finished()
        self._compressor.finish()
        self._storing.finish()
        os.pwrite(self._file.fileno(), self._final_header.pack(), 0)
        self.syncing = True
        os.fsync(self._file.fileno())
        self._file.close()
        self._free_compressor()
        return SaveImage(
            self._payload, self._stored, self._digest.hexdigest(), self._final_header.compression
        )

    def _free_compressor(self) -> None:
        """Free the compressor's memory now.

        It is part of a reference cycle, which would keep it until a garbage collection.
        """
        self._compressor = self._storing = None

    def _check_finished(self) -> None:
        assert self._source_header is not None
        finished = replace(self._source_header, magic=MAGIC).pack()
        seen = bytes(self._held) if self._trailer else self._source_header.pack()
        if seen != finished:
            raise SaveImageError(
                "libvirt's RAM image", "libvirt did not finish it; its closing header is missing"
            )

    def enlarge_buffers(self) -> None:
        """Keep :meth:`write` from waiting for the store: queue the blocks in memory instead."""
        self._enlarged = True  # first: another thread may just be starting to store
        if self._storing is not None:
            self._storing.enlarge()

    def abort(self) -> None:
        """Make a :meth:`write` that is blocked in another thread fail."""
        self._aborted = True  # first: the thread that starts a compressor checks it
        storing, compressor = (
            self._storing,
            self._compressor,
        )  # another thread may be in finish()
        if storing is not None:
            storing.stop()
        if compressor is not None:
            compressor.abandon()

    def abandon(self) -> None:
        """Stop and remove the file. Never waits, because a guest may be paused meanwhile."""
        self.abort()
        if self._storing is None:
            self._file.close()
        else:
            self._storing.on_end(self._file.close)
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._free_compressor()


def read_header(path: Path) -> SaveImageHeader:
    """Read the header of a stored image.

    Raises:
        SaveImageError: it is not a finished save image.
        OSError: it cannot be read.
    """
    with path.open("rb") as stream:
        header = SaveImageHeader.parse(stream.read(HEADER_SIZE), str(path))
    if header.magic != MAGIC:
        raise SaveImageError(str(path), "is an unfinished save image")
    return header
