"""Split a save image into a page file and a rest, and build a save image from the two.

The rest is a save image without its pages: header, XML and cookie, the beginning of QEMU's stream,
and behind ``split`` the state of the devices. See :mod:`snaporch.bundle.qemu_stream`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import zstandard

from snaporch.bundle.compress import Compression, CompressionSettings
from snaporch.bundle.manifest import PagesEntry
from snaporch.bundle.page_file import CHUNK, PageFile, PageSum
from snaporch.bundle.qemu_stream import Read, StreamError, StreamHead, join, read_head, split
from snaporch.bundle.save_image import HEADER_SIZE, SaveImageError, SaveImageWriter, read_header
from snaporch.bundle.save_image_copy import read_preface, with_xml
from snaporch.private_files import write_private

Tick = Callable[[int], None]
"""Called regularly with the number of bytes done so far; it may raise to stop the work."""


class PageDamageError(SaveImageError):
    """A page file differs from its manifest."""


@dataclass(frozen=True, slots=True)
class SplitImage:
    """The rest and the page file that a save image was split into."""

    rest_bytes: int
    rest_sha256: str
    split: int
    page_file_bytes: int
    page_sum: str
    changed_bytes: int
    """Bytes of the page file that changed, before compression by ZFS."""


@dataclass(frozen=True, slots=True)
class SplitStream:
    """What a stream was split into; its pages are in the page file."""

    head: bytes
    tail: bytes
    page_file_bytes: int
    page_sum: str
    changed_bytes: int


def split_stream(
    read: Read, pages: Path, tick: Tick, settle: Callable[[], None] = lambda: None
) -> SplitStream:
    """Update a page file from QEMU's stream.

    Args:
        read: returns the bytes of the stream.
        pages: the page file; created if it does not exist. Only pages that differ are written.
        tick: see :data:`Tick`.
        settle: see :class:`~snaporch.bundle.page_file.PageFile`.

    Raises:
        StreamError: the stream contains something unknown, or lacks a page.
        OSError: the page file cannot be read or written.
    """
    target: PageFile | None = None

    def prepare(head: StreamHead) -> PageFile:
        nonlocal target
        target = PageFile(pages, head.page_file_bytes, tick, settle)
        for place, length in head.gaps:  # an earlier layout may have had blocks there
            target.put(place, bytes(length))
        return target

    try:
        found = split(read, prepare)
        assert target is not None
        return SplitStream(found.head.raw, found.tail, target.size, target.finish(), target.written)
    finally:
        if target is not None:
            target.close()


def split_image(
    image: Path, rest: Path, pages: Path, tick: Tick, settle: Callable[[], None] = lambda: None
) -> SplitImage:
    """Update the page file from a save image; write the rest to stable storage.

    Args:
        image: a finished save image.
        rest: the file to create (0600).
        pages: the page file; created if it does not exist. Only pages that differ are written.
        tick: see :data:`Tick`.
        settle: see :class:`~snaporch.bundle.page_file.PageFile`.

    Raises:
        StreamError, SaveImageError: the image cannot be split.
        OSError: a file cannot be read or written.
    """
    header = read_header(image)
    with image.open("rb") as stream:
        preface = stream.read(HEADER_SIZE + header.data_length)
        with _explained(image):
            found = split_stream(_payload(stream, header.compression), pages, tick, settle)
    plain = replace(header, compression=0).pack() + preface[HEADER_SIZE:]
    data = plain + found.head + found.tail
    write_private(rest, data)
    return SplitImage(
        rest_bytes=len(data),
        rest_sha256=hashlib.sha256(data).hexdigest(),
        split=len(plain) + len(found.head),
        page_file_bytes=found.page_file_bytes,
        page_sum=found.page_sum,
        changed_bytes=found.changed_bytes,
    )


def build_image(
    rest: Path,
    entry: PagesEntry,
    pages: Path,
    target: Path,
    how: CompressionSettings,
    tick: Tick,
    *,
    xml: str | None = None,
    into: int | None = None,
) -> None:
    """Build a save image from the rest and the page file, so that libvirt can restore it.

    The page file is compared with the manifest while it is read.

    Args:
        target: the file to create (0600).
        xml: replaces the domain's XML in the image, if given.
        into: see :class:`~snaporch.bundle.save_image.SaveImageWriter`.

    Raises:
        PageDamageError: the page file differs from the manifest; ``target`` was removed.
        StreamError, SaveImageError: the rest is damaged.
        OSError: a file cannot be read or written.
    """
    preface = read_preface(rest)
    header, data = (preface.header, b"") if xml is None else with_xml(preface, xml)
    writer = SaveImageWriter(target, how, trailer=False, into=into)
    try:
        with rest.open("rb") as stream:
            kept = stream.read(preface.end)
        writer.write(header.pack() + (data or kept[HEADER_SIZE:]))
        for block in _stream(rest, preface.end, entry, pages, tick):
            writer.write(block)
        writer.finish()
    except BaseException:
        writer.abandon()
        raise


def decompress_image(image: Path, target: Path, tick: Tick) -> int:
    """Write a copy of a finished save image that is not compressed, to stable storage.

    Args:
        target: the file to create (0600).
        tick: see :data:`Tick`.

    Returns: the bytes of QEMU's stream.

    Raises:
        SaveImageError: the image cannot be decompressed; ``target`` was removed.
        OSError: a file cannot be read or written.
    """
    header = read_header(image)
    writer = SaveImageWriter(target, CompressionSettings(Compression.NONE), trailer=False)
    try:
        with image.open("rb") as stream, _explained(image):
            preface = stream.read(HEADER_SIZE + header.data_length)
            writer.write(replace(header, compression=0).pack() + preface[HEADER_SIZE:])
            read = _payload(stream, header.compression)
            while block := read(CHUNK):
                writer.write(block)
                tick(writer.payload_bytes)
        return writer.finish().payload_bytes
    except BaseException:
        writer.abandon()
        raise


def check_image(rest: Path, entry: PagesEntry, pages: Path, tick: Tick) -> None:
    """Read and check everything as :func:`build_image` does, but write no image.

    Raises:
        PageDamageError: the page file differs from the manifest.
        StreamError, SaveImageError: the rest is damaged.
        OSError: a file cannot be read.
    """
    for _ in _stream(rest, read_preface(rest).end, entry, pages, tick):
        pass


def _stream(rest: Path, begin: int, entry: PagesEntry, pages: Path, tick: Tick) -> Iterator[bytes]:
    """QEMU's stream, from the rest (which contains it from ``begin`` on) and the page file."""
    raw = rest.read_bytes()
    if not begin < entry.split < len(raw):
        raise SaveImageError(str(rest), f"is too short: its pages belong at byte {entry.split}")
    head = _parse_head(raw[begin : entry.split], rest)
    with pages.open("rb") as source:
        reader = _ChecksumReader(source, entry, head, tick)
        yield from join(head, raw[entry.split :], reader.read)
    reader.compare()


