"""Split QEMU's stream while it arrives: a compressor whose output is the stream without its pages.

The pages go into a page file. So the file that :class:`~snaporch.bundle.save_image.SaveImageWriter`
writes with it is the rest of :mod:`snaporch.bundle.page_image`, and is checked and sealed as an
image is. The snapshot of the page file is up to the caller.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path

from snaporch.bundle.compress import Block, Sink
from snaporch.bundle.page_image import SplitStream, split_stream

_DEPTH = 16
"""Blocks that may wait while the guest runs: at most 16 MiB."""
_LARGE_DEPTH = 2048
"""Blocks that may wait after :meth:`PageSplitter.enlarge`: at most 1 GiB, half of them small."""
_REST_SECONDS = 0.5
"""At most so long it rests after :meth:`PageSplitter.enlarge`, while the guest is paused."""


class PageSplitter:
    """Takes QEMU's stream block by block, and splits it in a thread of its own.

    An error of that thread is raised by the next call of :meth:`write` or :meth:`finish`. The page
    file may be half updated then, which does no harm: only its snapshots count.

    Args:
        pages: the page file; created if it does not exist.
        sink: gets the stream without its pages, at the end.
        settle: see :class:`~snaporch.bundle.page_file.PageFile`.
    """

    def __init__(self, pages: Path, sink: Sink, settle: Callable[[], None]) -> None:
        self._pages = pages
        self._sink = sink
        self._settle = settle
        self._blocks: queue.Queue[bytes | None] = queue.Queue(_DEPTH)
        self._stopped = False
        self._failure: BaseException | None = None
        self._found: SplitStream | None = None
        self._enlarged = False
        self._resting_until = 0.0
        self._hurry = threading.Event()
        self.moved_bytes = 0
        """Bytes compared and summed up so far. While the number grows, there is progress."""
        self._thread = threading.Thread(
            target=copy_context().run, args=[self._run], name="pages", daemon=True
        )
        self._thread.start()

    @property
    def found(self) -> SplitStream:
        """What the stream was split into; only after :meth:`finish`."""
        assert self._found is not None
        return self._found

    def write(self, block: Block) -> None:
        """Queue a block; wait while the queue is full. The caller may reuse the block afterwards.

        Raises:
            StreamError: the stream contains something unknown.
            OSError, PoolError: the page file cannot be written, or :meth:`abandon` was called.
        """
        self._check()
        self._blocks.put(bytes(block))
        self._check()

    def enlarge(self) -> None:
        """Let many more blocks wait, and rest for a moment: the guest is paused now.

        Only the first call has an effect: it is repeated as long as the guest is paused.
        """
        if self._enlarged:
            return
        self._enlarged = True
        self._resting_until = time.monotonic() + _REST_SECONDS
        with self._blocks.mutex:
            self._blocks.maxsize = _LARGE_DEPTH
            self._blocks.not_full.notify_all()

    def finish(self) -> None:
        """Wait until the whole stream is split, and emit what is left of it.

        Raises:
            As :meth:`write`.
        """
        self._hurry.set()
        self._blocks.put(None)
        self._thread.join()
        self._check()
        self._sink(self.found.head)
        self._sink(self.found.tail)

    def abandon(self) -> None:
        """Stop without waiting: nothing more is written than the pages that are being written."""
        self._stopped = True
        self._hurry.set()
        self._drop_blocks()

    def _drop_blocks(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._blocks.get_nowait()
        self._blocks.put(None)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._check_stopped()

    def _check_stopped(self) -> None:
        if self._stopped:
            raise OSError("it was aborted")

    def _run(self) -> None:
        try:
            self._found = split_stream(self._read, self._pages, self._tick, self._settle)
        except BaseException as error:  # noqa: BLE001 - raised again by write and finish
            self._failure = error
            self._drop_blocks()

    def _read(self, _count: int) -> bytes:
        if (left := self._resting_until - time.monotonic()) > 0:
            self._hurry.wait(left)
        block = self._blocks.get()
        self._check_stopped()
        return block or b""

    def _tick(self, moved: int) -> None:
        self._check_stopped()
        self.moved_bytes = moved
