"""A hypervisor in memory."""

from __future__ import annotations

import errno
import math
import os
import shutil
import stat
import threading
import time
import uuid as uuids
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from xml.etree import ElementTree

import zstandard

from fakes import images
from fakes.hooks import Hooks
from snaporch.errors import NoSuchDomainError, NotFoundError
from snaporch.hypervisor import domain_xml
from snaporch.hypervisor.commit_timeouts import CommitTimeouts
from snaporch.hypervisor.definition_blockers import find_domain_blockers
from snaporch.hypervisor.interface import (
    BackingImage,
    Blocker,
    CancelledError,
    CaptureRequest,
    CommitStage,
    DiskWrites,
    GuestExit,
    HostObject,
    HypervisorError,
    NotFrozenByUsError,
    OnCommitStage,
    OnStop,
    OpenFile,
    OverlayDisk,
    Pause,
    PausedBy,
    Screenshot,
    StartHookProblem,
    Tick,
    Vitals,
    unnoticed,
)
from snaporch.known_faults import Component
from snaporch.model import Domain, DomainState, Owner, PauseParts, Versions

_CAPACITY = 1 << 20
_TICK_SECONDS = 0.005


AGENT_PROGRAM = "/usr/sbin/qemu-ga"


class Agent(StrEnum):
    """The guest's agent."""

    MISSING = "missing"
    ANSWERS = "answers"
    SILENT = "silent"
    """Connected, but never answers."""
    SLOW = "slow"
    """Freezes, but answers only after libvirt has given up."""
    LATE = "late"
    """Answers nothing while it freezes, and freezing takes so long that it stays silent."""
    DUMB = "dumb"
    """Forbids the request for its status."""


@dataclass(frozen=True)
class _Checkpoint:
    name: str

    def getName(self) -> str:  # noqa: N802 - libvirt's
        return self.name


@dataclass
class FakeGuest:
    """A domain: the data that libvirt has of it, and its RAM."""

    name: str
    uuid: str
    inactive: str | None
    live: str | None = None
    state: DomainState = DomainState.OFF
    paused_reason: str | None = None
    job: str | None = None
    outdated: bool = False
    """Its emulator's program was replaced by another version after the start."""
    ram: bytes = b""
    ram_bytes: int | None = None
    """The RAM in use, as QEMU reports it; the length of ``ram`` if ``None``."""
    misses_resume: bool = False
    """It does not run when it is resumed the next time."""
    managed_save: bool = False
    autostart: bool = False
    agent: Agent = Agent.MISSING
    frozen: bool = False
    running_reason: str = "booted"
    """The reason for which it runs: libvirt keeps only the last one."""
    boot: int = 1
    """Counts the emulators of this domain."""
    writes_fast: bool = False
    """It writes faster than a commit copies."""
    images_inactive: bool = False
    """QEMU closes its images after the RAM has been saved, until the guest runs again."""
    committing: set[str] = field(default_factory=set)
    checkpoints: list[str] = field(default_factory=list)
    vcpu_ns: int = 0
    downtime_limit: int = 300
    """In milliseconds; by default QEMU's own."""
    resident_bytes: int = 2 << 20
    vcpu_quotas: dict[str, str] = field(default_factory=lambda: {"/machine/vcpu0": "max 100000"})
    """By control group."""
    dirty_rate: int | None = None
    """MiB of RAM that it changes a second; ``None`` if its QEMU cannot measure that."""
    hangs: bool = False
    """It is running, but its CPUs do nothing."""
    screen: bytes | None = None
    writes: dict[str, DiskWrites] = field(default_factory=dict)
    """What it has written to its disks, by target; the others have been written nothing."""
    opened: list[str] = field(default_factory=list)
    """Files that its emulator has open for writing, besides its disks."""
    programs: dict[str, GuestExit | None] = field(default_factory=dict)
    """The programs in it besides its agent, and how they end; ``None``: they run on."""
    processes: list[GuestExit | None] = field(default_factory=list)
    """Started by the agent; by process number, counted from 1."""

    def listAllCheckpoints(self, flags: int) -> list[_Checkpoint]:  # noqa: N802 - libvirt's
        """The method of libvirt's handle that the search for blockers calls."""
        return [_Checkpoint(name) for name in self.checkpoints]

    def sources(self) -> tuple[dict[str, str] | None, dict[str, str] | None]:
        """Paths by target, live and inactive."""
        return _paths(self.live), _paths(self.inactive)


