"""Check that code leaves no threads and open files in its own process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE = 60


def _join(threads: list[threading.Thread]) -> None:
    end = time.monotonic() + _PATIENCE
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))


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
def nothing_left_open(end_others: Callable[[], None]) -> Iterator[None]:
    """All threads started within the block end by themselves, and all files are closed by then.

    An aborted writer's file is closed a moment later, by a thread of that writer.

    Args:
        end_others: ends the fakes of other processes, whose files are open in this one.
    """
    _join([thread for thread in threading.enumerate() if thread.name == "store"])
    end_others()
    threads, files = threading.enumerate(), _open_files()
    yield
    started = [thread for thread in threading.enumerate() if thread not in threads]
    _join(started)
    assert [thread for thread in started if thread.is_alive()] == []
    end_others()
    assert _open_files() == files
