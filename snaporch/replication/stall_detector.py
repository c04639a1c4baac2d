"""Whether a transfer still moves.

A living connection to a machine whose pool is suspended lets a transfer wait for ever, and whatever
else is to be copied with it.
"""

from __future__ import annotations

import time
from pathlib import Path

STILL_SECONDS = 3600
_LOOK_SECONDS = 30
_MOVING_BYTES = 1 << 20
"""What counts as moving: a connection that is only kept alive reads and writes, too."""


class StallDetector:
    """What a process group reads and writes (``rchar`` and ``wchar`` of proc_pid_io(5))."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._known = 0
        self._since = self._looked = time.monotonic()

    def stands_still(self) -> bool:
        """Whether it has moved nothing for :data:`STILL_SECONDS`; looks only now and then."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return False
        self._looked = now
        moved = moved_bytes(self._group)
        if moved is None:
            return False
        if abs(moved - self._known) >= _MOVING_BYTES:  # less when one of them has ended
            self._known, self._since = moved, now
        return now - self._since >= STILL_SECONDS


def moved_bytes(group: int) -> int | None:
    """The bytes that those processes of a group that have not ended have read and written.

    None where the kernel does not count them (``CONFIG_TASK_IO_ACCOUNTING``; Debian's does).
    """
    numbered = (path for path in Path("/proc").iterdir() if path.name.isdigit())
    members = [path for path in numbered if _is_member(path, group)]
    counts = [_moved_by(path) for path in members]
    return sum(counts) if any(counts) or not members else None


def _is_member(process: Path, group: int) -> bool:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[2]) == group
    except OSError:  # it has ended
        return False


def _moved_by(process: Path) -> int:
    try:
        counters = dict(line.split(": ") for line in (process / "io").read_text().splitlines())
    except OSError:
        return 0
    return int(counters["rchar"]) + int(counters["wchar"])
