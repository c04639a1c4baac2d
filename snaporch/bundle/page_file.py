"""The page file: a guest's memory at fixed places, of which only what changed is written."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from snaporch.bundle.qemu_stream import ALIGNMENT, PAGE

PAGES_NAME = "pages"
"""The page file's name in its dataset."""
CHUNK = ALIGNMENT
"""Bytes under one checksum."""
_NOTHING = bytes(CHUNK)


class PageFile:
    """A page file being brought up to date: pages that are in it already are not written."""

    def __init__(self, path: Path, size: int, tick: Callable[[int], None]) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o600)
        self.size = size
        self._tick = tick
        self._taken = 0
        self.written = 0
        """Bytes that differed."""
        try:
            if os.fstat(self._descriptor).st_size != size:
                os.ftruncate(self._descriptor, size)
        except BaseException:
            self.close()
            raise

    def put(self, place: int, data: bytes) -> None:
        """Write what differs; see :class:`~snaporch.bundle.qemu_stream.Sink`."""
        self._taken += len(data)
        self._tick(self._taken)
        old = os.pread(self._descriptor, len(data), place)
        if old == data:
            return
        start = None
        for offset in range(0, len(data), PAGE):
            same = old[offset : offset + PAGE] == data[offset : offset + PAGE]
            if same and start is not None:
                self._write(place + start, data[start:offset])
                start = None
            elif not same and start is None:
                start = offset
        if start is not None:
            self._write(place + start, data[start:])

    def _write(self, place: int, data: bytes) -> None:
        self.written += len(data)
        view = memoryview(data)
        while view:
            done = os.pwrite(self._descriptor, view, place)
            view, place = view[done:], place + done

    def finish(self) -> str:
        """Put everything on stable storage; the checksum of what is there."""
        os.fsync(self._descriptor)
        return _sum(self._descriptor, self.size, lambda _place: None)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._descriptor)


class PageSum:
    """The checksum of a page file, whose chunks come in order.

    It is the SHA-256 of, for each chunk that is not all zeros: its number (8 bytes, big endian) and
    its SHA-256. So a large guest that uses little memory costs little.
    """

    def __init__(self) -> None:
        self._total = hashlib.sha256()

    def add(self, place: int, data: bytes) -> None:
        """The next chunk, at its place; zeros at the end of a chunk may be left out."""
        if data == _NOTHING[: len(data)]:
            return
        self._total.update((place // CHUNK).to_bytes(8, "big"))
        self._total.update(hashlib.sha256(data.ljust(CHUNK, b"\0")).digest())

    def hexdigest(self) -> str:
        """Of what was added."""
        return self._total.hexdigest()


def page_sum(path: Path, tick: Callable[[int], None]) -> tuple[int, str]:
    """Length and checksum of a page file.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb", buffering=0) as stream:
        size = os.fstat(stream.fileno()).st_size
        return size, _sum(stream.fileno(), size, tick)


def _sum(descriptor: int, size: int, tick: Callable[[int], None]) -> str:
    total = PageSum()
    for place in range(0, size, CHUNK):
        total.add(place, os.pread(descriptor, min(CHUNK, size - place), place))
        tick(place)
    return total.hexdigest()
