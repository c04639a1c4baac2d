"""Doing something with blocks in a thread of its own, in their order, a few blocks behind."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from snaporch.bundle.compress import Block

_DEPTH = 8
"""Blocks that may wait; with what a compressor hands over at once, some 8 MiB."""
_ROOMY_DEPTH = 1024
"""When nobody is to wait: a GiB at most."""


class AsyncWriter:
    """Calls ``act`` with every block that was put; what it raises, a later call raises."""

    def __init__(self, act: Callable[[Block], None]) -> None:
        self._act = act
        self._blocks: deque[Block] = deque()
        self._changed = threading.Condition()
        self._depth = _DEPTH
        self._closing = False
        self._stopped = False
        self._ended = False
        self._afterwards: Callable[[], None] = lambda: None
        self._failure: BaseException | None = None
        self._waited = 0.0
        self._waiting_since = 0.0
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def put(self, block: Block) -> None:
        """Hand over a block; it is copied unless it is ``bytes``. Waits while too many wait."""
        owned = block if isinstance(block, bytes) else bytes(block)
        with self._changed:
            if len(self._blocks) >= self._depth:
                self._wait_for_room()
            self._check()
            self._blocks.append(owned)
            self._changed.notify_all()

    def _wait_for_room(self) -> None:
        self._waiting_since = time.monotonic()
        self._changed.wait_for(lambda: self._stopped or len(self._blocks) < self._depth)
        self._waited += time.monotonic() - self._waiting_since
        self._waiting_since = 0.0

    def make_room(self) -> None:
        """Let many more blocks wait from now on, so that nobody waits in :meth:`put`."""
        with self._changed:
            self._depth = _ROOMY_DEPTH
            self._changed.notify_all()

    @property
    def waited(self) -> float:
        """Seconds that :meth:`put` has waited in all, up to now."""
        since = self._waiting_since
        return self._waited + (time.monotonic() - since if since else 0.0)

    def finish(self) -> None:
        """Wait until everything is done."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._check()

    def stop(self) -> None:
        """Do nothing any more; whoever waits in :meth:`put` gets an error."""
        with self._changed:
            self._stopped = True
            self._blocks.clear()
            self._changed.notify_all()

    def afterwards(self, act: Callable[[], None]) -> None:
        """After :meth:`stop`: call ``act`` when the block that was under way is done.

        That may be now, or much later in the thread of the blocks; nobody waits for it here.
        """
        with self._changed:
            if not self._ended:
                self._afterwards = act
                return
        act()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._stopped:
            raise OSError("it was broken off")

    def _run(self) -> None:
        while (block := self._next()) is not None:
            try:
                self._act(block)
            except BaseException as error:  # noqa: BLE001 - handed to whoever puts or finishes
                self._failure = error
                self.stop()
        with self._changed:
            self._ended = True
        self._afterwards()

    def _next(self) -> Block | None:
        with self._changed:
            self._changed.wait_for(lambda: self._blocks or self._closing or self._stopped)
            if self._stopped or not self._blocks:
                return None
            block = self._blocks.popleft()
            self._changed.notify_all()
            return block
