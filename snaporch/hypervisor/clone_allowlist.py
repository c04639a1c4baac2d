"""The allow-list for a clone's XML: what it may take over from its original.

Anything that is not in the list may refer to something of the host or of the original. Each line
has an element and the attributes it may have; its children are indented below it. The sign after an
attribute's name (``.`` is the element's text) says which values are allowed:

======== ======================================================================
nothing  a word or a number, nothing with a slash
``~``    any text: the guest reads it, the host does not
``<``    a file of the host that is only read
``!``    a path of the clone's own
``@``    a file that a package installs: firmware, an emulator
``=a|b`` one of these; ``=`` alone is none
======== ======================================================================

``**`` stands for any attributes, text and children with such values, ``**~`` for any at all.
A ``-`` alone forbids an element that an earlier line allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from xml.etree.ElementTree import Element

QEMU = "{http://libvirt.org/schemas/domain/qemu/1.0}"
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
_PROGRAM = re.compile(r"/usr/(s?bin|libexec|lib/qemu)/(qemu-system-\w+|qemu-kvm|kvm|virtiofsd)")

LIST = """
domain type id
  name|title|description .~
  uuid|genid|iothreads .
  metadata **~
  memory unit dumpCore .
  currentMemory|maxMemory unit slots .
  memoryBacking|memtune|numatune|vcpu|vcpus|iothreadids|defaultiothread|throttlegroups **
  cputune
    shares|period|quota|global_period|global_quota|emulator_period|emulator_quota .
    iothread_period|iothread_quota .
    vcpupin|emulatorpin|iothreadpin|vcpusched|iothreadsched|emulatorsched **
  blkiotune
    weight .
  cpu|features|pm|perf|keywrap|on_poweroff|on_reboot|on_crash|on_lockfailure **
  clock offset adjustment basis timezone~ start
    timer **
  sysinfo type
    bios|system|baseBoard|chassis|oemStrings
      entry name .~
    entry name~ file< .~
  os firmware
    type arch machine .
    firmware|boot|bootmenu|bios|smbios **
    loader readonly secure stateless type format .<
    nvram template< templateFormat format .!
    varstore template< path!
    kernel|initrd|dtb|shim .<
    cmdline .~
    acpi
      table type .<
  qemu:commandline
    qemu:arg value~
  qemu:capabilities|qemu:deprecation|qemu:override **
  devices
    emulator .<
    disk type=file|block device=disk|lun|cdrom|floppy model snapshot
      driver|target|iotune|geometry|blockio|boot|address|alias|acpi|throttlefilters **
      readonly|shareable|transient **
      serial|wwn|vendor|product .~
      source file! dev! index startupPolicy
        encryption format engine
          secret type uuid usage~
          cipher|ivgen **
        slices
          slice type offset size
        dataStore type=file|block
          format type
          source file! dev!
      backingStore type=file|block
        format type
        source file! dev! index
          encryption format engine
            secret type uuid usage~
            cipher|ivgen **
          slices
            slice type offset size
      encryption format engine
        secret type uuid usage~
        cipher|ivgen **
    medium type=file|block device=disk|cdrom|floppy model snapshot
      driver|target|iotune|geometry|blockio|boot|address|alias|acpi|throttlefilters **
      readonly|shareable **
      serial|wwn|vendor|product .~
      source file< dev< index startupPolicy
        encryption format engine
          secret type uuid usage~
          cipher|ivgen **
        slices
          slice type offset size
      backingStore type=file|block
        format type
        source file< dev< index
          encryption format engine
            secret type uuid usage~
            cipher|ivgen **
          slices
            slice type offset size
    controller|hub|redirfilter|memballoon|nvram|panic|iommu|watchdog|sound **
    interface type=ethernet|network
      mac|model|driver|address|mtu|boot|alias|acpi|link **
      rom bar enabled file<
      source network
    input type=mouse|keyboard|tablet bus model
      driver|address|alias|acpi **
    graphics type=vnc|spice|egl-headless|dbus autoport=yes keymap sharePolicy passwd~ \
passwdValidTo connected defaultMode powerControl wait p2p
      channel|image|jpeg|zlib|playback|streaming|clipboard|mouse|filetransfer|audio **
      gl enable
      listen type=none|socket
    audio type=none|spice|dbus id timerPeriod
      input|output **
    video
      driver name=qemu vgaconf iommu ats packed page_per_vq
      model type ram vram vram64 vgamem heads primary blob edid
        acceleration accel2d accel3d
        resolution **
      address|alias|acpi **
    serial|parallel|console|channel \
type=pty|null|stdio|vc|spicevmc|spiceport|qemu-vdagent|dbus|unix|file
      source channel path! append
      clipboard|mouse **
      target type port name state
        model name
      address|alias|acpi **
    smartcard mode=passthrough type=null|spicevmc
      address|alias **
    redirdev bus type=null|spicevmc|dbus
      source channel
      boot|address|alias **
    rng model
      backend model=builtin|random .=/dev/urandom|/dev/random
      rate|driver|address|alias|acpi **
    tpm model
      backend type=emulator version persistent_state debug
        encryption secret
        active_pcr_banks|profile **
        source type=dir|file path!
      address|alias|acpi **
    memory model=dimm|virtio-mem access discard
      uuid .
      source
        nodemask .
        pagesize unit .
      target|address|alias|acpi **
    vsock model
      cid auto=yes
      driver|address|alias|acpi **
    crypto model type
      backend model=builtin queues
      driver|address|alias|acpi **
