"""QEMU's migration stream taken apart: pages of RAM, and the rest, kept byte by byte.

The stream (QEMU's docs/devel/migration/main.rst, migration/savevm.c, migration/ram.c; numbers are
big endian): magic and version; the machine's name; then sections. Memory is one section with parts:
START names its blocks with their sizes, PART and END hold pages in any order, a later one replacing
an earlier one of its place. Sections of devices have no length, so everything behind END is taken
as it is. ``docs/bundle-format.md`` has it byte by byte.

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
"""A block of memory begins at a multiple of this in the page file; a run of pages is no longer."""

Read = Callable[[int], bytes]
"""The next bytes, at most so many; nothing at the end."""

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
_NO_PAGE = bytes(PAGE)
_NOTHING = bytes(ALIGNMENT)


class StreamError(SnaporchError):
    """The stream holds something unknown, or ends too early."""

    def __init__(self, reason: str) -> None:
        super().__init__("QEMU's migration stream", reason)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of the guest's memory: its name, its size, and where it begins in the page file."""

    name: bytes
    bytes: int
    start: int


@dataclass(frozen=True, slots=True)
class StreamHead:
    """What stands before the pages."""

    raw: bytes
    """From the magic to the end of START and the commands behind it."""
    section: int
    blocks: tuple[Block, ...]

    @property
    def page_file_bytes(self) -> int:
        """Length of a page file that holds all blocks."""
        last = self.blocks[-1]
        return last.start + last.bytes

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Where the page file belongs to no block: place and length of each."""
        ends = [block.start + block.bytes for block in self.blocks]
        starts = [block.start for block in self.blocks[1:]]
        pairs = zip(ends, starts, strict=False)
        return [(end, start - end) for end, start in pairs if start > end]


@dataclass(frozen=True, slots=True)
class StreamRest:
    """Everything but the pages."""

    head: StreamHead
    tail: bytes
    """The devices' state, to the end of the stream."""
    stream_bytes: int


class Sink(Protocol):
    """Where pages go."""

    def put(self, place: int, data: bytes) -> None:
        """Pages at ``place`` of the page file; a later one replaces an earlier one."""


class _Source:
    """Reads ahead, and keeps what was consumed as long as it is wanted."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.buffer = b""
        self.position = 0
        self.ended = False
        self.passed = 0

    def fill(self, wanted: int) -> None:
        """Have ``wanted`` bytes at the position, unless the stream ends before."""
        parts = [self.buffer[self.position :]]
        have = len(parts[0])
        self.passed += self.position
        while have < wanted and not self.ended:
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

    def comes(self, byte: int) -> bool:
        """Whether ``byte`` is the next one; at the end nothing is."""
        if self.position == len(self.buffer):
            self.fill(1)
        return self.buffer[self.position : self.position + 1] == bytes([byte])

    @property
    def at(self) -> int:
        return self.passed + self.position


class _Recorder:
    """A source that remembers what was taken."""

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
    """The head alone, from a stream or from the rest of one.

    Raises:
        StreamError: it is not what a live save into a file begins with.
    """
    return _head(_Recorder(_Source(read)))


def split(read: Read, prepare: Callable[[StreamHead], Sink]) -> StreamRest:
    """Take a stream apart in one pass.

    Args:
        read: gives the stream.
        prepare: called with the head, before the first page; where the pages go.

    Raises:
        StreamError: something in it is unknown, or it does not hold every page.
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
    tail = _tail(source)
    return StreamRest(StreamHead(bytes(recorder.raw), head.section, head.blocks), tail, source.at)


def join(head: StreamHead, tail: bytes, read: Callable[[int, int], bytes]) -> Iterator[bytes]:
    """A stream with the same memory and devices; pages come in the order of the page file.

    Args:
        head: of the stream, as :func:`split` gave it.
        tail: likewise.
        read: gives so many bytes of the page file, from a place on.
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
    while source.source.comes(_COMMAND):
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
    """Behind its type byte. One is harmless: that the devices' state comes next (QEMU 10)."""
    number, length = source.number(2), source.number(2)
    if (number, length) != (_SWITCHOVER_START, 0):
        source.refuse(f"the unknown command {number}")


def _footer(source: _Recorder | _Source, section: int) -> None:
    if source.take(1)[0] != _FOOTER or source.number(4) != section:
        raise StreamError("a part of memory does not end where it should")


def _tail(source: _Source) -> bytes:
    source.fill(_MAX_TAIL + 1)
    tail = source.buffer
    if not tail:
        raise StreamError("ends without the state of the devices")
    if len(tail) > _MAX_TAIL:
        raise StreamError(f"holds more than {_MAX_TAIL >> 20} MiB of devices' state")
    source.position = len(tail)
    return tail


class _Pages:
    """Gathers pages into runs, and sees to it that every page comes at least once."""

    def __init__(self, head: StreamHead, sink: Sink) -> None:
        self._sink = sink
        self._blocks = {block.name: block for block in head.blocks}
        self._seen = bytearray(head.page_file_bytes // PAGE)
        self._head = head
        self._block = Block(b"", 0, 0)
        """That of the last page: it goes on from part to part until another is named."""
        self._run: list[bytes] = []
        self._start = 0

    def take_part(self, source: _Source) -> None:
        """The pages of one part, to its end mark."""
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
        """Every page of every block was there."""
        for block in self._head.blocks:
            first = block.start // PAGE
            missing = self._seen.find(0, first, first + block.bytes // PAGE)
            if missing >= 0:
                where = missing * PAGE - block.start
                raise StreamError(f"does not hold the page {where:#x} of {block.name!r}")


def _page(buffer: bytes, position: int, flags: int) -> tuple[bytes, int]:
    """The page behind its record's head, and where the next record begins."""
    if flags == _IS_PAGE | _CONTINUE:
        page = buffer[position : position + PAGE]
        if len(page) == PAGE:
            return page, position + PAGE
    elif flags == _ZERO | _CONTINUE:
        if buffer[position : position + 1] == b"\0":
            return _NO_PAGE, position + 1
    else:
        raise StreamError(f"a page of an unknown kind (flags {flags:#x})")
    raise StreamError("ends in the middle of a page, or fills one with something unknown")


def _records(block: Block, read: Callable[[int, int], bytes]) -> Iterator[bytes]:
    """All pages of a block, a run at a time; the first one carries its name."""
    name = bytes([len(block.name)]) + block.name
    for offset in range(0, block.bytes, ALIGNMENT):
        data = read(block.start + offset, min(ALIGNMENT, block.bytes - offset))
        empty = data == _NOTHING[: len(data)]
        parts: list[bytes] = []
        for inner in range(0, len(data), PAGE):
            page = _NO_PAGE if empty else data[inner : inner + PAGE]
            flags, content = (_ZERO, b"\0") if page == _NO_PAGE else (_IS_PAGE, page)
            if offset == inner == 0:
                parts += (_U64.pack(flags), name, content)
            else:
                parts += (_U64.pack(offset + inner | flags | _CONTINUE), content)
        yield b"".join(parts)
