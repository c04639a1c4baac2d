"""Domain XML for a clone: the same machine under another name, on disks of its own.

What the guest sees stays (addresses, models, sizes), for a clone may be resumed from RAM. What it
would share with the original is replaced or taken away: disks, UEFI variables, TPM state, logs,
sockets, ports, networks.
"""

from __future__ import annotations

import re
import secrets
import uuid as uuids
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from snaporch.errors import RefusedError
from snaporch.hypervisor.passthrough import unknown_argument
from snaporch.hypervisor.xml import (
    disk_element,
    parse,
    text,
    tpm_directory,
    tpm_state,
    uncapturable,
)

NAMESPACE = "urn:snaporch:clone:1"
NO_NETWORK = "none"
ISOLATED = "isolated"

_MARK = f"{{{NAMESPACE}}}clone"
_HOW_TO_READ = ("encryption", "slices")
_WRITES = ("disk", "lun")
_CHARACTER_DEVICES = ("serial", "parallel", "console", "channel")
_OWN_BACKENDS = ("pty", "null", "stdio", "vc", "spicevmc", "spiceport", "qemu-vdagent", "dbus")
_OF_THE_GUEST = ("mac", "model", "address", "driver", "mtu", "boot", "rom", "alias", "acpi")
_FIRMWARE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "os/nvram": (("type", "format", "template", "templateFormat"), ("source",)),
    "os/nvram/source": (("file", "index"), ()),
    "os/varstore": (("path", "template"), ()),
    "devices/tpm": (("model",), ("backend", "address", "alias")),
    "devices/tpm/backend": (
        ("type", "version", "persistent_state", "debug"),
        ("source", "encryption", "active_pcr_banks", "profile"),
    ),
    "devices/tpm/backend/source": (("type", "path"), ()),
}
"""Attributes and children of what UEFI variables and TPM state are told by (libvirt's schema)."""
_TPM_FILE = "state"
_HOST_DEVICES = ("hostdev", "filesystem", "lease", "shmem")
_SPACE = re.compile(r"\s*")

ElementTree.register_namespace("snaporch", NAMESPACE)


class SharedError(RefusedError):
    """A clone would share something with the original, or with another."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a disk of the clone is."""

    path: str
    kind: str
    """libvirt's ``<disk type=…>``: file or block."""
    format: str = "raw"
    below: Place | None = None
    """Its backing file."""
    data: Place | None = None
    """The file with its data, if that is another."""

    @property
    def chain(self) -> tuple[Place, ...]:
        """All that is below it, the nearest first."""
        return (self.below, *self.below.chain) if self.below is not None else ()


@dataclass(frozen=True, slots=True)
class Identity:
    """Who the clone is."""

    name: str
    uuid: str
    of: str
    """``DOMAIN@SNAPSHOT``"""
    disks: Mapping[str, Place]
    """By target."""
    files: str
    """A directory for what it writes beside its disks: logs, UEFI variables."""
    network: str
    """:data:`NO_NETWORK`, :data:`ISOLATED`, or the name of a libvirt network."""
    resumed: bool
    """From RAM: every device has to stay, MAC addresses too."""
    throw_away: bool = False
    """Gone in a minute: takes no huge pages and no CPUs that are set aside for somebody."""

    @property
    def nvram(self) -> str:
        """The file of its UEFI variables."""
        return f"{self.files}/nvram.fd"


@dataclass(frozen=True, slots=True)
class Rewritten:
    """XML, and what the clone does without."""

    xml: str
    missing: tuple[str, ...]


def rewrite(xml: str, identity: Identity) -> Rewritten:
    """The XML of the clone.

    Raises:
        SharedError, RefusedError: it would share something that cannot be shared, and that it
            cannot do without.
    """
    root = parse(xml)
    if (argument := unknown_argument(root)) is not None:
        raise SharedError(
            identity.of,
            f"its XML passes {argument} on to QEMU, which may be in use by the original",
            "take it out of <qemu:commandline>",
        )
    _name(root, identity)
    missing = _disks(root, identity) + _host_devices(root, identity)
    _firmware(root, identity)
    _character_devices(root, identity)
    for interface in root.findall("devices/interface"):
        _interface(interface, identity)
    _graphics(root)
    _scheduling(root, identity)
    for element in root.iter():
        if element.text is not None and _SPACE.fullmatch(element.text):
            element.text = None
        element.tail = None
    return Rewritten(ElementTree.tostring(root, encoding="unicode"), tuple(missing))


