"""Whether libvirt reads a definition as snaporch does.

A forged one can be made to be read in two ways. libvirt takes the first of two elements for some
purposes, the last for others. It finds an attribute by its name without the namespace, so that
``x:type='qcow2' type='raw'`` is qcow2 for libvirt, and raw for others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from xml.etree.ElementTree import Element

from snaporch.hypervisor.clone_allowlist import text_of
from snaporch.zfs_names import quoted

_REPEATED_AT_THE_TOP = ("seclabel", "sysinfo")
_REPEATED_IN_OS = ("boot", "initarg", "initenv")
_SINGLE = frozenset(
    {"backend", "backingStore", "cid", "dataStore", "devices", "driver", "format"}
    | {"hugepages", "mac", "memoryBacking", "mirror", "rom", "target", "uuid"}
)
"""What the code that makes a clone looks for once."""


def two_readings(root: Element) -> str | None:
    """The first part of a definition that can be read in two ways; ``None`` if there is none.

    Args:
        root: the ``<domain>``. Its metadata, which libvirt does not read, may have anything.

    Returns:
        Words for an error: what the definition has.
    """
    for check in (_repeated, _namespaced, _variables):
        for found in check(root):
            return f"{found}, as libvirt writes none"
    return None


def _parents(root: Element) -> Iterator[Element]:
    """All elements of the definition, except what is in its metadata."""
    foreign = {each for metadata in root.findall("metadata") for each in metadata.iter()}
    return (each for each in root.iter() if each not in foreign)


def _repeated(root: Element) -> Iterator[str]:
    os = root.findall("os")
    for parent in _parents(root):
        counts = Counter(child.tag for child in parent)
        for tag in sorted(tag for tag, count in counts.items() if count > 1):
            if (
                (parent is root and tag not in _REPEATED_AT_THE_TOP)
                or tag in _SINGLE
                or (parent in os and tag not in _REPEATED_IN_OS)
            ):
                yield f"more than one <{_local(tag)}>"


def _namespaced(root: Element) -> Iterator[str]:
    """Attributes with a namespace, and elements with one that are not below one of the domain's.

    Those of the domain itself are arguments of the emulator.
    """
    for parent in _parents(root):
        for name in parent.attrib:
            if name.startswith("{"):
                yield f"an attribute {_local(name)} with a namespace in <{_local(parent.tag)}>"
        for child in parent:
            is_below = parent is root or parent.tag.startswith("{")
            if child.tag.startswith("{") and not is_below:
                yield f"a <{_local(child.tag)}> with a namespace in <{_local(parent.tag)}>"


def _variables(root: Element) -> Iterator[str]:
    """Of UEFI variables: libvirt takes the text unless there is a type, and then a source."""
    for element in root.findall("os/nvram"):
        if element.find("source") is not None and (not element.get("type") or text_of(element)):
            yield "an <nvram> with a <source> and without a type, or with a text"


def _local(name: str) -> str:
    return quoted(name.rpartition("}")[2])[1:-1]
