"""Limits of what another host can use on this one while it sends: time without data, processes.

They apply to ``receive`` and, by :mod:`snaporch.pull.slow_reader_limit` and
:mod:`snaporch.pull.source`, to pulls.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from snaporch.errors import BusyError, UnavailableError
from snaporch.replication.interface import ReplicaError

SILENT_SECONDS = 900
"""How long a sender may send nothing: a host without power does not close its connection."""
SLOWEST = 1 << 14
"""Bytes per second of a pull at least, on average: over a slow line, but no trickle."""
MAX_REQUESTS = 16
"""Requests that are carried out at the same time; a host needs one."""
_LOCKS = ".requests"
_POLL_SECONDS = 0.5


class LimitedStream:
    """A stream that a read waits for only so long.

    Args:
        stream: is read by its descriptor, so it must have no buffer.
        check: called twice a second while a read waits; an exception ends it.
        on_read: is called with the bytes that were read so far.
        seconds: how long a read may wait.
        slowest: bytes per second that come at least on average, over the time that all reads
            together wait beyond ``seconds``; 0 for no such limit, infinite for one of all reads.
    """

    def __init__(
        self,
        stream: IO[bytes],
        check: Callable[[], None] = lambda: None,
        on_read: Callable[[int], None] = lambda _done: None,
        seconds: float = SILENT_SECONDS,
        slowest: float = 0.0,
    ) -> None:
        self._descriptor = stream.fileno()
        self._check = check
        self._on_read = on_read
        self._seconds = seconds
        self._slowest = slowest
        self.waited = 0.0
        """The seconds that all reads together have waited."""
        self.done = 0
        """The bytes that were read."""

    def read(self, size: int) -> bytes:
        """Some of the next bytes, at most ``size``; empty at the end.

        Raises:
            ReplicaError: none came within the limit.
        """
        start = time.monotonic()
        try:
            self._wait(start + self._seconds)
        finally:
            self.waited += time.monotonic() - start
        if self._slowest and self.waited > self._seconds + self.done / self._slowest:
            raise ReplicaError(
                "the stream", f"came too slowly for {self.waited:.0f} s", "try again"
            )
        self._check()
        block = os.read(self._descriptor, size)
        self.done += len(block)
        self._on_read(self.done)
        return block

    def _wait(self, end: float) -> None:
        with selectors.PollSelector() as selector:
            selector.register(self._descriptor, selectors.EVENT_READ)
            while not selector.select(min(_POLL_SECONDS, self._seconds)):
                self._check()
                if time.monotonic() > end:
                    reason = f"no data came for {self._seconds:.0f} s"
                    raise ReplicaError("the stream", reason, "try again")

    def exactly(self, size: int) -> bytes:
        """The next bytes; fewer at the end."""
        found = b""
        while len(found) < size and (block := self.read(size - len(found))):
            found += block
        return found


@contextmanager
def limited_requests(
    directory: Path, limit: int = MAX_REQUESTS, *, file: str = _LOCKS
) -> Iterator[None]:
    """Carry out a request while fewer than ``limit`` others are, of the same file.

    Args:
        directory: where the file of the locks is.
        limit: of requests.
        file: its name.

    Raises:
        BusyError: there are too many.
        UnavailableError: the directory cannot be written.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(directory / file, flags, 0o600)
    except OSError as error:
        step = "it must exist, and belong to the receiving user"
        raise UnavailableError(str(directory), error.strerror or str(error), step) from error
    try:
        if not any(_has(descriptor, number) for number in range(limit)):
            raise BusyError(str(directory), f"{limit} requests are carried out already")
        yield
    finally:
        os.close(descriptor)


def _has(descriptor: int, number: int) -> bool:
    """Whether the lock of this number could be taken; the end of the process releases it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
    except (BlockingIOError, PermissionError):
        return False
    return True
