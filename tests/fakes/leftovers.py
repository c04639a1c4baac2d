"""Check that code leaves no threads and open files in its own process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE = 60


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(_PATIENCE)


def _open_files() -> set[str]:
    """The open files as ``number -> path``, without the descriptor of this query itself."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{number} -> {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:
            continue
    return found


@contextmanager
def nothing_left_open() -> Iterator[None]:
    """All threads started within the block end by themselves, and all files are closed by then.

    An aborted writer's file is closed a moment later, by a thread of that writer.
    """
    _join([thread for thread in threading.enumerate() if thread.name == "store"])
    threads, files = threading.enumerate(), _open_files()
    yield
    started = [thread for thread in threading.enumerate() if thread not in threads]
    _join(started)
    assert [thread for thread in started if thread.is_alive()] == []
    assert _open_files() == files
