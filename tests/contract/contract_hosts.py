"""Guests for the contract of a hypervisor: a fake one, and a probe guest in the lab."""

from pathlib import Path
from typing import Any

from fakes import images
from fakes.domain_xml import DiskSpec, domain_xml
from fakes.hypervisor import Agent, FakeGuest, FakeHypervisor

from snaporch.disks import overlay_files
from snaporch.hypervisor import Hypervisor, OverlayDisk
from snaporch.model import DomainState

NAME = "contract <vm> & Co"


class FakeHost:
    """A fake hypervisor with a guest."""

    agent = Agent.MISSING

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.base = directory / "vda.img"
        self.base.write_bytes(bytes(1 << 20))
        self.uuid = "7f1c0d4e-4f7d-4a6e-9d0a-0d7c5a1b2c3d"
        channel = None if self.agent is Agent.MISSING else "connected"
        xml = domain_xml(NAME, self.uuid, [DiskSpec("vda", str(self.base))], agent=channel)
        ram = images.qemu_stream(100_000)
        guest = FakeGuest(NAME, self.uuid, xml, xml, DomainState.RUNNING, ram=ram, agent=self.agent)
        self.hypervisor: Hypervisor = FakeHypervisor(guest)

    def overlay(self) -> OverlayDisk:
        """An overlay for the guest's disk, ready to be used."""
        path = self.directory / "vda.qcow2"
        path.touch()
        return OverlayDisk("vda", str(self.base), "file", "raw", str(path))

    def suspend(self) -> None:
        """``virsh suspend``."""
        guest = self.hypervisor.guests[self.uuid]  # type: ignore[attr-defined]
        guest.state, guest.paused_reason = DomainState.PAUSED, "user"

    def managed_save(self) -> None:
        """``virsh managedsave``."""
        guest = self.hypervisor.guests[self.uuid]  # type: ignore[attr-defined]
        image = self.directory / "managed.save"
        self.hypervisor.save(self.uuid, image)
        guest.managed_save = True
        self.hypervisor.managed_saves[self.uuid] = image  # type: ignore[attr-defined]

    def autostart(self) -> None:
        """``virsh autostart``."""
        self.hypervisor.guests[self.uuid].autostart = True  # type: ignore[attr-defined]

    def copy(self) -> None:
        """``virsh blockcopy``."""
        guest = self.hypervisor.guests[self.uuid]  # type: ignore[attr-defined]
        guest.live = guest.live.replace("<target dev", '<mirror job="copy"/><target dev')

    def remove(self) -> None:
        """Nothing to remove."""


class FakeAgentHost(FakeHost):
    """A fake hypervisor with a guest whose agent answers."""

    agent = Agent.ANSWERS

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.hypervisor.guests[self.uuid].dirty_rate = 1  # type: ignore[attr-defined]


class ProbeHost:
    """The real libvirt with a probe guest; only inside the lab."""

    def __init__(self, directory: Path) -> None:
        from guests.disks import Disk
        from guests.guest import Guest

        from snaporch.hypervisor.libvirt_driver import LibvirtHypervisor

        self.guest: Any = self.make_guest(Guest, Disk("plain", str(directory / "images")))
        self.uuid: str = self.guest.domain().UUIDString()
        self.directory = directory
        self._overlays = directory / "overlays" / "run"
        self.hypervisor: Hypervisor = LibvirtHypervisor("qemu:///system")

    def make_guest(self, guest: Any, disk: Any) -> Any:
        """Start the guest, which runs a counter only."""
        return guest.create(NAME, [disk])

    def overlay(self) -> OverlayDisk:
        """An overlay for the guest's disk, ready to be used."""
        domain = self.hypervisor.domain(self.uuid)
        overlay_files.make_directory(self._overlays)
        source = str(domain.disks[0].source)
        made = OverlayDisk("vda", source, "file", "raw", str(self._overlays / "vda.qcow2"))
        capacity = self.hypervisor.disk_capacity(self.uuid, "vda")
        overlay_files.make_overlay(made, capacity, domain.emulator_owner)
        return made

    def suspend(self) -> None:
        """``virsh suspend``."""
        self.guest.domain().suspend()

    def managed_save(self) -> None:
        """``virsh managedsave``."""
        self.guest.domain().managedSave(0)

    def autostart(self) -> None:
        """``virsh autostart``."""
        self.guest.domain().setAutostart(1)

    def copy(self) -> None:
        """``virsh blockcopy``."""
        path = self.directory / "copy.img"
        wanted = f"<disk type='file'><source file='{path}'/><driver type='raw'/></disk>"
        import libvirt

        flags = libvirt.VIR_DOMAIN_BLOCK_COPY_TRANSIENT_JOB
        self.guest.domain().blockCopy("vda", wanted, {}, flags)

    def remove(self) -> None:
        """The guest and its disks."""
        self.guest.remove()


class LinuxHost(ProbeHost):
    """The real libvirt with a Linux guest, in which an agent answers."""

    def make_guest(self, guest: Any, disk: Any) -> Any:
        """Start the guest and wait for its agent."""
        made = guest.create(NAME, [disk], kind="linux")
        made.wait_agent()
        return made
