"""From libvirt's handles to :class:`~snaporch.model.Domain`."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import libvirt

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
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/run/libvirt/qemu")
_SECURE = libvirt.VIR_DOMAIN_XML_SECURE
_INACTIVE = libvirt.VIR_DOMAIN_XML_INACTIVE


def _boot(handle: Any) -> str:
    """Of this boot of the host, libvirt's number of the domain, and its emulator's process.

    libvirtd counts anew from what runs when it is started again, so its number may come again.
    """
    process = ""
    with contextlib.suppress(OSError):  # another driver's, or a user's libvirt
        process = (_PROCESSES / f"{handle.name()}.pid").read_text().strip()
    return f"{_BOOT_ID.read_text().strip()}:{handle.ID()}:{process}"


class DomainReader:
    """Reads domains over one connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def read(self, handle: Any) -> Domain | None:
        """The domain behind a handle, or ``None`` when it went away meanwhile."""
        try:
            return self._read(handle)
        except libvirt.libvirtError as error:
            if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
                return None
            raise

    def read_listed(self, handle: Any) -> Domain | None:
        """Like :meth:`read`; of one that does not answer, what its definition says.

        An emulator with a stuck monitor must not keep the other guests from being looked at.
        """
        try:
            return self.read(handle)
        except libvirt.libvirtError as error:
            if not handle.isActive():
                raise
            definition = self._xml(handle, _SECURE | _INACTIVE)  # needs no emulator
            return self._domain(handle, definition, trouble=error.get_error_message())

    def _read(self, handle: Any) -> Domain:
        return self._domain(handle, self._live_xml(handle))

    def _domain(self, handle: Any, live: str | None, trouble: str = "") -> Domain:
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
            boot=_boot(handle) if live else "",
            trouble=trouble,
        )

    def _has_managed_save(self, handle: Any) -> bool:
        try:
            return bool(handle.hasManagedSaveImage(0))
        except libvirt.libvirtError:  # a driver without managed save
            return False

    def _live_xml(self, handle: Any) -> str | None:
        return self._xml(handle, _SECURE) if handle.isActive() else None

    def _xml(self, handle: Any, flags: int) -> str:
        """With secrets where we may see them; a read-only or test connection may not."""
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
