"""A storage pool of libvirt that this host lacks: defined only on datasets that a rebuild creates.

A ZFS pool that this host lacks is refused by :mod:`snaporch.rebuild.local_checks`.

The definition comes from a replica. A pool over a dataset that was here before could delete what
other guests have there (``virsh vol-delete``).
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import PurePosixPath
from typing import NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring

from snaporch.rebuild.host_object_xml import Allowed, NotAllowedError, read_definition
from snaporch.zfs_names import quoted

_ALLOWED: Allowed = {
    "": ("type",),
    "name": (),
    "uuid": (),
    **dict.fromkeys(("capacity", "allocation", "available"), ("unit",)),
    "source": (),
    "source/name": (),
    "target": (),
    "target/path": (),
    "target/permissions": (),
    **{f"target/permissions/{each}": () for each in ("mode", "owner", "group", "label")},
}


class Created(NamedTuple):
    """What a rebuild creates on this host."""

    mountpoints: Collection[str]
    """Of the file systems."""
    file_systems: Collection[str]
    """Names of the file systems that no dataset of another guest is below, also of those that are
    created above others."""


class AllowedPool(NamedTuple):
    """A storage pool that a rebuild may define."""

    name: str
    xml: str
    description: str
    directory: str
    """Of a pool of type dir; empty otherwise."""
    mountpoint: str
    """The mount point that the directory is below."""


def allowed_pool(name: str, xml: str, created: Created) -> AllowedPool:
    """Build the definition of a storage pool from one that a replica has.

    Args:
        name: of the pool.
        xml: its definition on the host that the guest comes from.
        created: what the rebuild creates.

    Raises:
        NotAllowedError: it has to be defined by hand.
    """
    thing = f"storage pool {quoted(name)}"
    root = read_definition("pool", name, xml, _ALLOWED)
    kind = root.get("type", "")
    made = Element("pool", type=kind)
    SubElement(made, "name").text = name
    if kind == "dir":
        path = (root.findtext("target/path") or "").strip()
        above = _mountpoint(path, created)
        if not above:
            raise NotAllowedError(thing, f"is at {quoted(path)}, outside of the guest's datasets")
        SubElement(SubElement(made, "target"), "path").text = path
        return AllowedPool(name, _text(made), f"dir {path}", path, above)
    if kind == "zfs":
        dataset = (root.findtext("source/name") or "").strip()
        if dataset not in created.file_systems:
            raise NotAllowedError(thing, f"is on {quoted(dataset)}, which is not the guest's alone")
        SubElement(SubElement(made, "source"), "name").text = dataset
        return AllowedPool(name, _text(made), f"zfs {dataset}", "", "")
    raise NotAllowedError(thing, f"has the type {quoted(kind)}")


def is_on_created(xml: str, created: Created) -> bool:
    """Whether a storage pool that this host has is on what comes back, and so cannot start before.

    Args:
        xml: its definition, of this host's libvirt.
        created: what the rebuild creates.
    """
    try:
        root = fromstring(xml, forbid_dtd=True)
    except (ElementTree.ParseError, DefusedXmlException, ValueError):
        return False
    if root.get("type") == "zfs":
        dataset = PurePosixPath((root.findtext("source/name") or "").strip())
        return any(dataset.is_relative_to(each) for each in created.file_systems)
    return bool(_mountpoint((root.findtext("target/path") or "").strip(), created))


def _mountpoint(path: str, created: Created) -> str:
    """The mount point that a directory is at or below; empty if there is none."""
    if not path.isprintable() or str(PurePosixPath(path)) != path or ".." in path.split("/"):
        return ""
    wanted = PurePosixPath(path)
    found = [each for each in created.mountpoints if each and wanted.is_relative_to(each)]
    return max(found, key=len, default="")


def _text(element: Element) -> str:
    return ElementTree.tostring(element, encoding="unicode")
