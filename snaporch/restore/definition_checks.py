"""Whether the definitions in a bundle are of its guest: a bundle may come from another host.

libvirt defines whatever guest the definition names, so one of another guest would replace that. And
it resumes a guest with the definition in the RAM image, while the user is shown the definitions of
the bundle.
"""

from __future__ import annotations

from pathlib import Path

from snaporch.bundle.manifest import Manifest, Role
from snaporch.bundle.save_image_copy import read_preface
from snaporch.errors import RefusedError
from snaporch.hypervisor import domain_xml
from snaporch.zfs_names import quoted


def check_identity(thing: str, what: str, xml: str, manifest: Manifest) -> None:
    """Refuse a definition of another guest than the manifest is of.

    Args:
        thing: the subject of the error.
        what: the definition, for the error.
        xml: the definition.
        manifest: of the bundle that has it.

    Raises:
        RefusedError: its UUID or name is another, or it cannot be read.
    """
    uuid, name = domain_xml.identity(domain_xml.parse(xml))
    if (uuid, name) != (manifest.uuid, manifest.domain):
        reason = f"{what} is of another guest: {quoted(name)} ({quoted(uuid)})"
        raise RefusedError(thing, reason, "choose another snapshot: its bundle is not its own")


def check_ram_definition(thing: str, directory: Path, manifest: Manifest) -> None:
    """Refuse a RAM image whose definition takes more of the host than those of its bundle.

    Args:
        thing: the subject of errors.
        directory: of the bundle; its files have the SHA-256 of the manifest.
        manifest: of the bundle, which has RAM.

    Raises:
        RefusedError: the definition is of another guest, or names a path or device that the
            bundle's definitions do not name.
        SaveImageError: the image is damaged.
        OSError: a file cannot be read.
    """
    ram = manifest.part(Role.RAM)
    assert ram is not None
    xml = read_preface(directory / ram.name).xml
    check_identity(thing, "the definition in its RAM", xml, manifest)
    shown: set[tuple[str, str, str]] = set()
    for part in filter(None, map(manifest.part, (Role.LIVE_XML, Role.INACTIVE_XML))):
        data = (directory / part.name).read_bytes()
        shown |= domain_xml.host_values(domain_xml.parse(data.decode("utf-8", "replace")))
    other = sorted(domain_xml.host_values(domain_xml.parse(xml)) - shown)
    if other:
        reason = f"the definition in its RAM has what its bundle's has not: {quoted(other[0][2])}"
        raise RefusedError(thing, reason, "boot from the disks with --cold")
