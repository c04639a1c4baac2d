"""Read domain XML; write snapshot XML and changed definitions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring

from snaporch.errors import RefusedError
from snaporch.hypervisor.interface import BackingImage, CaptureRequest, OverlayDisk
from snaporch.model import Disk, Owner, TpmState
from snaporch.zfs_names import quoted

_SOURCE_ATTRIBUTES = {"file": "file", "block": "dev", "dir": "dir"}
_OF_THE_IMAGE = ("driver", "auth", "source", "backingStore", "mirror", "encryption")
"""Children of a ``<disk>`` that describe its image, not the guest's device."""
SWTPM_STATE = PurePosixPath("/var/lib/libvirt/swtpm")
"""Where libvirt keeps the state of emulated TPMs (docs/formatdomain, "TPM device")."""
_MAX_NODES = 4096
"""More than any host has (the kernel's CONFIG_NODES_SHIFT is at most 10)."""
_UNIT = re.compile(r"(?:bytes?|b|([kmgtpe])(b|ib)?)")
_DIGITS = re.compile(r"[0-9]{1,20}")
_OF_AN_EMULATOR = "{http://libvirt.org/schemas/domain/"
"""How the names of elements begin that libvirt passes to QEMU without knowing them."""
_ENCODING = re.compile(r"\ufeff?<\?xml\s[^>]*?\bencoding\s*=\s*[\"']([^\"']*)")
_NO_VARIABLES = ("readonly", "stateless")
"""A ``<loader>`` is not written to if one of these attributes is ``yes``."""


def parse(xml: str) -> Element:
    """Parse a ``<domain>`` document.

    Raises:
        RefusedError: not XML, not a domain, XML that would load external data, or that says it is
            not in UTF-8: libvirt would read it so, and find other elements.
    """
    declared = _ENCODING.match(xml)
    if declared is not None and declared[1].upper() != "UTF-8":
        raise RefusedError("domain XML", f"is in {quoted(declared[1])}, not in UTF-8")
    try:
        root: Element = fromstring(xml, forbid_dtd=True)
    except (ElementTree.ParseError, DefusedXmlException, ValueError) as error:
        raise RefusedError(
            "domain XML", f"cannot be read ({type(error).__name__}: {error})"
        ) from error
    if root.tag != "domain":
        raise RefusedError("domain XML", f"is a <{root.tag}>, not a <domain>")
    return root


def text(root: Element, path: str) -> str:
    """The text at ``path``, stripped; empty when absent."""
    return (root.findtext(path) or "").strip()


def identity(root: Element) -> tuple[str, str]:
    """The UUID and the name of the domain, as libvirt reads them; each empty when absent."""
    found = (root.find(tag) for tag in ("uuid", "name"))
    uuid, name = ("" if each is None else "".join(each.itertext()) for each in found)
    return uuid, name


def host_paths(root: Element) -> set[str]:
    """The paths of the host that a definition names, and arguments of QEMU that may contain one."""
    found = set()
    for element in root.iter():
        if element.tag == "partition":  # of control groups
            continue
        is_argument = element.tag.startswith(_OF_AN_EMULATOR)
        for value in map(str.strip, (element.text or "", *element.attrib.values())):
            if value.startswith("/") or (is_argument and "/" in value):
                found.add(value)
    return found


def host_values(root: Element) -> set[tuple[str, str, str]]:
    """What a definition takes of the host: each value with its element and attribute.

    These are all paths, all that is in a ``<source>`` or a ``<seclabel>``, and arguments of QEMU.
    """
    found = {("", "", path) for path in host_paths(root)}
    marked = [each for tag in ("source", "seclabel") for each in root.iter(tag)]
    elements = [each for above in marked for each in above.iter()]
    elements += [each for each in root.iter() if each.tag.startswith(_OF_AN_EMULATOR)]
    for element in elements:
        values = {"": element.text or "", **element.attrib}
        found |= {(element.tag, key, text) for key, v in values.items() if (text := v.strip())}
    return found


def source_path(element: Element, kind: str) -> str | None:
    """The local path in the ``<source>`` of a disk or backing store."""
    attribute = _SOURCE_ATTRIBUTES.get(kind)
    source = element.find("source")
    return source.get(attribute) if attribute and source is not None else None


