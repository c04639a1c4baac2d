"""The parts of a disk that hold data, which an archive stores; the rest are holes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from snaporch.archive.contents import MAX_EXTENTS
from snaporch.context import Context
from snaporch.extract.disk_reader import blocks, data_extents
from snaporch.restore.source import Source

_GAP = 1 << 20
"""Holes up to this size are stored as zeros, which compress well: the map stays short."""


def used_extents(
    context: Context, source: Source, reading: BinaryIO
) -> tuple[list[tuple[int, int]], int]:
    """Find the parts of an open disk that hold data.

    ZFS reports the holes of an image file. A volume is read once for this: Linux reports no holes
    of a block device.

    Returns:
        Start and end of each part, in bytes, and the size of the disk.

    Raises:
        InterruptedRunError: a signal came.
        OSError: a volume cannot be read.
    """
    size = reading.seek(0, os.SEEK_END)
    if stat.S_ISBLK(os.fstat(reading.fileno()).st_mode):
        context.progress.step(source.thing, "looking for the used parts of a volume")
        runs = written_runs(blocks(context, source, reading, size))
    else:
        runs = data_extents(reading.fileno(), size)
    return merged(runs), size


def written_runs(found: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, int]]:
    """Start and end of each block that is not all zeros."""
    zeros = b""
    for offset, block in found:
        if len(zeros) != len(block):
            zeros = bytes(len(block))
        if block != zeros:
            yield offset, offset + len(block)


def merged(
    runs: Iterable[tuple[int, int]], gap: int = _GAP, limit: int = MAX_EXTENTS
) -> list[tuple[int, int]]:
    """Join runs that are at most ``gap`` bytes apart, or further if there are more than ``limit``.

    Args:
        runs: start and end of each, in order.
    """
    joined: list[tuple[int, int]] = []
    for start, end in runs:
        if joined and start - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined if len(joined) <= limit else merged(joined, gap * 4, limit)
