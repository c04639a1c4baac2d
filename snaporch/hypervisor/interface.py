"""What snaporch needs of a hypervisor.

:class:`~snaporch.hypervisor.libvirt_driver.LibvirtHypervisor` is the real one; unit tests have a
fake that passes the same contract test.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from snaporch.errors import ExitCode, SnaporchError
from snaporch.faults import Component
from snaporch.model import Domain, DomainState, PauseParts, Strategy, Versions

Tick = Callable[[], None]
"""Called several times a second while something long goes on; raising aborts it."""


def nothing() -> None:
    """A tick that lets things go on."""


class CommitStage(Enum):
    """What :meth:`Hypervisor.commit` tells about itself, before it does it."""

    WAITING = "waiting"
    """Told several times a second; nothing happens."""
    PIVOTING = "pivoting"
    """All bases have caught up; from now on any disk may be on either image."""
    PIVOTED = "pivoted"
    """No disk is being switched any more, and definitions say where each is; some have failed."""
    SUSPENDING = "suspending"
    """The guest is about to be suspended, for the commit to catch up with it."""
    RESUMED = "resumed"
    """The guest runs again."""


Told = Callable[[CommitStage], None]
"""Hears how a commit goes on; raising ends the waiting, not the commit."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a commit waits, in seconds."""

    running: float = 60.0
    """The guest may write faster than the commit copies, before it is suspended."""
    pause: float = 5.0
    """The first suspension; each is followed by as long a rest, and the next is twice as long."""
    stall: float = 300.0
    """Without any progress, before the commit is given up."""


class HypervisorError(SnaporchError):
    """libvirt refused or failed an operation."""

    exit_code = ExitCode.FAILED


class LostLibvirtError(HypervisorError):
    """libvirt went away meanwhile: what became of the operation is not known."""


class CancelledError(HypervisorError):
    """Somebody had libvirt give up what it did (``virsh domjobabort``)."""


@dataclass(frozen=True, slots=True)
class BackingImage:
    """An image in the chain of a disk."""

    path: str
    kind: str
    """libvirt's ``<disk type=…>``: file or block."""
    format: str


@dataclass(frozen=True, slots=True)
class OverlayDisk:
    """A disk whose writes go to ``overlay`` while its ``base`` is snapshotted."""

    target: str
    base: str
    base_kind: str
    """libvirt's ``<disk type=…>`` of the base: file or block."""
    base_format: str
    overlay: str
    below: tuple[BackingImage, ...] = ()
    """The base's own chain, the nearest first."""
    xml: str = ""
    """The ``<disk>`` of the definition, as it was on its base."""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> OverlayDisk:
        """As a journal has it.

        Raises:
            KeyError, TypeError: it is not what it should be.
        """
        below = tuple(BackingImage(**image) for image in value.get("below", ()))
        return cls(**value | {"below": below})


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """An external snapshot with memory: what to switch, what to leave, where RAM goes."""

    uuid: str
    disks: tuple[OverlayDisk, ...]
    manual: tuple[str, ...]
    """Targets that get no overlay and are of the instant only while the guest stays paused."""
    left_out: tuple[str, ...]
    """Targets of the disks that get no overlay; libvirt wants every disk named."""
    ram_path: str


@dataclass(frozen=True, slots=True)
class Blocker:
    """Something that makes some strategies impossible."""

    strategies: frozenset[Strategy]
    reason: str
    step: str
    target: str = ""
    """The disk that has to be left out of the snapshot for it to be in the way no more."""


@dataclass(frozen=True, slots=True)
class Pause:
    """How long the guest stood still, as libvirt's events tell it."""

    began: datetime | None
    milliseconds: float
    since: float | None = None
    """``time.monotonic()`` at its beginning, for a pause that goes on."""
    parts: PauseParts = field(default_factory=PauseParts)
    asked_for: bool = False
    """Somebody suspended the guest while its RAM was saved: it did not only stop for its end."""

    def over(self, released: float, now: float) -> Pause:
        """A pause that ends now, after a release begun at ``released``; on the monotonic clock."""
        if self.since is None:
            return self
        still = self.since + ((self.parts.downtime or 0.0) + (self.parts.switch or 0.0)) / 1000
        parts = replace(
            self.parts, snapshot=milliseconds(released - still), resume=milliseconds(now - released)
        )
        return replace(self, milliseconds=milliseconds(now - self.since), parts=parts)


def milliseconds(seconds: float) -> float:
    """Seconds as a pause is given: in milliseconds, to a tenth, never less than none."""
    return max(round(seconds * 1000, 1), 0.0)


