"""Domain XML for a clone: the same machine with another name and its own disks.

What the guest sees stays (addresses, models, sizes), since a clone may be resumed from RAM. What it
would share with the original is replaced or removed: disks, UEFI variables, TPM state, logs,
sockets, ports, networks (:mod:`snaporch.hypervisor.clone_backends`). Everything that remains must
be in the allow-list (:mod:`snaporch.hypervisor.clone_allowlist`).
"""

from __future__ import annotations

import re
import secrets
import uuid as uuids
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from snaporch.errors import RefusedError
from snaporch.hypervisor.clone_allowlist import MEDIUM, unlisted, unlisted_in_device
from snaporch.hypervisor.clone_backends import character_devices, displays, other_backends
from snaporch.hypervisor.domain_xml import (
    disk_element,
    parse,
    text,
    tpm_directory,
    tpm_state,
    uncapturable_reason,
)
from snaporch.hypervisor.foreign_xml import (
    for_the_emulator,
    forbidden_file,
    needs_secret,
    remove_gpu,
    remove_privileges,
)
from snaporch.hypervisor.one_reading import two_readings
from snaporch.hypervisor.qemu_arguments import receive_user_networks, unknown_argument
from snaporch.zfs_names import quoted

NAMESPACE = "urn:snaporch:clone:1"
NO_NETWORK = "none"
ISOLATED = "isolated"

_MARK = f"{{{NAMESPACE}}}clone"
_HOW_TO_READ = ("encryption", "slices")
_WRITES = ("disk", "lun")
_OF_THE_GUEST = ("mac", "model", "address", "driver", "mtu", "boot", "rom", "alias", "acpi")
_TPM_FILE = "state"
_PASSED_THROUGH = ("hostdev", "vdpa", "vhostuser")
"""With these, what the guest sees depends on the backend."""
_NEEDED = ("emulator", "disk", "controller", "memory", "tpm")
"""A clone without one of these would be another machine."""
_OF_THE_HOST = ("resource", "blkiotune/device", "cputune/cachetune", "cputune/memorytune")
"""Groups and shares of the host, which the guest does not see."""
_LIBOSINFO = "{http://libosinfo.org/xmlns/libvirt/domain/1.0}"
_SPACE = re.compile(r"\s*")

ElementTree.register_namespace("snaporch", NAMESPACE)


class SharedError(RefusedError):
    """A clone would share something with the original or with another clone."""


@dataclass(frozen=True, slots=True)
class CloneDisk:
    """An image of the clone."""

    path: str
    kind: str
    """libvirt's ``<disk type=…>``: file or block."""
    format: str = "raw"
    below: CloneDisk | None = None
    """Its backing file."""
    data: CloneDisk | None = None
    """Its data file, if its data is in another file."""

    @property
    def chain(self) -> tuple[CloneDisk, ...]:
        """All images below it, the nearest first."""
        return (self.below, *self.below.chain) if self.below is not None else ()


@dataclass(frozen=True, slots=True)
class CloneSpec:
    """The clone's name, disks, files and network."""

    name: str
    uuid: str
    of: str
    """``DOMAIN@SNAPSHOT``"""
    disks: Mapping[str, CloneDisk]
    """The disks by target."""
    files: str
    """A directory for the files that it writes besides its disks: logs, UEFI variables."""
    network: str
    """:data:`NO_NETWORK`, :data:`ISOLATED`, or the name of a libvirt network."""
    resumed: bool
    """It is resumed from RAM, so every device must stay, also the MAC addresses."""
    loads_ram: bool = True
    """If it is resumed: RAM is loaded with this XML. It is not for the XML that stays defined."""
    throw_away: bool = False
    """It exists for a minute only.

    So it gets no huge pages, and none of the original's pinned CPUs.
    """
    is_clone: bool = True
    """It is marked as a clone; an imported guest is none."""
    keeps_addresses: bool = False
    """It has the MAC addresses of the original, also if it is not resumed."""

    emulators: frozenset[str] | None = None
    """If set, the XML is of another host: it gets one of these emulators of this one, or libvirt's
    default, and may name no other file of this host than firmware
    (:mod:`snaporch.hypervisor.foreign_xml`)."""

    @property
    def nvram(self) -> str:
        """The file of its UEFI variables."""
        return f"{self.files}/nvram.fd"


