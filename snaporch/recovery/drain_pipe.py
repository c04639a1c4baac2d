"""A reader for a RAM pipe whose run was killed.

libvirt opens the pipe twice: for the RAM, and with the guest paused for the header. An open waits
for a reader without limit, and libvirt locks the domain meanwhile: not even its state can be read.
So recovery reads from the pipe before it asks libvirt about the domain.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_MILLISECONDS = 50
_BLOCK = 1 << 20


@contextmanager
def reader_of(pipe: Path) -> Iterator[None]:
    """Read from ``pipe`` in a thread and discard the data; a missing pipe is no error."""
    try:
        descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_drain, args=(descriptor, done), name="ram-pipe", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        os.close(descriptor)


def _drain(descriptor: int, done: threading.Event) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while not done.is_set():
        # poll(2) always reports a pipe without a writer as ready, though it is empty
        if not poll.poll(_POLL_MILLISECONDS) or not _read_some(descriptor):
            done.wait(_POLL_MILLISECONDS / 1000)


def _read_some(descriptor: int) -> bool:
    """Read once; whether there was data. An empty read means that one writer closed, not all."""
    try:
        return bool(os.read(descriptor, _BLOCK))
    except BlockingIOError:
        return False