class FakeHypervisor:
    """A :class:`~snaporch.hypervisor.interface.Hypervisor`.

    Places for hooks, besides one for each act (``hypervisor.commit`` …): ``capture.writing`` when
    half of the RAM is written. ``capture.switched`` when the disks are on their overlays and the
    guest is still paused. ``commit.suspended`` when a commit has suspended a guest that writes
    faster. ``commit.pivoting`` before the disks are switched back. ``agent.frozen`` when the file
    systems are frozen, before the caller gets the answer.
    """

    def __init__(self, *guests: FakeGuest, hooks: Hooks | None = None) -> None:
        self.hooks = hooks or Hooks()
        self.guests = {guest.uuid: guest for guest in guests}
        self.zstd = True
        self.installed = {Component.LIBVIRT: "12.1.0", Component.QEMU: "11.0.2"}
        self.machines = {"pc-q35-9.2"}
        self.cpu_incompatibility = ""
        self.cpu = "<cpu><model>Skylake</model></cpu>"
        """The host's CPU, as guests with ``host-passthrough`` see it."""
        self.managed_saves: dict[str, Path] = {}
        self.overlays_must_exist = True
        self.why_unguarded: StartHookProblem | None = None
        self.garbles_pipes = False
        """Whether the RAM that is saved through a pipe is no save image."""
        self.reports_pauses = True
        """Whether a capture reports when the guest pauses."""
        self.confined: set[str] = set()
        """Guests, by UUID, that AppArmor confines."""
        self.commit_timeouts: list[CommitTimeouts] = []
        """Those of each commit."""
        self.networks: dict[str, bool] = {}
        """Names of libvirt's networks, and whether each is isolated."""
        self.network_objects: dict[str, HostObject] = {}
        self.pool_objects: dict[str, HostObject] = {}
        self.emulator_paths = frozenset({"/usr/bin/qemu-system-x86_64"})
        self.restored: Callable[[FakeGuest], None] = lambda _guest: None
        """Called with every guest that was resumed from RAM, or booted."""

        self.listeners: list[Callable[[], None]] = []

    def happen(self) -> None:
        """Report to all listeners that a domain changed."""
        for callback in self.listeners:
            callback()

    # -- queries ---------------------------------------------------------------------------------

    def on_change(self, callback: Callable[[], None]) -> None:
        """See the protocol."""
        self.hooks.reach("hypervisor.on_change")
        self.listeners.append(callback)

    def domains(self) -> list[Domain]:
        """See the protocol."""
        found = [_domain(guest) for guest in self.guests.values()]
        return sorted(found, key=lambda domain: domain.name)

    def domain(self, name: str) -> Domain:
        """See the protocol."""
        for guest in self.guests.values():
            if name in (guest.name, guest.uuid):
                return _domain(guest)
        raise NoSuchDomainError(name, "no such domain")

    def find(self, uuid: str) -> Domain | None:
        """See the protocol."""
        self.hooks.reach("hypervisor.find")
        guest = self.guests.get(uuid)
        return _domain(guest) if guest else None

    def versions(self, domain: Domain) -> Versions:
        """See the protocol."""
        self.hooks.reach("hypervisor.versions")
        found = self.installed
        cpu = domain_xml.parse(domain.live_xml).find("cpu") if domain.live_xml else None
        own = cpu is not None and cpu.get("mode") in ("host-passthrough", "maximum")
        return Versions(
            "0.0",
            found[Component.LIBVIRT],
            found[Component.QEMU],
            domain.machine,
            self.cpu if own else "",
        )

    def emulator_release(self, domain: Domain) -> str:
        """See the protocol."""
        return "" if self.guests[domain.uuid].outdated else self.installed[Component.QEMU]

    def releases(self) -> Mapping[Component, str]:
        """See the protocol."""
        self.hooks.reach("hypervisor.releases")
        return self.installed

    def reads_zstd(self) -> bool:
        """See the protocol."""
        return self.zstd

    def state(self, uuid: str) -> DomainState:
        """See the protocol."""
        return self.guests[uuid].state if uuid in self.guests else DomainState.OFF

    def paused_by(self, uuid: str) -> str | None:
        """See the protocol."""
        self.hooks.reach("hypervisor.paused_by")
        return self._guest(uuid).paused_reason

    def busy_with(self, uuid: str) -> str | None:
        """See the protocol."""
        self.hooks.reach("hypervisor.busy_with")
        return self._guest(uuid).job

    def disk_capacity(self, uuid: str, target: str) -> int:
        """See the protocol."""
        self.hooks.reach("hypervisor.disk_capacity")
        if self.domain(uuid).disk(target) is None:
            raise HypervisorError(target, "invalid path: no such disk")
        return _CAPACITY

    def disk_writes(self, uuid: str) -> dict[str, DiskWrites]:
        """See the protocol."""
        self.hooks.reach("hypervisor.disk_writes")
        guest = self._guest(uuid)
        if guest.job:
            return {}
        targets = [disk.target for disk in self.domain(uuid).disks]
        return {target: guest.writes.get(target, DiskWrites()) for target in targets}

    def sources(self, uuid: str) -> tuple[dict[str, str] | None, dict[str, str] | None]:
        """See the protocol."""
        guest = self.guests.get(uuid)
        return guest.sources() if guest else (None, None)

    def backing_images(self, domain: Domain, target: str) -> tuple[BackingImage, ...]:
        """Like backing_chain, with formats."""
        return domain_xml.backing_images(domain_xml.parse(domain.live_xml or ""), target)

    def backing_chain(self, domain: Domain, target: str) -> list[str]:
        """See the protocol."""
        return domain_xml.backing_chain(domain_xml.parse(domain.live_xml or ""), target)

    def ram_in_use(self, uuid: str) -> int:
        """See the protocol."""
        guest = self._guest(uuid)
        if guest.live is None:
            raise HypervisorError(guest.name, "domain is not running")
        root = domain_xml.parse(guest.live)
        if domain_xml.huge_memory(root):
            return int(domain_xml.text(root, "memory")) << 10
        return len(guest.ram) if guest.ram_bytes is None else guest.ram_bytes

    def dirty_rates(self, uuids: Sequence[str]) -> dict[str, int]:
        """See the protocol."""
        found = {uuid: self.guests[uuid] for uuid in uuids if uuid in self.guests}
        running = {uuid: each for uuid, each in found.items() if each.live is not None}
        return {u: each.dirty_rate for u, each in running.items() if each.dirty_rate is not None}

    def blockers(self, domain: Domain) -> list[Blocker]:
        """See the protocol; it looks at the same XML as libvirt's."""
        self.hooks.reach("hypervisor.blockers")
        return find_domain_blockers(self._guest(domain.uuid), domain)

    # -- changes ---------------------------------------------------------------------------------

    def capture(self, request: CaptureRequest, tick: Tick, stopped: OnStop = unnoticed) -> Pause:
        """See the protocol."""
        guest = self._guest(request.uuid)
        self.hooks.act("hypervisor.capture", guest.name)
        self._check_request(guest, request)
        ran = guest.state is DomainState.RUNNING
        guest.job = "snapshot"
        try:
            self._save(guest, request, tick, stopped)
        except BaseException:
            if ran and guest.paused_reason == "snapshot":
                self._let_run(guest)
            raise
        finally:
            guest.job = None
        began, since = datetime.now(UTC), time.monotonic()
        guest.images_inactive = True
        asked_for = ran and guest.paused_reason == "snapshot"
        if guest.state is DomainState.RUNNING:
            guest.state, guest.paused_reason = DomainState.PAUSED, "unknown"
        for disk in request.disks:
            guest.live = _on_overlay(guest.live, disk, chain=True)
            guest.inactive = _on_overlay(guest.inactive, disk)
        self.hooks.reach("capture.switched")
        if not ran:
            return Pause(None, 0.0)
        if request.manual:
            return Pause(began, 0.0, since, PauseParts(0.0, 0.0), asked_for)
        self._let_run(guest)
        return Pause(began, 7.5, parts=PauseParts(6.0, 1.5), asked_for=asked_for)

    def _check_request(self, guest: FakeGuest, request: CaptureRequest) -> None:
        if guest.live is None:
            raise HypervisorError(guest.name, "domain is not running")
        if domain_xml.mirrors(domain_xml.parse(guest.live)):
            raise HypervisorError(guest.name, "domain has active block job")
        named = {disk.target for disk in request.disks}
        named |= {*request.manual, *request.left_out}
        for disk in _domain(guest).disks:
            if disk.target not in named:
                raise HypervisorError(disk.target, "is not named in the request")
        for overlay in request.disks:
            if self.overlays_must_exist and not os.path.exists(overlay.overlay):
                raise HypervisorError(overlay.target, f"no such file: {overlay.overlay}")

    def _save(self, guest: FakeGuest, request: CaptureRequest, tick: Tick, stopped: OnStop) -> None:
        goes_on = guest.state is DomainState.RUNNING and not request.manual
        path = Path(request.ram_path)
        garbled = self.garbles_pipes and path.is_fifo()
        call = _SaveCall(path, f"{guest.live}\0".encode(), guest.ram, goes_on, garbled=garbled)
        call.start()
        try:
            call.half.wait()
            self.hooks.reach("capture.writing")
            self._look(guest, stopped)
            tick()
            _check_job(guest)
            self._look(guest, stopped)
            if self.reports_pauses and guest.paused_reason != "snapshot":
                stopped(PausedBy.QEMU)
            call.go_on.set()
            while call.is_alive():
                call.join(_TICK_SECONDS)
                tick()
        except BaseException:
            call.aborted = True
            raise
        finally:
            call.go_on.set()
            call.join()
        if call.error is not None:
            reason = call.error.strerror
            raise HypervisorError(guest.name, f"libvirt's snapshot failed: {reason}")

    def _look(self, guest: FakeGuest, stopped: OnStop) -> None:
        """Report a guest that another program has suspended."""
        if guest.paused_reason == "snapshot":
            stopped(PausedBy.ANOTHER)
            self.hooks.reach("capture.paused")

    def downtime_limit(self, uuid: str) -> int | None:
        """See the protocol."""
        guest = self.guests.get(uuid)
        return None if guest is None or guest.live is None else guest.downtime_limit

    def limit_downtime(self, uuid: str, milliseconds: int) -> None:
        """See the protocol."""
        guest = self.guests.get(uuid)
        if guest is not None and guest.live is not None:
            guest.downtime_limit = milliseconds

    def vcpu_quotas(self, uuid: str) -> dict[str, str]:
        """See the protocol."""
        guest = self.guests.get(uuid)
        return {} if guest is None or guest.live is None else dict(guest.vcpu_quotas)

    def set_vcpu_quotas(self, quotas: Mapping[str, str]) -> None:
        """See the protocol."""
        for guest in self.guests.values():
            guest.vcpu_quotas |= {key: quotas[key] for key in quotas if key in guest.vcpu_quotas}

    def resident_bytes(self, uuid: str) -> int:
        """See the protocol."""
        guest = self.guests.get(uuid)
        return 0 if guest is None or guest.live is None else guest.resident_bytes

    def abort_job(self, uuid: str) -> None:
        """See the protocol."""
        self.hooks.act("hypervisor.abort_job", uuid)
        if uuid in self.guests:
            self.guests[uuid].job = None

    def commit(
        self,
        uuid: str,
        disks: Sequence[OverlayDisk],
        on_stage: OnCommitStage,
        patience: CommitTimeouts,
    ) -> None:
        """See the protocol."""
        guest = self._guest(uuid)
        self.commit_timeouts.append(patience)
        self.hooks.act("hypervisor.commit", *(disk.target for disk in disks))
        live, _ = guest.sources()
        if guest.live is None:
            raise HypervisorError(guest.name, "commit: domain is not running")
        there = (live or {}).get
        lost = [disk for disk in disks if there(disk.target) not in (disk.base, disk.overlay)]
        disks = [disk for disk in disks if disk not in lost]
        if guest.images_inactive and any((live or {})[d.target] == d.overlay for d in disks):
            raise HypervisorError(guest.name, "commit: its images are inactive")
        on_stage(CommitStage.WAITING)
        fast = guest.writes_fast and guest.state is DomainState.RUNNING
        fast = fast and math.isfinite(patience.running)
        if fast:
            on_stage(CommitStage.SUSPENDING)
            guest.state, guest.paused_reason = DomainState.PAUSED, "user"
            self.hooks.reach("commit.suspended")
        on_overlays = {d.target for d in disks if (live or {})[d.target] == d.overlay}
        if on_overlays:
            guest.committing = on_overlays
            on_stage(CommitStage.PIVOTING)
            self.hooks.reach("commit.pivoting")
            guest.committing = set()
        if guest.live is not None:
            for disk in disks:
                _copy_down(disk, (live or {})[disk.target])
            guest.live = domain_xml.with_bases(guest.live, disks) or guest.live
        if fast:
            self._let_run(guest)
            on_stage(CommitStage.RESUMED)
        self._rebase(guest, disks)
        if lost:
            on_stage(CommitStage.PIVOTED)
            raise HypervisorError(lost[0].target, "is neither on its overlay nor on its base")

    def busy_disks(self, uuid: str) -> set[str]:
        """See the protocol."""
        self.hooks.reach("hypervisor.busy_disks")
        guest = self._guest(uuid)
        if guest.live is None:
            return set()
        return guest.committing | set(domain_xml.mirrors(domain_xml.parse(guest.live)))

    def rebase_inactive(self, uuid: str, disks: Sequence[OverlayDisk]) -> None:
        """See the protocol."""
        self.hooks.act("hypervisor.rebase_inactive")
        if uuid in self.guests:
            self._rebase(self.guests[uuid], disks)

    def rebase_managed_save(self, uuid: str, disks: Sequence[OverlayDisk]) -> bool:
        """See the protocol."""
        if not self._guest(uuid).managed_save or uuid not in self.managed_saves:
            return False
        self.hooks.act("hypervisor.rebase_managed_save")
        xml, ram = _load(self.managed_saves[uuid])
        rebased = domain_xml.with_bases(xml, disks)
        if rebased is not None:
            image = images.image(f"{rebased}\0".encode(), ram, running=1)
            self.managed_saves[uuid].write_bytes(image)
        return rebased is not None

    def unpause_managed_save(self, uuid: str) -> None:
        """See the protocol."""
        self.hooks.act("hypervisor.unpause_managed_save")
        if self._guest(uuid).managed_save and uuid in self.managed_saves:
            xml, ram = _load(self.managed_saves[uuid])
            image = images.image(f"{xml}\0".encode(), ram, running=1)
            self.managed_saves[uuid].write_bytes(image)

    def saved_sources(self, uuid: str) -> dict[str, str] | None:
        """See the protocol."""
        if not self._guest(uuid).managed_save or uuid not in self.managed_saves:
            return None
        return _paths(_load(self.managed_saves[uuid])[0])

    def is_confined(self, uuid: str) -> bool:
        """See the protocol."""
        return uuid in self.confined

    def start_hook_problem(self) -> StartHookProblem | None:
        """See the protocol."""
        return self.why_unguarded

    def starts_at_boot(self, uuid: str) -> bool:
        """See the protocol."""
        return self._guest(uuid).autostart

    def _rebase(self, guest: FakeGuest, disks: Sequence[OverlayDisk]) -> None:
        if guest.inactive is not None:
            guest.inactive = domain_xml.with_bases(guest.inactive, disks) or guest.inactive

    def suspend(self, uuid: str) -> None:
        """See the protocol."""
        guest = self._guest(uuid)
        self.hooks.act("hypervisor.suspend", guest.name)
        if guest.live is None:
            raise HypervisorError(guest.name, "domain is not running")
        if guest.state is DomainState.RUNNING:
            reason = "snapshot" if guest.job == "snapshot" else "user"
            guest.state, guest.paused_reason = DomainState.PAUSED, reason

    def resume(self, uuid: str) -> None:
        """See the protocol."""
        guest = self._guest(uuid)
        self.hooks.act("hypervisor.resume", guest.name)
        if guest.live is None:
            raise HypervisorError(guest.name, "domain is not running")
        self._let_run(guest)
        self.hooks.reach("hypervisor.resumed")

    def _let_run(self, guest: FakeGuest) -> None:
        if guest.misses_resume:
            guest.misses_resume = False
            return
        if guest.state is not DomainState.RUNNING:
            guest.running_reason = "unpaused"
        guest.state, guest.paused_reason = DomainState.RUNNING, None
        guest.images_inactive = False

    def agent_answers(self, uuid: str, seconds: int) -> bool:
        """See the protocol."""
        self.hooks.reach("hypervisor.agent_answers")
        return _answers(self._guest(uuid))

    def start_in_guest(self, uuid: str, words: Sequence[str], seconds: int) -> int:
        """See the protocol."""
        guest = self._guest(uuid)
        self.hooks.act("hypervisor.start_in_guest", *words)
        if not _answers(guest):
            raise HypervisorError(guest.name, "its agent is not connected")
        known = guest.programs | {AGENT_PROGRAM: _agent_program(words)}
        if words[0] not in known:
            raise HypervisorError(guest.name, "No such file or directory")
        guest.processes.append(known[words[0]])
        return len(guest.processes)

    def exit_in_guest(self, uuid: str, pid: int, seconds: int) -> GuestExit | None:
        """See the protocol."""
        self.hooks.reach("hypervisor.exit_in_guest")
        guest = self._guest(uuid)
        if guest.state is not DomainState.RUNNING:
            raise HypervisorError(guest.name, "domain is not running")
        if not _answers(guest):
            return None
        if not 0 < pid <= len(guest.processes):
            raise HypervisorError(guest.name, f"PID {pid} does not exist")
        return guest.processes[pid - 1]

    def freeze_file_systems(self, uuid: str, mountpoints: Sequence[Path], seconds: int) -> int:
        """See the protocol."""
        guest = self._guest(uuid)
        self.hooks.act("hypervisor.freeze_file_systems", *map(str, mountpoints))
        if not _answers(guest):
            raise HypervisorError(guest.name, "its agent did not freeze: it is not connected")
        if guest.frozen:
            reason = (
                "its agent did not freeze: the command is not allowed "
                "(another program has frozen it)"
            )
            raise NotFrozenByUsError(guest.name, reason)
        guest.frozen = True
        self.hooks.reach("agent.frozen")
        if guest.agent in (Agent.SLOW, Agent.LATE):
            guest.agent = Agent.ANSWERS if guest.agent is Agent.SLOW else Agent.SILENT
            raise HypervisorError(guest.name, f"its agent did not freeze: no answer in {seconds} s")
        return len(mountpoints) or 2

    def thaw_file_systems(self, uuid: str, seconds: int) -> None:
        """See the protocol."""
        guest = self._guest(uuid)
        self.hooks.act("hypervisor.thaw_file_systems")
        if not _answers(guest):
            raise HypervisorError(guest.name, "its file systems could not be thawed: no answer")
        guest.frozen = False

    def was_booted(self, uuid: str) -> bool:
        """See the protocol."""
        guest = self._guest(uuid)
        return guest.running_reason == "booted" and guest.state is DomainState.RUNNING

    def file_systems_frozen(self, uuid: str) -> bool | None:
        """See the protocol."""
        self.hooks.reach("hypervisor.file_systems_frozen")
        guest = self._guest(uuid)
        return guest.frozen if _answers(guest) and guest.agent is not Agent.DUMB else None

    def destroy(self, uuid: str) -> None:
        """See the protocol."""
        guest = self._guest(uuid)
        self.hooks.act("hypervisor.destroy", guest.name)
        self._end(guest)

    def _end(self, guest: FakeGuest) -> None:
        if guest.inactive is None:
            _delete_tpm(guest.live)
        guest.live, guest.state, guest.paused_reason = None, DomainState.OFF, None
        guest.frozen = guest.images_inactive = False
        if guest.inactive is None:
            del self.guests[guest.uuid]
        self.happen()

    def define(self, xml: str, *, validate: bool = False) -> None:
        """See the protocol."""
        root = domain_xml.parse(xml)
        if validate:
            self._validate(root)
        name = domain_xml.text(root, "name")
        uuid = domain_xml.text(root, "uuid") or str(uuids.uuid4())
        self.hooks.act("hypervisor.define", name)
        if any(other.name == name and other.uuid != uuid for other in self.guests.values()):
            raise HypervisorError("domain XML", f"define: domain '{name}' already exists")
        guest = self.guests.setdefault(uuid, FakeGuest(name, uuid, None))
        if guest.name != name:
            raise HypervisorError("domain XML", f"define: '{guest.name}' has uuid {uuid}")
        guest.inactive = xml
        self.happen()

    def _validate(self, root: ElementTree.Element) -> None:
        """Refuse elements below the root that no schema has; each test's definitions pass."""
        if (odd := root.find("unknown")) is not None:
            raise HypervisorError("domain XML", f"define: extra element {odd.tag}")

    def drop_managed_save(self, uuid: str) -> None:
        """See the protocol."""
        guest = self._guest(uuid)
        self.hooks.act("hypervisor.drop_managed_save")
        guest.managed_save = False

    def managed_save_path(self, uuid: str) -> Path | None:
        """See the protocol."""
        guest = self.guests.get(uuid)
        return self.managed_saves[uuid] if guest is not None and guest.managed_save else None

    def save(self, uuid: str, path: Path) -> None:
        """See the protocol."""
        guest = self._guest(uuid)
        self.hooks.act("hypervisor.save", guest.name)
        if guest.live is None:
            raise HypervisorError(guest.name, "saving its RAM: domain is not running")
        running = int(guest.state is DomainState.RUNNING)
        path.write_bytes(images.image(f"{guest.live}\0".encode(), guest.ram, running=running))
        self._end(guest)

    def incompatibility(self, xml: str, cpu: str = "") -> str:
        """See the protocol."""
        kind = domain_xml.parse(xml).find("os/type")
        machine = kind.get("machine") if kind is not None else None
        if machine not in self.machines:
            return f"the machine '{machine}' is not supported by emulator"
        if cpu and cpu != self.cpu:
            return "the CPU is incompatible with host CPU: Host CPU does not provide avx512f"
        return self.cpu_incompatibility

    def restore(self, ram_path: Path, *, running: bool) -> None:
        """See the protocol."""
        self.hooks.act("hypervisor.restore", ram_path.name)
        xml, ram = _load(ram_path)
        root = domain_xml.parse(xml)
        uuid, name = domain_xml.text(root, "uuid"), domain_xml.text(root, "name")
        guest = self.guests.setdefault(uuid, FakeGuest(name, uuid, None))
        if guest.live is not None:
            raise HypervisorError(str(ram_path), f"restore: domain '{name}' is already active")
        guest.live, guest.ram, guest.boot = xml, ram, guest.boot + 1
        guest.state = DomainState.RUNNING if running else DomainState.PAUSED
        guest.paused_reason = None if running else "migration"
        guest.running_reason = "restored"
        self._check_disks(guest)
        self.restored(guest)
        self.happen()

    def _check_disks(self, guest: FakeGuest) -> None:
        """QEMU opens every disk."""
        missing = [path for path in (guest.sources()[0] or {}).values() if not Path(path).exists()]
        if missing:
            self.destroy(guest.uuid)
            raise HypervisorError(guest.name, f"Could not open {missing[0]}: No such file")

    def start(self, uuid: str, *, paused: bool) -> None:
        """See the protocol."""
        guest = self._guest(uuid)
        self.hooks.act("hypervisor.start", guest.name)
        if guest.live is not None:
            raise HypervisorError(guest.name, "start: domain is already running")
        for path in (_paths(guest.inactive) or {}).values():
            if not os.path.exists(path):
                raise HypervisorError(guest.name, f"start: Cannot access storage file '{path}'")
        guest.live, guest.ram, guest.boot = guest.inactive, images.qemu_stream(64), guest.boot + 1
        saved = self.managed_saves.get(uuid) if guest.managed_save else None
        paused = paused or (saved is not None and _was_paused(saved))
        guest.state = DomainState.PAUSED if paused else DomainState.RUNNING
        guest.paused_reason = ("migration" if guest.managed_save else "user") if paused else None
        guest.running_reason = "restored" if guest.managed_save else "booted"
        guest.managed_save = False
        self.restored(guest)
        self.happen()

    def open_files(self, uuid: str) -> list[OpenFile]:
        """See the protocol: the disks of the live XML, and what a test says beside them."""
        guest = self._guest(uuid)
        paths = [*(guest.sources()[0] or {}).values(), *guest.opened]
        return [OpenFile(os.path.realpath(path), os.stat(path), True) for path in paths]

    def create(self, xml: str, *, paused: bool, validate: bool = False) -> None:
        """See the protocol."""
        root = domain_xml.parse(xml)
        if validate:
            self._validate(root)
        name, uuid = domain_xml.text(root, "name"), domain_xml.text(root, "uuid")
        self.hooks.act("hypervisor.create", name)
        if any(name == guest.name or uuid == guest.uuid for guest in self.guests.values()):
            raise HypervisorError("domain XML", f"start: domain '{name}' already exists")
        state = DomainState.PAUSED if paused else DomainState.RUNNING
        guest = FakeGuest(name, uuid, None, xml, state, ram=images.qemu_stream(64))
        self.guests[uuid] = guest
        self._check_disks(guest)
        self.restored(guest)
        self.happen()

    def undefine(self, uuid: str) -> None:
        """See the protocol."""
        self.hooks.act("hypervisor.undefine", uuid)
        guest = self.guests.get(uuid)
        if guest is None:
            return
        gone, guest.inactive, guest.managed_save = guest.inactive, None, False
        if guest.live is None:
            _delete_tpm(gone)
            del self.guests[uuid]
        self.happen()

    def vitals(self, uuid: str) -> Vitals:
        """See the protocol: CPUs of a running guest have used time at each query."""
        self.hooks.reach("hypervisor.vitals")
        guest = self._guest(uuid)
        if guest.state is DomainState.RUNNING and not guest.hangs:
            guest.vcpu_ns += 10_000_000
        return Vitals(guest.state, guest.vcpu_ns)

    def screenshot(self, uuid: str) -> Screenshot | None:
        """See the protocol."""
        self.hooks.reach("hypervisor.screenshot")
        guest = self._guest(uuid)
        return Screenshot(guest.screen, "png") if guest.screen is not None else None

    def network_is_isolated(self, name: str) -> bool:
        """See the protocol."""
        if name not in self.networks:
            raise NotFoundError(name, "no such libvirt network")
        return self.networks[name]

    def defined_networks(self) -> list[HostObject]:
        """See the protocol."""
        self.hooks.reach("hypervisor.defined_networks")
        return list(self.network_objects.values())

    def defined_storage_pools(self) -> list[HostObject]:
        """See the protocol."""
        self.hooks.reach("hypervisor.defined_storage_pools")
        return list(self.pool_objects.values())

    def define_network(self, xml: str, *, starts_at_boot: bool) -> None:
        """See the protocol."""
        self._define_object("network", self.network_objects, xml, starts_at_boot)

    def define_storage_pool(self, xml: str, *, starts_at_boot: bool) -> None:
        """See the protocol."""
        self._define_object("storage_pool", self.pool_objects, xml, starts_at_boot)

    def _define_object(
        self, kind: str, objects: dict[str, HostObject], xml: str, starts_at_boot: bool
    ) -> None:
        name = ElementTree.fromstring(xml).findtext("name") or ""
        self.hooks.act(f"hypervisor.define_{kind}", name)
        if name in objects:
            raise HypervisorError(kind.replace("_", " "), f"define: '{name}' already exists")
        objects[name] = HostObject(name, xml, starts_at_boot)

    def start_at_boot(self, uuid: str) -> None:
        """See the protocol."""
        guest = self._guest(uuid)
        self.hooks.act("hypervisor.start_at_boot", guest.name)
        guest.autostart = True

    def emulators(self) -> frozenset[str]:
        """See the protocol."""
        return self.emulator_paths

    def set_guest_clock(self, uuid: str) -> bool:
        """See the protocol."""
        self.hooks.act("hypervisor.set_guest_clock")
        return _answers(self._guest(uuid))

    def _guest(self, uuid: str) -> FakeGuest:
        if uuid not in self.guests:
            raise NotFoundError(uuid, "no such domain")
        return self.guests[uuid]


