"""What the definition of another host's guest may not have here: pure functions on its XML.

Such a definition comes with a copy or an archive, and may be forged. libvirt runs as root, and a
guest gets what its definition names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from snaporch.hypervisor.clone_allowlist import FIRMWARE, QEMU, is_own, text_of
from snaporch.hypervisor.domain_xml import host_paths, nvram, nvram_formats, source_path

_RANDOM = ("/dev/random", "/dev/urandom")
_BOOTED = ("os/kernel", "os/initrd", "os/dtb", "os/shim")
"""libvirt gives these files to the emulator's user, so that they must be no file of a package."""
_READ = ("os/loader", "os/acpi/table", "devices/emulator")
_READ_BY_ATTRIBUTE = (
    ("os/nvram", "template"),
    ("os/varstore", "template"),
    (".//rom", "file"),
)
_SECRETS = ("auth", "encryption", "secret")
_PRIVILEGES = (
    ("cputune", "shares"),
    ("blkiotune", "weight"),
    ("cputune", "vcpusched"),
    ("cputune", "iothreadsched"),
    ("cputune", "emulatorsched"),
    ("memoryBacking", "locked"),
    ("memoryBacking", "allocation"),
    ("memoryBacking", "source[@type='file']"),
    ("os", "smbios[@mode='host']"),
    (".", "perf"),
)
"""Priority over this host's processes, memory that cannot be swapped, files, and data of it."""
_DUMP = "coredump-"
_IMAGES = ("backingStore", "dataStore", "mirror")
_CHARACTERS = ("serial", "parallel", "console", "channel")


@dataclass(frozen=True, slots=True)
class ForeignImage:
    """An image that a definition names."""

    target: str
    """Of the disk that it belongs to; ``loader`` and ``nvram`` for those of the firmware."""
    path: str | None
    """``None`` for one that is not at a path of this host, such as a volume of a storage pool."""
    format: str


def for_the_emulator(root: Element) -> str | None:
    """The first element that libvirt passes on to an emulator, or ``None``."""
    top = list(root)
    for element in root.iter():
        if element.tag.startswith(QEMU) or (element.tag.startswith("{") and element in top):
            return element.tag.rpartition("}")[2]
    return None


def confining(root: Element) -> set[str]:
    """The elements by which a guest gets more of this host than libvirt gives others.

    These are the ones for the emulator, such as ``qemu:commandline``, and ``seclabel`` if one has
    more than what libvirt itself writes for a running guest, and does not read at its next start.
    All others: :mod:`snaporch.hypervisor.foreign_allowlist`.
    """
    found = {
        each.tag.replace(QEMU, "qemu:").rpartition("}")[2]
        for each in root
        if each.tag.startswith("{")
    }
    labels = {id(each) for each in root.findall("seclabel")}
    if any(_is_chosen(each, is_top=id(each) in labels) for each in root.iter("seclabel")):
        found.add("seclabel")
    return found


def _is_chosen(label: Element, *, is_top: bool) -> bool:
    """Whether a ``<seclabel>`` chooses a label, or none, in libvirt's place."""
    if label.get("type", "dynamic") != "dynamic" or label.find("baselabel") is not None:
        return True
    return not is_top and label.find("label") is not None


def images(root: Element) -> set[ForeignImage]:
    """All images of a definition: of disks, backing files, data files, and the firmware's."""
    found = set()
    for disk in root.findall("devices/disk"):
        target = disk.find("target")
        name = target.get("dev", "") if target is not None else ""
        for image in (disk, *(each for tag in _IMAGES for each in disk.iter(tag))):
            form = image.find("driver" if image is disk else "format")
            kind = (form.get("type") if form is not None else None) or "raw"
            if image.find("source") is not None:
                path = source_path(image, image.get("type", "file"))
                found.add(ForeignImage(name, path, kind))
    return found | set(_firmware_images(root))


def written_as_bytes(root: Element, image: ForeignImage) -> set[str]:
    """The files into which a guest can write any bytes, also the header of an image.

    Args:
        image: whose own part in the definition does not count: which of several formats a file of
            the firmware has depends on libvirt's version, and is one for it.
    """
    flash = _firmware_images(root)
    found = {each.path for each in flash if each.format == "raw" and each.target != image.target}
    for disk in root.findall("devices/disk"):
        driver = disk.find("driver")
        is_raw = driver is None or driver.get("type", "raw") == "raw"
        if is_raw and disk.find("readonly") is None and disk.get("device") != "cdrom":
            found.add(source_path(disk, disk.get("type", "file")))
    for device in (each for tag in _CHARACTERS for each in root.findall(f"devices/{tag}")):
        found |= {each.get("path") for each in device.findall("source")}
        found |= {each.get("file") for each in device.findall("log")}
    found |= {text_of(each) for each in root.findall("devices/memory/source/path")}
    return {path for path in found if path}


