"""Check that a guest has not changed since its plan was made.

Between the plan and the freeze a backup tool may take a snapshot of its own, or an admin may attach
a disk. Then the plan's datasets no longer hold all of the guest. Comparing libvirt's XML once is
enough to notice that, and hardly lengthens the pause of a frozen guest.
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
"""Elements that management tools write for themselves; a change of them does not matter."""
_OF_THE_MOMENT = ("index", "startupPolicy")
"""Attributes of a ``<source>`` that do not say where the image is."""

_Image = tuple[str, tuple[tuple[str, str], ...], str]
"""Kind, attributes of the source, and format."""


def check_unchanged(
    hypervisor: Hypervisor, planned: Domain, overlays: Sequence[OverlayDisk], *, state: bool = False
) -> None:
    """Check that a guest is as it was when its run was planned.

    Args:
        hypervisor: libvirt.
        planned: the domain as it was then.
        overlays: the run's overlays, which may be the active images by now.
        state: also check whether it runs or is paused as it did.

    Raises:
        ChangedError: something has changed; the reason names it.
        HypervisorError, UnavailableError: libvirt cannot be asked.
    """
    now = hypervisor.find(planned.uuid)
    change = find_change(planned, now, overlays)
    if not change and state and now is not None and now.state is not planned.state:
        change = f"it is {now.state}, and was {planned.state} when the run was planned"
    if change:
        raise ChangedError(
            planned.name, change, "wait until the other program has finished, and run it again"
        )


def check_idle(hypervisor: Hypervisor, domain: Domain) -> None:
    """Check that libvirt has no job on a guest: libvirt would delay another job until its end.

    Raises:
        RefusedError: there is a job.
        HypervisorError, UnavailableError: libvirt cannot be asked.
    """
    job = hypervisor.busy_with(domain.uuid)
    if job is not None:
        reason, step = f"libvirt is busy with it ({job})", "wait until that has ended"
        raise RefusedError(domain.name, reason, step)


def find_change(planned: Domain, now: Domain | None, overlays: Sequence[OverlayDisk]) -> str:
    """Describe what has changed since the plan; empty if nothing that matters has."""
    if now is None:
        return "it does not exist any more"
    if now.boot != planned.boot:
        return "it was started or stopped meanwhile"
    if (now.live_xml, now.inactive_xml) == (planned.live_xml, planned.inactive_xml):
        return ""  # without parsing, because the guest may be paused
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
    """Return the backing chains of all writable disks by target, the active image first."""
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
    """Return a definition in canonical form, without the elements that do not matter."""
    if xml is None:
        return ""
    root = domain_xml.parse(xml)
    for child in [child for child in root if child.tag in _OF_NO_ACCOUNT]:
        root.remove(child)
    text = ElementTree.tostring(root, encoding="unicode")
    return ElementTree.canonicalize(text, strip_text=True)