def _check_job(guest: FakeGuest) -> None:
    """Raise if a test has aborted the job."""
    if guest.job is None:
        raise CancelledError(guest.name, "operation aborted: canceled by client")


class _SaveCall(threading.Thread):
    """libvirt saving RAM: open, write, close; open again for the finished header.

    It stops in the middle until ``go_on``, so that a test can step in at a known place.
    """

    def __init__(self, path: Path, xml: bytes, ram: bytes, goes_on: bool, *, garbled: bool) -> None:
        super().__init__(name="fake-libvirt-save", daemon=True)
        self._path, self._xml, self._ram, self._running = path, xml, ram, int(goes_on)
        self._garbled = garbled
        self.half, self.go_on = threading.Event(), threading.Event()
        self.aborted = False
        self.error: OSError | None = None

    def run(self) -> None:
        try:
            self._write()
        except OSError as error:
            self.error = error
        finally:
            self.half.set()

    def _write(self) -> None:
        body = images.image(self._xml, self._ram, running=self._running, magic=images.UNFINISHED)
        middle = len(body) // 2
        if self._garbled:
            body = bytes(middle) + body[middle:]
        descriptor = self._open(os.O_CREAT | os.O_TRUNC)
        try:
            _write_all(descriptor, body[:middle])
            self.half.set()
            self.go_on.wait()
            if self.aborted:
                raise OSError(errno.ECANCELED, "operation aborted: canceled by client")
            _write_all(descriptor, body[middle:])
        finally:
            os.close(descriptor)
        descriptor = self._open(0)
        try:
            finished = images.header(data_length=len(self._xml), running=self._running)
            _write_all(descriptor, finished)
        finally:
            os.close(descriptor)

    def _open(self, flags: int) -> int:
        """A pipe without a reader is an error here; libvirt would wait for one."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | flags, 0o600)
        os.set_blocking(descriptor, True)
        return descriptor


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _load(path: Path) -> tuple[str, bytes]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise HypervisorError(str(path), f"restore: {error.strerror}") from error
    if not stat.S_ISREG(path.stat().st_mode) or raw[:16] != images.FINISHED:
        raise HypervisorError(str(path), "restore: image magic is incorrect")
    length = int.from_bytes(raw[20:24], "little")
    method = int.from_bytes(raw[28:32], "little")
    xml, payload = raw[92 : 92 + length], raw[92 + length :]
    if method == 5:
        payload = zstandard.ZstdDecompressor().decompressobj().decompress(payload)
    elif method == 1:
        payload = zlib.decompress(payload, wbits=31)
    return xml.split(b"\0", 1)[0].decode(), payload


def _was_paused(path: Path) -> bool:
    head = path.read_bytes()[: images.HEADER_SIZE]
    return head[:16] == images.FINISHED and not int.from_bytes(head[24:28], "little")


def _domain(guest: FakeGuest) -> Domain:
    root = domain_xml.parse(guest.live or guest.inactive or "")
    return Domain(
        name=guest.name,
        uuid=guest.uuid,
        state=guest.state,
        disks=tuple(domain_xml.disks(root)),
        live_xml=guest.live,
        inactive_xml=guest.inactive,
        nvram=domain_xml.nvram(root),
        tpm_state=domain_xml.tpm_state(root),
        machine="pc-q35-9.2",
        managed_save=guest.managed_save,
        emulator_owner=Owner(os.getuid(), os.getgid()) if guest.live else None,
        boot=f"host:{guest.boot}" if guest.live else "",
    )


def _keeps_tpm(root: ElementTree.Element) -> bool:
    return root.find("devices/tpm/backend[@persistent_state='yes']") is not None


def _delete_tpm(xml: str | None) -> None:
    """libvirt deletes the state of a TPM when its domain is undefined."""
    root = domain_xml.parse(xml) if xml else None
    state = domain_xml.tpm_state(root) if root is not None else None
    if root is None or state is None or _keeps_tpm(root):
        return
    if state.is_file:
        Path(state.path).unlink(missing_ok=True)
    else:
        shutil.rmtree(state.path, ignore_errors=True)


def _answers(guest: FakeGuest) -> bool:
    """Whether the agent answers: that of a paused guest does not."""
    there = guest.agent not in (Agent.MISSING, Agent.SILENT)
    return there and guest.state is DomainState.RUNNING


def _agent_program(words: Sequence[str]) -> GuestExit:
    """How the agent's own program ends, which is in every guest that has an agent."""
    if list(words[1:]) == ["--version"]:
        return GuestExit(0, "QEMU Guest Agent 10.0.0\n")
    return GuestExit(1, "Unknown option, try 'qemu-ga --help' for more information.\n")