def disks(root: Element) -> list[Disk]:
    """Every disk in the XML's own order."""
    return [_disk(element) for element in root.findall("devices/disk")]


def sources(xml: str | None) -> dict[str, str] | None:
    """The path of every disk by target; ``None`` without a definition."""
    if xml is None:
        return None
    return {disk.target: disk.source for disk in disks(parse(xml)) if disk.source}


def _disk(element: Element) -> Disk:
    kind = element.get("type", "file")
    driver = element.find("driver")
    target = element.find("target")
    return Disk(
        target=(target.get("dev") if target is not None else None) or "",
        source=source_path(element, kind),
        kind=kind,
        device=element.get("device", "disk"),
        format=(driver.get("type") if driver is not None else None) or "raw",
        readonly=element.find("readonly") is not None,
        cache=driver.get("cache") if driver is not None else None,
        transient=element.find("transient") is not None,
        discards=driver is not None and _discards(driver),
    )


def _discards(driver: Element) -> bool:
    return driver.get("discard") == "unmap" or driver.get("detect_zeroes") in ("on", "unmap")


def volume_references(root: Element) -> dict[str, tuple[str, str]]:
    """For each ``type='volume'`` disk: target → (storage pool, volume)."""
    found = {}
    for element in root.findall("devices/disk[@type='volume']"):
        source, target = element.find("source"), element.find("target")
        if source is not None and target is not None:
            found[target.get("dev", "")] = (source.get("pool", ""), source.get("volume", ""))
    return found


def nvram_formats(root: Element) -> set[str]:
    """The formats that a definition has for the file of the UEFI variables; may be empty.

    Without one of its own, the file has that of the firmware.
    """
    values = [
        each.get("format") for path in ("nvram", "loader") for each in root.iterfind(f"os/{path}")
    ]
    return {value for value in values if value}


def nvram(root: Element) -> str | None:
    """The file of the UEFI variables, if they are in a file."""
    element = root.find("os/nvram")
    if element is None:
        store = root.find("os/varstore")
        return store.get("path") if store is not None else None
    if element.get("type", "file") != "file":
        return None
    return source_path(element, "file") or (element.text or "").strip() or None


def tpm_directory(uuid: str, version: str | None) -> PurePosixPath:
    """The directory in which libvirt keeps the state of an emulated TPM by default.

    libvirt's AppArmor profiles allow only the emulator of this domain to write there.
    """
    return SWTPM_STATE / uuid / ("tpm1.2" if version == "1.2" else "tpm2")


def tpm_state(root: Element) -> TpmState | None:
    """The path of an emulated TPM's state; ``None`` without a TPM, or if the path is unknown."""
    backend = root.find("devices/tpm/backend[@type='emulator']")
    if backend is None:
        return None
    source = backend.find("source")
    if source is None:
        return TpmState(str(tpm_directory(text(root, "uuid"), backend.get("version"))))
    path, kind = source.get("path"), source.get("type")
    return TpmState(path, is_file=kind == "file") if path and kind in ("file", "dir") else None


def has_tpm_in_default_place(root: Element) -> bool:
    """Whether an emulated TPM has its state in libvirt's default directory."""
    backend = root.find("devices/tpm/backend[@type='emulator']")
    return backend is not None and backend.find("source") is None


def uncapturable_reason(root: Element) -> tuple[str, str] | None:
    """Why UEFI variables or TPM state cannot be copied, and the remedy; ``None`` if they can."""
    return _uncapturable_variables(root) or _uncapturable_tpm(root)


def _uncapturable_variables(root: Element) -> tuple[str, str] | None:
    element, store = root.find("os/nvram"), root.find("os/varstore")
    if element is not None and store is not None:
        return "it has both an <nvram> and a <varstore>", "remove one of them"
    if store is not None and not store.get("path"):
        return "its <varstore> does not say where its UEFI variables are", "give it a path"
    if element is not None:
        source, kind = element.find("source"), element.get("type", "file")
        if kind != "file" or (source is not None and not source.get("file")):
            where = f"<nvram type='{kind}'>"
            return (
                f"its UEFI variables ({where}) are not in a regular file, and cannot be restored",
                "have its <nvram> name a file",
            )
        return None
    loader = root.find("os/loader[@type='pflash']")
    if store is None and loader is not None and "yes" not in map(loader.get, _NO_VARIABLES):
        return (
            f"its firmware is writable, and its UEFI variables are in it ({loader.text})",
            "give it <loader readonly='yes'> and an <nvram>",
        )
    return None