def clone_of(xml: str) -> str | None:
    """``DOMAIN@SNAPSHOT`` that a domain is a clone of; ``None`` if snaporch did not make it.

    The mark names the UUID it was made for, for metadata is copied along with domains.
    """
    root = parse(xml)
    mark = root.find(f"metadata/{_MARK}")
    if mark is None or mark.get("uuid") != text(root, "uuid"):
        return None
    return mark.get("of", "")


def memory_bytes(xml: str) -> int:
    """The most memory the domain can have."""
    root = parse(xml)
    units = {"b": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    element = root.find("maxMemory")
    if element is None:
        element = root.find("memory")
    if element is None:
        return 0
    return int(element.text or 0) * units.get(element.get("unit", "KiB"), 1 << 10)


def _name(root: Element, identity: Identity) -> None:
    _child(root, "name").text = identity.name
    _child(root, "uuid").text = identity.uuid
    root.attrib.pop("id", None)
    if (generation := root.find("genid")) is not None:
        generation.text = str(uuids.uuid4())
    for entry in root.findall("sysinfo/system/entry[@name='uuid']"):
        entry.text = identity.uuid  # libvirt wants it to be the domain's
    metadata = _child(root, "metadata")
    for old in metadata.findall(_MARK):
        metadata.remove(old)
    SubElement(metadata, _MARK, {"uuid": identity.uuid, "of": identity.of})
    for label in root.findall("seclabel[@type='dynamic']"):
        root.remove(label)


def _child(root: Element, tag: str) -> Element:
    found = root.find(tag)
    return found if found is not None else SubElement(root, tag)


def _disks(root: Element, identity: Identity) -> list[str]:
    missing = []
    devices = _child(root, "devices")
    for element in root.findall("devices/disk"):
        found = element.find("target")
        target = found.get("dev", "") if found is not None else ""
        if place := identity.disks.get(target):
            _point_at(element, place)
        elif element.get("device", "disk") not in _WRITES:
            _make_optional(element)
        elif element.find("readonly") is None:
            if identity.resumed:
                raise RefusedError(
                    identity.of,
                    f"its disk {target} is not in the snapshot, and a clone must not share it",
                    "clone it cold, without --running",
                )
            devices.remove(element)
            missing.append(f"the disk {target}, which is not in the snapshot")
    absent = [target for target in identity.disks if disk_element(root, target) is None]
    if absent:
        raise RefusedError(identity.of, f"its XML has no disk {', '.join(absent)}")
    return missing


def _point_at(element: Element, place: Place) -> None:
    element.set("type", place.kind)
    source, store = element.find("source"), element.find("backingStore")
    for name in ("source", "backingStore", "mirror"):
        for old in element.findall(name):
            element.remove(old)
    _add_source(element, place, source)
    above = element
    for below in place.chain:
        above = SubElement(above, "backingStore", type=below.kind)
        SubElement(above, "format", type=below.format)
        source = store.find("source") if store is not None else None
        _add_source(above, below, source)
        store = store.find("backingStore") if store is not None else None
    SubElement(above, "backingStore")  # nothing below that, whatever a header says


def _add_source(element: Element, place: Place, original: Element | None) -> None:
    """Another path, read as the original is: by its secret, from its slice."""
    kind = "file" if place.kind == "file" else "dev"
    source = SubElement(element, "source", {kind: place.path})
    if original is not None:
        source.extend(child for child in original if child.tag in _HOW_TO_READ)
    if place.data is not None:
        store = SubElement(source, "dataStore", type=place.data.kind)
        SubElement(store, "format", type=place.data.format)
        _add_source(store, place.data, None)


def _make_optional(element: Element) -> None:
    """A medium that has gone since is no reason not to start."""
    source = element.find("source")
    if source is not None and element.get("type", "file") == "file":
        source.set("startupPolicy", "optional")


def _host_devices(root: Element, identity: Identity) -> list[str]:
    missing = []
    devices = _child(root, "devices")
    for tag in _HOST_DEVICES:
        for element in devices.findall(tag):
            if identity.resumed:
                raise RefusedError(identity.of, f"it has a <{tag}> of the host, which is in use")
            devices.remove(element)
            missing.append(f"a <{tag}> of the host")
    for element in devices.findall("memory"):
        if element.find("source/path") is not None:
            raise RefusedError(identity.of, "it has memory in a file of the host")
    for element in devices.findall("vsock/cid"):
        element.attrib.clear()
        element.set("auto", "yes")
    return missing


def _firmware(root: Element, identity: Identity) -> None:
    """UEFI variables and TPM state of its own: what libvirt knows of them, and nothing else."""
    trouble = uncapturable(root) or _unknown_firmware(root)
    if trouble is not None:
        reason, step = trouble
        raise SharedError(identity.of, reason, f"{step}, and snapshot it again")
    nvram, store = root.find("os/nvram"), root.find("os/varstore")
    if nvram is not None:
        for source in nvram.findall("source"):
            nvram.remove(source)
        nvram.attrib.pop("type", None)
        nvram.text = identity.nvram
    if store is not None:
        store.set("path", identity.nvram)
    _tpm(root, identity)


def _tpm(root: Element, identity: Identity) -> None:
    """In libvirt's own directory: where the original has its own, AppArmor may keep others out."""
    state, backend = tpm_state(root), root.find("devices/tpm/backend")
    source = backend.find("source") if backend is not None else None
    if state is None or backend is None or source is None:
        return
    place = tpm_directory(identity.uuid, backend.get("version"))
    source.set("path", str(place / _TPM_FILE if state.is_file else place))


def _unknown_firmware(root: Element) -> tuple[str, str] | None:
    """What may lead a clone to the original's UEFI variables or TPM state in a way unknown here."""
    for path, (attributes, children) in _FIRMWARE.items():
        for element in root.findall(path):
            names = [name for name in element.attrib if name not in attributes]
            tags = [f"<{child.tag}>" for child in element if child.tag not in children]
            if names or tags:
                reason = f"its <{element.tag}> has {', '.join(names + tags)}, which snaporch "
                return f"{reason}does not know", "take it out"
    return None


def _character_devices(root: Element, identity: Identity) -> None:
    logs: dict[str, str] = {}
    for tag in _CHARACTER_DEVICES:
        for element in root.findall(f"devices/{tag}"):
            _character_device(element, tag, identity, logs)


def _character_device(element: Element, tag: str, identity: Identity, logs: dict[str, str]) -> None:
    """A file becomes one of its own; what only one can hold (sockets, ports, devices), nothing."""
    kind = element.get("type", "pty")
    source = element.find("source")
    for log in element.findall("log"):
        element.remove(log)
    if kind == "file" and source is not None:
        original = source.get("path", "")  # a console names the file of its serial device again
        number = f"{len(logs)}." if logs and original not in logs else ""
        own = f"{identity.files}/{number}{PurePosixPath(original).name}"
        source.set("path", logs.setdefault(original, own))
        return
    for old in [*element.findall("source"), *element.findall("protocol")]:
        element.remove(old)
    if kind == "unix" and tag == "channel":
        return  # libvirt makes the socket
    if kind not in _OWN_BACKENDS:
        element.set("type", "null")
    element.attrib.pop("tty", None)


def _interface(element: Element, identity: Identity) -> None:
    for child in list(element):
        if child.tag not in _OF_THE_GUEST:
            element.remove(child)
    for name in ("managed", "trustGuestRxFilters"):
        element.attrib.pop(name, None)
    mac = element.find("mac")
    if mac is not None and not identity.resumed:
        mac.set("address", _new_mac())
    if identity.network in (NO_NETWORK, ISOLATED):
        element.set("type", "ethernet")  # a tap that is attached to nothing
        SubElement(element, "link", state="down" if identity.network == NO_NETWORK else "up")
    else:
        element.set("type", "network")
        SubElement(element, "source", network=identity.network)


def _new_mac() -> str:
    """QEMU's own prefix, as libvirt does."""
    return "52:54:00:" + ":".join(f"{byte:02x}" for byte in secrets.token_bytes(3))


def _graphics(root: Element) -> None:
    for element in root.findall("devices/graphics"):
        for name in ("port", "tlsPort", "websocket", "socket"):
            element.attrib.pop(name, None)
        if element.get("type") in ("vnc", "spice"):
            element.set("autoport", "yes")
        for listen in element.findall("listen[@type='socket']"):
            listen.attrib.pop("socket", None)


def _scheduling(root: Element, identity: Identity) -> None:
    if not identity.throw_away:
        return
    for name in ("cputune", "numatune"):
        for element in root.findall(name):
            root.remove(element)
    if (vcpu := root.find("vcpu")) is not None:
        vcpu.attrib.pop("cpuset", None)
    backing = root.find("memoryBacking")
    for name in ("hugepages", "locked"):
        for element in backing.findall(name) if backing is not None else []:
            _child(root, "memoryBacking").remove(element)
