"""Split QEMU's migration stream into pages of RAM and the rest, which is kept byte by byte.

The stream (QEMU's docs/devel/migration/main.rst, migration/savevm.c, migration/ram.c; numbers are
big endian) consists of magic and version, the machine's name, and sections. Memory is one section
with parts. START names its blocks with their sizes. PART and END contain pages in any order; a
later page replaces an earlier one at the same place. Sections of devices have no length, so
everything behind END is kept unparsed. ``docs/reference/bundle-format.md`` describes each byte.

The parser knows what a live save into a file contains and refuses everything else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn, Protocol

from snaporch.errors import SnaporchError

PAGE = 4096
ALIGNMENT = 1 << 20
"""Each block of memory begins at a multiple of this in the page file. It also limits a run of
pages.
"""

Read = Callable[[int], bytes]
"""Returns the next bytes, at most as many as asked for; none at the end of the stream."""

_MAGIC = struct.Struct(">4sI")
_U64 = struct.Struct(">Q")
_QEVM, _VERSION = b"QEVM", 3
_START, _PART, _END, _CONFIGURATION, _COMMAND, _FOOTER = 1, 2, 3, 7, 8, 0x7E
_SWITCHOVER_START = 11
_RAM, _RAM_VERSION = b"ram", 4
_ZERO, _MEM_SIZE, _IS_PAGE, _EOS, _CONTINUE = 0x02, 0x04, 0x08, 0x10, 0x20
_FLAGS = PAGE - 1
_RECORD = 8 + 256 + PAGE
_READ = 4 << 20
_MAX_NAME = 4096
_MAX_BLOCKS = 4096
_MAX_MEMORY = 1 << 46
_MAX_TAIL = 512 << 20
_ZERO_PAGE = bytes(PAGE)
_ZERO_RUN = bytes(ALIGNMENT)


class StreamError(SnaporchError):
    """The stream contains something unknown, or ends too early."""

    def __init__(self, reason: str) -> None:
        super().__init__("QEMU's migration stream", reason)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of the guest's memory: name, size in bytes, and offset in the page file."""

    name: bytes
    bytes: int
    start: int


@dataclass(frozen=True, slots=True)
class StreamHead:
    """The part of the stream before the pages."""

    raw: bytes
    """The bytes from the magic to the end of START, with the commands that follow START."""
    section: int
    blocks: tuple[Block, ...]

    @property
    def page_file_bytes(self) -> int:
        """Length of a page file that holds all blocks."""
        last = self.blocks[-1]
        return last.start + last.bytes

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Offset and length of each part of the page file that belongs to no block."""
        ends = [block.start + block.bytes for block in self.blocks]
        starts = [block.start for block in self.blocks[1:]]
        pairs = zip(ends, starts, strict=False)
        return [(end, start - end) for end, start in pairs if start > end]


@dataclass(frozen=True, slots=True)
class StreamRest:
    """The stream without its pages."""

    head: StreamHead
    tail: bytes
    """The state of the devices, to the end of the stream."""
    stream_bytes: int


class Sink(Protocol):
    """A receiver of pages."""

    def put(self, place: int, data: bytes) -> None:
        """Store pages at offset ``place`` of the page file. Later pages replace earlier ones."""


class _Source:
    """Reads the stream through a buffer. Bytes before ``position`` are consumed."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.buffer = b""
        self.position = 0
        self.ended = False
        self.passed = 0

    def fill(self, count: int) -> None:
        """Have at least ``count`` bytes behind the position, unless the stream ends earlier."""
        parts = [self.buffer[self.position :]]
        have = len(parts[0])
        self.passed += self.position
        while have < count and not self.ended:
            part = self._read(_READ)
            self.ended = not part
            parts.append(part)
            have += len(part)
        self.buffer = b"".join(parts)
        self.position = 0

    def take(self, count: int) -> bytes:
        if self.position + count > len(self.buffer):
            self.fill(count)
        data = self.buffer[self.position : self.position + count]
        if len(data) < count:
            raise StreamError(f"ends after {self.passed + len(self.buffer)} bytes, too early")
        self.position += count
        return data

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "big")

    def next_is(self, byte: int) -> bool:
        """Whether ``byte`` is the next byte; false at the end of the stream."""
        if self.position == len(self.buffer):
            self.fill(1)
        return self.buffer[self.position : self.position + 1] == bytes([byte])

    @property
    def at(self) -> int:
        return self.passed + self.position


