"""What recovery did, or would do, as data; only what prints a result makes its text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Effect(StrEnum):
    """One thing that recovery does. The value is its text, with a place for each detail."""

    THAWED = "thawed the guest"
    RESUMED = "resumed the guest"
    ENDED = "ended the guest, which is fenced"
    RESUMED_SAVED = "resumed the guest, whose RAM libvirt had saved"
    SAVED_WILL_RUN = "changed the RAM that libvirt saved so that the guest runs when it is resumed"
    COMMITTED = "committed {}"
    COMMITTED_OFFLINE = "committed {} while the guest is off"
    SAVED_REBASED = "pointed the RAM that libvirt saved at the base images"
    QUARANTINED = "quarantined {}, which may hold writes of {}"
    NOT_UNDECIDED = "no disk was undecided, so --take had no effect"
    COMPLETED = "completed {} snapshot @{}"
    DESTROYED = "destroyed {}"
    TORN = "{} was taken while overlays were committed: recorded as torn"
    RECOVERED = "recovered the run {}, which had been interrupted"
    STILL_OFF = "is off, and the libvirt hook may have refused to start it: virsh start"
    STARTED = "started it, as libvirt does at boot"
    OTHER_KIND = "{}"
    """What the code for another kind of run reports of it, in words."""

    WILL_HANDLE = "{}: {} {}"
    """Target, decision and path of an overlay."""
    WILL_THAW = "thaw the guest"
    WILL_RESUME = "resume the guest"
    WILL_STAY_PAUSED = "leave the guest paused: the journal does not show by whom"
    WILL_DESTROY = "destroy {}"
    WILL_KEEP = "keep @{} as {}"
    WILL_RECOVER = "recover the run {}, which was interrupted"

    def of(self, *details: object) -> RecoveryResult:
        """This effect on one thing."""
        return RecoveryResult(self, tuple(str(detail) for detail in details))


@dataclass(frozen=True, slots=True)
class RecoveryResult:
    """One effect, with what it concerns; ``str()`` is its text, without the domain's name."""

    effect: Effect
    details: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.effect.value.format(*self.details)
