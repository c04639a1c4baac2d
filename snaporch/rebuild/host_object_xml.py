"""Read the definition of a network or storage pool that a replica sent: only what a list allows."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring

from snaporch.errors import SnaporchError
from snaporch.zfs_names import quoted

MAX_XML = 1 << 16
"""Bytes of a definition."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class NotAllowedError(SnaporchError):
    """A definition has what a rebuild does not bring back; it can be defined by hand."""


Allowed = Mapping[str, Collection[str]]
"""The paths of elements below the root (``ip/dhcp``; empty for the root), with their attributes."""


def read_definition(what: str, name: str, xml: str, allowed: Allowed) -> Element:
    """Parse a definition, and check that it has allowed elements and attributes only.

    Args:
        what: the root's tag.
        name: the name that the manifest has for it.
        xml: the definition.
        allowed: what it may have.

    Raises:
        NotAllowedError: it has something else, or another name.
    """
    thing = f"{what} {quoted(name)}"
    if _NAME.fullmatch(name) is None:
        raise NotAllowedError(thing, "has a name of unusual form")
    try:
        if len(xml.encode()) > MAX_XML:
            raise NotAllowedError(thing, f"has a definition of over {MAX_XML >> 10} KiB")
        root: Element = fromstring(xml, forbid_dtd=True)
    except (ElementTree.ParseError, DefusedXmlException, ValueError) as error:
        raise NotAllowedError(thing, "has a definition that is no XML") from error
    if root.tag != what or root.findtext("name") != name:
        raise NotAllowedError(thing, "has a definition of something else")
    _check(thing, root, "", allowed)
    return root


def _check(thing: str, element: Element, path: str, allowed: Allowed) -> None:
    if path not in allowed:
        raise NotAllowedError(thing, f"has <{quoted(path)[1:-1]}>")
    for key in element.attrib:
        if key not in allowed[path]:
            raise NotAllowedError(thing, f"has the attribute {quoted(key)} of <{path or 'root'}>")
    for child in element:
        _check(thing, child, f"{path}/{child.tag}".lstrip("/"), allowed)
