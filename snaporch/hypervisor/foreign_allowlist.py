"""The allow-list for the definition of a guest of another host, which may be forged.

libvirt runs as root: it starts the programs that a definition names, and creates or opens files.
The list is that of clones with what an ordinary guest has besides: networks, displays, firmware of
packages. A path must be the guest's own. What is not in the list is to be accepted by an admin.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from snaporch.hypervisor.clone_allowlist import LIST, QEMU, IsOwn, not_allowed, read_rules, text_of

_MORE = """
domain
  resource
    partition .~
    fibrechannel appid~
  seclabel type model relabel
    label|imagelabel|baselabel .~
  launchSecurity **~
    quoteGenerationService path!
  blkiotune
    device
      path .!
      weight|read_bytes_sec|write_bytes_sec|read_iops_sec|write_iops_sec .
  cputune
    cachetune|memorytune **
    vcpusched|iothreadsched|emulatorsched -
  perf -
  memoryBacking
    locked -
    source type=memfd|anonymous
  on_crash .=destroy|restart|preserve|rename-destroy|rename-restart
  features
    xen
      passthrough state=off
  sysinfo
    entry file!
  os
    smbios mode=emulate|sysinfo
    loader .@
    nvram template@ type
      source file! dev! index
    varstore template@
    kernel|initrd|dtb|shim .!
    acpi
      table .!
  devices
    emulator .@
    disk
      source
        slices -
        seclabel model relabel labelskip
          label .~
      mirror type=file|block job ready file! format
        format type
          metadata_cache **
        source file! dev! index
      backingStore index
        source
          slices -
        format
          metadata_cache **
    interface type=network|bridge|direct|ethernet managed trustGuestRxFilters=no
      source bridge dev mode=bridge|vepa|private portid portgroup
      target dev managed=yes
      script|downscript path=
      rom bar enabled file@
      filterref **~
      virtualport|bandwidth|vlan|guest|ip|route|coalesce|teaming|tune|port **
      backend type
    graphics type=vnc|spice|dbus autoport=yes|no port tlsPort websocket \
listen=127.0.0.1|::1|localhost socket!
      gl enable=no
      listen type=none|socket|address address=127.0.0.1|::1|localhost socket!
    video
      model
        acceleration accel3d=no
    serial|parallel|console|channel tty!
      source mode
        seclabel model relabel
          label .~
        clipboard|mouse|reconnect **
      log file! append
      target address
    redirdev
      source mode
    rng
      backend .=/dev/urandom|/dev/random|/dev/hwrng
    memory model=dimm|nvdimm|virtio-pmem|virtio-mem|sgx-epc
      source
        path .!
        alignsize unit .
        pmem
    vsock
      cid auto address
    watchdog action=reset|shutdown|poweroff|pause|none|inject-nmi
    filesystem type=mount|ram accessmode model fmode dmode multidevs
      source dir! usage units socket!
      target dir~
      binary path@ xattr
        cache|sandbox|lock|thread_pool|openfiles **
      driver|address|alias|acpi|boot|readonly|idmap|space_hard_limit|space_soft_limit **
"""
"""What the definition of a guest of another host may have besides, or with other values."""
_DOMAIN = read_rules(LIST + _MORE).children["domain"]
"""What the definition of a guest of another host may have besides, or with other values."""
_DOMAIN = read_rules(LIST + _MORE).children["domain"]
_LESS = (("cputune", "vcpusched"), ("cputune", "iothreadsched"), ("cputune", "emulatorsched"))
"""What a clone keeps of its original: priority over the processes of this host."""
for _tag, _below in _LESS:
    del _DOMAIN.children[_tag].children[_below]
del _DOMAIN.children["perf"]
_NEVER = (("memoryBacking", "locked"),)

_MADE_FOR_GUEST = "/var/lib/libvirt/qemu/nvram/{0}_VARS\\.\\w+|/var/lib/libvirt/swtpm/{1}(/[^/]+)*"
"""Where libvirt keeps UEFI variables and TPM state, of a name and a UUID."""
_CHANNEL = "/(var/lib|run|var/run)/libvirt/qemu/channel/(target/)?(domain-)?[0-9]+-{}/{}"
"""The socket of a running guest's channel: libvirt makes a new one for it at the next start."""
_SHORT_NAME = 20
"""So much of a guest's name is in it (libvirt's ``VIR_DOMAIN_SHORT_NAME_MAX``)."""
_PTY = re.compile("/dev/pts/[0-9]+")
_PROGRAMS = ("script", "downscript", "emulator", "binary", "bootloader")
"""Their paths are accepted for them only: libvirt runs them."""
_WITHIN = ("domain", "devices", "os")
_FILES = ("file", "path")
_SHOWN = 160
"""So many characters of an element are shown at most."""


