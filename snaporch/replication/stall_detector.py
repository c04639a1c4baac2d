"""Detect a transfer that no longer moves data.

If the pool of another machine is suspended, the connection stays alive and the transfer waits for
ever, and so do all transfers after it.
"""

from __future__ import annotations

import time
from pathlib import Path

STALL_SECONDS = 3600
_CHECK_SECONDS = 30
_MIN_MOVED_BYTES = 1 << 20
"""The least that counts as progress: keepalive messages are read and written, too."""


class StallDetector:
    """Watches the bytes that a process group reads and writes.

    The counters are ``rchar`` and ``wchar`` of proc_pid_io(5).

    Args:
        group: the process group's ID.
    """

    def __init__(self, group: int) -> None:
        self._group = group
        self._last_bytes = 0
        self._since = self._checked = time.monotonic()

    def is_stalled(self) -> bool:
        """Whether no data has moved for :data:`STALL_SECONDS`; checked every 30 seconds at most."""
        now = time.monotonic()
        if now - self._checked < _CHECK_SECONDS:
            return False
        self._checked = now
        moved = moved_bytes(self._group)
        if moved is None:
            return False
        # The sum may decrease: it does not count processes that have exited.
        if abs(moved - self._last_bytes) >= _MIN_MOVED_BYTES:
            self._last_bytes, self._since = moved, now
        return now - self._since >= STALL_SECONDS


def moved_bytes(group: int) -> int | None:
    """The bytes that the living processes of a group have read and written.

    Returns:
        None if the kernel does not count them (``CONFIG_TASK_IO_ACCOUNTING``; Debian's does).
    """
    numbered = (path for path in Path("/proc").iterdir() if path.name.isdigit())
    members = [path for path in numbered if _is_member(path, group)]
    counts = [_counted(path) for path in members]
    return sum(counts) if any(counts) or not members else None


def _is_member(process: Path, group: int) -> bool:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[2]) == group
    except OSError:  # the process has exited
        return False


def passed_bytes(process: int) -> int:
    """The bytes that a process has read and written on; 0 if it has exited."""
    return _counted(Path("/proc") / str(process)) // 2


def _counted(process: Path) -> int:
    try:
        counters = dict(line.split(": ") for line in (process / "io").read_text().splitlines())
    except OSError:
        return 0
    return int(counters["rchar"]) + int(counters["wchar"])