def _uncapturable_tpm(root: Element) -> tuple[str, str] | None:
    found = root.findall("devices/tpm")
    if len(found) > 1:
        return (
            f"it has {len(found)} TPMs, and only the state of one can be captured",
            "remove the others",
        )
    if not found or tpm_state(root) is not None:
        return None
    backend = found[0].find("backend")
    kind = backend.get("type") if backend is not None else None
    source = backend.find("source") if backend is not None else None
    what = f"<backend type='{kind}'>"
    if kind == "emulator" and source is not None:
        what += f" with <source type='{source.get('type')}'>"
    return (
        f"the state of its TPM cannot be captured ({what})",
        "give it <backend type='emulator'> with its state in a file or a directory",
    )


def emulator_owner(root: Element) -> Owner | None:
    """The user and group of the emulator, from the DAC security label of a running domain."""
    label = text(root, "seclabel[@model='dac']/label")
    uid, _, gid = label.replace("+", "").partition(":")
    return Owner(int(uid), int(gid)) if uid.isdecimal() and gid.isdecimal() else None


def amount(number: str | None, unit: str | None) -> int:
    """Bytes of an amount of memory, with any unit of libvirt; KiB without one.

    Raises:
        ValueError: it is no number, or the unit is unknown to libvirt.
    """
    digits, word = (number or "0").strip(), (unit or "KiB").strip().lower()
    found = _UNIT.fullmatch(word)
    if found is None or not _DIGITS.fullmatch(digits):
        raise ValueError(f"{digits[:80]} {word[:80]}")
    if not found[1]:
        return int(digits)
    factor: int = (1000 if found[2] == "b" else 1024) ** ("kmgtpe".index(found[1]) + 1)
    return int(digits) * factor


def memory_bytes(root: Element) -> int:
    """The largest amount of memory that the guest may have, in bytes.

    libvirt takes the sum of the NUMA cells if there are any, and memory devices come on top.

    Raises:
        RefusedError: an amount is no number, or has an unknown unit.
    """
    try:
        cells = [
            amount(each.get("memory"), each.get("unit")) for each in root.iterfind("cpu/numa/cell")
        ]
        plugged, top, highest = (
            [amount(each.text, each.get("unit")) for each in root.iterfind(path)]
            for path in ("devices/memory/target/size", "memory", "maxMemory")
        )
    except ValueError as error:
        raise RefusedError(
            "domain XML", f"has an amount of memory that is none ({error})"
        ) from error
    return max(sum(cells) + sum(plugged), *top, *highest, 0)


def smallest_memory(root: Element) -> int:
    """Bytes of the smallest part of a guest's memory: of a NUMA cell, or all of it.

    Raises:
        ValueError: a size is no number.
    """
    cells = root.findall("cpu/numa/cell")
    if cells:
        return min(amount(cell.get("memory"), cell.get("unit")) for cell in cells)
    return whole_memory(root)


def whole_memory(root: Element) -> int:
    """Bytes of memory that the guest has now, of which a balloon may have taken a part; 0 if none.

    Raises:
        ValueError: the size is no number.
    """
    memory = root.find("memory")
    return amount(memory.text, memory.get("unit")) if memory is not None else 0


def huge_memory(root: Element) -> dict[int, int]:
    """Bytes of memory on huge pages, by the size of a page in KiB.

    The size 0 is the host's default size. libvirt writes the sizes of pages in KiB.

    Raises:
        ValueError: a size or a node set is no number, or impossible.
    """
    pages = root.findall("memoryBacking/hugepages/page")
    if root.find("memoryBacking/hugepages") is None:
        return {}
    cells = {
        cell.get("id", str(place)): amount(cell.get("memory"), cell.get("unit"))
        for place, cell in enumerate(root.findall("cpu/numa/cell"))
    }
    if not cells:
        cells = {"0": whole_memory(root)}
    everywhere = [page.get("size", "0") for page in pages if page.get("nodeset") is None]
    sizes = dict.fromkeys(cells, (everywhere or ["0"])[0]) if everywhere or not pages else {}
    for page in pages:
        for node in _nodes(page.get("nodeset", "")):
            sizes[node] = page.get("size", "0")
    found: dict[int, int] = {}
    for node, size in sizes.items():
        found[int(size)] = found.get(int(size), 0) + cells.get(node, 0)
    return found


