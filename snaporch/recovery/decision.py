"""What to do with one disk of a run that was cut short: a pure function of what can be seen.

Every observable state has exactly one decision, and no decision removes an overlay that may hold a
write which is nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EmulatorState(StrEnum):
    """Whether there is an emulator."""

    ACTIVE = "active"
    """The emulator that was there when the run began."""
    RESTARTED = "restarted"
    """Another emulator: the guest was off in between."""
    OFF = "off"
    GONE = "gone"
    """There is no such domain any more."""


class ImageRef(StrEnum):
    """Where a definition says that the disk is."""

    BASE = "base"
    OVERLAY = "overlay"
    ELSEWHERE = "elsewhere"
    """Another image, or the disk was taken out."""
    NOWHERE = "nowhere"
    """There is no such definition."""


class OverlayState(StrEnum):
    """The overlay file."""

    MISSING = "missing"
    EMPTY = "empty"
    COMMITTED = "committed"
    """It holds writes, and its base holds the same bytes."""
    WRITTEN = "written"
    """It holds writes that its base does not have, or cannot be read."""


class Action(StrEnum):
    """What is done."""

    COMMIT = "commit"
    """Block commit in the running guest, then remove."""
    COMMIT_OFFLINE = "commit offline"
    """qemu-img commit, point the definition at the base, then remove."""
    REMOVE = "remove"
    """Point a stale definition at the base; the overlay holds nothing of its own."""
    QUARANTINE = "quarantine"
    """Nobody uses the overlay, but it may hold the only copy of a write: set it aside."""
    ATTENTION = "attention"
    """The definition names an overlay that is not there."""
    UNDECIDED = "undecided"
    """The emulator ended while it was being switched: either image may be the newer one."""


class UserDecision(StrEnum):
    """What a human has decided of a disk that is undecided: which image is the newer one."""

    OVERLAY = "overlay"
    BASE = "base"


@dataclass(frozen=True, slots=True)
class Observation:
    """What can be seen of one disk."""

    power: EmulatorState
    live: ImageRef
    inactive: ImageRef
    file: OverlayState
    pivoting: bool
    """The switch back to the base had been asked for, and was not known to be over."""
    unused: bool
    """The run is alive, and nobody has had the base since the guest left it for the overlay."""


def decide(sight: Observation, take: UserDecision | None = None) -> Action:
    """The one thing to do; with ``take`` for a disk that is undecided, too."""
    action = _decide(sight)
    if action is not Action.UNDECIDED or take is None:
        return action
    if take is UserDecision.OVERLAY:
        return Action.COMMIT_OFFLINE if sight.power is EmulatorState.OFF else Action.COMMIT
    return (
        Action.QUARANTINE if sight.power is EmulatorState.OFF else action
    )  # it runs on the other one


def _decide(sight: Observation) -> Action:
    if sight.power in (EmulatorState.ACTIVE, EmulatorState.RESTARTED):
        return _with_an_emulator(sight)
    if sight.power is EmulatorState.OFF and sight.inactive is ImageRef.OVERLAY:
        if sight.file is OverlayState.MISSING:
            return Action.ATTENTION
        if sight.file is OverlayState.WRITTEN and sight.pivoting:
            # libvirt may not have come to write down that the guest was on its base, and had
            # written to it: a commit would undo that. As long as both are the same, it cannot.
            return Action.UNDECIDED
        return Action.REMOVE if sight.file is OverlayState.EMPTY else Action.COMMIT_OFFLINE
    if sight.power is EmulatorState.GONE and sight.unused and not sight.pivoting:
        # A transient guest that was shut down: its last writes are in the overlay, and it was the
        # last to write. Quarantine would lose them.
        held = sight.file in (OverlayState.WRITTEN, OverlayState.COMMITTED)
        return Action.COMMIT_OFFLINE if held else Action.REMOVE
    return _used_by_nobody(sight.file)


def _with_an_emulator(sight: Observation) -> Action:
    if sight.live is ImageRef.OVERLAY and sight.power is EmulatorState.RESTARTED and sight.pivoting:
        return Action.UNDECIDED  # it was started on what may be the older one
    if sight.live is ImageRef.OVERLAY:
        return Action.COMMIT  # even if its file was unlinked: QEMU still has it open
    if sight.power is EmulatorState.ACTIVE and sight.live is ImageRef.BASE:
        # The same emulator: a pivot was completed, or it never left its base.
        return Action.REMOVE
    return _used_by_nobody(sight.file)


def _used_by_nobody(file: OverlayState) -> Action:
    return {
        OverlayState.MISSING: Action.REMOVE,
        OverlayState.EMPTY: Action.REMOVE,
        OverlayState.COMMITTED: Action.REMOVE,
        OverlayState.WRITTEN: Action.QUARANTINE,
    }[file]
