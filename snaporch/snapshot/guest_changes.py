"""Whether a guest is still what its plan saw.

Between the plan and the frozen instant others may act on the guest: a backup tool takes a snapshot
of its own, an administrator attaches a disk. Then the plan's datasets do not hold the guest any
more. One look at libvirt's XML tells, so that it costs a guest that stands still next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from snaporch.errors import ChangedError, RefusedError
from snaporch.hypervisor import Hypervisor, OverlayDisk, domain_xml
from snaporch.model import Domain

_WRITABLE = ("disk", "lun")
_OF_NO_ACCOUNT = ("title", "description", "metadata")
"""What management tools write into a definition for themselves."""
_OF_THE_MOMENT = ("index", "startupPolicy")
"""Attributes of a ``<source>`` that say nothing about where it is."""

_Image = tuple[str, tuple[tuple[str, str], ...], str]
"""Kind, place and format."""


def check_unchanged(
    hypervisor: Hypervisor, planned: Domain, overlays: Sequence[OverlayDisk], *, state: bool = False
) -> None:
    """See that a guest is what its plan saw.

    Args:
        overlays: of the run, which may lie over the disks by now.
        state: whether it must also run, or stand still, as it did.

    Raises:
        ChangedError: it is not, and what has changed.
        HypervisorError, UnavailableError: libvirt does not tell.
    """
    now = hypervisor.find(planned.uuid)
    change = find_change(planned, now, overlays)
    if not change and state and now is not None and now.state is not planned.state:
        change = f"it is {now.state}, and was {planned.state} when the run was planned"
    if change:
        raise ChangedError(planned.name, change, "let others end what they do, and run it again")


def check_idle(hypervisor: Hypervisor, domain: Domain) -> None:
    """See that libvirt has no job on a guest, for the end of which it would wait with another.

    Raises:
        RefusedError: it has.
        HypervisorError, UnavailableError: libvirt does not tell.
    """
    job = hypervisor.busy_with(domain.uuid)
    if job is not None:
        reason, step = f"libvirt is busy with it ({job})", "wait until that has ended"
        raise RefusedError(domain.name, reason, step)


def find_change(planned: Domain, now: Domain | None, overlays: Sequence[OverlayDisk]) -> str:
    """What others have changed since the plan; empty if nothing that counts."""
    if now is None:
        return "it is not there any more"
    if now.boot != planned.boot:
        return "it was started or stopped meanwhile"
    if (now.live_xml, now.inactive_xml) == (planned.live_xml, planned.inactive_xml):
        return ""  # without a closer look, for the guest may be standing still
    return (
        _find_changed_disks(planned.live_xml, now.live_xml, overlays)
        or _find_changed_devices(planned.live_xml, now.live_xml)
        or _find_changed_definition(planned.inactive_xml, now.inactive_xml, overlays)
    )


def _find_changed_disks(
    planned: str | None, now: str | None, overlays: Sequence[OverlayDisk]
) -> str:
    before, after = _chains(planned), _chains(now)
    own = {disk.target: disk.overlay for disk in overlays}
    for target in sorted(before.keys() | after.keys()):
        if target not in after:
            return f"its disk {target} was detached meanwhile"
        if target not in before:
            return f"the disk {target} was attached meanwhile"
        images = after[target]
        if own.get(target) in _paths(images[:1]):
            images = images[1:]
        if images != before[target]:
            there, then = (" over ".join(_paths(each)) for each in (images, before[target]))
            return f"its disk {target} is on {there}, and was on {then} when the run was planned"
    return ""


def _chains(xml: str | None) -> dict[str, tuple[_Image, ...]]:
    """The images of all disks that a guest may write to, the active one first."""
    root = domain_xml.parse(xml) if xml else Element("domain")
    found = {}
    for element in root.findall("devices/disk"):
        target = element.find("target")
        if element.get("device", "disk") in _WRITABLE and target is not None:
            found[target.get("dev", "")] = tuple(_chain(element))
    return found


def _chain(disk: Element) -> list[_Image]:
    found, driver = [], disk.find("driver")
    element: Element | None = disk
    while element is not None and (source := element.find("source")) is not None:
        form = driver if element is disk else element.find("format")
        found.append(
            (
                element.get("type", "file"),
                _place(source),
                form.get("type", "") if form is not None else "",
            )
        )
        element = element.find("backingStore")
    return found


def _place(source: Element) -> tuple[tuple[str, str], ...]:
    parts = [source, *source.findall("host")]
    pairs = (pair for part in parts for pair in part.attrib.items())
    return tuple(sorted(pair for pair in pairs if pair[0] not in _OF_THE_MOMENT))


def _paths(images: Sequence[_Image]) -> list[str]:
    return [" ".join(value for _, value in place) for _, place, _ in images]


def _find_changed_devices(planned: str | None, now: str | None) -> str:
    changed = sorted(_devices(planned) ^ _devices(now))
    return f"devices were attached or detached meanwhile ({', '.join(changed)})" if changed else ""


def _devices(xml: str | None) -> set[str]:
    root = domain_xml.parse(xml) if xml else Element("domain")
    return {alias.get("name", "") for alias in root.findall("devices/*/alias")}


def _find_changed_definition(
    planned: str | None, now: str | None, overlays: Sequence[OverlayDisk]
) -> str:
    if _plain(planned) == _plain(now):
        return ""
    on_bases = domain_xml.with_bases(now, overlays) if now else None
    return "" if _plain(planned) == _plain(on_bases) else "its definition was changed meanwhile"


def _plain(xml: str | None) -> str:
    """A definition without what is of no account, in a form that can be compared."""
    if xml is None:
        return ""
    root = domain_xml.parse(xml)
    for child in [child for child in root if child.tag in _OF_NO_ACCOUNT]:
        root.remove(child)
    text = ElementTree.tostring(root, encoding="unicode")
    return ElementTree.canonicalize(text, strip_text=True)
