"""What snaporch has libvirt do: every call here changes a domain or its definition."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import libvirt

from snaporch.errors import NotFoundError
from snaporch.hypervisor import agent, domain_xml, vcpu_quota
from snaporch.hypervisor.block_commit import commit_overlays
from snaporch.hypervisor.commit_timeouts import CommitTimeouts
from snaporch.hypervisor.events import DomainEvents
from snaporch.hypervisor.interface import (
    CaptureRequest,
    CommitStage,
    GuestExit,
    HypervisorError,
    OnCommitStage,
    OnStop,
    OverlayDisk,
    Tick,
    unnoticed,
)
from snaporch.hypervisor.libvirt_connection import NO_DOMAIN
from snaporch.hypervisor.libvirt_queries import LibvirtQueries
from snaporch.hypervisor.logged_calls import log_calls
from snaporch.hypervisor.memory_snapshot import capture
from snaporch.hypervisor.pause_clock import Pause
from snaporch.known_faults import needs_pipe

_AGENT_SECONDS = 5
_CLOCK_TRIES = 3
_DEFINITIONS = (Path("/etc/libvirt/qemu"), Path.home() / ".config/libvirt/qemu")
"""Where libvirt keeps definitions: the system's daemon, and a user's own (libvirt's drvqemu)."""
_UNDEFINE = (
    libvirt.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE
    | libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
    | libvirt.VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA
    | libvirt.VIR_DOMAIN_UNDEFINE_NVRAM
)


class LibvirtHypervisor(LibvirtQueries):
    """:class:`~snaporch.hypervisor.interface.Hypervisor` by libvirt, with the changing calls."""

    def capture(self, request: CaptureRequest, tick: Tick, stopped: OnStop = unnoticed) -> Pause:
        handle = self._handle(request.uuid)
        with self._explained(request.uuid, "capture"), self._events(handle) as events:
            pause = capture(handle, events, request, tick, stopped)
        if request.disks:
            _keep_definitions()
        return pause

    def limit_downtime(self, uuid: str, milliseconds: int) -> None:
        with contextlib.suppress(libvirt.libvirtError, HypervisorError, NotFoundError):
            self._handle(uuid).migrateSetMaxDowntime(milliseconds, 0)

    def set_vcpu_quotas(self, quotas: Mapping[str, str]) -> None:
        vcpu_quota.write_quotas(quotas)

    def abort_job(self, uuid: str) -> None:
        with contextlib.suppress(libvirt.libvirtError, NotFoundError):
            self._handle(uuid).abortJob()

    def commit(
        self,
        uuid: str,
        disks: Sequence[OverlayDisk],
        on_stage: OnCommitStage,
        patience: CommitTimeouts,
    ) -> None:
        handle = self._handle(uuid)
        with self._explained(uuid, "commit"), self._events(handle) as events:
            failed = commit_overlays(handle, events, disks, on_stage, patience)
        self.rebase_inactive(uuid, [disk for disk in disks if disk.target not in failed])
        _keep_definitions()
        if failed:
            on_stage(CommitStage.PIVOTED)
            raise next(iter(failed.values()))

    def _events(self, handle: Any) -> DomainEvents:
        return DomainEvents(self._conn(), handle)

    def rebase_inactive(self, uuid: str, disks: Sequence[OverlayDisk]) -> None:
        found = self.find(uuid)
        if found is None or found.inactive_xml is None:
            return
        rebased = domain_xml.with_bases(found.inactive_xml, disks)
        if rebased is not None:
            self.define(rebased)

    def rebase_managed_save(self, uuid: str, disks: Sequence[OverlayDisk]) -> bool:
        with self._explained(uuid, "pointing its managed save image at the bases"):
            xml = self._saved_xml(uuid)
            rebased = domain_xml.with_bases(xml, disks) if xml is not None else None
            if rebased is not None:
                self._handle(uuid).managedSaveDefineXML(rebased, 0)
        return rebased is not None

    def unpause_managed_save(self, uuid: str) -> None:
        with self._explained(uuid, "setting its managed save image to run"):
            xml = self._saved_xml(uuid)
            if xml is not None:
                self._handle(uuid).managedSaveDefineXML(xml, libvirt.VIR_DOMAIN_SAVE_RUNNING)

    def suspend(self, uuid: str) -> None:
        with self._explained(uuid, "suspend"):
            self._handle(uuid).suspend()

    def start_in_guest(self, uuid: str, words: Sequence[str], seconds: int) -> int:
        with self._explained(uuid, f"starting {words[0]} in the guest"):
            return agent.start_command(self._handle(uuid), words, seconds)

    def exit_in_guest(self, uuid: str, pid: int, seconds: int) -> GuestExit | None:
        with self._explained(uuid, "waiting for a command in the guest"):
            return agent.command_exit(self._handle(uuid), pid, seconds)

    def freeze_file_systems(self, uuid: str, mountpoints: Sequence[Path], seconds: int) -> int:
        return agent.freeze(self._handle(uuid), mountpoints, seconds)

    def thaw_file_systems(self, uuid: str, seconds: int) -> None:
        agent.thaw(self._handle(uuid), seconds)

    def resume(self, uuid: str) -> None:
        handle = self._handle(uuid)
        with self._explained(uuid, "resume"):
            try:
                handle.resume()
            except libvirt.libvirtError:
                if handle.state()[0] != libvirt.VIR_DOMAIN_RUNNING:  # resumed by another
                    raise

    def destroy(self, uuid: str) -> None:
        handle = self._handle(uuid)
        with self._explained(uuid, "destroy"):
            try:
                if handle.isActive():
                    handle.destroy()
            except libvirt.libvirtError as error:
                if error.get_error_code() not in NO_DOMAIN:  # a transient domain just ended
                    raise

    def define(self, xml: str, *, validate: bool = False) -> None:
        flag = libvirt.VIR_DOMAIN_DEFINE_VALIDATE if validate else 0
        with self._explained("domain XML", "define"):
            self._conn().defineXMLFlags(xml, flag)
        _keep_definitions()

    def drop_managed_save(self, uuid: str) -> None:
        handle = self._handle(uuid)
        with self._explained(uuid, "removing its managed save image"):
            if handle.hasManagedSaveImage(0):
                handle.managedSaveRemove(0)

    def save(self, uuid: str, path: Path) -> None:
        handle = self._handle(uuid)
        with self._explained(uuid, "saving its RAM"):
            handle.saveFlags(str(path), None, 0)

    def restore(self, ram_path: Path, *, running: bool) -> None:
        flag = libvirt.VIR_DOMAIN_SAVE_RUNNING if running else libvirt.VIR_DOMAIN_SAVE_PAUSED
        if needs_pipe(self.releases()):
            flag |= libvirt.VIR_DOMAIN_SAVE_BYPASS_CACHE  # through its helper, which writes a pipe
        with self._explained(str(ram_path), "restore"):
            self._conn().restoreFlags(str(ram_path), None, flag)

    def start(self, uuid: str, *, paused: bool) -> None:
        flag = libvirt.VIR_DOMAIN_START_PAUSED if paused else 0
        with self._explained(uuid, "start"):
            self._handle(uuid).createWithFlags(flag)

    def create(self, xml: str, *, paused: bool, validate: bool = False) -> None:
        flag = libvirt.VIR_DOMAIN_START_PAUSED if paused else 0
        flag |= libvirt.VIR_DOMAIN_START_VALIDATE if validate else 0
        with self._explained("domain XML", "start"):
            self._conn().createXML(xml, flag)

    def undefine(self, uuid: str) -> None:
        with contextlib.suppress(NotFoundError), self._explained(uuid, "undefine"):
            self._handle(uuid).undefineFlags(_UNDEFINE)

    def define_network(self, xml: str, *, starts_at_boot: bool) -> None:
        with self._explained("network", "define"):
            self._start_new(self._conn().networkDefineXML(xml), starts_at_boot=starts_at_boot)

    def define_storage_pool(self, xml: str, *, starts_at_boot: bool) -> None:
        with self._explained("storage pool", "define"):
            self._start_new(self._conn().storagePoolDefineXML(xml), starts_at_boot=starts_at_boot)

    def _start_new(self, handle: Any, *, starts_at_boot: bool) -> None:
        """Start what was just defined; if that fails, undefine it."""
        handle = log_calls(handle)
        try:
            handle.create()
            handle.setAutostart(int(starts_at_boot))
        except libvirt.libvirtError:
            with contextlib.suppress(libvirt.libvirtError):
                if handle.isActive():
                    handle.destroy()
            with contextlib.suppress(libvirt.libvirtError):
                handle.undefine()
            raise

    def start_at_boot(self, uuid: str) -> None:
        with self._explained(uuid, "having it start at boot"):
            self._handle(uuid).setAutostart(1)

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

    libvirt syncs the new file and renames it over the old one (``virFileRewrite``), but does not
    sync the directory. For some seconds, a power loss would restore a definition that names other
    images.
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
