"""The requests of a host to its append-only replica: written here, and checked on the replica.

A request is the command of ssh: ``snaporch-replica 1 VERB [ARGUMENT]``. The argument is a JSON
object in base64url. The host may be hostile, so :func:`parse_request` accepts nothing but what the
table of verbs names, and each value is checked before any code uses it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from snaporch.bundle.store import COPY_NAME, RUN_NAME, UUID_NAME
from snaporch.catalog.records import ENDED, ENDED_HERE, NOT_ENDED
from snaporch.errors import RefusedError
from snaporch.model import Level
from snaporch.replication.marks import MARKS
from snaporch.replication.request_command import RequestProtocol, checked_text
from snaporch.zfs_names import is_snapshot, quoted

_THING = "snaporch receive"
_MAX_FILES = 64
_MAX_FILE_BYTES = 1 << 50
_MAX_VALUE = 1024
"""Bytes of the value of a property, as of a note; ZFS permits 8191."""
_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,99}")
_SHA256 = re.compile("[0-9a-f]{64}")


class Verb(StrEnum):
    """What a host may ask for."""

    CHECK = "check"
    SNAPSHOTS = "snapshots"
    STATE = "state"
    RECEIVE = "receive"
    DISCARD = "discard"
    MARK = "mark"
    POLICIES = "policies"
    BUNDLES = "bundles"
    MANIFEST = "manifest"
    DAMAGED = "damaged"
    BEGUN = "begun"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class SentFile:
    """A file of a bundle that a host sends."""

    name: str
    bytes: int
    sha256: str
    offset: int
    """The bytes at its beginning that the replica has already."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request whose values were checked; those that its verb does not have are empty."""

    verb: Verb
    copy: str = ""
    """The copy of a dataset, without the dataset above it."""
    copies: tuple[str, ...] = ()
    uuid: str = ""
    run: str = ""
    sums: Mapping[str, str] | None = None
    """The SHA-256 of files, by name."""
    files: tuple[SentFile, ...] = ()
    marks: Mapping[str, Mapping[str, str]] | None = None
    """The wanted properties of snapshots, without their prefix, by ``copy@snapshot``."""
    policies: Mapping[str, str] | None = None
    """The policies of copies; empty for none."""


def _text(value: object, is_valid: Callable[[str], object], what: str) -> str:
    """A text that is valid.

    Raises:
        RefusedError: it is not.
    """
    return checked_text(_THING, value, is_valid, what)


def _copy(value: object) -> str:
    # The rule for a part of a dataset's name is that for a snapshot's.
    return _text(value, is_snapshot, "name of a copy")


def _snapshot(value: object) -> str:
    def is_valid(text: str) -> bool:
        copy, _, name = text.partition("@")
        return is_snapshot(copy) and is_snapshot(name)

    return _text(value, is_valid, "name of a copy's snapshot")


def _uuid(value: object) -> str:
    return _text(value, re.compile(UUID_NAME).fullmatch, "UUID")


def _run(value: object) -> str:
    return _text(value, re.compile(RUN_NAME).fullmatch, "name of a run")


def _file(value: object) -> str:
    name = _text(value, _FILE_NAME.fullmatch, "name of a bundle's file")
    if name == COPY_NAME:
        raise _refused(f"{name} is the replica's own record")
    return name


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_FILE_BYTES:
        raise _refused(f"{quoted(str(value))} is no number of bytes")
    return value


def _sum(value: object) -> str:
    return _text(value, _SHA256.fullmatch, "SHA-256")


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise _refused("a list is expected")
    return value


def _table(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refused("an object is expected")
    return value


def _copies(value: object) -> tuple[str, ...]:
    return tuple(_copy(each) for each in _list(value))


def _sums(value: object) -> dict[str, str]:
    return {_file(name): _sum(digest) for name, digest in _table(value).items()}


def _files(value: object) -> tuple[SentFile, ...]:
    found = []
    for each in _list(value):
        if (given := _table(each)).keys() != {"name", "bytes", "sha256", "offset"}:
            raise _refused("a file has a name, bytes, sha256 and an offset")
        size, offset = _number(given["bytes"]), _number(given["offset"])
        if offset > size:
            raise _refused("the offset is behind the end of the file")
        found.append(SentFile(_file(given["name"]), size, _sum(given["sha256"]), offset))
    if not found or len(found) > _MAX_FILES or len({each.name for each in found}) != len(found):
        raise _refused(f"a bundle has 1 to {_MAX_FILES} files, each with a name of its own")
    return tuple(found)


def _is_value(text: str) -> bool:
    return len(text.encode("utf-8", "surrogatepass")) <= _MAX_VALUE and text.isprintable()


def _value_rules() -> dict[str, Callable[[str], object]]:
    reference = re.compile(f"{UUID_NAME}/{RUN_NAME}").fullmatch
    levels = {each.value for each in Level}
    return {
        "run": re.compile(RUN_NAME).fullmatch,
        "uuid": re.compile(UUID_NAME).fullmatch,
        "bundle": reference,
        "ram": reference,
        "level": levels.__contains__,
        "torn": "yes".__eq__,
        ENDED: (ENDED_HERE, NOT_ENDED).__contains__,
    }


def is_mark(key: str, value: str) -> bool:
    """Whether a property of a copy's snapshot can have this value."""
    rule = _value_rules().get(key, bool)
    return key in MARKS and _is_value(value) and bool(rule(value))


def _mark(values: object) -> dict[str, str]:
    found = {}
    for key, value in _table(values).items():
        if key not in MARKS:
            raise _refused(f"{quoted(key)} is no mark of a copy")
        found[key] = _text(value, partial(is_mark, key), f"value of {key}")
    if "bundle" in found and found["bundle"] != f"{found.get('uuid')}/{found.get('run')}":
        raise _refused("the bundle is not that of the domain's run")
    return found


def _marks(value: object) -> dict[str, dict[str, str]]:
    return {_snapshot(name): _mark(values) for name, values in _table(value).items()}


def _policies(value: object) -> dict[str, str]:
    return {_copy(name): _text(text, _is_value, "policy") for name, text in _table(value).items()}


def _refused(reason: str) -> RefusedError:
    return RefusedError(_THING, reason)


_CHECKS: dict[str, Callable[[object], Any]] = {
    "copy": _copy,
    "copies": _copies,
    "uuid": _uuid,
    "run": _run,
    "sums": _sums,
    "files": _files,
    "marks": _marks,
    "policies": _policies,
}
_VALUES: dict[Verb, tuple[str, ...]] = {
    Verb.CHECK: (),
    Verb.SNAPSHOTS: ("copies",),
    Verb.STATE: ("copy",),
    Verb.RECEIVE: ("copy",),
    Verb.DISCARD: ("copy",),
    Verb.MARK: ("marks",),
    Verb.POLICIES: ("policies",),
    Verb.BUNDLES: ("uuid",),
    Verb.MANIFEST: ("uuid", "run"),
    Verb.DAMAGED: ("uuid", "run", "sums"),
    Verb.BEGUN: ("uuid", "run"),
    Verb.STORE: ("uuid", "run", "files"),
}
_PROTOCOL = RequestProtocol(_THING, "snaporch-replica 1", _VALUES, _CHECKS, Request)
request_command, parse_request = _PROTOCOL.command, _PROTOCOL.parse
