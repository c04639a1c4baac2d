"""Reads from a run's journal whether the run may hold its guest, and whether it exceeds a limit.

The deadline is handed over by :mod:`snaporch.recovery.start_guardian`, the limits of overlays by
the journal (:mod:`snaporch.snapshot.plan` sets them from ``paths``).
:mod:`snaporch.recovery.guardian` compares and releases.

Only the standard library is imported, because each guardian keeps this module in memory.
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
"""Notes that these strategies write before they pause the guest or freeze its file systems."""
_RELEASE_NOTES = ("resumed", "released")
"""Notes of a guest that runs again."""


class GuestHold(Enum):
    """How a run holds its guest, so that the guardian may have to release it."""

    STOPPED = "stopped"
    """The guest is paused, or its file systems are frozen."""
    SAVING_RAM = "saving RAM"
    """The guest's RAM is being saved. The guest runs, except at the end of the save, or when it
    changes RAM too fast."""
    ON_OVERLAYS = "on overlays"
    """The guest runs on overlays, and its bases do not change."""
    SUSPENDED_FOR_COMMIT = "suspended for its commit"
    """The guest is suspended so that its commit catches up with its writes."""


def facts_of(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The facts of the run, from the journal's first line; empty if that line is damaged."""
    facts = lines[0].get("facts") if lines else None
    return facts if isinstance(facts, dict) else {}


def hold_of(lines: Sequence[dict[str, Any]]) -> GuestHold | None:
    """How the run holds its guest now; ``None`` if it does not.

    A hold lasts from the beginning of the freeze to the end of the release. A guest on overlays
    counts as held only to the beginning of the release, because a commit takes long.

    Args:
        lines: the journal's lines.
    """
    facts = facts_of(lines)
    if not facts:
        return None
    strategy = facts["strategy"]
    ended = {line["step"] for line in lines if line.get("event") == "end"}
    begun = {line["step"] for line in lines if line.get("event") == "begin"}
    if is_released(lines) or last_noted(lines, ("ending",)):
        return None
    if last_noted(lines, _HOLD_NOTES, _RELEASE_NOTES) == "released" and strategy != "overlay":
        return None
    if "freeze" not in ended and strategy in _SAVING_RAM:
        return GuestHold.SAVING_RAM if "freeze" in begun and facts["was"] == "running" else None
    if strategy in _HELD:
        if last_noted(lines, ("held",)):
            return None
        asked = (
            strategy in _HELD_ON_REQUEST
            and last_noted(lines, _HOLD_NOTES, _RELEASE_NOTES) in _HOLD_NOTES
        )
        return GuestHold.STOPPED if asked or "freeze" in ended else None
    if is_suspended(lines):
        return GuestHold.SUSPENDED_FOR_COMMIT
    if "release" in begun:
        return None
    return GuestHold.ON_OVERLAYS if "freeze" in ended else None


def is_suspended(lines: Sequence[dict[str, Any]]) -> bool:
    """Whether the run noted that it suspends the guest, and no resume after that."""
    return last_noted(lines, ("suspended",), _RELEASE_NOTES) == "suspended"


def is_frozen(lines: Sequence[dict[str, Any]]) -> bool:
    """Whether the freeze has ended."""
    return any(line.get("event") == "end" and line["step"] == "freeze" for line in lines)


def is_released(lines: Sequence[dict[str, Any]]) -> bool:
    """Whether the release has ended: the guest runs on its bases."""
    return any(line.get("event") == "end" and line.get("step") == "release" for line in lines)


def last_noted(lines: Sequence[dict[str, Any]], *wanted: Sequence[str]) -> str:
    """The last of the wanted notes; "" if there is none.

    A ``released`` note does not count if the freeze ended after it: then the guest is held again.
    """
    for at, line in reversed(list(enumerate(lines))):
        note = line.get("note", "")
        undone = note == "released" and is_frozen(lines[at:])
        if any(note in each for each in wanted) and not undone:
            return str(note)
    return ""


def exceeds_limits(hold: GuestHold, facts: dict[str, Any], seconds: float, deadline: float) -> bool:
    """Whether a guest is held too long, or its overlays are too large or have no room left.

    Args:
        seconds: how long the guest has been held.
        deadline: how many seconds it may be held.
    """
    if hold is not GuestHold.ON_OVERLAYS:
        return seconds > deadline
    held = facts.get("window_seconds")
    if held and seconds > held + _GRACE_SECONDS:
        return True  # the run had time to release the guest itself
    paths = [disk["overlay"] for disk in facts["overlays"]]
    try:
        size = sum(os.stat(path).st_blocks * 512 for path in paths)
        room = os.statvfs(facts["overlay_dir"])
    except OSError:  # the overlays were committed and removed meanwhile
        return False
    limit, floor = facts["overlay_max_mib"], facts["overlay_floor_mib"]
    return bool(limit and size >> 20 > limit) or room.f_bavail * room.f_frsize >> 20 < floor


def slows_too_long(facts: dict[str, Any], seconds: float) -> bool:
    """Whether a run that may slow its guest down has saved RAM for too long: it may hang.

    Args:
        seconds: how long it has saved RAM.
    """
    limit = facts.get("slowing_seconds", 0) if facts.get("vcpu_quotas") else 0
    return bool(limit and seconds > limit + _GRACE_SECONDS)