@dataclass(frozen=True, slots=True)
class CloneXml:
    """The XML of a clone, and the parts of the original that it lacks."""

    xml: str
    missing: tuple[str, ...]


def make_clone_xml(xml: str, identity: CloneSpec) -> CloneXml:
    """Make the XML of the clone.

    Args:
        xml: the XML of the original.

    Raises:
        SharedError, RefusedError: it would share something that cannot be shared nor left out.
    """
    root = parse(xml)
    if (found := two_readings(root)) is not None:
        raise SharedError(identity.of, f"its XML has {found}")
    missing = _of_another_host(root, identity) if identity.emulators is not None else []
    if (argument := unknown_argument(root)) is not None:
        raise SharedError(
            identity.of,
            f"its XML passes {argument} on to QEMU, which may be in use by the original",
            "remove it from <qemu:commandline>",
        )
    _set_identity(root, identity)
    _remove_host_settings(root)
    missing += _disks(root, identity)
    _host_memory(root, identity)
    _firmware(root, identity)
    character_devices(root, identity.files)
    if identity.resumed and identity.loads_ram:
        receive_user_networks(root)
    for interface in root.findall("devices/interface"):
        _interface(interface, identity)
    displays(root)
    other_backends(root)
    _remove_reservations(root, identity)
    if identity.emulators is not None:
        missing += _other_media(root, identity)
    missing += _remove_unlisted(root, identity)
    if identity.emulators is not None:
        _check_other_files(root, identity)  # of what is left
    for element in root.iter():
        if element.text is not None and _SPACE.fullmatch(element.text):
            element.text = None
        element.tail = None
    return CloneXml(ElementTree.tostring(root, encoding="unicode"), tuple(missing))


def own_paths(identity: CloneSpec) -> set[str]:
    """The paths of the clone's own: files, and directories with everything in them."""
    own = {identity.files, str(tpm_directory(identity.uuid, None).parent)}
    for place in identity.disks.values():
        own |= {place.path, *(below.path for below in place.chain)}
        own |= {place.data.path} if place.data is not None else set()
    return own


def clone_of(xml: str) -> str | None:
    """``DOMAIN@SNAPSHOT`` of which a domain is a clone; ``None`` if it is not a clone by snaporch.

    Metadata is copied along with a domain's definition. So the mark contains the UUID of its clone.
    """
    root = parse(xml)
    mark = root.find(f"metadata/{_MARK}")
    if mark is None or mark.get("uuid") != text(root, "uuid"):
        return None
    return mark.get("of", "")


def _set_identity(root: Element, identity: CloneSpec) -> None:
    _child(root, "name").text = identity.name
    _child(root, "uuid").text = identity.uuid
    root.attrib.pop("id", None)
    if (generation := root.find("genid")) is not None:
        generation.text = str(uuids.uuid4())
    for entry in root.findall("sysinfo/system/entry[@name='uuid']"):
        entry.text = identity.uuid  # libvirt requires that it equals the domain's
    metadata = _child(root, "metadata")
    for old in list(metadata):
        if not old.tag.startswith(_LIBOSINFO):  # hooks and tools of the host act on the others
            metadata.remove(old)
    if identity.is_clone:
        SubElement(metadata, _MARK, {"uuid": identity.uuid, "of": identity.of})


def _remove_host_settings(root: Element) -> None:
    """Remove the host's groups and shares, and security labels.

    A label that was set by hand would give access to the original's files.
    """
    for path in _OF_THE_HOST:
        above, _, tag = path.rpartition("/")
        for parent in root.findall(above or "."):
            for element in parent.findall(tag):
                parent.remove(element)
    for parent in list(root.iter()):
        for label in parent.findall("seclabel"):
            parent.remove(label)


def _child(root: Element, tag: str) -> Element:
    found = root.find(tag)
    return found if found is not None else SubElement(root, tag)