class _Recorder:
    """A source that also records every byte it returns."""

    def __init__(self, source: _Source) -> None:
        self.source = source
        self.raw = bytearray()

    def take(self, count: int) -> bytes:
        data = self.source.take(count)
        self.raw += data
        return data

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "big")

    def refuse(self, what: str) -> NoReturn:
        raise StreamError(f"{what} at byte {self.source.at}")


def read_head(read: Read) -> StreamHead:
    """Parse the head, from a complete stream or from the rest of one.

    Raises:
        StreamError: the stream does not begin like a live save into a file.
    """
    return _head(_Recorder(_Source(read)))


def split(
    read: Read, prepare: Callable[[StreamHead], Sink], max_tail: int = _MAX_TAIL
) -> StreamRest:
    """Split a stream in one pass.

    Args:
        read: returns the bytes of the stream.
        prepare: called with the head before the first page; returns the receiver of the pages.
        max_tail: the largest accepted state of the devices, in bytes.

    Raises:
        StreamError: the stream contains something unknown, or lacks a page.
    """
    source = _Source(read)
    recorder = _Recorder(source)
    head = _head(recorder)
    pages = _Pages(head, prepare(head))
    kind = _PART
    while kind != _END:
        kind = source.take(1)[0]
        if kind == _COMMAND:
            recorder.raw.append(kind)
            _command(recorder)
            continue
        if kind not in (_PART, _END) or source.number(4) != head.section:
            recorder.refuse(f"an unknown section (type {kind}) before the end of memory")
        pages.take_part(source)
        _footer(source, head.section)
    pages.finish()
    tail = _tail(source, max_tail)
    return StreamRest(StreamHead(bytes(recorder.raw), head.section, head.blocks), tail, source.at)


def join(head: StreamHead, tail: bytes, read: Callable[[int, int], bytes]) -> Iterator[bytes]:
    """Build a stream with the same memory and devices. Its pages are in the order of the page file.

    Args:
        head: as :func:`split` returned it.
        tail: as :func:`split` returned it.
        read: called with an offset in the page file and a number of bytes; returns the bytes.
    """
    section = head.section.to_bytes(4, "big")
    yield head.raw
    yield bytes([_END]) + section
    for block in head.blocks:
        yield from _records(block, read)
    yield _U64.pack(_EOS) + bytes([_FOOTER]) + section
    yield tail


def _head(source: _Recorder) -> StreamHead:
    magic, version = _MAGIC.unpack(source.take(_MAGIC.size))
    if (magic, version) != (_QEVM, _VERSION):
        source.refuse(f"not a stream of version {_VERSION} ({magic!r}, {version})")
    kind = source.take(1)[0]
    if kind == _CONFIGURATION:
        length = source.number(4)
        if length > _MAX_NAME:
            source.refuse("an impossible machine name")
        source.take(length)
        kind = source.take(1)[0]
    if kind != _START:
        source.refuse(f"section type {kind}, where memory should begin")
    section = source.number(4)
    name = source.take(source.number(1))
    instance, revision = source.number(4), source.number(4)
    if (name, instance, revision) != (_RAM, 0, _RAM_VERSION):
        source.refuse(f"section {name!r} version {revision}, where memory should begin")
    blocks = _blocks(source)
    if source.number(8) != _EOS:
        source.refuse("something unknown behind the list of memory blocks")
    _footer(source, section)
    while source.source.next_is(_COMMAND):
        source.take(1)
        _command(source)
    return StreamHead(bytes(source.raw), section, blocks)


