"""Write blocks in a thread of its own, in order, while the caller prepares the next ones."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from snaporch.bundle.compress import Block

_DEPTH = 8
"""Blocks that may wait: about 8 MiB, with the blocks that a compressor emits at once."""
_LARGE_DEPTH = 1024
"""Blocks that may wait after :meth:`AsyncWriter.enlarge`: at most 1 GiB."""


class AsyncWriter:
    """Calls ``write`` with each block that was put, in a thread of its own.

    An error that ``write`` raises is raised by the next call of :meth:`put` or :meth:`finish`.
    """

    def __init__(self, write: Callable[[Block], None]) -> None:
        self._write = write
        self._blocks: queue.Queue[Block | None] = queue.Queue(_DEPTH)
        self._stopped = False
        self._failure: BaseException | None = None
        self._waited = 0.0
        self._waiting_since = 0.0
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def put(self, block: Block) -> None:
        """Queue a block; wait while the queue is full. A block that is not ``bytes`` is copied.

        Raises:
            OSError: writing failed, or :meth:`stop` was called.
        """
        self._check()
        owned = block if isinstance(block, bytes) else bytes(block)
        try:
            self._blocks.put_nowait(owned)
        except queue.Full:
            self._waiting_since = time.monotonic()
            self._blocks.put(owned)
            self._waited += time.monotonic() - self._waiting_since
            self._waiting_since = 0.0
            self._check()

    def enlarge(self) -> None:
        """Let many more blocks wait from now on, so that :meth:`put` does not block."""
        with self._blocks.mutex:
            self._blocks.maxsize = _LARGE_DEPTH
            self._blocks.not_full.notify_all()

    @property
    def waited(self) -> float:
        """Seconds that :meth:`put` has waited in total until now."""
        since = self._waiting_since
        return self._waited + (time.monotonic() - since if since else 0.0)

    def finish(self) -> None:
        """Wait until every block is written.

        Raises:
            OSError: writing failed, or :meth:`stop` was called.
        """
        self._blocks.put(None)
        self._thread.join()
        self._check()

    def stop(self) -> None:
        """Drop the blocks that wait; a :meth:`put` that waits in another thread raises."""
        self._stopped = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._blocks.get_nowait()
        self._blocks.put(None)

    def on_end(self, act: Callable[[], None]) -> None:
        """After :meth:`stop`: call ``act`` when the block that is being written is done.

        ``act`` runs now if no block is being written, else later in a thread of its own. This
        method never waits.
        """
        if not self._thread.is_alive():
            act()
            return
        threading.Thread(target=self._join_and, args=(act,), name="store", daemon=True).start()

    def _join_and(self, act: Callable[[], None]) -> None:
        self._thread.join()
        act()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._stopped:
            raise OSError("it was aborted")

    def _run(self) -> None:
        while (block := self._blocks.get()) is not None and not self._stopped:
            try:
                self._write(block)
            except BaseException as error:  # noqa: BLE001 - raised again by put and finish
                self._failure = error
                self.stop()
