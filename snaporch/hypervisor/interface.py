"""The operations of a hypervisor that snaporch uses.

:class:`~snaporch.hypervisor.libvirt_driver.LibvirtHypervisor` implements them by libvirt. Unit
tests have a fake, which passes the same contract test.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from snaporch.errors import ExitCode, SnaporchError
from snaporch.hypervisor.commit_timeouts import CommitTimeouts
from snaporch.hypervisor.pause_clock import Pause
from snaporch.known_faults import Component
from snaporch.model import Domain, DomainState, Strategy, Versions

Tick = Callable[[], None]
"""Called several times a second during a long operation. If it raises, the operation is aborted."""


class PausedBy(Enum):
    """Who has paused a guest while its RAM is saved."""

    QEMU = "for the last of its RAM"
    """Or it is not known yet."""
    ANOTHER = "another program suspended it"


OnStop = Callable[[PausedBy], None]
"""Called when the guest is paused."""


def unnoticed(_by: PausedBy) -> None:
    """Ignore that the guest is paused."""


class CommitStage(Enum):
    """Stages that :meth:`Hypervisor.commit` reports before it enters them."""

    WAITING = "waiting"
    """Reported several times a second."""
    PIVOTING = "pivoting"
    """All bases have caught up. From now on each disk may be on either image."""
    PIVOTED = "pivoted"
    """The pivots are over and the definitions name each disk's image. Some disks have failed."""
    SUSPENDING = "suspending"
    """The guest is about to be suspended, so that the commit can catch up."""
    RESUMED = "resumed"
    """The guest runs again."""


OnCommitStage = Callable[[CommitStage], None]
"""Receives the stages of a commit. If it raises, the waiting ends, but not the commit."""


class HypervisorError(SnaporchError):
    """libvirt refused or failed an operation."""

    exit_code = ExitCode.FAILED


class LostLibvirtError(HypervisorError):
    """The connection to libvirt was lost during the operation; its result is unknown."""


class CancelledError(HypervisorError):
    """Another program aborted libvirt's job (``virsh domjobabort``)."""


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
    """The images below the base, the nearest first."""
    xml: str = ""
    """The ``<disk>`` of the definition while it was on its base."""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> OverlayDisk:
        """The disk from a journal.

        Raises:
            KeyError, TypeError: a key is missing or unknown.
        """
        below = tuple(BackingImage(**image) for image in value.get("below", ()))
        return cls(**value | {"below": below})


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """An external snapshot with memory: the disks to switch or to keep, and a path for the RAM."""

    uuid: str
    disks: tuple[OverlayDisk, ...]
    manual: tuple[str, ...]
    """Targets that get no overlay.

    Their snapshots match the RAM only while the guest stays paused.
    """
    left_out: tuple[str, ...]
    """Targets that are excluded. libvirt requires that every disk is listed."""
    ram_path: str


@dataclass(frozen=True, slots=True)
class Blocker:
    """A property of the domain that makes some strategies impossible."""

    strategies: frozenset[Strategy]
    reason: str
    step: str
    target: str = ""
    """The disk that the admin can exclude to remove the blocker; empty if there is none."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """State and CPU time of a domain."""

    state: DomainState
    vcpu_ns: int
    """CPU time of its virtual CPUs, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class DiskWrites:
    """What a guest has written to a disk since its emulator started."""

    requests: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class GuestExit:
    """How a command in a guest has ended."""

    status: int
    """Its exit status; negative for the number of the signal that ended it."""
    output: str
    """The end of its output, and behind it the end of its error output: text of the guest."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file that an emulator has open."""

    path: str
    """As the kernel reports it (proc(5), ``/proc/pid/fd``)."""
    status: os.stat_result
    writable: bool


@dataclass(frozen=True, slots=True)
class Screenshot:
    """An image of a guest's screen."""

    data: bytes
    suffix: str
    """The file name's suffix: ``png``, ``ppm``."""


@dataclass(frozen=True, slots=True)
class HostObject:
    """A network or a storage pool of libvirt."""

    name: str
    xml: str
    """As libvirt has it now, also if it is not active."""
    starts_at_boot: bool
    """Whether libvirt starts it by itself (``autostart``)."""
    active: bool = True


