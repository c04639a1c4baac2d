"""Detect a transfer that no longer moves data.

Transfers are ended by :mod:`snaporch.replication.transfer`; streams that are read (pull, rebuild,
restic) have the same ``STALL_SECONDS``.

If the pool of another machine is suspended, the connection stays alive and the transfer waits for
ever, and so do all transfers after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

STALL_SECONDS = 3600
_CHECK_SECONDS = 30
_PROC = Path("/proc")
_MIN_MOVED_BYTES = 1 << 20
"""The least that counts as progress: keepalive messages are read and written, too."""


def moved_bytes(group: int, proc: Path = _PROC) -> int | None:
    """The bytes that the living processes of a group have read and written.

    Args:
        group: the process group's ID.
        proc: where the kernel shows processes.

    Returns:
        None if the kernel does not count them (``CONFIG_TASK_IO_ACCOUNTING``; Debian's does).
    """
    numbered = (path for path in proc.iterdir() if path.name.isdigit())
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
    return _counted(_PROC / str(process)) // 2


def _counted(process: Path) -> int:
    try:
        counters = dict(line.split(": ") for line in (process / "io").read_text().splitlines())
    except OSError:
        return 0
    return int(counters["rchar"]) + int(counters["wchar"])


class StallDetector:
    """Watches the bytes that a process group reads and writes.

    The counters are ``rchar`` and ``wchar`` of proc_pid_io(5).

    Args:
        group: the process group's ID.
        moved: returns the bytes that a group has moved; see :func:`moved_bytes`.
        monotonic: the clock, in seconds.
    """

    def __init__(
        self,
        group: int,
        moved: Callable[[int], int | None] = moved_bytes,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group = group
        self._moved = moved
        self._monotonic = monotonic
        self._last_bytes = 0
        self._since = self._checked = monotonic()

    def is_stalled(self) -> bool:
        """Whether no data has moved for :data:`STALL_SECONDS`; checked every 30 seconds at most."""
        now = self._monotonic()
        if now - self._checked < _CHECK_SECONDS:
            return False
        self._checked = now
        moved = self._moved(self._group)
        if moved is None:
            return False
        # The sum may decrease: it does not count processes that have exited.
        if abs(moved - self._last_bytes) >= _MIN_MOVED_BYTES:
            self._last_bytes, self._since = moved, now
        return now - self._since >= STALL_SECONDS