def _firmware_images(root: Element) -> Iterator[ForeignImage]:
    """What the emulator opens as flash of the firmware."""
    formats = nvram_formats(root) or {"raw"}
    for path in _variables(root):
        yield from (ForeignImage("nvram", path, form) for form in formats)
    for loader in root.findall("os/loader"):
        if path := (loader.text or "").strip():
            yield ForeignImage("loader", path, loader.get("format", "raw"))
    for variables_of in root.findall("os/nvram[@template]"):
        form = variables_of.get("templateFormat", "raw")
        yield ForeignImage("nvram", variables_of.get("template"), form)


def _variables(root: Element) -> set[str]:
    """All paths that may have the UEFI variables, whichever of them libvirt takes."""
    found = {nvram(root)}
    for element in root.findall("os/nvram"):
        found.add(text_of(element))
        found |= {each.get(name) for each in element.findall("source") for name in ("file", "dev")}
    return {path for path in found if path}


def needs_secret(root: Element) -> bool:
    """Whether it names a secret of its host, which here is another or none."""
    return any(element.tag in _SECRETS for element in root.iter())


def remove_privileges(root: Element) -> None:
    """Remove what harms other guests of this host, or shows its data; the guest runs without."""
    for above, path in _PRIVILEGES:
        for parent in root.findall(above):
            for element in parent.findall(path):
                parent.remove(element)
    for element in root.findall("on_crash"):
        if _DUMP in "".join(element.itertext()):  # libvirt takes the text of children, too
            element[:] = []
            element.text = "destroy"
    for element in root.findall("devices/watchdog[@action='dump']"):
        element.set("action", "reset")


def remove_gpu(root: Element) -> list[str]:
    """Remove what has libvirt give the guest a GPU of this host; it chooses one by itself.

    Returns:
        What the guest does not have then; a device of the guest has no acceleration.
    """
    found = []
    for devices in root.findall("devices"):
        for display in devices.findall("graphics[@type='egl-headless']"):
            devices.remove(display)
            found.append("<graphics type='egl-headless'>, which uses a GPU of this host")
        for display in devices.findall("graphics"):
            for gl in display.findall("gl"):
                display.remove(gl)
                if gl.get("enable") == "yes":
                    found.append("<gl>, which uses a GPU of this host")
        for acceleration in devices.findall("video/model/acceleration[@accel3d='yes']"):
            acceleration.set("accel3d", "no")
            found.append("accel3d, which needs a GPU of this host")
    return found


def forbidden_file(
    root: Element,
    own: Collection[str],
    accepted: Collection[str],
    real: Callable[[str], str] = os.path.realpath,
) -> str | None:
    """The first file of this host that it names and must not; ``None`` if there is none.

    Args:
        root: the definition that was made for this host.
        own: the guest's own files, and directories with everything in them.
        accepted: other paths that it may name.
        real: returns a path without links.
    """
    booted = set(_booted(root))
    for path in sorted(host_paths(root) | booted | set(_read(root))):
        if path in accepted:
            continue
        if path in booted or not (path in _RANDOM or is_own(path, own) or _is_firmware(path, real)):
            return path
    return None


def _booted(root: Element) -> Iterator[str]:
    for path in _BOOTED:
        yield from _stripped(each.text for each in root.iterfind(path))
    yield from _stripped(each.get("file") for each in root.iterfind(".//entry"))


def _read(root: Element) -> Iterator[str]:
    for path in _READ:
        yield from _stripped(each.text for each in root.iterfind(path))
    for path, name in _READ_BY_ATTRIBUTE:
        yield from _stripped(each.get(name) for each in root.iterfind(path))


def _stripped(values: Iterator[str | None]) -> Iterator[str]:
    return (value.strip() for value in values if value and value.strip())


def _is_firmware(path: str, real: Callable[[str], str]) -> bool:
    if not path.startswith("/") or ".." in path.split("/"):
        return False
    return is_own(path, FIRMWARE) and is_own(real(path), FIRMWARE)