"""

IsOwn = Callable[[str], bool]
"""Whether a path belongs to the guest itself."""
_Fits = Callable[[str, IsOwn], bool]


@dataclass(slots=True)
class Rule:
    """The allowed attributes, text and children of an element."""

    values: dict[str, _Fits] = field(default_factory=dict)
    """The check of each attribute's value; the text's is ``.``."""
    children: dict[str, Rule] = field(default_factory=dict)
    all: _Fits | None = None
    """If set: any attributes and children are allowed, whose values pass this check."""
    never: bool = False
    """Whether the element itself is not allowed."""


def _word(value: str, _own: IsOwn) -> bool:
    return "/" not in value


def _any(_value: str, _own: IsOwn) -> bool:
    return True


def is_own(value: str, own: Collection[str]) -> bool:
    """Whether a path is one of the clone's own, or below one."""
    if ".." in value.split("/"):
        return False
    return any(value == path or value.startswith(f"{path}/") for path in own)


def _has(value: str, own: IsOwn) -> bool:
    return own(value)


def _packaged(value: str, _own: IsOwn) -> bool:
    return is_own(value, FIRMWARE) or _PROGRAM.fullmatch(value) is not None


_SIGNS: dict[str, _Fits] = {"": _word, "~": _any, "<": _any, "!": _has, "@": _packaged}


def _fits(sign: str) -> _Fits:
    if sign.startswith("="):
        choices = sign[1:].split("|")
        return lambda value, _own: value in choices
    return _SIGNS[sign]


def read_rules(lines: str) -> Rule:
    """Read a list, whose signs are those of this module.

    A later line on an element that is there adds to it, or changes the values that it may have.
    """
    top = Rule()
    open_rules = [(-1, [top])]
    for line in filter(None, lines.splitlines()):
        depth = len(line) - len(line.lstrip())
        tags, *tokens = line.split()
        while open_rules[-1][0] >= depth:
            open_rules.pop()
        below = []
        for parent in open_rules[-1][1]:
            for tag in tags.split("|"):
                rule = parent.children.setdefault(tag.replace("qemu:", QEMU), Rule())
                if tag == "backingStore":
                    rule.children[tag] = rule  # an entry of a chain may have another
                _allow(rule, tokens)
                below.append(rule)
        open_rules.append((depth, below))
    return top


def _allow(rule: Rule, tokens: Collection[str]) -> None:
    if tokens == ["-"]:
        rule.never = True
        return
    for token in tokens:
        found = re.fullmatch(r"(\*\*|\.|[\w-]+)(.*)", token)
        assert found is not None, token
        if found[1] == "**":
            rule.all = _fits(found[2])
        else:
            rule.values[found[1]] = _fits(found[2])


_DOMAIN = read_rules(LIST).children["domain"]
_DEVICES = _DOMAIN.children.pop("devices").children
MEDIUM = "medium"
"""Used instead of ``disk`` for a read-only disk that is shared with the original."""


def unlisted(root: Element, own: Collection[str]) -> Iterator[str]:
    """The parts of a domain's XML that are not in the list, except devices.

    Args:
        root: the ``<domain>``.
        own: paths that belong to the clone: files, and directories with everything in them.
    """
    return _unlisted(root, _DOMAIN, partial(is_own, own=own), ("devices",))


def unlisted_in_device(element: Element, own: Collection[str], tag: str = "") -> Iterator[str]:
    """The parts of a device that are not in the list.

    Args:
        tag: the entry of the list to use, if not that of the element's name.
    """
    rule = _DEVICES.get(tag or element.tag)
    if rule is None:
        return iter([f"<{element.tag}>"])
    return _unlisted(element, rule, partial(is_own, own=own))


def _unlisted(
    element: Element, rule: Rule, own: IsOwn, without: Collection[str] = ()
) -> Iterator[str]:
    for found, name in not_allowed(element, rule, own, without):
        if name is None:
            yield f"<{found.tag}>"
        else:
            value = text_of(found) if name == "." else found.get(name)
            yield f"{'' if name == '.' else f'{name}='}{value!r} in <{found.tag}>"


def text_of(element: Element) -> str:
    """The text of an element, also that between its children: libvirt reads all of it as one."""
    return "".join([element.text or "", *(child.tail or "" for child in element)]).strip()


def not_allowed(
    element: Element, rule: Rule, own: IsOwn, without: Collection[str] = ()
) -> Iterator[tuple[Element, str | None]]:
    """What an element has that its rule does not allow.

    Args:
        own: whether the sign ``!`` allows a path.
        without: children of the element that are not looked at.

    Returns:
        Elements, each with the name of an attribute (``.`` is the text), or with ``None`` if the
        whole element is not allowed.
    """
    values = dict(element.attrib)
    if (text := text_of(element)) != "":
        values["."] = text
    for name, value in values.items():
        fits = rule.values.get(name, rule.all)
        if fits is None or not fits(value, own):
            yield element, name
    for child in element:
        if child.tag in without:
            continue
        below = rule.children.get(child.tag) or (rule if rule.all is not None else None)
        if below is None or below.never:
            yield child, None
        else:
            yield from not_allowed(child, below, own)