def _nodes(nodeset: str) -> list[str]:
    """Parse a node set as libvirt writes it: ``0,2-3``."""
    words = [span.partition("-") for span in nodeset.split(",") if span]
    spans = [range(int(low), int(high or low) + 1) for low, _, high in words]
    if any(span.stop > _MAX_NODES for span in spans) or sum(map(len, spans)) > _MAX_NODES:
        raise ValueError(nodeset[:80])
    return [str(node) for span in spans for node in span]


def backing_source(root: Element, target: str) -> str | None:
    """The path of the image directly below a disk's active one, from the live XML."""
    element = disk_element(root, target)
    store = element.find("backingStore") if element is not None else None
    return source_path(store, store.get("type", "file")) if store is not None else None


def backing_chain(root: Element, target: str) -> list[str]:
    """The paths of all images below a disk's active one, the nearest first."""
    return [image.path for image in backing_images(root, target)]


def backing_images(root: Element, target: str) -> tuple[BackingImage, ...]:
    """All images below a disk's active one, the nearest first."""
    element = disk_element(root, target)
    found = []
    while element is not None and (element := element.find("backingStore")) is not None:
        kind, form = element.get("type", "file"), element.find("format")
        path = source_path(element, kind)
        if path is None:
            break
        found.append(BackingImage(path, kind, (form.get("type") if form is not None else "") or ""))
    return tuple(found)


def disk_element(root: Element, target: str) -> Element | None:
    """The ``<disk>`` whose target is ``target``."""
    for element in root.findall("devices/disk"):
        found = element.find("target")
        if found is not None and found.get("dev") == target:
            return element
    return None


def is_shareable(root: Element, target: str) -> bool:
    """Whether other guests may use the disk at the same time."""
    element = disk_element(root, target)
    return element is not None and element.find("shareable") is not None


def mirrors(root: Element) -> dict[str, tuple[str, bool]]:
    """The block jobs with a mirror, by target: the job's name, and whether it is ready to pivot."""
    found = {}
    for element in root.findall("devices/disk"):
        mirror, target = element.find("mirror"), element.find("target")
        if mirror is not None and target is not None:
            found[target.get("dev", "")] = (mirror.get("job", "copy"), mirror.get("ready") == "yes")
    return found


def mac_addresses(root: Element, network: str) -> set[str]:
    """The MAC addresses of the interfaces on a libvirt network, in lower case."""
    found = set()
    for card in root.findall("devices/interface"):
        source, mac = card.find("source"), card.find("mac")
        if source is not None and source.get("network") == network and mac is not None:
            found.add(mac.get("address", "").lower())
    return found


def networks(root: Element) -> set[str]:
    """The libvirt networks that the domain's interfaces name."""
    return _named(root, "devices/interface/source", "network")


def storage_pools(root: Element) -> set[str]:
    """The libvirt storage pools that the domain's disks name."""
    return _named(root, "devices/disk//source", "pool")


def needed_storage_pools(root: Element, *, resumes: bool) -> set[str]:
    """Those without which libvirt does not start the domain: the disk may not be left out.

    Args:
        root: the definition.
        resumes: it is resumed from RAM: then a disk that only a boot requires may be left out.
    """
    required = ("mandatory",) if resumes else ("mandatory", "requisite")
    sources = root.findall("devices/disk/source")
    needed = [each for each in sources if each.get("startupPolicy", "mandatory") in required]
    return {name for each in needed if (name := each.get("pool"))}


def host_interfaces(root: Element) -> set[str]:
    """The bridges and network interfaces of the host that the domain's interfaces name."""
    bridges = _named(root, "devices/interface[@type='bridge']/source", "bridge")
    return bridges | _named(root, "devices/interface[@type='direct']/source", "dev")