def _disks(root: Element, identity: CloneSpec) -> list[str]:
    missing = []
    devices = _child(root, "devices")
    for element in root.findall("devices/disk"):
        found = element.find("target")
        target = found.get("dev", "") if found is not None else ""
        if place := identity.disks.get(target):
            _point_at(element, place)
        elif _is_shareable(element):
            _make_optional(element)
        elif element.get("device", "disk") in ("cdrom", "floppy"):
            _empty_drive(element)
            missing.append(f"the medium in {target}")
        elif identity.resumed:
            raise SharedError(
                identity.of,
                f"its disk {target} is not in the snapshot, and a clone must not share it",
                "clone it cold, without --running",
            )
        else:
            devices.remove(element)
            missing.append(f"the disk {target}, which is not in the snapshot")
    absent = [target for target in identity.disks if disk_element(root, target) is None]
    if absent:
        raise RefusedError(identity.of, f"its XML has no disk {', '.join(absent)}")
    return missing


def _point_at(element: Element, place: CloneDisk) -> None:
    element.set("type", place.kind)
    driver = element.find("driver")
    if driver is None:
        driver = SubElement(element, "driver", name="qemu")
    driver.set("type", place.format)  # only files of this format were checked
    for name in ("rawio", "sgio"):  # they permit commands to a device of the host
        element.attrib.pop(name, None)
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
    SubElement(above, "backingStore")  # ends the chain, whatever the image's header says


def _add_source(element: Element, place: CloneDisk, original: Element | None) -> None:
    """Add a ``<source>`` with the clone's path.

    It is read like the original: by secret and slices.
    """
    kind = "file" if place.kind == "file" else "dev"
    source = SubElement(element, "source", {kind: place.path})
    if original is not None:
        source.extend(child for child in original if child.tag in _HOW_TO_READ)
    if place.data is not None:
        store = SubElement(source, "dataStore", type=place.data.kind)
        SubElement(store, "format", type=place.data.format)
        _add_source(store, place.data, None)


def _is_shareable(element: Element) -> bool:
    """Whether a disk is empty, or read-only and a file (for a disk also a device) of the host.

    A drive of the host would be opened and ejected, a writable image has changed since the
    snapshot, and anything else is reached over a network.
    """
    device = element.get("device", "disk")
    if device != "disk":
        if element.find("source") is None and element.get("type", "file") == "file":
            return True  # empty
        if element.get("type", "file") != "file":
            return False
    if device != "cdrom" and element.find("readonly") is None:
        return False
    return next(unlisted_in_device(element, (), MEDIUM), None) is None


def _empty_drive(element: Element) -> None:
    for name in ("source", "backingStore", "mirror", "auth", "encryption", "driver", "transient"):
        for old in element.findall(name):
            element.remove(old)
    element.set("type", "file")


def _of_another_host(root: Element, identity: CloneSpec) -> list[str]:
    """Remove privileges and GPUs; return what the clone lacks then."""
    if (tag := for_the_emulator(root)) is not None:
        raise SharedError(identity.of, f"its XML has <{tag}> for the emulator of another host")
    if next(root.iter("slices"), None) is not None:
        reason = "its XML has <slices>: the header that counts may be another than the one read"
        raise SharedError(identity.of, reason)
    remove_privileges(root)
    return remove_gpu(root)


def _other_media(root: Element, identity: CloneSpec) -> list[str]:
    """Remove media that the XML of another host's guest names and this host might have.

    Raises:
        SharedError: a disk cannot be removed.
    """
    known = identity.emulators or frozenset()
    missing = []
    for element in root.findall("devices/emulator"):
        if text(root, "devices/emulator") not in known:
            _child(root, "devices").remove(element)
    for element in root.findall("devices/disk"):
        found = element.find("target")
        target = found.get("dev", "") if found is not None else ""
        if target in identity.disks or element.find("source") is None:
            continue
        if element.get("device", "disk") not in ("cdrom", "floppy"):
            reason = f"its disk {target} is a file of its host"
            raise SharedError(identity.of, reason)
        _empty_drive(element)
        missing.append(f"the medium in {target}")
    return missing


