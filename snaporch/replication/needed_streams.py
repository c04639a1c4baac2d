"""Which streams bring a copy up to date, and whether an interrupted one may be continued.

A replica is another machine, so its answers are input. A resume token names a dataset, a snapshot
and flags, and ``zfs send -t`` sends whatever it names, also an encrypted dataset in clear
(https://github.com/openzfs/zfs/issues/14153). So a token is used only if it continues a stream that
this host would send now.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from snaporch.model import PoolSnapshot
from snaporch.zfs import Bookmark

NO_TOKEN = "-"  # noqa: S105 - what ZFS prints for a property without a value
_TOKEN = re.compile(r"1-[0-9a-f]{1,16}-[0-9a-f]{1,4}-([0-9a-f]{2}){1,4096}")
"""The second number is a size that libzfs allocates."""
_HEADER = ["resume token contents:", "nvlist version: 0"]
_PAIR = re.compile(r"\t(?:(\w+) = (0x[0-9a-f]{1,16}|1)|(toname) = (.+))")
_REQUIRED = {"object", "offset", "bytes", "toguid", "toname"}
_FLAGS = {"largeblockok": "L", "compressok": "c", "embedok": "e", "rawok": "w"}
"""The option of ``zfs send`` that sets each flag."""
RAW = "w"
"""The option for raw streams, which implies the others."""


class Stream(NamedTuple):
    """A stream of ``zfs send``."""

    base: str
    """The snapshot or bookmark at which it begins; empty for a full stream."""
    snapshot: str
    """The last snapshot in it; a stream that begins at a snapshot has all between, too."""


class Originals(NamedTuple):
    """What this host has of a dataset."""

    dataset: str
    snapshots: Sequence[PoolSnapshot]
    """Oldest first."""
    bookmarks: Mapping[str, Bookmark]
    """By their full names."""

    @property
    def births(self) -> dict[int, int]:
        """The txg of each snapshot and bookmark, by GUID."""
        births = dict(self.bookmarks.values())
        return births | {each.guid: each.createtxg for each in self.snapshots}


def streams(ours: Originals, newest: int | None, *, one_by_one: bool = False) -> list[Stream]:
    """The streams that a copy needs, in this order.

    Args:
        ours: the dataset; its snapshots are never empty.
        newest: the GUID of the copy's newest snapshot, which this host has, or has a bookmark of;
            None if the copy has no snapshot.
        one_by_one: a stream for each snapshot.
    """
    wanted = [each.full_name for each in later(ours, newest)]
    if not wanted:
        return []
    names = {mark.guid: name for name, mark in ours.bookmarks.items()}
    names |= {each.guid: each.full_name for each in ours.snapshots}
    base = "" if newest is None else names[newest]
    if one_by_one:
        return [Stream(*pair) for pair in pairwise([base, *wanted])]
    found = []
    if "@" not in base:  # such a stream has only one snapshot
        found.append(Stream(base, wanted[0]))
        base = wanted[0]
    return found if base == wanted[-1] else [*found, Stream(base, wanted[-1])]


def later(ours: Originals, newest: int | None) -> list[PoolSnapshot]:
    """The snapshots that a copy lacks, oldest first; the arguments as for :func:`streams`."""
    birth = -1 if newest is None else ours.births[newest]
    return [each for each in ours.snapshots if each.createtxg > birth]


def is_token(text: str) -> bool:
    """Whether a text has the form of a resume token."""
    return _TOKEN.fullmatch(text) is not None


def token_refusal(report: str, ours: Originals, newest: int | None, options: str) -> str:
    """Why a token must not be used; empty if it may be.

    Args:
        report: the contents, as ``zfs send -nvP -t`` prints them. The token's text is in it as it
            is, with any line breaks: a line that is not expected, or comes twice, is a refusal.
        ours: what this host has of the dataset.
        newest: as for :func:`streams`.
        options: the options of ``zfs send`` for a new stream.
    """
    lines = report.split("\n")
    values = _values(lines[2:-3])
    if lines[:2] != _HEADER or values is None or not values.keys() >= _REQUIRED:
        return "its token has unknown contents"
    kind, *names = lines[-3].split("\t")
    wanted = {each.guid: each.full_name for each in later(ours, newest)}
    if values["toname"].partition("@")[0] != ours.dataset:
        return "its token names another dataset"
    if names[-2:-1] != [wanted.get(int(values["toguid"], 16))]:
        return "its token names a snapshot that is not to be sent"
    base = int(values.get("fromguid", "0"), 16)
    if (kind, base in ours.births) not in (("full", False), ("incremental", True)):
        return "its token names an unknown base"
    flags = {option for name, option in _FLAGS.items() if name in values}
    if RAW in options:
        return "" if RAW in flags else "its token is not for a raw stream"
    return "its token is for a stream with other options" if flags - set(options) else ""


def _values(lines: Iterable[str]) -> dict[str, str] | None:
    """The values of a token by name; None if a line is not of a known form, or comes twice."""
    values: dict[str, str] = {}
    for line in lines:
        match = _PAIR.fullmatch(line)
        name, value = (match[1] or match[3], match[2] or match[4]) if match else ("", "")
        if name not in {*_REQUIRED, "fromguid", *_FLAGS} or name in values:
            return None
        values[name] = value
    return values
