"""QEMU's migration streams, built by hand."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

PAGE = 4096
SECTION = 2
Record = tuple[bytes, int, bytes | None]
"""Block, number of the page, content; ``None`` for a page of zeros sent as such."""


def head(blocks: Mapping[bytes, int], *, machine: bytes | None = b"pc-q35-10.0") -> bytes:
    """The stream to the end of START; ``blocks`` has the number of pages of each block."""
    start = b"QEVM" + struct.pack(">I", 3)
    if machine is not None:
        start += b"\x07" + struct.pack(">I", len(machine)) + machine
    start += b"\x01" + struct.pack(">I", SECTION) + b"\x03ram" + struct.pack(">II", 0, 4)
    start += struct.pack(">Q", sum(blocks.values()) * PAGE | 4)
    for name, pages in blocks.items():
        start += bytes([len(name)]) + name + struct.pack(">Q", pages * PAGE)
    return start + end()


def end() -> bytes:
    """The end of a part."""
    return struct.pack(">Q", 0x10) + b"\x7e" + struct.pack(">I", SECTION)


def part(records: Iterable[Record], *, kind: int = 2, last: bytes = b"") -> bytes:
    """PART (2) or END (3) with its pages; ``last`` is the block that was current before."""
    made = bytearray([kind]) + struct.pack(">I", SECTION)
    for name, number, content in records:
        flags = (0x02 if content is None else 0x08) | (0x20 if name == last else 0)
        made += struct.pack(">Q", number * PAGE | flags)
        made += b"" if name == last else bytes([len(name)]) + name
        made += b"\0" if content is None else content
        last = name
    return bytes(made) + end()


def stream(
    blocks: Mapping[bytes, int],
    parts: Sequence[Sequence[Record]],
    *,
    tail: bytes = b"\x04the devices' state\x00\x06",
    command: bytes = b"",
) -> bytes:
    """A complete stream; the last of ``parts`` is END, and ``command`` comes before it."""
    made, last = head(blocks), b""
    for number, records in enumerate(parts):
        final = number == len(parts) - 1
        made += command if final else b""
        made += part(records, kind=3 if final else 2, last=last)
        last = records[-1][0] if records else last
    return made + tail


def memory_of(blocks: Mapping[bytes, int], parts: Iterable[Sequence[Record]]) -> dict[bytes, bytes]:
    """The final content of the guest's memory, block by block."""
    memory = {name: bytearray(pages * PAGE) for name, pages in blocks.items()}
    for records in parts:
        for name, number, content in records:
            memory[name][number * PAGE : (number + 1) * PAGE] = content or bytes(PAGE)
    return {name: bytes(content) for name, content in memory.items()}


def guest_stream(pages: int = 64, seed: int = 1, changed: Iterable[int] = ()) -> bytes:
    """The stream of a small guest: a third of its pages is empty, and ``changed`` pages differ."""
    blocks = {b"pc.ram": pages, b"vga.vram": 4}
    other = set(changed)

    def content(number: int) -> bytes | None:
        if number % 3 == 0 and number not in other:
            return None
        return bytes([number % 251, seed if number in other else 0, 7, 9]) * (PAGE // 4)

    first = [(b"pc.ram", number, content(number)) for number in range(pages)]
    return stream(blocks, [[*first, *((b"vga.vram", n, None) for n in range(4))], []])


def contents(data: bytes) -> tuple[dict[bytes, bytes], bytes]:
    """Memory and state of the devices, parsed without snaporch; no commands."""
    place = 8
    if data[place] == 7:
        place += 5 + struct.unpack_from(">I", data, place + 1)[0]
    place += 5 + 4 + 8
    left = struct.unpack_from(">Q", data, place)[0] & ~(PAGE - 1)
    place += 8
    memory: dict[bytes, bytearray] = {}
    while left:
        name = data[place + 1 : place + 1 + data[place]]
        place += 1 + len(name)
        memory[name] = bytearray(struct.unpack_from(">Q", data, place)[0])
        left -= len(memory[name])
        place += 8
    place += 8 + 5
    kind, name = 0, b""
    while kind != 3:
        kind = data[place]
        place += 5
        while (word := struct.unpack_from(">Q", data, place)[0]) != 0x10:
            place += 8
            if not word & 0x20:
                name = data[place + 1 : place + 1 + data[place]]
                place += 1 + len(name)
            offset = word & ~(PAGE - 1)
            size = PAGE if word & 0x08 else 1
            page = data[place : place + PAGE] if word & 0x08 else bytes(PAGE)
            memory[name][offset : offset + PAGE] = page
            place += size
        place += 8 + 5
    return {name: bytes(content) for name, content in memory.items()}, data[place:]
