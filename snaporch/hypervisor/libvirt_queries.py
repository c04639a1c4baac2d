"""What snaporch reads from libvirt: every call here leaves the domains as they are."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import libvirt

from snaporch import __version__
from snaporch.errors import NoSuchDomainError, NotFoundError
from snaporch.hypervisor import agent, apparmor, domain_xml, vcpu_quota
from snaporch.hypervisor.definition_blockers import find_domain_blockers
from snaporch.hypervisor.dirty_rate import measure_dirty_rates
from snaporch.hypervisor.domain_reader import DomainReader
from snaporch.hypervisor.host_compat import emulators_in, find_incompatibility, guest_cpu
from snaporch.hypervisor.interface import (
    BackingImage,
    Blocker,
    DiskWrites,
    HostObject,
    HypervisorError,
    OpenFile,
    Screenshot,
    StartHookProblem,
    Vitals,
)
from snaporch.hypervisor.libvirt_connection import NO_DOMAIN, LibvirtConnection
from snaporch.hypervisor.open_files import open_files_of, resident_bytes_of
from snaporch.hypervisor.screenshot import take_screenshot
from snaporch.hypervisor.start_hook_check import find_hook_problem
from snaporch.known_faults import Component
from snaporch.model import Domain, DomainState, Versions

_ZSTD_SINCE = 10_004_000
"""libvirt 10.4.0 reads and writes zstd save images (its news.rst)."""
_VCPU_TIME = re.compile(r"vcpu\.\d+\.time")
_MANAGED_SAVES = (Path("/var/lib/libvirt/qemu/save"), Path.home() / ".config/libvirt/qemu/save")
"""Where libvirt keeps managed save images, as ``NAME.save`` (its qemu_conf.c, ``saveDir``)."""
_UNKNOWN_NAME = NO_DOMAIN | {libvirt.VIR_ERR_INVALID_ARG}
"""libvirt's errors for an unknown name, and for a string that is not a UUID."""