@dataclass(frozen=True, slots=True, order=True)
class Unlisted:
    """Something in a definition that is not in the list."""

    word: str
    """What an admin accepts: a whole path, the place of a value and the value, or an element."""
    shown: str
    """The element, with what it has."""


def unlisted_of_another_host(root: Element, is_own: IsOwn) -> set[Unlisted]:
    """What a definition has that is not in the list, without elements for the emulator.

    Those are in :func:`snaporch.hypervisor.foreign_xml.confining`.

    Args:
        root: the ``<domain>``.
        is_own: whether a path is in the guest's own datasets. What libvirt makes for a guest of
            its name or UUID is its own, too.
    """
    above = {child: parent for parent in root.iter() for child in parent}
    names = (re.escape(root.findtext(tag, "").strip()) for tag in ("name", "uuid"))
    made = re.compile(_MADE_FOR_GUEST.format(*names))

    def has(path: str) -> bool:
        return ".." not in path.split("/") and bool(made.fullmatch(path) or is_own(path))

    findings = [*not_allowed(root, _DOMAIN, has), *_relative_files(root), *_writable_flash(root)]
    whole = {element for element, name in findings if name in ("type", None)}
    found = set()
    for element, name in findings:
        places = [element, *_parents(element, above)]
        is_within = not whole.isdisjoint(places[1:])
        if is_within or (element in whole and name not in ("type", None)):
            continue  # it is shown with all that is in it
        if element.tag.startswith("{") and places[1:] == [root]:
            continue
        if name is not None and _is_made_at_each_start(element, name, places):
            continue
        found.add(_unlisted(element, name, places))
        if element in whole:
            found |= {
                Unlisted(path, f"{_cut(path)} in <{element.tag}>") for path in _paths(element)
            }
    return found


def _relative_files(root: Element) -> Iterator[tuple[Element, str]]:
    """Names of files without a directory, which a list of words allows."""
    foreign = {each for metadata in root.findall("metadata") for each in metadata.iter()}
    for element in root.iter():
        for name in _FILES:
            value = element.get(name, "/")
            if "/" not in value and element not in foreign and element.tag not in _PROGRAMS:
                yield element, name


def _writable_flash(root: Element) -> Iterator[tuple[Element, str]]:
    """Firmware as flash that the emulator may write to: other guests have the same file."""
    for loader in root.findall("os/loader[@type='pflash']"):
        if loader.get("readonly") != "yes":
            yield loader, "readonly"


def _is_made_at_each_start(element: Element, name: str, places: list[Element]) -> bool:
    """Whether libvirt has made a value for a running guest, and takes it from no definition."""
    value = element.get(name, "")
    device = places[1] if element.tag in ("source", "listen") else element
    if device.get("type") == "pty" and name in ("path", "tty"):
        return _PTY.fullmatch(value) is not None
    target = device.find("target")
    if device.tag == "channel" and device.get("type") == "unix" and name == "path":
        if target is None or target.get("type") != "virtio" or element.get("mode") == "connect":
            return False
        words = (places[-1].findtext("name", "").strip()[:_SHORT_NAME], target.get("name", ""))
        return re.fullmatch(_CHANNEL.format(*map(re.escape, words)), value) is not None
    listens = {listen.get("address") for listen in device.findall("listen")}  # judged themselves
    return element.tag == "graphics" and name == "listen" and value in listens


def _unlisted(element: Element, name: str | None, places: list[Element]) -> Unlisted:
    tags = [each.tag.replace(QEMU, "qemu:") for each in reversed(places)]
    word = ".".join([*(tag for tag in tags[:-1] if tag not in _WITHIN), tags[-1]])
    if name is None:
        return Unlisted(word, _text(element))
    value = text_of(element) if name == "." else element.get(name, "").strip()
    if name == "type":
        return Unlisted(f"{word}.type={value}", _text(element))
    shown = f"<{tags[-1]}>{value}" if name == "." else f"<{tags[-1]} {name}='{value}'>"
    if value.startswith("/") and element.tag not in _PROGRAMS:
        return Unlisted(value, _cut(shown))
    return Unlisted(f"{word}={value}" if name == "." else f"{word}.{name}={value}", _cut(shown))


def _parents(element: Element, above: dict[Element, Element]) -> Iterator[Element]:
    while (parent := above.get(element)) is not None:
        yield parent
        element = parent


def _text(element: Element) -> str:
    """The element with its values, cut to :data:`_SHOWN`; its paths are listed besides."""
    parts = []
    for each in element.iter():
        values = "".join(f" {key}='{value}'" for key, value in each.attrib.items())
        parts.append(f"<{each.tag.rpartition('}')[2]}{values}>{(each.text or '').strip()}")
    return _cut("".join(parts))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _paths(element: Element) -> set[str]:
    values = {
        each.strip() for part in element.iter() for each in (part.text or "", *part.attrib.values())
    }
    return {value for value in values if value.startswith("/")}