def _named(root: Element, path: str, attribute: str) -> set[str]:
    return {name for each in root.findall(path) if (name := each.get(attribute))}


def agent_connected(root: Element) -> bool:
    """Whether a guest agent has opened its channel, according to the live XML."""
    channel = root.find("devices/channel/target[@name='org.qemu.guest_agent.0']")
    return channel is not None and channel.get("state") == "connected"


def snapshot_xml(request: CaptureRequest) -> str:
    """``<domainsnapshot>`` for an external snapshot with memory (docs/formatsnapshot)."""
    root = Element("domainsnapshot")
    ElementTree.SubElement(root, "memory", snapshot="external", file=request.ram_path)
    listing = ElementTree.SubElement(root, "disks")
    for disk in request.disks:
        element = ElementTree.SubElement(
            listing, "disk", name=disk.target, snapshot="external", type="file"
        )
        ElementTree.SubElement(element, "driver", type="qcow2")
        ElementTree.SubElement(element, "source", file=disk.overlay)
    for target in request.manual:
        ElementTree.SubElement(listing, "disk", name=target, snapshot="manual")
    for target in request.left_out:
        ElementTree.SubElement(listing, "disk", name=target, snapshot="no")
    return ElementTree.tostring(root, encoding="unicode")


def with_bases(xml: str, overlays: Iterable[OverlayDisk]) -> str | None:
    """Domain XML with overlays replaced by their bases; ``None`` if it contains no overlay."""
    root = parse(xml)
    changed = False
    for disk in overlays:
        element = disk_element(root, disk.target)
        if element is None or source_path(element, element.get("type", "file")) != disk.overlay:
            continue
        _point_at(element, disk)
        changed = True
    return ElementTree.tostring(root, encoding="unicode") if changed else None


def barred(xml: str, path: str) -> str:
    """The definition with its first disk at ``path``, which must not exist: it cannot be started.

    libvirt refuses with "Cannot access storage file" and that path. A definition without disks is
    returned unchanged.
    """
    root = parse(xml)
    element = root.find("devices/disk")
    if element is None:
        return xml
    kind = "block" if element.get("device") == "lun" else "file"
    for name in ("source", "backingStore", "auth", "mirror"):
        for child in element.findall(name):
            element.remove(child)
    element.set("type", kind)
    ElementTree.SubElement(element, "source", {_SOURCE_ATTRIBUTES[kind]: path})
    return ElementTree.tostring(root, encoding="unicode")


def has_disk_at(xml: str, path: str) -> bool:
    """Whether the domain has a disk at ``path``."""
    return any(disk.source == path for disk in disks(parse(xml)))


def disk_xml(xml: str, target: str) -> str:
    """The ``<disk>`` with this target as a document; empty if there is none."""
    element = disk_element(parse(xml), target)
    return ElementTree.tostring(element, encoding="unicode") if element is not None else ""


def _restore_image(element: Element, original: Element) -> None:
    """Restore all that describes the disk's image: its path, secrets, slices and data files."""
    element.set("type", original.get("type", "file"))
    ours = [child for child in element if child.tag in _OF_THE_IMAGE]
    place = min((list(element).index(child) for child in ours), default=0)
    for child in ours:
        element.remove(child)
    element[place:place] = [child for child in original if child.tag in _OF_THE_IMAGE]


def _point_at(element: Element, disk: OverlayDisk) -> None:
    original: Element | None = fromstring(disk.xml, forbid_dtd=True) if disk.xml else None
    if original is not None and source_path(original, original.get("type", "file")) == disk.base:
        _restore_image(element, original)
        return
    element.set("type", disk.base_kind)
    source, driver, store = (
        element.find("source"),
        element.find("driver"),
        element.find("backingStore"),
    )
    if source is None or driver is None:
        raise RefusedError(disk.target, "its <disk> has no source or driver to point at the base")
    source.attrib.clear()
    source.set(_SOURCE_ATTRIBUTES[disk.base_kind], disk.base)
    driver.set("type", disk.base_format)
    if store is not None:
        element.remove(store)
