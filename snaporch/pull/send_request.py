"""The requests of a machine that pulls: written there, and checked on the source.

A request is the command of ssh: ``snaporch-source 1 VERB [ARGUMENT]``. The machine that asks may be
hostile, so :func:`parse_request` accepts nothing but what the table of verbs names. All of them
read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from snaporch.bundle.store import RUN_NAME, UUID_NAME
from snaporch.errors import RefusedError
from snaporch.replication.request_command import RequestProtocol, checked_text
from snaporch.replication.resume_transfer import NO_TOKEN, is_token
from snaporch.zfs_names import is_dataset, quoted

MAX_FILES = 64
"""Of a bundle."""
MAX_GUID = (1 << 64) - 1
MAX_FILE_BYTES = 1 << 50
_THING = "snaporch send"
_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,99}")


class Verb(StrEnum):
    """What a machine that pulls may ask for."""

    GUESTS = "guests"
    SNAPSHOTS = "snapshots"
    MANIFEST = "manifest"
    STREAM = "stream"
    BUNDLE = "bundle"


@dataclass(frozen=True, slots=True)
class WantedFile:
    """A file of a bundle that is asked for."""

    name: str
    offset: int
    """Bytes at its beginning that are not sent."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request whose values were checked; those that its verb does not have are empty."""

    verb: Verb
    uuid: str = ""
    dataset: str = ""
    guid: int = 0
    """Of the snapshot to send."""
    base: int = 0
    """The GUID of the snapshot at which the stream begins; 0 for a full stream."""
    token: str = NO_TOKEN
    """Continues an interrupted stream."""
    run: str = ""
    files: tuple[WantedFile, ...] = ()


def _refused(reason: str) -> RefusedError:
    return RefusedError(_THING, reason)


def _uuid(value: object) -> str:
    return checked_text(_THING, value, re.compile(UUID_NAME).fullmatch, "UUID")


def _run(value: object) -> str:
    return checked_text(_THING, value, re.compile(RUN_NAME).fullmatch, "name of a run")


def _dataset(value: object) -> str:
    return checked_text(_THING, value, is_dataset, "name of a dataset")


def _token(value: object) -> str:
    return checked_text(
        _THING, value, lambda text: text == NO_TOKEN or is_token(text), "resume token"
    )


def _number(most: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        if type(value) is not int or not 0 <= value <= most:
            raise _refused(f"{quoted(str(value))} is no number from 0 to {most}")
        return value

    return check


def _files(value: object) -> tuple[WantedFile, ...]:
    found = []
    for each in value if isinstance(value, list) else ():
        if not isinstance(each, dict) or each.keys() != {"name", "offset"}:
            raise _refused("a file has a name and an offset")
        name = checked_text(_THING, each["name"], _FILE_NAME.fullmatch, "name of a bundle's file")
        found.append(WantedFile(name, _number(MAX_FILE_BYTES)(each["offset"])))
    if not found or len(found) > MAX_FILES or len({each.name for each in found}) != len(found):
        raise _refused(f"1 to {MAX_FILES} files are expected, each with a name of its own")
    return tuple(found)


_CHECKS: dict[str, Callable[[object], Any]] = {
    "uuid": _uuid,
    "dataset": _dataset,
    "guid": _number(MAX_GUID),
    "base": _number(MAX_GUID),
    "token": _token,
    "run": _run,
    "files": _files,
}
_VALUES: dict[Verb, tuple[str, ...]] = {
    Verb.GUESTS: (),
    Verb.SNAPSHOTS: ("uuid",),
    Verb.MANIFEST: ("uuid", "run"),
    Verb.STREAM: ("uuid", "dataset", "guid", "base", "token"),
    Verb.BUNDLE: ("uuid", "run", "files"),
}
_PROTOCOL = RequestProtocol(_THING, "snaporch-source 1", _VALUES, _CHECKS, Request)
request_command, parse_request = _PROTOCOL.command, _PROTOCOL.parse
