"""Domain XML as libvirt writes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement


@dataclass(frozen=True)
class DiskSpec:
    """A disk to put into domain XML."""

    target: str
    source: str | None
    device: str = "disk"
    kind: str = "file"
    format: str = "raw"
    cache: str | None = None
    readonly: bool = False
    transient: bool = False
    discard: str | None = None
    shareable: bool = False


def domain_xml(
    name: str,
    uuid: str,
    disks: Iterable[DiskSpec] = (),
    *,
    nvram: str | None = None,
    tpm: str | None = None,
    agent: str | None = None,
) -> str:
    """``<domain>`` with these disks; ``agent`` is the state of its agent's channel."""
    root = Element("domain", type="kvm")
    SubElement(root, "name").text = name
    SubElement(root, "uuid").text = uuid
    SubElement(root, "memory", unit="KiB").text = "16384"
    system = SubElement(root, "os")
    SubElement(system, "type", arch="x86_64", machine="pc-q35-9.2").text = "hvm"
    if nvram is not None:
        SubElement(system, "nvram").text = nvram
    devices = SubElement(root, "devices")
    for disk in disks:
        devices.append(_disk(disk))
    if tpm is not None:
        backend = SubElement(SubElement(devices, "tpm"), "backend", type="emulator")
        SubElement(backend, "source", type="file" if Path(tpm).is_file() else "dir", path=tpm)
    if agent is not None:
        channel = SubElement(devices, "channel", type="unix")
        SubElement(channel, "target", type="virtio", name="org.qemu.guest_agent.0", state=agent)
    return ElementTree.tostring(root, encoding="unicode")


def _disk(disk: DiskSpec) -> Element:
    element = Element("disk", type=disk.kind, device=disk.device)
    driver = SubElement(element, "driver", name="qemu", type=disk.format)
    if disk.cache:
        driver.set("cache", disk.cache)
    if disk.discard:
        driver.set("discard", disk.discard)
    attribute = {"file": "file", "block": "dev"}.get(disk.kind)
    if disk.source is not None and attribute:
        SubElement(element, "source", {attribute: disk.source})
    SubElement(element, "target", dev=disk.target, bus="virtio")
    if disk.readonly:
        SubElement(element, "readonly")
    if disk.transient:
        SubElement(element, "transient")
    if disk.shareable:
        SubElement(element, "shareable")
    return element