def _blocks(source: _Recorder) -> tuple[Block, ...]:
    word = source.number(8)
    left = word & ~_FLAGS
    if word & _FLAGS != _MEM_SIZE or not 0 < left <= _MAX_MEMORY:
        source.refuse(f"no list of memory blocks ({word:#x})")
    blocks: dict[bytes, Block] = {}
    start = 0
    while left:
        name = source.take(source.number(1))
        size = source.number(8)
        if name in blocks or len(blocks) == _MAX_BLOCKS or not 0 < size <= left or size % PAGE:
            source.refuse(f"an impossible memory block {name!r} of {size} bytes")
        blocks[name] = Block(name, size, start)
        start += -(-size // ALIGNMENT) * ALIGNMENT
        left -= size
    return tuple(blocks.values())


def _command(source: _Recorder) -> None:
    """Parse a command behind its type byte.

    Only SWITCHOVER_START (QEMU 10) is accepted: the state of the devices follows it.
    """
    number, length = source.number(2), source.number(2)
    if (number, length) != (_SWITCHOVER_START, 0):
        source.refuse(f"the unknown command {number}")


def _footer(source: _Recorder | _Source, section: int) -> None:
    if source.take(1)[0] != _FOOTER or source.number(4) != section:
        raise StreamError("a part of memory does not end where it should")


def _tail(source: _Source, limit: int) -> bytes:
    source.fill(limit + 1)
    tail = source.buffer
    if not tail:
        raise StreamError("ends without the state of the devices")
    if len(tail) > limit:
        raise StreamError(f"holds more than {limit >> 20} MiB of devices' state")
    source.position = len(tail)
    return tail


class _Pages:
    """Collects pages into contiguous runs, and checks that each page occurs at least once."""

    def __init__(self, head: StreamHead, sink: Sink) -> None:
        self._sink = sink
        self._blocks = {block.name: block for block in head.blocks}
        self._seen = bytearray(head.page_file_bytes // PAGE)
        self._head = head
        self._block = Block(b"", 0, 0)
        """The block of the last page. It stays current, across parts, until a record names another
        block.
        """
        self._run: list[bytes] = []
        self._start = 0

    def take_part(self, source: _Source) -> None:
        """Read the pages of one part, up to its end mark."""
        buffer, position, size = source.buffer, source.position, len(source.buffer)
        unpack = _U64.unpack_from
        run, start, limit, following = self._run, self._block.start, self._block.bytes, -1
        while True:
            if size - position < _RECORD and not source.ended:
                source.position = position
                source.fill(_RECORD)
                buffer, position, size = source.buffer, 0, len(source.buffer)
            if position + _U64.size > size:
                raise StreamError("ends in the middle of memory")
            word = unpack(buffer, position)[0]
            position += 8
            flags = word & _FLAGS
            if flags == _EOS:
                break
            if not flags & _CONTINUE:
                length = buffer[position] if position < size else 0
                block = self._named(buffer[position + 1 : position + 1 + length], word)
                position += 1 + length
                self._block, start, limit = block, block.start, block.bytes
                flags |= _CONTINUE
            offset = word & ~_FLAGS
            if offset >= limit:
                raise StreamError(f"a page at {offset:#x} lies outside its block")
            page, position = _page(buffer, position, flags)
            place = start + offset
            if place != following or place % ALIGNMENT == 0:
                self._flush()
                self._start = place
            run.append(page)
            following = place + PAGE
        self._flush()
        source.position = position

    def _named(self, name: bytes, word: int) -> Block:
        block = self._blocks.get(name)
        if block is None:
            raise StreamError(f"a page of the unknown block {name!r} ({word:#x})")
        return block

    def _flush(self) -> None:
        if not self._run:
            return
        first, count = self._start // PAGE, len(self._run)
        self._seen[first : first + count] = b"\1" * count
        self._sink.put(self._start, b"".join(self._run))
        self._run.clear()

    def finish(self) -> None:
        """Check that every page of every block occurred."""
        for block in self._head.blocks:
            first = block.start // PAGE
            missing = self._seen.find(0, first, first + block.bytes // PAGE)
            if missing >= 0:
                where = missing * PAGE - block.start
                raise StreamError(f"does not hold the page {where:#x} of {block.name!r}")


def _page(buffer: bytes, position: int, flags: int) -> tuple[bytes, int]:
    """The page behind its record's head, and the position of the next record."""
    if flags == _IS_PAGE | _CONTINUE:
        page = buffer[position : position + PAGE]
        if len(page) == PAGE:
            return page, position + PAGE
    elif flags == _ZERO | _CONTINUE:
        if buffer[position : position + 1] == b"\0":
            return _ZERO_PAGE, position + 1
    else:
        raise StreamError(f"a page of an unknown kind (flags {flags:#x})")
    raise StreamError("ends in the middle of a page, or fills one with something unknown")


def _records(block: Block, read: Callable[[int, int], bytes]) -> Iterator[bytes]:
    """The records of all pages of a block, one run at a time.

    The first record has the block's name.
    """
    name = bytes([len(block.name)]) + block.name
    for offset in range(0, block.bytes, ALIGNMENT):
        data = read(block.start + offset, min(ALIGNMENT, block.bytes - offset))
        empty = data == _ZERO_RUN[: len(data)]
        parts: list[bytes] = []
        for inner in range(0, len(data), PAGE):
            page = _ZERO_PAGE if empty else data[inner : inner + PAGE]
            flags, content = (_ZERO, b"\0") if page == _ZERO_PAGE else (_IS_PAGE, page)
            if offset == inner == 0:
                parts += (_U64.pack(flags), name, content)
            else:
                parts += (_U64.pack(offset + inner | flags | _CONTINUE), content)
        yield b"".join(parts)
