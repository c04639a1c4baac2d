"""An output to another machine that waits only so long for it to read."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable
from typing import IO

from snaporch.replication.interface import ReplicaError
from snaporch.replication.receive_limits import SILENT_SECONDS

_POLL_SECONDS = 0.5


class LimitedOutput:
    """Writes to a stream; a reader that reads nothing for too long ends it.

    Args:
        stream: is written by its descriptor, which is set to not block.
        check: called twice a second while a write waits; an exception ends it.
        seconds: how long a write may wait.
    """

    def __init__(
        self,
        stream: IO[bytes],
        check: Callable[[], None] = lambda: None,
        seconds: float = SILENT_SECONDS,
    ) -> None:
        self._descriptor = stream.fileno()
        self._check = check
        self._seconds = seconds
        os.set_blocking(self._descriptor, False)

    def write(self, data: bytes) -> None:
        """Write all of the data.

        Raises:
            ReplicaError: the reader has gone, or read nothing within the limit.
        """
        left = memoryview(data)
        end = time.monotonic() + self._seconds
        with selectors.PollSelector() as selector:
            selector.register(self._descriptor, selectors.EVENT_WRITE)
            while left:
                self._check()
                if not selector.select(min(_POLL_SECONDS, self._seconds)):
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
                end = time.monotonic() + self._seconds
