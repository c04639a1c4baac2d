"""Streams that are split and joined."""

import itertools
import struct

import pytest
from fakes import streams
from fakes.streams import PAGE
from hypothesis import given, settings
from hypothesis import strategies as st

from snaporch.bundle.qemu_stream import ALIGNMENT, StreamError, join, read_head, split

ONE = {b"pc.ram": 3}
FULL = [(b"pc.ram", number, bytes([number + 1]) * PAGE) for number in range(3)]
SWITCHOVER = b"\x08" + struct.pack(">HH", 11, 0)


class Memory:
    """A page file in memory."""

    def __init__(self, head):
        self.content = bytearray(head.page_file_bytes)

    def put(self, place, data):
        assert place % PAGE == 0
        assert place // ALIGNMENT == (place + len(data) - 1) // ALIGNMENT
        self.content[place : place + len(data)] = data

    def read(self, place, count):
        return bytes(self.content[place : place + count])


def reader(data, step=1 << 20):
    """Gives the stream in pieces of at most ``step`` bytes."""
    view, place = memoryview(data), 0

    def read(count):
        nonlocal place
        block = bytes(view[place : place + min(count, step)])
        place += len(block)
        return block

    return read


def taken_apart(data, step=1 << 20, **limits):
    made = []

    def prepare(head):
        made.append(Memory(head))
        return made[0]

    rest = split(reader(data, step), prepare, **limits)
    return rest, made[0]


def blocks_of(rest, memory):
    return {b.name: memory.read(b.start, b.bytes) for b in rest.head.blocks}


def pages():
    return st.one_of(
        st.none(), st.binary(min_size=1, max_size=8).map(lambda seed: (seed * PAGE)[:PAGE])
    )


@st.composite
def guests(draw):
    """Blocks, and parts that send every page at least once, in any order."""
    names = draw(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=3, unique=True))
    blocks = {name: draw(st.integers(1, 6)) for name in names}
    every = [(name, number) for name, count in blocks.items() for number in range(count)]
    order = draw(st.permutations(every))
    again = draw(st.lists(st.sampled_from(every), max_size=8))
    records = [(*place, draw(pages())) for place in [*order, *again]]
    cuts = sorted(draw(st.lists(st.integers(0, len(records)), max_size=3)))
    bounds = [0, *cuts, len(records)]
    return blocks, [records[a:b] for a, b in itertools.pairwise(bounds)]


@given(guests(), st.binary(min_size=1, max_size=40), st.integers(1, 9000), st.booleans())
def test_the_last_copy_of_a_page_counts_and_joining_restores_it(guest, tail, step, command):
    blocks, parts = guest
    data = streams.stream(blocks, parts, tail=tail, command=SWITCHOVER if command else b"")
    rest, memory = taken_apart(data, step)
    assert rest.tail == tail
    assert rest.stream_bytes == len(data)
    assert blocks_of(rest, memory) == streams.memory_of(blocks, parts)
    again, other = taken_apart(b"".join(join(rest.head, rest.tail, memory.read)))
    assert again.tail == tail
    assert again.head == rest.head
    assert blocks_of(again, other) == blocks_of(rest, memory)


@st.composite
def large_guests(draw):
    """Blocks that end around a whole MiB, sent in one piece or from somewhere in the middle."""
    blocks = {
        b"pc.ram": draw(st.sampled_from([255, 256, 257, 511, 512, 513])),
        b"vga.vram": draw(st.sampled_from([1, 255, 256, 257])),
    }
    records = []
    for name, count in blocks.items():
        first = draw(st.sampled_from([0, 1, 255, 256]) | st.integers(0, count - 1)) % count
        empty = draw(st.sets(st.integers(0, count - 1) | st.sampled_from([254, 255, 256, 257])))
        numbers = [*range(first, count), *range(first)]
        records += [(name, n, None if n in empty else page(n)) for n in numbers]
    edge = st.integers(253, 258).filter(lambda n: n < blocks[b"pc.ram"])
    again = [(b"pc.ram", n, page(n + 100)) for n in draw(st.lists(edge, max_size=6))]
    return blocks, [records, again]


