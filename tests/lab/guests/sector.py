"""What a probe writes to a disk: the last count and the one before.

The probes own LBA 1 (even counts) and LBA 2 (odd counts) of every disk. A
sector holds, little-endian: ``SNAPORCH``, the count, its complement, the index
of the disk, then the count again up to the end.
"""

import itertools
import struct
from collections.abc import Callable

SIZE = 512
FIRST_LBA = 1
OFFSET = FIRST_LBA * SIZE
LENGTH = 2 * SIZE
MAGIC = b"SNAPORCH"

# Where and how much the probes of kinds load and busy write besides, before each count.
LOAD_OFFSET = 2048 * SIZE
LOAD_LENGTH = 64 * SIZE
LOAD_SLOTS = 32


class DiskContentError(AssertionError):
    """A disk holds what no probe can have left there at one instant."""


def encode(count: int, disk: int) -> bytes:
    """The sector the probe writes to the disk of that index for that count."""
    words = [count, ~count & 0xFFFFFFFF, disk] + [count] * 123
    return MAGIC + struct.pack("<126I", *words)


def count_in(block: bytes, disk: int) -> int | None:
    """The count in one sector, None where there is none.

    Raises DiskContentError for a torn sector and for another disk's sector.
    """
    if not block.startswith(MAGIC):
        return None
    count, _, index = struct.unpack_from("<3I", block, len(MAGIC))
    if block != encode(count, disk):
        raise DiskContentError(
            f"disk {disk}: torn or foreign sector, count {count:#x}, "
            f"disk {index}, as read: {block[:32].hex(' ', 4)}"
        )
    return int(count)


def last_count(blocks: bytes, disk: int) -> int:
    """The last count in the LENGTH bytes at OFFSET of a disk; 0 if none.

    Raises DiskContentError where the two sectors are not of one run of the
    probe: a healthy disk holds a count and the one before it.
    """
    even = count_in(blocks[:SIZE], disk)
    odd = count_in(blocks[SIZE:LENGTH], disk)
    if even is None or odd is None:
        return even or odd or 0
    if abs(even - odd) != 1 or even % 2:
        raise DiskContentError(f"disk {disk}: the counts {even:#x} and {odd:#x} are not neighbours")
    return max(even, odd)


def agreed_count(counts: list[int]) -> int:
    """The count which disks read at one instant stand for.

    The probe writes the first disk first, so at any instant the disks hold
    R, R, ... or R, ..., R-1, ...: never more than one apart, never rising.
    Returns R. Raises DiskContentError for anything else.
    """
    falling = all(a >= b for a, b in itertools.pairwise(counts))
    if not counts or not falling or counts[0] - counts[-1] > 1:
        raise DiskContentError(f"disks are not of one instant: {counts}")
    return counts[0]


def assert_load_whole(read: Callable[[int, int], bytes], disk: int, count: int) -> None:
    """Check what the busy probe wrote besides its counts, on a disk whose last count is given.

    ``read(offset, length)`` reads the disk. The slots for the count and the 31 before it must be
    there; the one for the next count may have replaced the oldest.
    Raises DiskContentError.
    """
    for expected in range(max(0, count - LOAD_SLOTS + 1), count + 1):
        slot = expected % LOAD_SLOTS
        found = count_in(read(LOAD_OFFSET + slot * LOAD_LENGTH, SIZE), disk)
        if found != expected and (found != count + 1 or expected + LOAD_SLOTS != found):
            raise DiskContentError(
                f"disk {disk}, count {count:#x}: slot {slot} holds {found}, not {expected}"
            )
