"""QEMU arguments in ``<qemu:commandline>``, which libvirt passes on without knowing them.

A drive that is named there is no disk of the domain: no snapshot contains it, and a clone would use
the original's. So only arguments are accepted that cannot refer to a file, device or network. The
same applies to ``<qemu:override>``, which sets properties of devices.
"""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element, SubElement

_QEMU = "{http://libvirt.org/schemas/domain/qemu/1.0}"
_OPTIONS = frozenset({"cpu", "global", "icount", "machine", "msg", "overcommit", "rtc", "set"})
_DEVICE = "device"
_NETDEV = "netdev"
_CUT_OFF = re.compile(r"user,id=snaporch\d+,restrict=on")
_DEVICES = re.compile(
    r"(usb-(kbd|mouse|tablet|hub|audio)|(virtio-)?(keyboard|mouse|tablet)(-pci|-device)?"
    r"|(virtio-(vga|gpu|balloon|serial|scsi)|pcie-root-port|pcie-pci-bridge|pci-bridge)(-pci)?"
    r"|(nec|qemu)-(usb-)?xhci|usb-ehci|ich9-(usb-\w+|intel-hda)|intel-hda|hda-(duplex|micro|output)"
    r"|AC97|isa-(applesmc|debug-exit)|pvpanic(-pci)?|vmcoreinfo|vmgenid|edu|sga|intel-iommu"
    r"|amd-iommu|virtio-iommu(-pci)?)(,.*)?"
)
"""Devices without a backend on the host."""
_NAMES = re.compile(
    r"/|\b(drive|\w*file(name)?|path|host(bus|addr|port|device|name)?|netdev|chardev|mem-path|mem(ory-backend|dev)|\w*fd"
    r"|[\w-]*cid|vendorid|productid|wwpn|hidraw|\w*dir|evdev|sysfsdev|driver|tpmdev|audiodev"
    r"|pflash\d|kernel|initrd|\w*dtb|firmware)="
)
"""Parts of an option's value that refer to something outside of the emulator."""
_SETTABLE = re.compile(r"device\.[^.=]+\.[^.=]+=.*")


def unknown_argument(root: Element) -> str | None:
    """The first argument that may refer to a file, device or network; ``None`` if there is none."""
    option = ""
    for element in root.findall(f"{_QEMU}commandline/{_QEMU}arg"):
        value = element.get("value", "")
        if value.startswith("-") and not option:
            option = value.lstrip("-")
            if option not in (*_OPTIONS, _DEVICE, _NETDEV):
                return value
            continue
        if not option or not _is_known(option, value):
            return f"-{option} {value}" if option else value
        option = ""
    return _unknown_property(root)


def _is_known(option: str, value: str) -> bool:
    if option == _DEVICE and not _DEVICES.fullmatch(value):
        return False
    if option == _NETDEV:
        return _CUT_OFF.fullmatch(value) is not None
    if option == "set" and not _SETTABLE.fullmatch(value):
        return False
    return not _NAMES.search(value)


def _unknown_property(root: Element) -> str | None:
    for element in root.findall(f"{_QEMU}override//{_QEMU}property"):
        setting = f"{element.get('name', '')}={element.get('value', '')}"
        if _NAMES.search(setting):
            return setting
    return None


def receive_user_networks(root: Element) -> None:
    """Add a receiver for the state of each ``<interface type='user'>``, whose card is replaced.

    QEMU's image of the RAM has a section for each such network (``slirp``), which an emulator
    without one refuses. The added networks have no card and no access to outside (``restrict``). A
    card whose link is down would not do: resuming sets it up again.
    """
    cards = root.findall("devices/interface[@type='user']")
    count = sum(card.find("backend[@type='passt']") is None for card in cards)
    if count == 0:
        return
    line = root.find(f"{_QEMU}commandline")
    line = SubElement(root, f"{_QEMU}commandline") if line is None else line
    there = len(line.findall(f"{_QEMU}arg"))
    for number in range(there, there + count):
        SubElement(line, f"{_QEMU}arg", value=f"-{_NETDEV}")
        SubElement(line, f"{_QEMU}arg", value=f"user,id=snaporch{number},restrict=on")
