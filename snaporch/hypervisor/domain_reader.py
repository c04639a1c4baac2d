"""Make a :class:`~snaporch.model.Domain` from a handle of libvirt."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import libvirt

from snaporch.default_paths import HOST, HostPaths
from snaporch.hypervisor import domain_xml
from snaporch.model import Disk, Domain, DomainState

_STATES = {
    libvirt.VIR_DOMAIN_RUNNING: DomainState.RUNNING,
    libvirt.VIR_DOMAIN_BLOCKED: DomainState.RUNNING,
    libvirt.VIR_DOMAIN_PAUSED: DomainState.PAUSED,
    libvirt.VIR_DOMAIN_SHUTDOWN: DomainState.STOPPING,
    libvirt.VIR_DOMAIN_SHUTOFF: DomainState.OFF,
    libvirt.VIR_DOMAIN_CRASHED: DomainState.CRASHED,
    libvirt.VIR_DOMAIN_PMSUSPENDED: DomainState.SUSPENDED,
}
_SECURE = libvirt.VIR_DOMAIN_XML_SECURE
_INACTIVE = libvirt.VIR_DOMAIN_XML_INACTIVE


def _boot(handle: Any, host: HostPaths) -> str:
    """Identifies one run of an emulator: the host's boot, libvirt's ID and the emulator's process.

    libvirt's ID alone is not unique: a restarted libvirtd counts from the running domains on.
    """
    process = ""
    with contextlib.suppress(OSError):  # another driver, or libvirt of a user
        process = (host.run / "libvirt" / "qemu" / f"{handle.name()}.pid").read_text().strip()
    boot_id = (host.proc / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    return f"{boot_id}:{handle.ID()}:{process}"


class DomainReader:
    """Reads domains over one connection."""

    def __init__(self, connection: Any, host: HostPaths = HOST) -> None:
        self._connection = connection
        self._host = host

    def read(self, handle: Any) -> Domain | None:
        """The domain of a handle; ``None`` if it was removed meanwhile."""
        try:
            return self._read(handle)
        except libvirt.libvirtError as error:
            if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
                return None
            raise

    def read_listed(self, handle: Any) -> Domain | None:
        """Like :meth:`read`; if libvirt cannot read the domain, its definition and the error.

        An emulator whose monitor is blocked must not keep other guests from being listed.
        """
        try:
            return self.read(handle)
        except libvirt.libvirtError as error:
            if not handle.isActive():
                raise
            definition = self._xml(handle, _SECURE | _INACTIVE)  # needs no emulator
            return self._domain(handle, definition, problem=error.get_error_message())

    def _read(self, handle: Any) -> Domain:
        return self._domain(handle, self._live_xml(handle))

    def _domain(self, handle: Any, live: str | None, problem: str = "") -> Domain:
        inactive = self._xml(handle, _SECURE | _INACTIVE) if handle.isPersistent() else None
        root = domain_xml.parse(live or inactive or "")
        kind = root.find("os/type")
        return Domain(
            name=handle.name(),
            uuid=handle.UUIDString(),
            state=_STATES.get(handle.state()[0], DomainState.STOPPING),
            disks=self._disks(root),
            live_xml=live,
            inactive_xml=inactive,
            nvram=domain_xml.nvram(root),
            tpm_state=domain_xml.tpm_state(root),
            machine=(kind.get("machine") if kind is not None else None) or "",
            managed_save=self._has_managed_save(handle),
            emulator_owner=domain_xml.emulator_owner(root) if live else None,
            boot=_boot(handle, self._host) if live else "",
            problem=problem,
        )

    def _has_managed_save(self, handle: Any) -> bool:
        try:
            return bool(handle.hasManagedSaveImage(0))
        except libvirt.libvirtError:  # a driver without managed save
            return False

    def _live_xml(self, handle: Any) -> str | None:
        return self._xml(handle, _SECURE) if handle.isActive() else None

    def _xml(self, handle: Any, flags: int) -> str:
        """XML with secrets where permitted; a read-only or test connection gets none."""
        try:
            return str(handle.XMLDesc(flags))
        except libvirt.libvirtError:
            return str(handle.XMLDesc(flags & ~_SECURE))

    def _disks(self, root: Any) -> tuple[Disk, ...]:
        volumes = domain_xml.volume_references(root)
        return tuple(
            replace(disk, source=self._volume_path(*volumes[disk.target]))
            if disk.target in volumes
            else disk
            for disk in domain_xml.disks(root)
        )

    def _volume_path(self, pool: str, volume: str) -> str | None:
        with contextlib.suppress(libvirt.libvirtError):
            storage = self._connection.storagePoolLookupByName(pool)
            return str(storage.storageVolLookupByName(volume).path())
        return None