def _copy_down(disk: OverlayDisk, source: str) -> None:
    """Copy the guest's writes from the overlay to the base."""
    overlay = Path(disk.overlay)
    if source == disk.overlay and overlay.exists() and (written := overlay.read_bytes()):
        Path(disk.base).write_bytes(written)


def _paths(xml: str | None) -> dict[str, str] | None:
    if xml is None:
        return None
    disks = domain_xml.disks(domain_xml.parse(xml))
    return {disk.target: disk.source for disk in disks if disk.source}


def _on_overlay(xml: str | None, disk: OverlayDisk, *, chain: bool = False) -> str | None:
    """XML with the disk on its overlay; libvirt shows the chain below in the live XML."""
    if xml is None:
        return None
    root = domain_xml.parse(xml)
    element = domain_xml.disk_element(root, disk.target)
    assert element is not None
    source, driver = element.find("source"), element.find("driver")
    assert source is not None
    assert driver is not None
    if chain:
        deeper = element.find("backingStore")
        below = ElementTree.SubElement(element, "backingStore", type=element.get("type", "file"))
        ElementTree.SubElement(below, "format", type=disk.base_format)
        ElementTree.SubElement(below, "source", dict(source.attrib))
        if deeper is not None:
            element.remove(deeper)
            below.append(deeper)
    element.set("type", "file")
    source.attrib.clear()
    source.set("file", disk.overlay)
    driver.set("type", "qcow2")
    return ElementTree.tostring(root, encoding="unicode")
