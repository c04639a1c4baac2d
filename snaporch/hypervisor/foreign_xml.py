"""What the definition of another host's guest may not have here: pure functions on its XML.

Such a definition comes with a copy or an archive, and may be forged. libvirt runs as root, and a
guest gets what its definition names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from xml.etree.ElementTree import Element

from snaporch.hypervisor.clone_allowlist import QEMU, is_own
from snaporch.hypervisor.domain_xml import host_paths

FIRMWARE = (
    "/usr/lib/ipxe",
    "/usr/share/AAVMF",
    "/usr/share/OVMF",
    "/usr/share/edk2",
    "/usr/share/edk2-ovmf",
    "/usr/share/ipxe",
    "/usr/share/ovmf",
    "/usr/share/qemu",
    "/usr/share/qemu-efi-aarch64",
    "/usr/share/qemu-efi-arm",
    "/usr/share/qemu-efi-riscv64",
    "/usr/share/seabios",
)
"""Where packages install firmware and ROMs for guests, and nothing else."""
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


def for_the_emulator(root: Element) -> str | None:
    """The first element that libvirt passes on to an emulator, or ``None``."""
    top = list(root)
    for element in root.iter():
        if element.tag.startswith(QEMU) or (element.tag.startswith("{") and element in top):
            return element.tag.rpartition("}")[2]
    return None


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
