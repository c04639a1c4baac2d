"""Decides what recovery does with one disk: a pure function of the observed state.

Whether a run's snapshots are kept is decided by :mod:`snaporch.recovery.recover_runs`; what is done
with an interrupted restore by :mod:`snaporch.restore.recovery_decision`.

Every observable state has exactly one decision, and no decision removes an overlay that may hold
the only copy of a write.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EmulatorState(StrEnum):
    """Whether the guest's emulator runs, and whether it is the run's."""

    ACTIVE = "active"
    """The emulator that ran when the run began."""
    RESTARTED = "restarted"
    """Another emulator: the guest was off meanwhile."""
    OFF = "off"
    NO_DOMAIN = "no domain"
    """The domain no longer exists."""


class ImageRef(StrEnum):
    """The image that a definition names for the disk."""

    BASE = "base"
    OVERLAY = "overlay"
    ELSEWHERE = "elsewhere"
    """Another image, or the disk was removed."""
    NOWHERE = "nowhere"
    """There is no such definition (live or inactive)."""


class OverlayState(StrEnum):
    """The state of the overlay file."""

    MISSING = "missing"
    EMPTY = "empty"
    COMMITTED = "committed"
    """It holds writes, and its base holds the same bytes."""
    WRITTEN = "written"
    """It holds writes that its base does not have, or it cannot be read."""


class Action(StrEnum):
    """What recovery does with a disk."""

    COMMIT = "commit"
    """Commit in the running guest (blockcommit), then remove the overlay."""
    COMMIT_OFFLINE = "commit offline"
    """qemu-img commit, point the definition at the base, then remove the overlay."""
    REMOVE = "remove"
    """Point a stale definition at the base; the overlay holds no write of its own."""
    QUARANTINE = "quarantine"
    """No guest uses the overlay, but it may hold the only copy of a write: quarantine it."""
    ATTENTION = "attention"
    """The definition names an overlay that is missing: the admin must act."""
    UNDECIDED = "undecided"
    """The emulator exited during the pivot: either image may be the newer one."""


class UserDecision(StrEnum):
    """Which image of an undecided disk is the newer one, as the admin decided."""

    OVERLAY = "overlay"
    BASE = "base"


@dataclass(frozen=True, slots=True)
class Observation:
    """The observed state of one disk."""

    power: EmulatorState
    live: ImageRef
    inactive: ImageRef
    file: OverlayState
    pivoting: bool
    """The journal notes the begin of a pivot, and not its end."""
    unused: bool
    """The run is alive, and no process used the base since the guest moved to the overlay."""


def decide(observation: Observation, take: UserDecision | None = None) -> Action:
    """The action for a disk.

    Args:
        take: the admin's decision for an undecided disk.
    """
    action = _decide(observation)
    if action is not Action.UNDECIDED or take is None:
        return action
    if take is UserDecision.OVERLAY:
        return Action.COMMIT_OFFLINE if observation.power is EmulatorState.OFF else Action.COMMIT
    return (
        Action.QUARANTINE if observation.power is EmulatorState.OFF else action
    )  # it runs on the other one


def _decide(observation: Observation) -> Action:
    if observation.power in (EmulatorState.ACTIVE, EmulatorState.RESTARTED):
        return _running(observation)
    if observation.power is EmulatorState.OFF and observation.inactive is ImageRef.OVERLAY:
        if observation.file is OverlayState.MISSING:
            return Action.ATTENTION
        if observation.file is OverlayState.WRITTEN and observation.pivoting:
            # libvirt may have been killed before it recorded that the guest was on its base and
            # wrote to it: a commit would undo these writes. If both images are equal, it cannot.
            return Action.UNDECIDED
        return Action.REMOVE if observation.file is OverlayState.EMPTY else Action.COMMIT_OFFLINE
    if (
        observation.power is EmulatorState.NO_DOMAIN
        and observation.unused
        and not observation.pivoting
    ):
        # a transient guest that was shut down: its last writes are in the overlay, and no process
        # wrote to the base since; a quarantine would lose them
        held = observation.file in (OverlayState.WRITTEN, OverlayState.COMMITTED)
        return Action.COMMIT_OFFLINE if held else Action.REMOVE
    return _unused(observation.file)


def _running(observation: Observation) -> Action:
    if (
        observation.live is ImageRef.OVERLAY
        and observation.power is EmulatorState.RESTARTED
        and observation.pivoting
    ):
        return Action.UNDECIDED  # it may have been started on the older image
    if observation.live is ImageRef.OVERLAY:
        return Action.COMMIT  # even if the file was unlinked: QEMU still has it open
    if observation.power is EmulatorState.ACTIVE and observation.live is ImageRef.BASE:
        # the same emulator: the pivot was completed, or the guest never left its base
        return Action.REMOVE
    return _unused(observation.file)


def _unused(file: OverlayState) -> Action:
    return {
        OverlayState.MISSING: Action.REMOVE,
        OverlayState.EMPTY: Action.REMOVE,
        OverlayState.COMMITTED: Action.REMOVE,
        OverlayState.WRITTEN: Action.QUARANTINE,
    }[file]
