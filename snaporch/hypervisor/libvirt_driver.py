"""libvirt behind the :class:`~snaporch.hypervisor.interface.Hypervisor` protocol."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import libvirt

from snaporch import __version__
from snaporch.errors import NotFoundError, UnavailableError
from snaporch.faults import Component
from snaporch.hypervisor import agent, domain_xml
from snaporch.hypervisor.block_commit import commit_overlays
from snaporch.hypervisor.blockers import find_blockers
from snaporch.hypervisor.domain_reader import DomainReader
from snaporch.hypervisor.events import DomainEvents, start_event_loop, tell_changes
from snaporch.hypervisor.host_compat import find_misfit, seen_cpu
from snaporch.hypervisor.interface import (
    BackingImage,
    Blocker,
    CaptureRequest,
    CommitStage,
    HypervisorError,
    LostLibvirtError,
    OpenFile,
    OverlayDisk,
    Patience,
    Pause,
    Screenshot,
    Tick,
    Told,
    Unguarded,
    Vitals,
    nothing,
)
from snaporch.hypervisor.logged_calls import LoggedHandle
from snaporch.hypervisor.memory_snapshot import capture
from snaporch.hypervisor.open_files import open_files_of
from snaporch.hypervisor.screenshot import take_screenshot
from snaporch.hypervisor.start_hook import find_unguarded
from snaporch.model import Domain, DomainState, Versions

_ZSTD_SINCE = 10_004_000
"""libvirt 10.4.0 reads and writes zstd save images (its news.rst)."""
_KEEPALIVE = (5, 6)
_AGENT_SECONDS = 5
_CLOCK_TRIES = 3
_DEFINITIONS = (Path("/etc/libvirt/qemu"), Path.home() / ".config/libvirt/qemu")
"""Where libvirt keeps definitions: the system's daemon, and a user's own (libvirt's drvqemu)."""
_VCPU_TIME = re.compile(r"vcpu\.\d+\.time")
_UNDEFINE = (
    libvirt.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE
    | libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
    | libvirt.VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA
    | libvirt.VIR_DOMAIN_UNDEFINE_NVRAM
)
_MANAGED_SAVES = (Path("/var/lib/libvirt/qemu/save"), Path.home() / ".config/libvirt/qemu/save")
"""Where libvirt keeps managed save images, as ``NAME.save`` (its qemu_conf.c, ``saveDir``)."""
_ABSENT = {libvirt.VIR_ERR_NO_DOMAIN}
_NOT_ITS_NAME = _ABSENT | {libvirt.VIR_ERR_INVALID_ARG}
"""libvirt's answers to a name, and to what is no UUID."""


class LibvirtHypervisor:
    """One connection, opened anew when libvirtd went away."""

    def __init__(self, uri: str) -> None:
        libvirt.registerErrorHandler(lambda _context, _error: None, None)
        start_event_loop()
        self._uri = uri
        self._connection: Any = None
        self._told: list[Callable[[], None]] = []
        self._conn()

    def _conn(self) -> Any:
        if self._connection is not None and self._alive():
            return self._connection
        try:
            self._connection = LoggedHandle(libvirt.open(self._uri))
        except libvirt.libvirtError as error:
            raise UnavailableError(
                self._uri,
                f"libvirt does not answer ({error.get_error_message()})",
                "see `systemctl status libvirtd` and the libvirt_uri setting",
            ) from error
        with contextlib.suppress(libvirt.libvirtError):  # not every driver has it
            self._connection.setKeepAlive(*_KEEPALIVE)
        for told in self._told:
            tell_changes(self._connection, told)
        return self._connection

    def _alive(self) -> bool:
        try:
            return bool(self._connection.isAlive())
        except libvirt.libvirtError:
            return False

    @contextlib.contextmanager
    def _explained(self, thing: str, operation: str) -> Iterator[None]:
        try:
            yield
        except libvirt.libvirtError as error:
            raise self._failure(thing, f"{operation}: {error.get_error_message()}") from error

    def _failure(self, thing: str, reason: str) -> HypervisorError:
        """Whether libvirt has answered that, or does not answer any more."""
        if self._connection is not None and not self._alive():
            step = "see `systemctl status libvirtd`, and try again"
            return LostLibvirtError(thing, f"{reason}: libvirt went away", step)
        return HypervisorError(thing, reason)

    def _handle(self, uuid: str) -> Any:
        try:
            return LoggedHandle(self._conn().lookupByUUIDString(uuid))
        except libvirt.libvirtError as error:
            if error.get_error_code() in _ABSENT:
                raise NotFoundError(uuid, "no such domain") from error
            raise self._failure(uuid, error.get_error_message()) from error

    # -- looking ----------------------------------------------------------------------------

    def domains(self) -> list[Domain]:
        with self._explained("libvirt", "listing domains"):
            handles = self._conn().listAllDomains(0)
            reader = DomainReader(self._conn())
            found = [reader.read_listed(handle) for handle in handles]
        return sorted((domain for domain in found if domain), key=lambda domain: domain.name)

    def domain(self, name: str) -> Domain:
        connection = self._conn()
        for lookup in (connection.lookupByName, connection.lookupByUUIDString):
            try:
                handle = lookup(name)
            except libvirt.libvirtError as error:
                if error.get_error_code() not in _NOT_ITS_NAME:
                    raise self._failure(name, error.get_error_message()) from error
                continue
            with self._explained(name, "reading the domain"):
                found = DomainReader(connection).read(handle)
            if found is not None:
                return found
        raise NotFoundError(name, "no such domain", "see `virsh list --all` for their names")

    def find(self, uuid: str) -> Domain | None:
        try:
            handle = self._handle(uuid)
        except NotFoundError:
            return None
        with self._explained(uuid, "reading the domain"):
            return DomainReader(self._conn()).read(handle)

    def on_change(self, told: Callable[[], None]) -> None:
        with self._explained("libvirt", "asking for events"):
            tell_changes(self._conn(), told)
        self._told.append(told)

    def versions(self, domain: Domain) -> Versions:
        found = self.releases()
        with self._explained(domain.name, "asking for its CPU"):
            cpu = seen_cpu(self._conn(), domain.live_xml) if domain.live_xml else ""
        return Versions(
            __version__, found[Component.LIBVIRT], found[Component.QEMU], domain.machine, cpu
        )

    def emulator_release(self, domain: Domain) -> str:
        """See the protocol; a program that was replaced on disk goes on as it was."""
        process = domain.boot.rpartition(":")[2]
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/{int(process or 0)}/exe").endswith(" (deleted)"):
                return self.releases()[Component.QEMU]
        return ""

    def releases(self) -> Mapping[Component, str]:
        with self._explained("libvirt", "asking for versions"):
            library, emulator = self._conn().getLibVersion(), self._conn().getVersion()
        return {Component.LIBVIRT: _dotted(library), Component.QEMU: _dotted(emulator)}

    def reads_zstd(self) -> bool:
        with self._explained("libvirt", "asking for its version"):
            return bool(self._conn().getLibVersion() >= _ZSTD_SINCE)

    def state(self, uuid: str) -> DomainState:
        found = self.find(uuid)
        return found.state if found else DomainState.OFF

    def paused_by(self, uuid: str) -> str | None:
        with self._explained(uuid, "asking for its state"):
            state, reason = self._handle(uuid).state()
        if state != libvirt.VIR_DOMAIN_PAUSED:
            return None
        return _constant_name("VIR_DOMAIN_PAUSED_", reason)

    def busy_with(self, uuid: str) -> str | None:
        with self._explained(uuid, "asking for its job"):
            handle = self._handle(uuid)
            if not handle.isActive():
                return None
            job = handle.jobStats()
        if job.get("type", libvirt.VIR_DOMAIN_JOB_NONE) == libvirt.VIR_DOMAIN_JOB_NONE:
            return None
        return _constant_name("VIR_DOMAIN_JOB_OPERATION_", job.get("operation", 0)) or "a job"

    def disk_capacity(self, uuid: str, target: str) -> int:
        with self._explained(target, "asking for its size"):
            return int(self._handle(uuid).blockInfo(target, 0)[0])

    def sources(self, uuid: str) -> tuple[dict[str, str] | None, dict[str, str] | None]:
        found = self.find(uuid)
        if found is None:
            return None, None
        return domain_xml.sources(found.live_xml), domain_xml.sources(found.inactive_xml)

    # -- acting -----------------------------------------------------------------------------

    def capture(self, request: CaptureRequest, tick: Tick, stopped: Tick = nothing) -> Pause:
        handle = self._handle(request.uuid)
        with self._explained(request.uuid, "capture"), self._events(handle) as events:
            pause = capture(handle, events, request, tick, stopped)
        if request.disks:
            _keep_definitions()
        return pause

    def downtime_limit(self, uuid: str) -> int | None:
        try:
            found = self._handle(uuid).migrateGetMaxDowntime(0)
        except (libvirt.libvirtError, HypervisorError, NotFoundError):
            return None
        return None if found is None else int(found)  # libvirt before 3.7, or no emulator

    def limit_downtime(self, uuid: str, milliseconds: int) -> None:
        with contextlib.suppress(libvirt.libvirtError, HypervisorError, NotFoundError):
            self._handle(uuid).migrateSetMaxDowntime(milliseconds, 0)

    def abort_job(self, uuid: str) -> None:
        with contextlib.suppress(libvirt.libvirtError, NotFoundError):
            self._handle(uuid).abortJob()

    def commit(
        self, uuid: str, disks: Sequence[OverlayDisk], told: Told, patience: Patience
    ) -> None:
        handle = self._handle(uuid)
        with self._explained(uuid, "commit"), self._events(handle) as events:
            failed = commit_overlays(handle, events, disks, told, patience)
        self.rebase_inactive(uuid, [disk for disk in disks if disk.target not in failed])
        _keep_definitions()
        if failed:
            told(CommitStage.PIVOTED)
            raise next(iter(failed.values()))

    def _events(self, handle: Any) -> DomainEvents:
        return DomainEvents(self._conn(), handle)

    def busy_disks(self, uuid: str) -> set[str]:
        found = self.find(uuid)
        if found is None or found.live_xml is None:
            return set()
        return set(domain_xml.mirrors(domain_xml.parse(found.live_xml)))

    def rebase_inactive(self, uuid: str, disks: Sequence[OverlayDisk]) -> None:
        found = self.find(uuid)
        if found is None or found.inactive_xml is None:
            return
        mended = domain_xml.with_bases(found.inactive_xml, disks)
        if mended is not None:
            self.define(mended)

    def rebase_managed_save(self, uuid: str, disks: Sequence[OverlayDisk]) -> bool:
        with self._explained(uuid, "pointing its managed save image at the bases"):
            xml = self._saved_xml(uuid)
            mended = domain_xml.with_bases(xml, disks) if xml is not None else None
            if mended is not None:
                self._handle(uuid).managedSaveDefineXML(mended, 0)
        return mended is not None

    def unpause_managed_save(self, uuid: str) -> None:
        with self._explained(uuid, "having its managed save image run"):
            xml = self._saved_xml(uuid)
            if xml is not None:
                self._handle(uuid).managedSaveDefineXML(xml, libvirt.VIR_DOMAIN_SAVE_RUNNING)

    def saved_sources(self, uuid: str) -> dict[str, str] | None:
        with self._explained(uuid, "reading its managed save image"):
            return domain_xml.sources(self._saved_xml(uuid))

    def _saved_xml(self, uuid: str) -> str | None:
        handle = self._handle(uuid)
        if not handle.hasManagedSaveImage(0):
            return None
        return str(handle.managedSaveGetXMLDesc(libvirt.VIR_DOMAIN_SAVE_IMAGE_XML_SECURE))

    def unguarded(self) -> Unguarded | None:
        with self._explained("libvirt", "counting domains"):
            return find_unguarded(may_have_called=self._conn().numOfDomains() > 0)

    def starts_at_boot(self, uuid: str) -> bool:
        with self._explained(uuid, "asking whether it starts at boot"):
            return bool(self._handle(uuid).autostart())

    def suspend(self, uuid: str) -> None:
        with self._explained(uuid, "suspend"):
            self._handle(uuid).suspend()

    def agent_answers(self, uuid: str, seconds: int) -> bool:
        return agent.answers(self._handle(uuid), seconds)

    def freeze_file_systems(self, uuid: str, mountpoints: Sequence[Path], seconds: int) -> int:
        return agent.freeze(self._handle(uuid), mountpoints, seconds)

    def thaw_file_systems(self, uuid: str, seconds: int) -> None:
        agent.thaw(self._handle(uuid), seconds)

    def was_booted(self, uuid: str) -> bool:
        with self._explained(uuid, "asking for its state"):
            found = self._handle(uuid).state()
        return bool(found == [libvirt.VIR_DOMAIN_RUNNING, libvirt.VIR_DOMAIN_RUNNING_BOOTED])

    def file_systems_frozen(self, uuid: str) -> bool | None:
        return agent.frozen(self._handle(uuid))

    def backing_images(self, domain: Domain, target: str) -> tuple[BackingImage, ...]:
        return domain_xml.backing_images(domain_xml.parse(domain.live_xml or ""), target)

    def backing_chain(self, domain: Domain, target: str) -> list[str]:
        return domain_xml.backing_chain(domain_xml.parse(domain.live_xml or ""), target)

    def ram_in_use(self, uuid: str) -> int:
        with self._explained(uuid, "asking for its memory"):
            handle = self._handle(uuid)
            whole = int(handle.info()[1])
            if domain_xml.huge_memory(domain_xml.parse(handle.XMLDesc(0))):
                return whole << 10  # QEMU has touched all of it, and the kernel's RSS has none
            return min(int(handle.memoryStats().get("rss", whole)), whole) << 10

    def blockers(self, domain: Domain) -> list[Blocker]:
        with self._explained(domain.name, "looking for blockers"):
            return find_blockers(self._handle(domain.uuid), domain)

    def resume(self, uuid: str) -> None:
        handle = self._handle(uuid)
        with self._explained(uuid, "resume"):
            try:
                handle.resume()
            except libvirt.libvirtError:
                if handle.state()[0] != libvirt.VIR_DOMAIN_RUNNING:  # somebody was quicker
                    raise

    def destroy(self, uuid: str) -> None:
        handle = self._handle(uuid)
        with self._explained(uuid, "destroy"):
            try:
                if handle.isActive():
                    handle.destroy()
            except libvirt.libvirtError as error:
                if error.get_error_code() not in _ABSENT:  # a transient one that has just ended
                    raise

    def define(self, xml: str) -> None:
        with self._explained("domain XML", "define"):
            self._conn().defineXML(xml)
        _keep_definitions()

    def drop_managed_save(self, uuid: str) -> None:
        handle = self._handle(uuid)
        with self._explained(uuid, "removing its managed save image"):
            if handle.hasManagedSaveImage(0):
                handle.managedSaveRemove(0)

    def managed_save_path(self, uuid: str) -> Path | None:
        found = self.find(uuid)
        if found is None or not found.managed_save:
            return None
        paths = [directory / f"{found.name}.save" for directory in _MANAGED_SAVES]
        there = next((path for path in paths if path.is_file()), None)
        if there is None:
            raise HypervisorError(found.name, "its managed save image is not where libvirt puts it")
        return there

    def save(self, uuid: str, path: Path) -> None:
        handle = self._handle(uuid)
        with self._explained(uuid, "saving its RAM"):
            handle.saveFlags(str(path), None, 0)

    def misfit(self, xml: str, cpu: str = "") -> str:
        return find_misfit(self._conn(), xml, cpu)

    def restore(self, ram_path: Path, *, running: bool) -> None:
        flag = libvirt.VIR_DOMAIN_SAVE_RUNNING if running else libvirt.VIR_DOMAIN_SAVE_PAUSED
        with self._explained(str(ram_path), "restore"):
            self._conn().restoreFlags(str(ram_path), None, flag)

    def start(self, uuid: str, *, paused: bool) -> None:
        flag = libvirt.VIR_DOMAIN_START_PAUSED if paused else 0
        with self._explained(uuid, "start"):
            self._handle(uuid).createWithFlags(flag)

    def create(self, xml: str, *, paused: bool) -> None:
        flag = libvirt.VIR_DOMAIN_START_PAUSED if paused else 0
        with self._explained("domain XML", "start"):
            self._conn().createXML(xml, flag)

    def open_files(self, uuid: str) -> list[OpenFile]:
        return open_files_of(uuid)

    def undefine(self, uuid: str) -> None:
        with contextlib.suppress(NotFoundError), self._explained(uuid, "undefine"):
            self._handle(uuid).undefineFlags(_UNDEFINE)

    def vitals(self, uuid: str) -> Vitals:
        handle = self._handle(uuid)
        with self._explained(uuid, "asking for its CPUs"):
            statistics = self._conn().domainListGetStats([handle], libvirt.VIR_DOMAIN_STATS_VCPU)
        told = statistics[0][1] if statistics else {}
        used = [value for key, value in told.items() if _VCPU_TIME.fullmatch(key)]
        return Vitals(self.state(uuid), sum(used))

    def screenshot(self, uuid: str) -> Screenshot | None:
        return take_screenshot(self._conn(), self._handle(uuid))

    def network_is_isolated(self, name: str) -> bool:
        try:
            network = self._conn().networkLookupByName(name)
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_NO_NETWORK:
                raise self._failure(name, error.get_error_message()) from error
            raise NotFoundError(
                name, "no such libvirt network", "see `virsh net-list --all`"
            ) from error
        with self._explained(name, "reading the network"):
            return "<forward" not in network.XMLDesc(0)

    def set_guest_clock(self, uuid: str) -> bool:
        handle = self._handle(uuid)
        for _ in range(_CLOCK_TRIES):
            if not domain_xml.agent_connected(domain_xml.parse(handle.XMLDesc(0))):
                return False
            now = time.time()
            moment = {"seconds": int(now), "nseconds": int(now % 1 * 1e9)}
            with contextlib.suppress(libvirt.libvirtError), agent.answering(handle, _AGENT_SECONDS):
                handle.setTime(moment, 0)
                return True
        return False


def _keep_definitions() -> None:
    """Make the definitions that libvirt has written survive a power loss.

    libvirt syncs the new file and renames it over the old one (``virFileRewrite``), but not the
    directory: for seconds, a power loss would bring back a definition that names other images.
    """
    found = [path for path in _DEFINITIONS if path.is_dir()]
    for path in found:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if not found:
        os.sync()


def _dotted(version: int) -> str:
    """libvirt's packed version number: 11003000 is 11.3.0."""
    return f"{version // 1_000_000}.{version // 1000 % 1000}.{version % 1000}"


def _constant_name(prefix: str, value: int) -> str:
    for name in dir(libvirt):
        if (
            name.startswith(prefix)
            and getattr(libvirt, name) == value
            and not name.endswith("LAST")
        ):
            return name.removeprefix(prefix).lower().replace("_", " ")
    return f"reason {value}"
