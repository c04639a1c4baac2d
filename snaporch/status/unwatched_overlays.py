"""Limits of overlays that no guardian watches, because their journal is missing or unreadable.

Those of a run that a guardian watches are in :mod:`snaporch.recovery.hold_limits`.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from snaporch.config import Paths
from snaporch.snapshot.host_directories import free_mib

_BLOCK = 512
"""Bytes of the blocks that stat(2) counts."""


def exceeded_limit(paths: Paths, directory: Path) -> str:
    """How the overlays of a run exceed a limit; empty if they do not.

    Args:
        paths: has the limits.
        directory: the overlays' directory.
    """
    try:
        found = [each.stat(follow_symlinks=False) for each in os.scandir(directory)]
        room = free_mib(directory)
        since = datetime.fromtimestamp(directory.stat().st_mtime, UTC)
    except FileNotFoundError:  # removed meanwhile
        return ""
    except OSError as error:
        return f"its size cannot be read: {error.strerror}"
    size = sum(each.st_blocks for each in found) * _BLOCK >> 20
    used = f"uses {size} MiB, written since {since:%Y-%m-%d %H:%M} UTC"
    if paths.overlay_max_mib and size > paths.overlay_max_mib:
        return f"{used}: more than paths.overlay_max_mib ({paths.overlay_max_mib})"
    if found and room < paths.overlay_floor_mib:
        floor = f"paths.overlay_floor_mib ({paths.overlay_floor_mib})"
        return f"{used}; its file system has {room} MiB free, less than {floor}"
    return ""
