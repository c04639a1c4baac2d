"""Whether a process group still has processes, also those that a command of it started."""

from __future__ import annotations

import os


def has_members(group: int) -> bool:
    """Whether any process of the group exists; those that were not waited for count."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
