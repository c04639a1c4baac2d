"""The page file: a guest's memory at fixed offsets, so that a run writes only changed pages.

When pages are stored in it is decided by :mod:`snaporch.snapshot.store_pages`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from snaporch.bundle.qemu_stream import ALIGNMENT, PAGE
from snaporch.private_files import write_at

PAGES_NAME = "pages"
"""The page file's name in its dataset."""
SETTLE_BYTES = 32 << 20
"""After so many written bytes the caller's ``settle`` is called."""
CHUNK = ALIGNMENT
"""Bytes that each checksum covers."""
_ZEROS = bytes(CHUNK)


class PageFile:
    """A page file that is being updated: only pages that differ are written.

    It is locked, so that no writer that hangs can write into it later.

    Args:
        path: created if it does not exist.
        size: bytes; an existing file is truncated or extended to it.
        tick: called with the number of bytes compared so far, before anything is written.
        settle: called after every :data:`SETTLE_BYTES` written. It may raise an ``OSError``.

    If there is no room left (``ENOSPC``, ``EDQUOT``), the file is emptied, so that the room that
    it took is free again. Then the next run writes all of it.

    Raises:
        OSError: it cannot be opened, or another thread or process still writes into it.
    """

    def __init__(
        self,
        path: Path,
        size: int,
        tick: Callable[[int], None],
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o600)
        self.size = size
        self._tick = tick
        self._settle = settle
        self._unsettled = 0
        self._compared = 0
        self.written = 0
        """Bytes that differed."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._descriptor).st_size != size:
                os.ftruncate(self._descriptor, size)
        except BaseException:
            self.close()
            raise

    def put(self, place: int, data: bytes) -> None:
        """Write the pages that differ; see :class:`~snaporch.bundle.qemu_stream.Sink`."""
        self._compared += len(data)
        self._tick(self._compared)
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
        self._unsettled += len(data)
        try:
            write_at(self._descriptor, data, place)
            if self._unsettled >= SETTLE_BYTES:
                self._unsettled = 0
                self._settle()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                os.ftruncate(self._descriptor, 0)
            raise

    def finish(self) -> str:
        """Return the checksum of the content.

        Nothing is synced: only a ZFS snapshot of the file counts, which has all that was written
        before. ZFS would write what an fsync asks for twice.
        """
        compared = self._compared
        return _sum(self._descriptor, self.size, lambda place: self._tick(compared + place))

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class PageSum:
    """The checksum of a page file whose chunks are added in order.

    For each chunk that is not all zeros, the chunk's number (8 bytes, big endian) and its SHA-256
    are hashed with SHA-256. So a large guest that uses little memory costs little.
    """

    def __init__(self) -> None:
        self._total = hashlib.sha256()

    def add(self, place: int, data: bytes) -> None:
        """Add the chunk at ``place``. Zeros at the end of a chunk may be omitted."""
        if data == _ZEROS[: len(data)]:
            return
        self._total.update((place // CHUNK).to_bytes(8, "big"))
        self._total.update(hashlib.sha256(data.ljust(CHUNK, b"\0")).digest())

    def hexdigest(self) -> str:
        """The checksum of all chunks added so far."""
        return self._total.hexdigest()


def page_sum(path: Path, tick: Callable[[int], None]) -> tuple[int, str]:
    """The length in bytes and the checksum of a page file.

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