class LibvirtQueries(LibvirtConnection):
    """The part of :class:`~snaporch.hypervisor.interface.Hypervisor` that changes nothing."""

    def domains(self) -> list[Domain]:
        with self._explained("libvirt", "listing domains"):
            handles = self._conn().listAllDomains(0)
            reader = DomainReader(self._conn(), self._host)
            found = [reader.read_listed(handle) for handle in handles]
        return sorted((domain for domain in found if domain), key=lambda domain: domain.name)

    def domain(self, name: str) -> Domain:
        connection = self._conn()
        for lookup in (connection.lookupByName, connection.lookupByUUIDString):
            try:
                handle = lookup(name)
            except libvirt.libvirtError as error:
                if error.get_error_code() not in _UNKNOWN_NAME:
                    raise self._failure(name, error.get_error_message()) from error
                continue
            with self._explained(name, "reading the domain"):
                found = DomainReader(connection, self._host).read(handle)
            if found is not None:
                return found
        raise NoSuchDomainError(name, "no such domain", "see `virsh list --all` for their names")

    def find(self, uuid: str) -> Domain | None:
        try:
            handle = self._handle(uuid)
        except NotFoundError:
            return None
        with self._explained(uuid, "reading the domain"):
            return DomainReader(self._conn(), self._host).read(handle)

    def state(self, uuid: str) -> DomainState:
        found = self.find(uuid)
        return found.state if found else DomainState.OFF

    def vitals(self, uuid: str) -> Vitals:
        handle = self._handle(uuid)
        with self._explained(uuid, "asking for its CPUs"):
            statistics = self._conn().domainListGetStats([handle], libvirt.VIR_DOMAIN_STATS_VCPU)
        values = statistics[0][1] if statistics else {}
        used = [value for key, value in values.items() if _VCPU_TIME.fullmatch(key)]
        return Vitals(self.state(uuid), sum(used))

    def disk_writes(self, uuid: str) -> dict[str, DiskWrites]:
        handle = self._handle(uuid)
        with self._explained(uuid, "asking for its disks"):
            statistics = self._conn().domainListGetStats(
                [handle],
                libvirt.VIR_DOMAIN_STATS_BLOCK,
                libvirt.VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT,
            )
        values = statistics[0][1] if statistics else {}
        return {
            values[f"{disk}.name"]: DiskWrites(
                values[f"{disk}.wr.reqs"], values[f"{disk}.wr.bytes"]
            )
            for disk in (f"block.{number}" for number in range(values.get("block.count", 0)))
            if f"{disk}.name" in values and f"{disk}.wr.reqs" in values
            if f"{disk}.wr.bytes" in values
        }

    def sources(self, uuid: str) -> tuple[dict[str, str] | None, dict[str, str] | None]:
        found = self.find(uuid)
        if found is None:
            return None, None
        return domain_xml.sources(found.live_xml), domain_xml.sources(found.inactive_xml)

    def saved_sources(self, uuid: str) -> dict[str, str] | None:
        with self._explained(uuid, "reading its managed save image"):
            return domain_xml.sources(self._saved_xml(uuid))

    def _saved_xml(self, uuid: str) -> str | None:
        handle = self._handle(uuid)
        if not handle.hasManagedSaveImage(0):
            return None
        return str(handle.managedSaveGetXMLDesc(libvirt.VIR_DOMAIN_SAVE_IMAGE_XML_SECURE))

    def versions(self, domain: Domain) -> Versions:
        found = self.releases()
        with self._explained(domain.name, "asking for its CPU"):
            cpu = guest_cpu(self._conn(), domain.live_xml) if domain.live_xml else ""
        return Versions(
            __version__, found[Component.LIBVIRT], found[Component.QEMU], domain.machine, cpu
        )

    def emulator_release(self, domain: Domain) -> str:
        """See the protocol. A program that was replaced on disk still runs in its old version."""
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

    def busy_disks(self, uuid: str) -> set[str]:
        found = self.find(uuid)
        if found is None or found.live_xml is None:
            return set()
        return set(domain_xml.mirrors(domain_xml.parse(found.live_xml)))

    def disk_capacity(self, uuid: str, target: str) -> int:
        with self._explained(target, "asking for its size"):
            return int(self._handle(uuid).blockInfo(target, 0)[0])

    def downtime_limit(self, uuid: str) -> int | None:
        try:
            found = self._handle(uuid).migrateGetMaxDowntime(0)
        except (libvirt.libvirtError, HypervisorError, NotFoundError):
            return None
        return None if found is None else int(found)  # libvirt before 3.7, or no emulator

    def vcpu_quotas(self, uuid: str) -> dict[str, str]:
        return vcpu_quota.read_quotas(uuid)

    def resident_bytes(self, uuid: str) -> int:
        return resident_bytes_of(uuid)

    def ram_in_use(self, uuid: str) -> int:
        with self._explained(uuid, "asking for its memory"):
            handle = self._handle(uuid)
            whole = int(handle.info()[1])
            if domain_xml.huge_memory(domain_xml.parse(handle.XMLDesc(0))):
                return whole << 10  # QEMU has touched all of it; RSS does not count it
            return min(int(handle.memoryStats().get("rss", whole)), whole) << 10

    def dirty_rates(self, uuids: Sequence[str]) -> dict[str, int]:
        handles = {}
        for uuid in uuids:
            with contextlib.suppress(NotFoundError):
                handles[uuid] = self._handle(uuid)
        return measure_dirty_rates(self._conn(), handles) if handles else {}

    def was_booted(self, uuid: str) -> bool:
        with self._explained(uuid, "asking for its state"):
            found = self._handle(uuid).state()
        return bool(found == [libvirt.VIR_DOMAIN_RUNNING, libvirt.VIR_DOMAIN_RUNNING_BOOTED])

    def starts_at_boot(self, uuid: str) -> bool:
        with self._explained(uuid, "asking whether it starts at boot"):
            return bool(self._handle(uuid).autostart())

    def is_confined(self, uuid: str) -> bool:
        return apparmor.is_confined(uuid)

    def start_hook_problem(self) -> StartHookProblem | None:
        with self._explained("libvirt", "counting domains"):
            return find_hook_problem(may_have_called=self._conn().numOfDomains() > 0)

    def blockers(self, domain: Domain) -> list[Blocker]:
        with self._explained(domain.name, "looking for blockers"):
            return find_domain_blockers(self._handle(domain.uuid), domain)

    def incompatibility(self, xml: str, cpu: str = "") -> str:
        return find_incompatibility(self._conn(), xml, cpu)

    def backing_images(self, domain: Domain, target: str) -> tuple[BackingImage, ...]:
        return domain_xml.backing_images(domain_xml.parse(domain.live_xml or ""), target)

    def backing_chain(self, domain: Domain, target: str) -> list[str]:
        return domain_xml.backing_chain(domain_xml.parse(domain.live_xml or ""), target)

    def agent_answers(self, uuid: str, seconds: int) -> bool:
        return agent.answers(self._handle(uuid), seconds)

    def file_systems_frozen(self, uuid: str) -> bool | None:
        return agent.frozen(self._handle(uuid))

    def managed_save_path(self, uuid: str) -> Path | None:
        found = self.find(uuid)
        if found is None or not found.managed_save:
            return None
        paths = [directory / f"{found.name}.save" for directory in _MANAGED_SAVES]
        there = next((path for path in paths if path.is_file()), None)
        if there is None:
            raise HypervisorError(
                found.name, "its managed save image is not in libvirt's directory"
            )
        return there

    def open_files(self, uuid: str) -> list[OpenFile]:
        return open_files_of(uuid)

    def screenshot(self, uuid: str) -> Screenshot | None:
        handle = self._handle(uuid)
        with self._explained(uuid, "taking a screenshot"):
            return take_screenshot(self._conn(), handle)

    def defined_networks(self) -> list[HostObject]:
        return self._objects("networks", "listAllNetworks")

    def defined_storage_pools(self) -> list[HostObject]:
        return self._objects("storage pools", "listAllStoragePools")

    def _objects(self, kind: str, listing: str) -> list[HostObject]:
        """All networks or storage pools."""
        connection = self._conn()
        with self._explained("libvirt", f"listing {kind}"):
            try:
                handles = getattr(connection, listing)(0)
            except libvirt.libvirtError as error:
                if error.get_error_code() == libvirt.VIR_ERR_NO_SUPPORT:
                    return []
                raise
            return [
                HostObject(
                    handle.name(),
                    handle.XMLDesc(0),
                    bool(handle.isPersistent() and handle.autostart()),
                    bool(handle.isActive()),
                )
                for handle in handles
            ]

    def emulators(self) -> frozenset[str]:
        with self._explained("libvirt", "asking for its emulators"):
            return emulators_in(self._conn().getCapabilities())

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
