"""Domains of every kind that libvirt knows, made from its own schema.

The schema comes with libvirt's library. Each domain has one thing more than a plain guest: one
element of ``<domain>`` or ``<devices>``, made by walking its rules and taking every way at
each fork once. Whatever the schema lets one choose freely (a path, a name, an address, a
port) is a *mark*: a value by which it is known again wherever it turns up.
"""

from __future__ import annotations

import copy
import ctypes
import ctypes.util
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from hypothesis import find
from hypothesis.strategies import from_regex

SCHEMA = Path("/usr/share/libvirt/schemas/domain.rng")
MARKS = re.compile(r"q7q|10\.77\.|fe77:|77777777|52:54:77|naa\.77|\b0x77|\b77\d\d\b")
_RNG = "{http://relaxng.org/ns/structure/1.0}"
_DEEP = 40
_SELF = 2
"""So often a rule may be within itself."""
_RARE = (2, 4)
"""What is optional is taken one time in so many: much at once, and hardly anything at once."""
_PATIENCE = 6
"""So many domains in a row that took no new way, and all ways were taken."""


def _candidates(number: int) -> Iterator[str]:
    """Values that identify a mark; the first that the schema accepts is used."""
    low = number % 90 + 10
    words = f"/q7q/{number}", f"q7q{number}"
    yield from words if number % 2 else reversed(words)
    yield from (f"vdq7q{number}", f"10.77.0.{low}")
    yield from (
        f"fe77::{low}",
        f"77777777-0000-4000-8000-0000000000{low}",
        f"77777777000000{low}",
        f"naa.77777777000000{low}",
    )
    yield from (f"52:54:77:00:00:{low}", f"53:54:77:00:00:{low}", f"77{low}", f"0x77{low}")
    yield from (
        "777",
        f"0x77{low}77",
        f"77777777{'0' * 22}{low}",
        "q7q-45678901",
        f"[q7q] {number}",
    )
    yield from (f"http://q7q/{number}", f"{low}", f"{low}.5", "7", "1", "0", "-1", "0x7", "0xf1")
    yield from ("2026-01-01T00:00:00", "2026-01-01T00:00:00Z", "KiB", "ipv4", "tcp", "sync_pt")
    yield from ("vepa", "00:02:00:00:00:00:00", "00:04" + ":77" * 16, "00:03:00:01" + ":77" * 6)
    yield "00:01:00:01" + ":77" * 10


_NUMBERS = {
    "short", "int", "integer", "long", "positiveInteger",
    "unsignedInt", "unsignedLong", "unsignedShort", "unsignedByte",
}  # fmt: skip
_LARGEST = {"short": 1 << 15, "unsignedShort": 1 << 16, "unsignedByte": 1 << 8}


def _takes(node: Element, value: str) -> bool:
    kind = node.get("type", "string")
    if kind in _NUMBERS and not (
        re.fullmatch(r"-?\d+", value)
        and int(value) < _LARGEST.get(kind, 1 << 31)
        and (int(value) > 0 or not kind.startswith(("unsigned", "positive")))
    ):
        return False
    if kind == "double" and not re.fullmatch(r"\d+(\.\d+)?", value):
        return False
    if kind == "NCName" and not re.fullmatch(r"[a-z]\w*", value):
        return False
    if kind == "dateTime" and not re.fullmatch(r"\d+-\d+-\d+T.*", value):
        return False
    for param in node.findall(f"{_RNG}param"):
        limit, name = param.text or "", param.get("name")
        if name == "pattern" and not re.fullmatch(limit, value):
            return False
        if name == "minInclusive" and float(value) < float(limit):
            return False
        if name == "maxInclusive" and float(value) > float(limit):
            return False
        if name == "maxLength" and len(value) > int(limit):
            return False
    return not any(value == other.text for other in node.findall(f"{_RNG}except//{_RNG}value"))