@dataclass(frozen=True, slots=True)
class Vitals:
    """Signs of life of a domain."""

    state: DomainState
    vcpu_ns: int
    """CPU time that its virtual CPUs have had, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """What a file descriptor of an emulator refers to."""

    path: str
    """As the kernel tells it (proc(5), ``/proc/pid/fd``)."""
    status: os.stat_result
    writable: bool


@dataclass(frozen=True, slots=True)
class Screenshot:
    """A screen shot."""

    data: bytes
    suffix: str
    """Of a file with it: ``png``, ``ppm``."""


@dataclass(frozen=True, slots=True)
class Unguarded:
    """Why nothing keeps libvirt from starting a guest on its overlays."""

    reason: str
    step: str
    """What to do."""


class NotFrozenByUsError(HypervisorError):
    """The agent froze nothing: it refused to, or somebody else has its file systems frozen."""


class Hypervisor(Protocol):
    """Operations on domains. A domain is named by its UUID once it has been looked up."""

    def domains(self) -> list[Domain]:
        """Every domain, defined or running, by name; see :attr:`Domain.trouble`."""

    def domain(self, name: str) -> Domain:
        """The domain called ``name``, or with that UUID.

        Raises:
            NotFoundError: there is none.
        """

    def find(self, uuid: str) -> Domain | None:
        """The domain with this UUID, if it exists."""

    def on_change(self, told: Callable[[], None]) -> None:
        """Call ``told`` whenever a domain was defined, undefined, started or stopped.

        From another thread, and perhaps more often than that. Not for what happens while libvirt
        does not answer, nor before somebody asks it anything again.
        """

    def versions(self, domain: Domain) -> Versions:
        """What runs the domain."""

    def emulator_release(self, domain: Domain) -> str:
        """The version of the emulator that runs a domain; empty if nobody knows.

        Raises:
            HypervisorError: libvirt does not tell it.
        """

    def releases(self) -> Mapping[Component, str]:
        """The versions of libvirt and of the emulator that is installed.

        Raises:
            HypervisorError: libvirt does not tell them.
        """

    def reads_zstd(self) -> bool:
        """Whether this libvirt restores save images compressed with zstd (10.4 and later)."""

    def paused_by(self, uuid: str) -> str | None:
        """libvirt's reason when the domain is paused (``user``, ``snapshot``, …), else ``None``."""

    def busy_with(self, uuid: str) -> str | None:
        """The job libvirt runs on the domain (``migration``, ``save``, …), if any."""

    def disk_capacity(self, uuid: str, target: str) -> int:
        """The virtual size of a disk in bytes."""

    def sources(self, uuid: str) -> tuple[dict[str, str] | None, dict[str, str] | None]:
        """Path of every disk by target: in the live XML and in the inactive XML."""

    def capture(self, request: CaptureRequest, tick: Tick, stopped: Tick = nothing) -> Pause:
        """Save RAM while the guest runs, then switch every disk to its overlay in one instant.

        ``stopped`` is called as soon as the guest stands still, whether for the last of its RAM or
        because somebody suspended it: from then on every moment counts.
        When ``tick`` raises, the job is aborted and its end awaited before the error goes on.
        With overlays libvirt lets a guest go on that was suspended meanwhile, too.

        Raises:
            CancelledError: somebody else aborted the job; the guest runs on its bases.
            HypervisorError: the guest runs on its bases, or on overlays if the switch was made.
        """

    def downtime_limit(self, uuid: str) -> int | None:
        """How many milliseconds the last of RAM may take; ``None`` if there is no such limit."""

    def limit_downtime(self, uuid: str, milliseconds: int) -> None:
        """Have QEMU end the live phase of saving RAM when the rest takes no longer than this.

        The limit stays with the emulator. Where there is no such thing, nothing is changed.
        """

    def abort_job(self, uuid: str) -> None:
        """Ask libvirt to give up the job on the domain; no job is not an error."""

    def commit(
        self, uuid: str, disks: Sequence[OverlayDisk], told: Told, patience: Patience
    ) -> None:
        """Bring the overlays' writes into the bases and pivot to them.

        Joins a commit already under way. A guest that writes faster than the commit copies is
        suspended now and then, as ``patience`` says. Returns only when live and inactive XML name
        the bases and no block job is left. A disk that fails does not keep the others from theirs.

        Raises:
            HypervisorError: an overlay may still hold writes; nothing was removed.
        """

    def busy_disks(self, uuid: str) -> set[str]:
        """Targets of the disks that a block job with a mirror (copy, active commit) runs on."""

    def rebase_inactive(self, uuid: str, disks: Sequence[OverlayDisk]) -> None:
        """Make the inactive XML name the bases again, where it names the overlays."""

    def rebase_managed_save(self, uuid: str, disks: Sequence[OverlayDisk]) -> bool:
        """Make the managed save image, if there is one, name the bases instead of the overlays.

        What the overlays held must be in the bases: its RAM goes with the disks as they were.
        Returns whether it named one.
        """

    def unpause_managed_save(self, uuid: str) -> None:
        """Have the managed save image, if there is one, run when it is resumed."""

    def saved_sources(self, uuid: str) -> dict[str, str] | None:
        """Path of every disk by target in the managed save image; ``None`` if there is none."""

    def unguarded(self) -> Unguarded | None:
        """Why libvirt would start a guest on the overlays of a run that was cut short, if so."""

    def starts_at_boot(self, uuid: str) -> bool:
        """Whether libvirt is to start the domain when the host boots."""

    def suspend(self, uuid: str) -> None:
        """Pause a running domain; also what makes a RAM capture converge."""

    def resume(self, uuid: str) -> None:
        """Let a paused domain run; one that runs already is not an error."""

    def agent_answers(self, uuid: str, seconds: int) -> bool:
        """Whether the guest's agent answers a ping within ``seconds``."""

    def freeze_file_systems(self, uuid: str, mountpoints: Sequence[Path], seconds: int) -> int:
        """Have the guest's agent freeze its file systems; how many it froze.

        Raises:
            NotFrozenByUsError: it froze nothing, so there is nothing to thaw.
            HypervisorError: no agent, or it did not answer within ``seconds``: it may have frozen
                some of them, or do so later.
        """

    def thaw_file_systems(self, uuid: str, seconds: int) -> None:
        """Have the agent thaw everything, whoever froze it; until the agent says that it is done.

        Raises:
            HypervisorError: the agent does not answer any more.
        """

    def was_booted(self, uuid: str) -> bool:
        """Whether a guest runs, and is known to have booted in its emulator.

        One that was paused since is not: libvirt keeps only the last reason for which it runs.
        """

    def file_systems_frozen(self, uuid: str) -> bool | None:
        """What the agent says about it; ``None`` when it says nothing."""

    def backing_images(self, domain: Domain, target: str) -> tuple[BackingImage, ...]:
        """The images below a disk's active one that are files or devices, the nearest first."""

    def backing_chain(self, domain: Domain, target: str) -> list[str]:
        """Files and devices below a disk's active image, as the live XML has them."""

    def ram_in_use(self, uuid: str) -> int:
        """Bytes of RAM that a running guest has touched, at most its whole memory."""

    def blockers(self, domain: Domain) -> list[Blocker]:
        """What about the domain stands in the way of which strategies."""

    def destroy(self, uuid: str) -> None:
        """Pull the plug; a domain that is off is not an error."""

    def define(self, xml: str) -> None:
        """Create or replace the persistent definition."""

    def drop_managed_save(self, uuid: str) -> None:
        """Remove libvirt's managed save image, which would otherwise be resumed by a start."""

    def managed_save_path(self, uuid: str) -> Path | None:
        """Where the managed save image of a domain is; ``None`` when it has none."""

    def save(self, uuid: str, path: Path) -> None:
        """Write the RAM of an active domain to a save image and end it, in one instant.

        Raises:
            HypervisorError: it could not be saved; the domain goes on.
        """

    def misfit(self, xml: str, cpu: str = "") -> str:
        """Why this host cannot run a domain with this XML (machine type, CPU); else empty.

        Args:
            cpu: what a guest that sees the host's CPU saw of it (:attr:`Versions.cpu`).
        """

    def restore(self, ram_path: Path, *, running: bool) -> None:
        """Resume a domain from a save image."""

    def start(self, uuid: str, *, paused: bool) -> None:
        """Boot a domain from its definition."""

    def create(self, xml: str, *, paused: bool) -> None:
        """Boot a transient domain: when it ends, libvirt forgets it."""

    def open_files(self, uuid: str) -> list[OpenFile]:
        """Everything the emulator of an active domain has open.

        Raises:
            UnavailableError: it cannot be found, or not looked at.
        """

    def undefine(self, uuid: str) -> None:
        """Forget a domain that is off, with its managed save and UEFI variables; its disks stay.

        One that is not there is not an error.
        """

    def vitals(self, uuid: str) -> Vitals:
        """State and CPU time of a domain."""

    def screenshot(self, uuid: str) -> Screenshot | None:
        """What is on the first screen; ``None`` for a domain without one."""

    def network_is_isolated(self, name: str) -> bool:
        """Whether a libvirt network leads nowhere (``<forward>`` is absent from its XML).

        Raises:
            NotFoundError: there is no such network.
        """

    def set_guest_clock(self, uuid: str) -> bool:
        """Set the guest's clock to the host's; False when no agent answers."""

    def state(self, uuid: str) -> DomainState:
        """The domain's state now."""
