"""What snaporch needs of a hypervisor.

:class:`~snaporch.hypervisor.facade.LibvirtHypervisor` is the real one; unit tests have a fake that
passes the same contract test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from snaporch.errors import ExitCode, SnaporchError
from snaporch.model import Domain, DomainState, Versions

Tick = Callable[[], None]
"""Called several times a second while something long goes on; raising aborts it."""


class HypervisorError(SnaporchError):
    """libvirt refused or failed an operation."""

    exit_code = ExitCode.FAILED


@dataclass(frozen=True, slots=True)
class OverlayDisk:
    """A disk whose writes go to ``overlay`` while its ``base`` is snapshotted."""

    target: str
    base: str
    base_kind: str
    """libvirt's ``<disk type=…>`` of the base: file or block."""
    base_format: str
    overlay: str


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
class Pause:
    """How long the guest stood still, as libvirt's lifecycle events tell it."""

    began: datetime | None
    milliseconds: float


class Hypervisor(Protocol):
    """Operations on domains. A domain is named by its UUID once it has been looked up."""

    def domains(self) -> list[Domain]:
        """Every domain, defined or running, by name."""

    def domain(self, name: str) -> Domain:
        """The domain called ``name``, or with that UUID.

        Raises:
            NotFoundError: there is none.
        """

    def find(self, uuid: str) -> Domain | None:
        """The domain with this UUID, if it exists."""

    def versions(self, domain: Domain) -> Versions:
        """What runs the domain."""

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

    def capture(self, request: CaptureRequest, tick: Tick) -> Pause:
        """Save RAM while the guest runs, then switch every disk to its overlay in one instant.

        When ``tick`` raises, the job is aborted and its end awaited before the error goes on.

        Raises:
            HypervisorError: the guest runs on its bases, or on overlays if the switch was made.
        """

    def abort_job(self, uuid: str) -> None:
        """Ask libvirt to give up the job on the domain; no job is not an error."""

    def commit(self, uuid: str, disks: Sequence[OverlayDisk], tick: Tick) -> None:
        """Bring the overlays' writes into the bases and pivot to them.

        Joins a commit already under way. Returns only when live and inactive XML name the bases
        and no block job is left.

        Raises:
            HypervisorError: an overlay may still hold writes; nothing was removed.
        """

    def rebase_inactive(self, uuid: str, disks: Sequence[OverlayDisk]) -> None:
        """Make the inactive XML name the bases again, where it names the overlays."""

    def resume(self, uuid: str) -> None:
        """Let a paused domain run."""

    def ram_progress(self, uuid: str) -> tuple[int, int] | None:
        """Bytes of RAM saved and in all, while a job runs."""

    def destroy(self, uuid: str) -> None:
        """Pull the plug; a domain that is off is not an error."""

    def define(self, xml: str) -> None:
        """Create or replace the persistent definition."""

    def drop_managed_save(self, uuid: str) -> None:
        """Remove libvirt's managed save image, which would otherwise be resumed by a start."""

    def restore(self, ram_path: Path, *, running: bool) -> None:
        """Resume a domain from a save image."""

    def start(self, uuid: str, *, paused: bool) -> None:
        """Boot a domain from its definition."""

    def set_guest_clock(self, uuid: str) -> bool:
        """Set the guest's clock to the host's; False when no agent answers."""

    def state(self, uuid: str) -> DomainState:
        """The domain's state now."""