class Grammar:
    """The rules of a RELAX NG schema, and a generator of documents."""

    def __init__(self, schema: Path = SCHEMA) -> None:
        self._defines: dict[str, Element] = {}
        self._namespaces: dict[Element, str] = {}
        self._taken: set[tuple[Element, int]] = set()
        self._random = random.Random(1)
        self._within: Counter[str] = Counter()
        self._odd: dict[Element, str] = {}
        self._number = 0
        self._rare = 1
        self._load(schema)
        self._common = set(self._below("address"))

    def _load(self, path: Path) -> None:
        root = ElementTree.parse(path).getroot()
        self._inherit(root, "")
        for include in root.findall(f"{_RNG}include"):
            self._load(path.with_name(include.get("href", "")))
        for define in root.iter(f"{_RNG}define"):
            self._defines[define.get("name", "")] = define

    def _inherit(self, node: Element, namespace: str) -> None:
        namespace = node.get("ns", namespace)
        self._namespaces[node] = namespace
        for child in node:
            self._inherit(child, namespace)

    def _below(self, name: str) -> Iterator[Element]:
        """The nodes of a rule; the nodes for addresses are the same for every device."""
        for node in self._defines[name].iter():
            yield node
            if node.tag == f"{_RNG}ref":
                yield from self._below(node.get("name", ""))

    def rules(self, name: str, tag: str) -> list[Element]:
        """The possible contents of the element ``tag`` of the rule ``name``, one by one."""
        top = self._defines[name]
        if tag:
            top = next(top.iter(f"{_RNG}element"))
        inner = next(top.iter(f"{_RNG}interleave"))
        return list(self._leaves(inner))

    def _leaves(self, node: Element) -> Iterator[Element]:
        """Single elements, also through refs that contain several."""
        for child in node:
            if child.tag == f"{_RNG}ref":
                yield from self._leaves(self._defines[child.get("name", "")])
            elif child.tag in (f"{_RNG}element", f"{_RNG}group"):
                yield child
            elif child.tag != f"{_RNG}attribute":
                yield from self._leaves(child)

    def examples(self, node: Element) -> Iterator[Element]:
        """Elements (below an empty one) until every alternative of a rule was used."""
        for self._rare in _RARE:
            self._taken = {way for way in self._taken if way[0] in self._common}
            idle = 0
            while idle < _PATIENCE:
                before = len(self._taken)
                holder = Element("holder")
                self._make(node, holder, [], 0)
                yield holder
                idle = idle + 1 if len(self._taken) == before else 0

    def _make(self, node: Element, into: Element, text: list[str], depth: int) -> None:
        kind = node.tag.removeprefix(_RNG)
        if kind in ("text", "data", "value"):
            text.append(self._word(node, kind))
        elif kind == "element":
            self._element(node, into, depth)
        elif kind == "attribute":
            inner: list[str] = []
            self._all(node, into, inner, depth)
            into.set(self._name(node), " ".join(inner or [next(self._new())]))
        elif kind == "ref":
            name = node.get("name", "")
            self._within[name] += 1
            self._make(self._defines[name], into, text, depth + 1)
            self._within[name] -= 1
        elif kind == "choice":
            ways = [child for child in node if self._is_possible(child)]
            self._make(ways[self._way(node, len(ways), depth)], into, text, depth + 1)
        elif kind not in ("optional", "zeroOrMore") or self._is_taken(node, depth):
            self._all(node, into, text, depth)

    def _all(self, node: Element, into: Element, text: list[str], depth: int) -> None:
        for child in node:
            if child.tag.removeprefix(_RNG) not in ("name", "anyName", "except", "empty"):
                self._make(child, into, text, depth + 1)

    def _is_taken(self, node: Element, depth: int) -> bool:
        return all(map(self._is_possible, node)) and self._way(node, self._rare, depth) == 0

    def _word(self, node: Element, kind: str) -> str:
        if kind == "value":
            return node.text or ""
        return next(self._new()) if kind == "text" else self._datum(node)

    def _new(self) -> Iterator[str]:
        self._number += 1
        return _candidates(self._number)

    def _is_possible(self, node: Element) -> bool:
        """False for rules that another schema should fill, which say ``notAllowed``."""
        if node.tag == f"{_RNG}ref":
            node = self._defines[node.get("name", "")]
        return node.find(f"{_RNG}notAllowed") is None

    def _element(self, node: Element, into: Element, depth: int) -> None:
        made = SubElement(into, self._name(node))
        text: list[str] = []
        self._all(node, made, text, depth)
        made.text = " ".join(text) or None

    def _name(self, node: Element) -> str:
        name = node.get("name") or node.findtext(f"{_RNG}name")
        if name is None:
            return "{urn:q7q}any" if node.tag == f"{_RNG}element" else "any"
        namespace = self._namespaces[node] if node.tag == f"{_RNG}element" else ""
        return f"{{{namespace}}}{name}" if namespace else name

    def _way(self, node: Element, count: int, depth: int) -> int:
        if depth > _DEEP or any(times > _SELF for times in self._within.values()):
            return count - 1  # where there is one, the way out
        new = [way for way in range(count) if (node, way) not in self._taken]
        way = new[0] if new else self._random.randrange(count)
        self._taken.add((node, way))
        return way

    def _datum(self, node: Element) -> str:
        for value in self._new():
            if _takes(node, value):
                return value
        if node not in self._odd:
            pattern = node.findtext(f"{_RNG}param[@name='pattern']", ".*")
            values = from_regex(pattern, fullmatch=True)
            self._odd[node] = find(values, lambda value: _takes(node, value))
        return self._odd[node]


