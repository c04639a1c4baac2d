"""The paths of disks that a definition names as volumes of storage pools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from defusedxml.ElementTree import fromstring

from snaporch.hypervisor.domain_xml import parse

_KINDS = {
    "dir": ("target/path", "", "file", "file"),
    "zfs": ("source/name", "/dev/zvol/", "block", "dev"),
}
"""Of each type of pool: where it is, what is before that, and how a disk names such a path."""


def with_volume_paths(xml: str, pools: Callable[[], Iterable[str]]) -> str:
    """A definition with the path of each disk that is a volume of one of these pools.

    Args:
        xml: of the domain.
        pools: returns definitions of storage pools; called if a disk is a volume. Only
            directories and ZFS datasets have paths by which a guest's own datasets are known;
            a disk in another pool stays as it is.
    """
    root = parse(xml)
    disks = root.findall("devices/disk[@type='volume']")
    if not disks:
        return xml
    read = [fromstring(each, forbid_dtd=True) for each in pools()]
    known = {each.findtext("name", "").strip(): each for each in read}
    for disk in disks:
        _set_path(disk, known)
    return ElementTree.tostring(root, encoding="unicode")


def _set_path(disk: Element, known: Mapping[str, Element]) -> None:
    source = disk.find("source")
    pool = known.get(source.get("pool", "")) if source is not None else None
    if source is None or pool is None or pool.get("type") not in _KINDS:
        return
    volume = source.get("volume", "")
    if "/" in volume or volume in ("", ".", ".."):
        return
    element, above, disk_kind, attribute = _KINDS[pool.get("type", "")]
    place = pool.findtext(element, "").strip()
    if place:
        disk.set("type", disk_kind)
        source.attrib = {attribute: f"{above}{place}/{volume}"}
