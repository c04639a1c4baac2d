"""The domain XML of a test guest: as little hardware as it can do with."""

import os
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from guests.disks import Image

Firmware = Literal["bios", "uefi"]
Mutate = Callable[[ET.Element], None]

_OVMF = Path("/usr/share/OVMF")
_AGENT = "org.qemu.guest_agent.0"
_PREFIX = {"virtio": "vd", "scsi": "sd", "sata": "sd", "ide": "hd"}


@dataclass(frozen=True)
class DirectBoot:
    """A kernel for libvirt to boot instead of the first disk."""

    kernel: Path
    initrd: Path
    command_line: str


@dataclass(frozen=True)
class Machine:
    """What a domain is made of, disks apart."""

    name: str
    title: str | None
    firmware: Firmware
    machine: str
    memory_mib: int
    vcpus: int
    serial_log: Path
    boot: DirectBoot | None = None
    agent: bool = False


def domain_xml(machine: Machine, images: Sequence[Image], mutate: Mutate | None = None) -> str:
    """XML to define the domain with; ``mutate`` may change it first.

    Every disk gets its own place in the boot order: SeaBIOS shows a boot
    sector only the disks that are in it. SNAPORCH_EMULATOR names the emulator
    if libvirt's own choice is not wanted.
    """
    domain = ET.Element("domain", type="qemu")
    _text(domain, "name", machine.name)
    if machine.title is not None:
        _text(domain, "title", machine.title)
    _text(domain, "memory", str(machine.memory_mib), unit="MiB")
    _text(domain, "vcpu", str(machine.vcpus))
    _os(domain, machine)
    ET.SubElement(ET.SubElement(domain, "features"), "acpi")
    cpu = ET.SubElement(domain, "cpu", mode="custom", match="exact", check="none")
    _text(cpu, "model", "qemu64")
    if machine.boot is not None:
        # QEMU 7.2 emulates cmpxchg16b wrongly at times; without it, Linux uses something else.
        ET.SubElement(cpu, "feature", policy="disable", name="cx16")
    clock = ET.SubElement(domain, "clock", offset="utc")
    ET.SubElement(clock, "timer", name="hpet", present="no")
    devices = ET.SubElement(domain, "devices")
    if emulator := os.environ.get("SNAPORCH_EMULATOR"):
        _text(devices, "emulator", emulator)
    for number, image in enumerate(images):
        _disk(devices, image, number)
    if any(image.disk.bus == "scsi" for image in images):
        ET.SubElement(devices, "controller", type="scsi", model="virtio-scsi")
    ET.SubElement(devices, "controller", type="usb", model="none")
    serial = ET.SubElement(devices, "serial", type="file")
    ET.SubElement(serial, "source", path=str(machine.serial_log), append="on")
    if machine.agent:
        channel = ET.SubElement(devices, "channel", type="unix")
        ET.SubElement(channel, "target", type="virtio", name=_AGENT)
    ET.SubElement(devices, "memballoon", model="none")
    if mutate is not None:
        mutate(domain)
    return ET.tostring(domain, encoding="unicode")


def disk_sources(xml: str) -> dict[str, str]:
    """Target name to source path of every disk in a domain's XML."""
    sources = {}
    for disk in ET.fromstring(xml).iterfind("devices/disk"):
        target, source = disk.find("target"), disk.find("source")
        if target is not None and source is not None:
            path = source.get("file") or source.get("dev") or ""
            sources[target.get("dev", "")] = path
    return sources


def disk_images(xml: str) -> list[tuple[str, str]]:
    """Path and format of every disk in a domain's XML."""
    found = []
    for disk in ET.fromstring(xml).iterfind("devices/disk[@device='disk'][source]"):
        source, driver = disk.find("source"), disk.find("driver")
        path = "" if source is None else source.get("file") or source.get("dev") or ""
        found.append((path, "raw" if driver is None else driver.get("type", "raw")))
    return found


def existing_machine(xml: str) -> Machine:
    """What there is to know of a domain that exists."""
    domain = ET.fromstring(xml)
    log = domain.find("devices/serial/source")
    system = domain.find("os/type")
    return Machine(
        name=domain.findtext("name", ""),
        title=domain.findtext("title"),
        firmware="uefi" if domain.find("os/nvram") is not None else "bios",
        machine=system.get("machine", "") if system is not None else "",
        memory_mib=int(domain.findtext("memory", "0")) // 1024,
        vcpus=int(domain.findtext("vcpu", "1")),
        serial_log=Path(log.get("path", "") if log is not None else ""),
    )


def agent_connected(xml: str) -> bool:
    """Whether a process in the guest holds the agent's channel open."""
    path = f"devices/channel/target[@name='{_AGENT}'][@state='connected']"
    return ET.fromstring(xml).find(path) is not None


def nvram_path(xml: str) -> Path | None:
    """Find the NVRAM file in a domain's XML."""
    path = ET.fromstring(xml).findtext("os/nvram")
    return Path(path) if path else None


def _text(parent: ET.Element, tag: str, text: str, **attributes: str) -> ET.Element:
    element = ET.SubElement(parent, tag, attributes)
    element.text = text
    return element


def _os(domain: ET.Element, machine: Machine) -> None:
    system = ET.SubElement(domain, "os")
    _text(system, "type", "hvm", arch="x86_64", machine=machine.machine)
    if machine.firmware == "uefi":
        # Named outright: left to choose, libvirt may take a secure boot
        # build, which wants SMM and is slower.
        _text(
            system,
            "loader",
            str(_OVMF / "OVMF_CODE_4M.fd"),
            readonly="yes",
            type="pflash",
        )
        ET.SubElement(system, "nvram", template=str(_OVMF / "OVMF_VARS_4M.fd"))
    if machine.boot is not None:
        _text(system, "kernel", str(machine.boot.kernel))
        _text(system, "initrd", str(machine.boot.initrd))
        _text(system, "cmdline", machine.boot.command_line)


def _disk(devices: ET.Element, image: Image, number: int) -> None:
    disk = ET.SubElement(
        devices,
        "disk",
        device="disk",
        type="block" if image.is_block else "file",
    )
    driver = ET.SubElement(disk, "driver", name="qemu", type=image.format)
    if image.cache is not None:
        driver.set("cache", image.cache)
    attribute = "dev" if image.is_block else "file"
    ET.SubElement(disk, "source", {attribute: str(image.path)})
    bus = image.disk.bus
    letter = chr(ord("a") + number)
    ET.SubElement(disk, "target", dev=f"{_PREFIX[bus]}{letter}", bus=bus)
    ET.SubElement(disk, "boot", order=str(number + 1))