@dataclass
class Example:
    """A domain, and its element of interest."""

    tag: str
    root: Element = field(repr=False)


def examples(plain: Element, grammar: Grammar) -> Iterator[Example]:
    """``plain`` with one more element, or with one in place of its own."""
    for rule in grammar.rules("domaincontents", ""):
        if rule.get("name") == "devices":
            continue
        for holder in grammar.examples(rule):
            yield from _with(plain, ".", holder)
    for rule in grammar.rules("devices", "devices"):
        for holder in grammar.examples(rule):
            yield from _with(plain, "devices", holder)


def _with(plain: Element, where: str, holder: Element) -> Iterator[Example]:
    if len(holder) == 0:
        return
    root = copy.deepcopy(plain)
    place = root.find(where)
    assert place is not None
    for element in holder:
        for old in place.findall(element.tag) if where == "." else []:
            place.remove(old)
    place.extend(holder)
    yield Example(holder[0].tag, root)


class Validator:
    """The validator of libxml2, which libvirt itself uses."""

    def __init__(self, schema: Path = SCHEMA) -> None:
        name = ctypes.util.find_library("xml2")
        assert name is not None
        self._xml = ctypes.CDLL(name)
        for function in ("xmlRelaxNGNewParserCtxt", "xmlRelaxNGParse", "xmlRelaxNGNewValidCtxt"):
            getattr(self._xml, function).restype = ctypes.c_void_p
            getattr(self._xml, function).argtypes = [ctypes.c_void_p]
        self._xml.xmlReadMemory.restype = ctypes.c_void_p
        self._xml.xmlReadMemory.argtypes = [
            ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int,
        ]  # fmt: skip
        self._xml.xmlRelaxNGValidateDoc.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._xml.xmlFreeDoc.argtypes = [ctypes.c_void_p]
        path = ctypes.c_char_p(str(schema).encode())
        parser = self._xml.xmlRelaxNGNewParserCtxt(ctypes.cast(path, ctypes.c_void_p))
        self._schema = self._xml.xmlRelaxNGParse(parser)
        assert self._schema
        self._context = self._xml.xmlRelaxNGNewValidCtxt(self._schema)

    def accepts(self, text: str) -> bool:
        """Whether a document is valid; the reason, if not, is on standard error."""
        data = text.encode()
        document = self._xml.xmlReadMemory(data, len(data), b"domain.xml", None, 0)
        assert document
        try:
            return bool(self._xml.xmlRelaxNGValidateDoc(self._context, document) == 0)
        finally:
            self._xml.xmlFreeDoc(document)
