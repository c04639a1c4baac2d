"""The room that archives, imports, copies and pages of RAM leave on a file system for others."""

from __future__ import annotations

import shutil
from pathlib import Path

from snaporch.errors import RunFailedError

_MOST = 1 << 30
_PART = 20
_STEP = 64 << 20
"""Bytes after which the room is looked at again: guests and other imports write meanwhile."""


def reserve(total: int) -> int:
    """The bytes to leave free on a file system: a twentieth of it, at most 1 GiB.

    Args:
        total: its size in bytes.
    """
    return min(total // _PART, _MOST)


def free_room(directory: Path) -> int:
    """The bytes that may be written on the file system of a directory."""
    usage = shutil.disk_usage(directory)
    return max(usage.free - reserve(usage.total), 0)


class RoomWatch:
    """Ends what would take the room that guests of this host need.

    A guest whose image cannot grow is paused by QEMU until an admin resumes it.

    Args:
        directory: on the file system that is written to.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._since = _STEP

    def wrote(self, count: int) -> None:
        """Count bytes that were written.

        Raises:
            RunFailedError: less than the :func:`reserve` is left.
        """
        self._since += count
        if self._since < _STEP:
            return
        self._since = 0
        usage = shutil.disk_usage(self._directory)
        kept = reserve(usage.total)
        if usage.free < kept:
            reason = f"has {usage.free >> 20} MiB left, and {kept >> 20} MiB are kept for others"
            raise RunFailedError(str(self._directory), reason, "free space, or take another place")