def _parse_head(raw: bytes, rest: Path) -> StreamHead:
    """Parse the part of the stream before the pages."""
    head = read_head(io.BytesIO(raw).read)
    if head.raw != raw:
        raise SaveImageError(str(rest), "contains unknown data before its pages")
    return head


class _ChecksumReader:
    """Reads a page file from end to end and computes its checksum on the way."""

    def __init__(self, source: BinaryIO, entry: PagesEntry, head: StreamHead, tick: Tick) -> None:
        self._descriptor = source.fileno()
        self._tick = tick
        self._entry = entry
        self._sum = PageSum()
        size = os.fstat(self._descriptor).st_size
        if size != head.page_file_bytes:
            raise PageDamageError(
                entry.full_name, f"has {size} bytes, expected {head.page_file_bytes}"
            )

    def read(self, place: int, count: int) -> bytes:
        """``count`` bytes from the beginning of a chunk on.

        The checksum covers the whole chunk, with the gap between two blocks.
        """
        data = os.pread(self._descriptor, CHUNK, place)
        self._sum.add(place, data)
        self._tick(place + count)
        return data[:count]

    def compare(self) -> None:
        """Compare the checksum; to be called after the last page."""
        if self._sum.hexdigest() != self._entry.sha256:
            raise PageDamageError(
                self._entry.full_name, "its checksum differs from the manifest's: it is damaged"
            )


def _payload(stream: BinaryIO, compression: int) -> Read:
    """A reader of QEMU's stream, decompressed, from the file's current position on."""
    if compression == Compression.NONE.image_format:
        return stream.read
    if compression == Compression.ZSTD.image_format:
        return zstandard.ZstdDecompressor().stream_reader(stream).read
    if compression == Compression.GZIP.image_format:
        return gzip.GzipFile(fileobj=stream).read
    raise StreamError(f"was compressed by libvirt (format {compression})")


@contextmanager
def _explained(image: Path) -> Iterator[None]:
    """Turn the errors of decompressors into an error about the image."""
    try:
        yield
    except (zstandard.ZstdError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise SaveImageError(str(image), f"cannot be decompressed ({error})") from error
