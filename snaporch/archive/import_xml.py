"""The definition of an imported guest: that of the archive, without anything of a host.

An archive may come from anywhere, and libvirt gives a guest what its definition names: files,
devices, programs. So the definition is made like a clone's (:mod:`snaporch.hypervisor.clone_xml`),
which keeps only what is in an allow-list. What a clone may share with its original is refused or
removed here, too.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from snaporch.errors import RefusedError
from snaporch.hypervisor import domain_xml
from snaporch.hypervisor.clone_xml import (
    CloneSpec,
    CloneXml,
    SharedError,
    make_clone_xml,
    own_paths,
)
from snaporch.hypervisor.foreign_xml import (
    for_the_emulator,
    forbidden_file,
    needs_secret,
    remove_gpu,
    remove_privileges,
)
from snaporch.zfs_names import quoted

_MEDIA = ("cdrom", "floppy")


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
    if (tag := for_the_emulator(root)) is not None:
        reason = f"its definition has <{tag}> for the emulator of another host"
        raise RefusedError(spec.of, reason, "remove it from the guest, and export it again")
    remove_privileges(root)
    without = remove_gpu(root)
    if without and spec.resumed:
        raise SharedError(spec.of, f"it has {without[-1]}")
    for devices in root.findall("devices"):
        for emulator in devices.findall("emulator"):
            if (emulator.text or "").strip() not in rules.emulators:
                devices.remove(emulator)  # libvirt chooses its own
    for element in root.findall("devices/disk"):
        _disk(element, spec, formats)
    made = make_clone_xml(ElementTree.tostring(root, encoding="unicode"), spec)
    if needs_secret(domain_xml.parse(made.xml)):
        reason = "its definition needs a secret of another host"
        raise RefusedError(spec.of, reason, "decrypt its disks, and export it again")
    _refuse_paths(made.xml, spec, rules)
    return replace(made, missing=(*made.missing, *without))


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
    if element.get("device") == "lun":  # libvirt refuses one that is a file
        reason = f"its disk {name} is a lun, which needs a SCSI device of its host"
        raise RefusedError(spec.of, reason, "make it device='disk', and take a snapshot")
    driver = element.find("driver")
    kind = driver.get("type", "raw") if driver is not None else "raw"
    if kind != formats[name]:
        reason = f"its definition has the disk {name} as {kind}, and the archive as {formats[name]}"
        raise RefusedError(spec.of, reason)


def _refuse_paths(xml: str, spec: CloneSpec, rules: HostRules) -> None:
    """Refuse files of this host, except the guest's own and firmware of packages."""
    accepted = {*rules.accepted, *rules.emulators}
    path = forbidden_file(domain_xml.parse(xml), own_paths(spec), accepted)
    if path is not None:
        raise RefusedError(
            spec.of,
            f"its definition names {quoted(path)} of this host",
            f"if that is what you want: --accept {shlex.quote(path)}",
        )