@dataclass(frozen=True, slots=True)
class StartHookProblem:
    """Why libvirt would start a guest on its overlays without checking them."""

    reason: str
    step: str
    """The remedy."""


class NotFrozenByUsError(HypervisorError):
    """The agent froze nothing: it refused, or another program has frozen the file systems."""


class Hypervisor(Protocol):
    """Operations on domains. After a lookup a domain is identified by its UUID."""

    def domains(self) -> list[Domain]:
        """All domains, defined or running, sorted by name; see :attr:`Domain.problem`."""

    def domain(self, name: str) -> Domain:
        """The domain called ``name``, or with that UUID.

        Raises:
            NotFoundError: there is none.
        """

    def find(self, uuid: str) -> Domain | None:
        """The domain with this UUID, if it exists."""

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever a domain was defined, undefined, started or stopped.

        The calls come from another thread, possibly more often than there are changes. There are
        none for changes while libvirt does not answer, until the next call of any method.
        """

    def versions(self, domain: Domain) -> Versions:
        """The versions of snaporch, libvirt, emulator and machine, and the CPU the domain sees."""

    def emulator_release(self, domain: Domain) -> str:
        """The version of the emulator that runs a domain; empty if it is unknown.

        Raises:
            HypervisorError: libvirt does not report it.
        """

    def releases(self) -> Mapping[Component, str]:
        """The versions of libvirt and of the installed emulator.

        Raises:
            HypervisorError: libvirt does not report them.
        """

    def reads_zstd(self) -> bool:
        """Whether this libvirt can restore save images compressed with zstd (10.4 and later)."""

    def paused_by(self, uuid: str) -> str | None:
        """libvirt's reason for a pause (``user``, ``snapshot``, …); ``None`` if not paused."""

    def busy_with(self, uuid: str) -> str | None:
        """The job that libvirt runs on the domain (``migration``, ``save``, …), if any."""

    def disk_capacity(self, uuid: str, target: str) -> int:
        """The virtual size of a disk in bytes."""

    def disk_writes(self, uuid: str) -> dict[str, DiskWrites]:
        """What an active domain has written to each disk, by target.

        Empty if the emulator cannot be asked at once, as during a job.
        """

    def sources(self, uuid: str) -> tuple[dict[str, str] | None, dict[str, str] | None]:
        """The path of every disk by target: in the live XML and in the inactive XML."""

    def capture(self, request: CaptureRequest, tick: Tick, stopped: OnStop = unnoticed) -> Pause:
        """Save the RAM while the guest runs, then switch all disks to overlays at one instant.

        With overlays libvirt resumes a guest even if another program suspended it meanwhile, and
        after an error in any case.

        Args:
            tick: if it raises, the job is aborted, and its end awaited before the error continues.
            stopped: called as soon as the guest is paused, for the last of its RAM or because
                another program suspended it, and until the job ends. It must be quick.

        Raises:
            CancelledError: another program aborted the job; the guest runs on its bases.
            HypervisorError: the guest runs on its bases, or on overlays if they were switched.
        """

    def downtime_limit(self, uuid: str) -> int | None:
        """The milliseconds that saving the last of RAM may take; ``None`` without a limit."""

    def limit_downtime(self, uuid: str, milliseconds: int) -> None:
        """Let QEMU end the live phase of saving RAM when the rest takes at most this long.

        The emulator keeps the limit. A hypervisor without such a limit ignores the call.
        """

    def vcpu_quotas(self, uuid: str) -> dict[str, str]:
        """The CPU time that each vCPU of a running guest may use, by control group.

        Empty if the vCPUs have no control groups of their own, or the guest does not run.
        """

    def set_vcpu_quotas(self, quotas: Mapping[str, str]) -> None:
        """Set the CPU time of vCPUs, also while libvirt saves RAM.

        A vCPU that is gone is no error.

        Raises:
            HypervisorError: the kernel refuses it.
        """

    def abort_job(self, uuid: str) -> None:
        """Request that libvirt aborts the job on the domain. It is no error if there is none."""

    def commit(
        self,
        uuid: str,
        disks: Sequence[OverlayDisk],
        on_stage: OnCommitStage,
        patience: CommitTimeouts,
    ) -> None:
        """Commit the overlays into the bases and pivot to the bases.

        Joins a commit that already runs. A guest that writes faster than the commit copies is
        suspended from time to time, as ``patience`` says. Returns only when live and inactive XML
        name the bases and no block job is left. One failed disk does not stop the commits of the
        others.

        Raises:
            HypervisorError: an overlay may still contain writes; nothing was removed.
        """

    def busy_disks(self, uuid: str) -> set[str]:
        """Targets of the disks with a block job that mirrors (copy, active commit)."""

    def rebase_inactive(self, uuid: str, disks: Sequence[OverlayDisk]) -> None:
        """Replace the overlays by their bases in the inactive XML."""

    def rebase_managed_save(self, uuid: str, disks: Sequence[OverlayDisk]) -> bool:
        """Replace the overlays by their bases in the managed save image, if there is one.

        The overlays must be committed, because the image's RAM belongs to the disks with these
        writes.

        Returns: whether the image contained an overlay.
        """

    def unpause_managed_save(self, uuid: str) -> None:
        """Let the guest run when its managed save image, if there is one, is resumed."""

    def saved_sources(self, uuid: str) -> dict[str, str] | None:
        """The path of every disk by target in the managed save image; ``None`` if there is none."""

    def is_confined(self, uuid: str) -> bool:
        """Whether AppArmor confines the running guest."""

    def start_hook_problem(self) -> StartHookProblem | None:
        """Why libvirt would start a guest on the overlays of an interrupted run, if so."""

    def starts_at_boot(self, uuid: str) -> bool:
        """Whether libvirt starts the domain when the host boots."""

    def suspend(self, uuid: str) -> None:
        """Pause a running domain. A RAM capture converges then."""

    def resume(self, uuid: str) -> None:
        """Resume a paused domain. A running domain is no error."""

    def agent_answers(self, uuid: str, seconds: int) -> bool:
        """Whether the guest's agent answers a ping within ``seconds``."""

    def start_in_guest(self, uuid: str, words: Sequence[str], seconds: int) -> int:
        """Let the guest's agent start a command, as the agent's user; return its process number.

        Args:
            words: the program, which is looked for in the agent's ``PATH``, and its arguments.
            seconds: for the agent's answer, not for the command.

        Raises:
            HypervisorError: the agent does not answer, does not run commands, or has no such
                program.
        """

    def exit_in_guest(self, uuid: str, pid: int, seconds: int) -> GuestExit | None:
        """How a command of :meth:`start_in_guest` has ended; the agent reports this only once.

        Returns:
            ``None`` while it runs, or if the agent does not answer within ``seconds``.

        Raises:
            HypervisorError: the agent does not know the command, or the domain does not run.
        """

    def freeze_file_systems(self, uuid: str, mountpoints: Sequence[Path], seconds: int) -> int:
        """Let the guest's agent freeze file systems.

        Args:
            mountpoints: the file systems to freeze; all if empty.

        Returns: the number of frozen file systems.

        Raises:
            NotFrozenByUsError: it froze nothing, so there is nothing to thaw.
            HypervisorError: no agent, or no answer within ``seconds``: it may have frozen some file
                systems, or may do so later.
        """

    def thaw_file_systems(self, uuid: str, seconds: int) -> None:
        """Let the agent thaw all file systems, until it confirms that they are thawed.

        It does not matter which program froze them.

        Raises:
            HypervisorError: the agent does not answer.
        """

    def was_booted(self, uuid: str) -> bool:
        """Whether a guest runs and its emulator is known to have booted it.

        ``False`` after a pause: libvirt keeps only the last reason for which the guest runs.
        """

    def file_systems_frozen(self, uuid: str) -> bool | None:
        """Whether the agent reports frozen file systems; ``None`` if it does not answer."""

    def backing_images(self, domain: Domain, target: str) -> tuple[BackingImage, ...]:
        """The files and devices below a disk's active image, the nearest first."""

    def backing_chain(self, domain: Domain, target: str) -> list[str]:
        """The paths of files and devices below a disk's active image, from the live XML."""

    def ram_in_use(self, uuid: str) -> int:
        """Bytes of RAM that a running guest has touched, at most its total memory."""

    def dirty_rates(self, uuids: Sequence[str]) -> dict[str, int]:
        """MiB of RAM that running guests change a second, by UUID; measured for a second.

        A guest is missing if its emulator cannot measure that, or a job runs on it.
        """

    def resident_bytes(self, uuid: str) -> int:
        """Bytes of memory that the emulator of a guest holds, without asking libvirt; 0 if unknown.

        Huge pages are not counted.
        """

    def blockers(self, domain: Domain) -> list[Blocker]:
        """What prevents which strategies for the domain."""

    def destroy(self, uuid: str) -> None:
        """Stop the domain immediately. A domain that is off is no error."""

    def define(self, xml: str, *, validate: bool = False) -> None:
        """Create or replace the persistent definition.

        Args:
            validate: refuse what libvirt's schema does not have, which libvirt ignores otherwise.
        """

    def drop_managed_save(self, uuid: str) -> None:
        """Remove libvirt's managed save image; otherwise a start would resume it."""

    def managed_save_path(self, uuid: str) -> Path | None:
        """The path of a domain's managed save image; ``None`` if it has none."""

    def save(self, uuid: str, path: Path) -> None:
        """Save the RAM of an active domain to a save image and end the domain, at one instant.

        Raises:
            HypervisorError: it could not be saved; the domain continues.
        """

    def incompatibility(self, xml: str, cpu: str = "") -> str:
        """Why this host cannot run a domain with this XML (machine type, CPU); else empty.

        Args:
            cpu: the host's CPU as the guest saw it (:attr:`Versions.cpu`).
        """

    def restore(self, ram_path: Path, *, running: bool) -> None:
        """Resume a domain from a save image."""

    def start(self, uuid: str, *, paused: bool) -> None:
        """Boot a domain from its definition."""

    def create(self, xml: str, *, paused: bool, validate: bool = False) -> None:
        """Boot a transient domain, which libvirt forgets when it ends.

        Args:
            validate: see :meth:`define`.
        """

    def open_files(self, uuid: str) -> list[OpenFile]:
        """All files that the emulator of an active domain has open.

        Raises:
            UnavailableError: its process cannot be found or inspected.
        """

    def undefine(self, uuid: str) -> None:
        """Remove the definition of a domain that is off, its managed save and UEFI variables.

        Its disks stay. A domain that does not exist is no error.
        """

    def vitals(self, uuid: str) -> Vitals:
        """The state and CPU time of a domain."""

    def screenshot(self, uuid: str) -> Screenshot | None:
        """The image of the first screen; ``None`` for a running domain without one.

        Raises:
            HypervisorError: the domain has ended, or no image can be taken.
        """

    def network_is_isolated(self, name: str) -> bool:
        """Whether a libvirt network has no connection to others (no ``<forward>`` in its XML).

        Raises:
            NotFoundError: there is no such network.
        """

    def defined_networks(self) -> list[HostObject]:
        """All networks of libvirt, also those that are not active; none without its driver."""

    def defined_storage_pools(self) -> list[HostObject]:
        """All storage pools of libvirt, also those that are not active; none without its driver."""

    def define_network(self, xml: str, *, starts_at_boot: bool) -> None:
        """Define a network that does not exist, and start it.

        Raises:
            HypervisorError: it was not started, and is not defined.
        """

    def define_storage_pool(self, xml: str, *, starts_at_boot: bool) -> None:
        """Define a storage pool that does not exist, and start it.

        Raises:
            HypervisorError: it was not started, and is not defined.
        """

    def start_at_boot(self, uuid: str) -> None:
        """Let libvirt start the domain when the host boots."""

    def emulators(self) -> frozenset[str]:
        """The paths of the emulators that libvirt has found on this host."""

    def set_guest_clock(self, uuid: str) -> bool:
        """Set the guest's clock to the host's; ``False`` if no agent answers."""

    def state(self, uuid: str) -> DomainState:
        """The domain's current state."""
