"""What the lines of a run's journal say of its guest: whether it may be held, and for too long.

Only the standard library is imported: the guardian waits with no more than this.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum
from typing import Any

_GRACE_SECONDS = 30
_SAVING_RAM = ("manual", "overlay")
_HELD = ("manual", "paused", "quiesced")
_HELD_ON_REQUEST = ("paused", "quiesced")
_HOLD_NOTES = ("suspended", "freezing")
"""Notes of those strategies, made before the guest is asked to stand still."""
_RELEASE_NOTES = ("resumed", "let-go")
"""Notes of a guest that stands still no more."""


class Window(Enum):
    """What the guardian may have to let go."""

    STILL = "still"
    """A guest that is paused, or whose file systems are frozen."""
    SAVING = "saving"
    """A guest whose RAM is saved: it runs, but for the end, or if it changes RAM too fast."""
    ON_OVERLAYS = "on overlays"
    """A guest that runs, over bases that stand still."""
    COMMITTING = "committing"
    """A guest that is suspended for its commit to catch up with it."""


def window_of(lines: Sequence[dict[str, Any]]) -> Window | None:
    """What may be kept still, from the beginning of the freeze to the end of the release.

    Overlays only to the beginning of the release, since a commit takes its time.
    """
    if not lines:
        return None
    facts = lines[0]["facts"]
    strategy = facts["strategy"]
    ended = {line["step"] for line in lines if line.get("event") == "end"}
    begun = {line["step"] for line in lines if line.get("event") == "begin"}
    if "release" in ended:
        return None
    if last_noted(lines, _HOLD_NOTES, _RELEASE_NOTES) == "let-go" and strategy != "overlay":
        return None
    if "freeze" not in ended and strategy in _SAVING_RAM:
        return Window.SAVING if "freeze" in begun and facts["was"] == "running" else None
    if strategy in _HELD:
        if last_noted(lines, ("held",)):
            return None
        asked = (
            strategy in _HELD_ON_REQUEST
            and last_noted(lines, _HOLD_NOTES, _RELEASE_NOTES) in _HOLD_NOTES
        )
        return Window.STILL if asked or "freeze" in ended else None
    if is_suspended(lines):
        return Window.COMMITTING
    if "release" in begun:
        return None
    return Window.ON_OVERLAYS if "freeze" in ended else None


def is_suspended(lines: Sequence[dict[str, Any]]) -> bool:
    """Whether the run has noted that it suspends the guest, and not that it runs again."""
    return last_noted(lines, ("suspended",), _RELEASE_NOTES) == "suspended"


def is_frozen(lines: Sequence[dict[str, Any]]) -> bool:
    """Whether the freeze has ended."""
    return any(line.get("event") == "end" and line["step"] == "freeze" for line in lines)


def last_noted(lines: Sequence[dict[str, Any]], *wanted: Sequence[str]) -> str:
    """The last of these notes; a guest that came to stand still after it was let go, was not."""
    for at, line in reversed(list(enumerate(lines))):
        note = line.get("note", "")
        undone = note == "let-go" and is_frozen(lines[at:])
        if any(note in each for each in wanted) and not undone:
            return str(note)
    return ""


def exceeds_limits(window: Window, facts: dict[str, Any], seconds: float, deadline: float) -> bool:
    """Frozen for too long; or on overlays that grow too large or have no room left."""
    if window is not Window.ON_OVERLAYS:
        return seconds > deadline
    held = facts.get("window_seconds")
    if held and seconds > held + _GRACE_SECONDS:
        return True  # the run had its time to let the guest go by itself
    paths = [disk["overlay"] for disk in facts["overlays"]]
    try:
        size = sum(os.stat(path).st_blocks * 512 for path in paths)
        room = os.statvfs(facts["overlay_dir"])
    except OSError:  # committed and removed meanwhile
        return False
    limit, floor = facts["overlay_max_mib"], facts["overlay_floor_mib"]
    return bool(limit and size >> 20 > limit) or room.f_bavail * room.f_frsize >> 20 < floor
