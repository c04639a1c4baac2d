"""The definition of an imported guest: that of the archive, without anything of a host.

An archive may come from anywhere, and libvirt gives a guest what its definition names: files,
devices, programs. So the definition is made like a clone's (:mod:`snaporch.hypervisor.clone_xml`),
which keeps only what is in an allow-list. What a clone may share with its original is refused or
removed here, too.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from snaporch.errors import RefusedError
from snaporch.hypervisor import domain_xml
from snaporch.hypervisor.clone_allowlist import QEMU
from snaporch.hypervisor.clone_xml import CloneSpec, CloneXml, make_clone_xml
from snaporch.zfs_names import quoted

_PACKAGES = PurePosixPath("/usr/share")
"""Firmware of packages: any user may read it."""
_RANDOM = ("/dev/random", "/dev/urandom")
_MEDIA = ("cdrom", "floppy")
_FILES = (
    ("os/nvram", "template"),
    ("os/varstore", "template"),
    (".//rom", "file"),
    (".//entry", "file"),
)
_FILES_IN_TEXT = ("os/loader", "os/kernel", "os/initrd", "os/dtb", "os/shim", "os/acpi/table")
_READS_SECRETS = ("source/encryption", "encryption", "source/auth", "auth")


@dataclass(frozen=True, slots=True)
class HostRules:
    """What an imported definition may use of this host."""

    emulators: Collection[str]
    """Emulators that libvirt has found by itself."""
    accepted: Collection[str] = ()
    """Other paths that the admin accepts."""


def imported_xml(
    xml: str, spec: CloneSpec, formats: Mapping[str, str], rules: HostRules
) -> CloneXml:
    """Make the definition of the imported guest.

    Args:
        xml: a definition of the archive.
        spec: name, UUID, disks and files that the guest gets here.
        formats: the format of each disk, by its target.
        rules: what it may use of this host.

    Raises:
        RefusedError: it names something else of a host, or has another format for a disk.
    """
    root = domain_xml.parse(xml)
    _refuse_arguments(root, spec.of)
    for devices in root.findall("devices"):
        for emulator in devices.findall("emulator"):
            if (emulator.text or "").strip() not in rules.emulators:
                devices.remove(emulator)  # libvirt chooses its own
    for element in root.findall("devices/disk"):
        _disk(element, spec, formats)
    made = make_clone_xml(ElementTree.tostring(root, encoding="unicode"), spec)
    _refuse_paths(made.xml, spec, rules)
    return made


def _refuse_arguments(root: Element, thing: str) -> None:
    for element in root.iter():
        if element.tag.startswith(QEMU) or (element.tag.startswith("{") and element in list(root)):
            name = element.tag.rpartition("}")[2]
            reason = f"its definition has <{name}> for the emulator of another host"
            raise RefusedError(thing, reason, "remove it from the guest, and export it again")


def _disk(element: Element, spec: CloneSpec, formats: Mapping[str, str]) -> None:
    target = element.find("target")
    name = target.get("dev", "") if target is not None else ""
    if name not in spec.disks:
        for tag in ("readonly", "source", "backingStore"):  # so that it is not taken for shareable
            for old in element.findall(tag):
                element.remove(old)
        if element.get("device", "disk") in _MEDIA:
            element.set("type", "file")
        return
    driver = element.find("driver")
    kind = driver.get("type", "raw") if driver is not None else "raw"
    if kind != formats[name]:
        reason = f"its definition has the disk {name} as {kind}, and the archive as {formats[name]}"
        raise RefusedError(spec.of, reason)
    if any(element.find(path) is not None for path in _READS_SECRETS):
        reason = f"its disk {name} needs a secret of another host"
        raise RefusedError(spec.of, reason, "decrypt the disk, and export it again")


def _refuse_paths(xml: str, spec: CloneSpec, rules: HostRules) -> None:
    """Refuse files of this host, except the guest's own and firmware of packages."""
    root = domain_xml.parse(xml)
    state = domain_xml.tpm_state(root)
    own = {spec.files, *(disk.path for disk in spec.disks.values())}
    own |= {state.path} if state is not None else set()
    for path in sorted(domain_xml.host_paths(root) | _names_of_files(root)):
        if path in (*rules.accepted, *rules.emulators, *_RANDOM, *own):
            continue
        place = PurePosixPath(path)
        inside = place.is_relative_to(spec.files) or place.is_relative_to(_PACKAGES)
        if inside and ".." not in place.parts:
            continue
        raise RefusedError(
            spec.of,
            f"its definition names {quoted(path)} of this host",
            f"if that is what you want: --accept {shlex.quote(path)}",
        )


def _names_of_files(root: Element) -> set[str]:
    """The files that the emulator reads, also by a name without a slash at its beginning."""
    values = [(each.get(name), name) for path, name in _FILES for each in root.iterfind(path)]
    values += [(each.text, path) for path in _FILES_IN_TEXT for each in root.iterfind(path)]
    return {value.strip() for value, _ in values if value and value.strip()}