def _check_other_files(root: Element, identity: CloneSpec) -> None:
    """Refuse what the XML of another host's guest names, and this host might have.

    Raises:
        SharedError: it names a file or a secret.
    """
    known = identity.emulators or frozenset()
    if needs_secret(root):
        raise SharedError(identity.of, "its XML names a secret, which would be of this host")
    if (path := forbidden_file(root, own_paths(identity), known)) is not None:
        raise SharedError(identity.of, f"its XML names {quoted(path)}, which would be of this host")


def _make_optional(element: Element) -> None:
    """Let the clone start even if the medium does not exist any more."""
    source = element.find("source")
    if source is not None and element.get("device", "disk") in ("cdrom", "floppy"):
        source.set("startupPolicy", "optional")


def _host_memory(root: Element, identity: CloneSpec) -> None:
    if root.find("devices/memory/source/path") is not None:
        raise SharedError(identity.of, "it has memory in a file of the host")
    for element in root.findall("devices/vsock/cid"):
        element.attrib.clear()
        element.set("auto", "yes")


def _firmware(root: Element, identity: CloneSpec) -> None:
    """Give the clone its own UEFI variables and TPM state. Refuse what libvirt does not know."""
    for loader in root.findall("os/loader[@type='pflash']"):
        if loader.get("readonly") != "yes":
            raise SharedError(identity.of, f"its firmware may write to {loader.text}")
    problem = uncapturable_reason(root)
    if problem is not None:
        reason, step = problem
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


def _tpm(root: Element, identity: CloneSpec) -> None:
    """Use libvirt's own directory. AppArmor may deny the clone any other, as the original's."""
    state, backend = tpm_state(root), root.find("devices/tpm/backend")
    source = backend.find("source") if backend is not None else None
    if state is None or backend is None or source is None:
        return
    place = tpm_directory(identity.uuid, backend.get("version"))
    source.set("path", str(place / _TPM_FILE if state.is_file else place))


def _interface(element: Element, identity: CloneSpec) -> None:
    if element.get("type") in _PASSED_THROUGH:
        return
    for child in list(element):
        if child.tag not in _OF_THE_GUEST:
            element.remove(child)
    for name in ("managed", "trustGuestRxFilters"):
        element.attrib.pop(name, None)
    mac = element.find("mac")
    if mac is not None:
        mac.attrib.pop("currentAddress", None)
        if not identity.resumed and not identity.keeps_addresses:
            mac.set("address", _new_mac())
    if identity.network in (NO_NETWORK, ISOLATED):
        element.set("type", "ethernet")  # a tap device without a bridge
        SubElement(element, "link", state="down" if identity.network == NO_NETWORK else "up")
    else:
        element.set("type", "network")
        SubElement(element, "source", network=identity.network)


def _new_mac() -> str:
    """A random address with QEMU's prefix, as libvirt makes them."""
    return "52:54:00:" + ":".join(f"{byte:02x}" for byte in secrets.token_bytes(3))


def _remove_reservations(root: Element, identity: CloneSpec) -> None:
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


def _remove_unlisted(root: Element, identity: CloneSpec) -> list[str]:
    """Remove or refuse what is not in the allow-list. A clone that boots can lack such devices."""
    own = own_paths(identity)
    for what in unlisted(root, own):
        raise SharedError(identity.of, f"its XML has {what}, which may belong to the host")
    missing = []
    devices = _child(root, "devices")
    for element in list(devices):
        found = next(_unlisted_in_device(element, identity, own), None)
        if found is None:
            continue
        reason = f"it has a <{element.tag}> of the host ({found})"
        if element.tag in _NEEDED:
            raise SharedError(identity.of, reason)
        if identity.resumed:
            raise SharedError(identity.of, reason, "clone it cold, without --running")
        devices.remove(element)
        missing.append(f"a <{element.tag}> of the host")
    return missing


def _unlisted_in_device(element: Element, identity: CloneSpec, own: set[str]) -> Iterator[str]:
    target = element.find("target")
    shared = element.tag == "disk" and (
        target is None or target.get("dev", "") not in identity.disks
    )
    return unlisted_in_device(element, own, MEDIUM if shared else "")