def page(number):
    return bytes([number % 251 + 1, number % 13 + 1]) * (PAGE // 2)


@settings(max_examples=30)
@given(large_guests())
def test_pages_around_a_whole_mebibyte(guest):
    blocks, parts = guest
    rest, memory = taken_apart(streams.stream(blocks, parts))
    assert blocks_of(rest, memory) == streams.memory_of(blocks, parts)
    again, _ = streams.contents(b"".join(join(rest.head, rest.tail, memory.read)))
    assert again == streams.memory_of(blocks, parts)


@given(guests(), st.data())
def test_damage_is_refused_or_taken_as_it_is_and_nothing_else(guest, data):
    """The stream has no checksum: only its structure is checked, with a readable error."""
    stream = bytearray(streams.stream(*guest))
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    del stream[data.draw(st.integers(1, len(stream))) :]
    try:
        rest, memory = taken_apart(bytes(stream))
    except StreamError:
        return
    taken_apart(b"".join(join(rest.head, rest.tail, memory.read)))


@given(guests())
def test_a_stream_cut_anywhere_before_the_devices_is_refused(guest):
    data = streams.stream(*guest, tail=b"x")
    for end in range(0, len(data) - 1, max(len(data) // 50, 1)):
        with pytest.raises(StreamError):
            taken_apart(data[:end])


def test_blocks_begin_at_whole_mebibytes():
    blocks = {b"a": 257, b"b": 1, b"c": 1}
    head = read_head(reader(streams.head(blocks)))
    assert [block.start for block in head.blocks] == [0, 2 << 20, 3 << 20]
    assert head.page_file_bytes == (3 << 20) + PAGE


def test_a_block_continues_in_the_next_part():
    parts = [FULL[:1], FULL[1:]]
    data = streams.stream(ONE, parts)
    assert data.count(b"pc.ram") == 2  # in the list of blocks, and with the first page
    rest, memory = taken_apart(data)
    assert blocks_of(rest, memory) == streams.memory_of(ONE, parts)


def test_a_machine_without_a_name():
    data = streams.head(ONE, machine=None) + streams.part(FULL, kind=3) + b"x"
    assert taken_apart(data)[0].tail == b"x"


def test_commands_between_the_parts_are_kept_before_the_pages():
    rest, memory = taken_apart(streams.stream(ONE, [FULL, []], command=SWITCHOVER))
    assert rest.head.raw.endswith(SWITCHOVER)
    assert b"".join(join(rest.head, rest.tail, memory.read)).startswith(rest.head.raw)


def test_a_page_that_never_came_is_an_error():
    with pytest.raises(StreamError, match=r"does not hold the page 0x1000 of b'pc\.ram'"):
        taken_apart(streams.stream(ONE, [[FULL[0], FULL[2]]]))


def test_an_unknown_block_is_an_error():
    with pytest.raises(StreamError, match="unknown block b'other'"):
        taken_apart(streams.stream(ONE, [[(b"other", 0, None)]]))


def test_a_page_outside_its_block_is_an_error():
    with pytest.raises(StreamError, match="outside its block"):
        taken_apart(streams.stream(ONE, [[(b"pc.ram", 3, None)]]))


@pytest.mark.parametrize("flags", [0x01, 0x40, 0x48, 0x80, 0x100, 0x200, 0x0A, 0x2A])
def test_flags_that_are_not_known_are_errors(flags):
    record = struct.pack(">Q", flags | 0x20) + bytes(PAGE)
    data = streams.head(ONE) + b"\x02" + struct.pack(">I", streams.SECTION)
    data += struct.pack(">Q", 0x02) + b"\x06pc.ram\0" + record
    with pytest.raises(StreamError, match="unknown"):
        taken_apart(data + bytes(20_000))


def test_a_page_filled_with_something_else_is_an_error():
    data = streams.stream(ONE, [[(b"pc.ram", 0, None)]])
    place = data.rindex(b"pc.ram") + 6
    with pytest.raises(StreamError):
        taken_apart(data[:place] + b"\x01" + data[place + 1 :])


@pytest.mark.parametrize(
    ("kind", "what"), [(0x04, "section"), (0x01, "section"), (0x00, "section"), (0x07, "section")]
)
def test_another_section_inside_memory_is_an_error(kind, what):
    with pytest.raises(StreamError, match=what):
        taken_apart(streams.head(ONE) + bytes([kind]) + bytes(100))


@pytest.mark.parametrize("command", [1, 2, 3, 7])
def test_other_commands_are_errors(command):
    words = b"\x08" + struct.pack(">HH", command, 0)
    with pytest.raises(StreamError, match=f"unknown command {command}"):
        taken_apart(streams.stream(ONE, [FULL, []], command=words))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"QEVM\0\0\0\3", b"QEVM\0\0\0\4"),
        (b"\x03ram\0\0\0\0\0\0\0\4", b"\x03ram\0\0\0\0\0\0\0\5"),
        (b"\x03ram\0\0\0\0", b"\x03ram\0\0\0\1"),
        (b"\x03ram", b"\x03rom"),
        (struct.pack(">Q", 3 * PAGE | 4), struct.pack(">Q", 3 * PAGE | 2)),
        (struct.pack(">Q", 3 * PAGE), struct.pack(">Q", 3 * PAGE + 1)),
        (struct.pack(">Q", 3 * PAGE), struct.pack(">Q", 4 * PAGE)),
        (struct.pack(">Q", 0x10) + b"\x7e", struct.pack(">Q", 0x10) + b"\x7d"),
        (b"\x7e\0\0\0\2", b"\x7e\0\0\0\3"),
        (struct.pack(">Q", 0x10) + b"\x7e", struct.pack(">Q", 0x200) + b"\x7e"),
    ],
)
def test_a_head_that_is_not_known_is_an_error(old, new):
    data = streams.stream(ONE, [FULL])
    assert old in data
    with pytest.raises(StreamError):
        taken_apart(data.replace(old, new, 1))


def test_memory_blocks_of_the_same_name_are_an_error():
    data = streams.head({b"aa": 1, b"ab": 1}).replace(b"\x02ab", b"\x02aa")
    with pytest.raises(StreamError, match="impossible memory block"):
        taken_apart(data)


def test_devices_that_never_end_are_an_error():
    data = streams.stream(ONE, [FULL], tail=bytes(1000))
    assert len(taken_apart(data, max_tail=1000)[0].tail) == 1000
    with pytest.raises(StreamError, match="devices"):
        taken_apart(data + b"x", max_tail=1000)
