"""On a source: an output to the machine that pulls, which waits only so long for it to read.

How long is set in :mod:`snaporch.replication.receive_limits`.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable
from typing import IO

from snaporch.replication.interface import ReplicaError
from snaporch.replication.receive_limits import SILENT_SECONDS, SLOWEST

_POLL_SECONDS = 0.5


class LimitedOutput:
    """Writes to a stream; a reader that reads nothing for too long ends it.

    Args:
        stream: is written by its descriptor, which is set to not block.
        check: called twice a second while a write waits; an exception ends it.
        seconds: how long a write may wait.
        slowest: bytes per second that are read at least on average, over the time that all writes
            together wait beyond ``seconds``.
    """

    def __init__(
        self,
        stream: IO[bytes],
        check: Callable[[], None] = lambda: None,
        seconds: float = SILENT_SECONDS,
        slowest: float = SLOWEST,
    ) -> None:
        self._descriptor = stream.fileno()
        self._check = check
        self._seconds = seconds
        self._slowest = slowest
        self._waited = 0.0
        self._done = 0
        os.set_blocking(self._descriptor, False)

    def write(self, data: bytes) -> None:
        """Write all of the data.

        Raises:
            ReplicaError: the reader has gone, or read nothing within the limit, or too slowly.
        """
        left = memoryview(data)
        end = time.monotonic() + self._seconds
        with selectors.PollSelector() as selector:
            selector.register(self._descriptor, selectors.EVENT_WRITE)
            while left:
                self._check()
                start = time.monotonic()
                is_ready = selector.select(min(_POLL_SECONDS, self._seconds))
                self._waited += time.monotonic() - start
                if not is_ready:
                    if time.monotonic() > end:
                        reason = f"nothing was read for {self._seconds:.0f} s"
                        raise ReplicaError("the stream", reason, "pull again")
                    continue
                try:
                    done = os.write(self._descriptor, left)
                except BlockingIOError:
                    continue
                except BrokenPipeError as error:
                    raise ReplicaError("the stream", "its reader has gone", "pull again") from error
                left = left[done:]
                self._done += done
                if self._waited > self._seconds + self._done / self._slowest:
                    reason = f"was read too slowly for {self._waited:.0f} s"
                    raise ReplicaError("the stream", reason, "pull again")
                end = time.monotonic() + self._seconds
