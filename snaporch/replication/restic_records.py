"""What a repository of restic has of this host: read from the tags of its snapshots.

restic stores a stream of ``zfs send`` also if ``zfs send`` failed. So a stream counts only if a
later snapshot of restic, its record, names it, with its size and SHA-256. Records are tags, so that
one listing has all of them. Only holders of the password can write them; all of it is checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import PurePosixPath
from typing import NamedTuple
from urllib.parse import quote, unquote

from snaporch.bundle.store import COPY_NAME, RUN_NAME, UUID_NAME
from snaporch.model import DatasetKind, PoolSnapshot
from snaporch.replication.interface import BundleCopy
from snaporch.replication.needed_streams import Originals, later
from snaporch.replication.receive_request import is_mark
from snaporch.replication.stream_header import CLOCK_SECONDS
from snaporch.zfs_names import is_dataset, is_snapshot

TAG = "snaporch"
"""Each snapshot of restic that snaporch makes has this tag."""
STREAM_FILE = "/stream.zfs"
"""The file in a restic snapshot that is a stream."""
_SAFE = "/:@.+-_"
"""Characters that a value in a tag keeps; a comma would end the tag, and restic removes spaces."""
_CHANGED = frozenset(("repaired", "rewrite"))
"""The tags that restic adds to what it has changed."""
_ID = re.compile(r"[0-9a-f]{64}")
_UPLOAD = re.compile(r"[0-9a-f]{32}")
_NUMBER = re.compile(r"[0-9]{1,20}")
_FILE = re.compile(r"([0-9]{1,20}):([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,100}")


class Kind(StrEnum):
    """What a restic snapshot is, by its tag ``kind``."""

    STREAM = "stream"
    BUNDLE = "bundle"
    STREAM_RECORD = "stream-record"
    BUNDLE_RECORD = "bundle-record"
    MARKS = "marks"


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """A stream of one ZFS snapshot that the repository has completely."""

    snapshot: PoolSnapshot
    """With this host's dataset name; its properties are those when it was sent, and later marks."""
    base: int
    """The GUID of the snapshot that the stream follows; 0 for a full stream."""
    bytes: int
    sha256: str
    raw: bool
    kind: DatasetKind
    referenced: int
    """The bytes that the ZFS snapshot refers to."""
    upload: str
    """The tag ``upload`` of the stream's restic snapshot."""
    stream: str = ""
    """The ID of that."""

    @property
    def key(self) -> tuple[str, int]:
        """The dataset and the GUID."""
        return self.snapshot.dataset, self.snapshot.guid

    @property
    def before(self) -> tuple[str, int]:
        """The dataset and the GUID of the snapshot that an increment follows."""
        return self.snapshot.dataset, self.base


@dataclass(frozen=True, slots=True)
class BundleRecord:
    """A bundle that the repository has completely."""

    reference: str
    """``uuid/run``"""
    place: str
    """Its directory in the restic snapshot."""
    files: Mapping[str, tuple[int, str]]
    """The bytes and the SHA-256 of each file."""
    upload: str
    directory: str = ""
    """The ID of its restic snapshot."""

    @property
    def copy(self) -> BundleCopy:
        """As a replica lists it; the record takes the place of :data:`COPY_NAME`."""
        sizes = {name: size for name, (size, _) in self.files.items()}
        return BundleCopy({**sizes, COPY_NAME: 0}, 0)


class Stored(NamedTuple):
    """A restic snapshot, by which it can be forgotten."""

    id: str
    kind: str
    upload: str
    chain: str
    """``DATASET@GUID``, of a stream and its record."""
    bundle: str
    """``uuid/run``, of a bundle and its record."""


@dataclass(slots=True)
class Contents:
    """What a repository has."""

    streams: dict[tuple[str, int], StreamRecord] = field(default_factory=dict)
    """By dataset and GUID, oldest first; only those of which the whole chain is there."""
    bundles: dict[str, BundleRecord] = field(default_factory=dict)
    """By ``uuid/run``."""
    policies: dict[str, str] = field(default_factory=dict)
    """By dataset."""
    stored: list[Stored] = field(default_factory=list)
    """Everything that snaporch has stored, also what does not count."""

    def chain(self, key: tuple[str, int]) -> list[StreamRecord]:
        """The streams that bring a snapshot back: a full one, and the increments up to it."""
        return _chain(self.streams, key) or []

    def chains(self) -> list[list[StreamRecord]]:
        """All streams, by the full stream that they need; each chain oldest first."""
        found: dict[tuple[str, int], list[StreamRecord]] = {}
        for key, each in self.streams.items():
            found.setdefault(self.chain(key)[0].key, []).append(each)
        return [sorted(e, key=lambda each: len(self.chain(each.key))) for e in found.values()]


def chain_tag(dataset: str, guid: int) -> str:
    """The tag that all streams of a chain have: it names the snapshot of the full stream."""
    return f"chain={_quoted(dataset)}@{guid}"


def upload_tags(kind: Kind, upload: str, what: Mapping[str, str]) -> list[str]:
    """The tags of a restic snapshot with data.

    Args:
        kind: a stream or a bundle.
        upload: 32 random hexadecimal digits.
        what: is stored, for a reader of the tags.
    """
    return _tags(kind, {"upload": upload, **what})


def stream_tags(record: StreamRecord) -> list[str]:
    """The tags of a stream's record."""
    snapshot = record.snapshot
    values = {
        "upload": record.upload,
        "dataset": snapshot.dataset,
        "snapshot": snapshot.name,
        "guid": str(snapshot.guid),
        "base": str(record.base),
        "txg": str(snapshot.createtxg),
        "created": str(int(snapshot.created.timestamp())),
        "bytes": str(record.bytes),
        "sha256": record.sha256,
        "raw": str(int(record.raw)),
        "type": str(record.kind),
        "referenced": str(record.referenced),
    }
    return [*_tags(Kind.STREAM_RECORD, values), *_mark_tags(snapshot.guid, snapshot.properties)]


def bundle_tags(record: BundleRecord) -> list[str]:
    """The tags of a bundle's record."""
    values = {"upload": record.upload, "bundle": record.reference, "place": record.place}
    files = {f"file.{name}": f"{size}:{sha256}" for name, (size, sha256) in record.files.items()}
    return _tags(Kind.BUNDLE_RECORD, values | files)


def marks_tags(marks: Mapping[int, Mapping[str, str]], policies: Mapping[str, str]) -> list[str]:
    """The tags that record properties of ZFS snapshots, by GUID, and policies of datasets."""
    found = _tags(Kind.MARKS, {})
    for guid, values in marks.items():
        found += _mark_tags(guid, values)
    return [*found, *(f"policy.{_quoted(name)}={_quoted(v)}" for name, v in policies.items())]


def _tags(kind: Kind, values: Mapping[str, str]) -> list[str]:
    return [TAG, f"kind={kind}", *(f"{key}={_quoted(value)}" for key, value in values.items())]


def _mark_tags(guid: int, values: Mapping[str, str]) -> list[str]:
    return [f"mark.{guid}.{key}={_quoted(value)}" for key, value in values.items()]


def _quoted(text: str) -> str:
    return quote(text, safe=_SAFE, errors="surrogateescape")


class _Entry(NamedTuple):
    """A restic snapshot."""

    time: datetime
    id: str
    values: Mapping[str, str]
    """Of its tags with ``=``."""
    is_changed: bool
    """restic has changed its data, as by ``repair snapshots``, which leaves a gap out."""


def parse_listing(text: str, now: datetime | None = None) -> Contents:
    """What a repository has, by what ``restic snapshots --json`` prints.

    A record of a form that is not expected does not count. Of several of one snapshot, the newest
    with a whole chain counts. What is dated ahead is taken for the oldest: a clock was wrong, or
    someone lies.

    Args:
        text: the listing.
        now: the present time by default.

    Raises:
        ValueError: the text is no listing.
    """
    ahead = (now or datetime.now(UTC)) + timedelta(seconds=CLOCK_SECONDS)
    entries = sorted(_entries(text), key=lambda each: (each.time <= ahead, *each[:2]))
    data: dict[tuple[str, str], str] = {}
    marks: dict[int, dict[str, str]] = {}
    contents, records = Contents(), dict[tuple[str, int], list[StreamRecord]]()
    for each in entries:
        keys = ("kind", "upload", "chain", "bundle")
        kind, upload, *owners = (each.values.get(key, "") for key in keys)
        contents.stored.append(Stored(each.id, kind, upload, *owners))
        if kind in (Kind.STREAM, Kind.BUNDLE) and not each.is_changed:
            data[kind, upload] = each.id
    for each in entries:
        upload = each.values.get("upload", "")
        for key, value in each.values.items():
            begin, _, rest = key.partition(".")
            guid, _, name = rest.partition(".")
            if begin == "mark" and _NUMBER.fullmatch(guid):
                marks.setdefault(int(guid), {})[name] = value
            elif begin == "policy" and is_dataset(unquote(rest)) and value.isprintable():
                contents.policies[unquote(rest)] = value
        with suppress(KeyError, ValueError, OverflowError, OSError):
            if each.values.get("kind") == Kind.STREAM_RECORD:
                stored = data[Kind.STREAM, upload]
                record = _stream_record(each.values, stored)
                records[record.key] = [*records.pop(record.key, ()), record]
            elif each.values.get("kind") == Kind.BUNDLE_RECORD:
                stored = data[Kind.BUNDLE, upload]
                bundle = _bundle_record(each.values, stored)
                contents.bundles[bundle.reference] = bundle
    contents.streams = {
        key: _marked(record, marks.get(record.snapshot.guid, {}))
        for key, record in _whole(records).items()
    }
    return contents


def _whole(
    records: dict[tuple[str, int], list[StreamRecord]],
) -> dict[tuple[str, int], StreamRecord]:
    """The newest record of each snapshot whose chain is whole.

    Args:
        records: by dataset and GUID, the newest one last; those without a whole chain are removed.
    """
    while True:
        newest = {key: some[-1] for key, some in records.items()}
        without = [e for e in newest.values() if e.base and e.before not in newest]
        if not without:  # each chain has all of its streams, or goes in a circle
            circles = [e for e in newest.values() if not _chain(newest, e.key)]
            without = circles[-1:]
        if not without:
            return newest
        for each in without:
            records[each.key].pop()
            if not records[each.key]:
                del records[each.key]


def _entries(text: str) -> Iterator[_Entry]:
    document = json.loads(text)
    if not isinstance(document, list):
        raise TypeError("no list")
    for each in document:
        if not isinstance(each, dict):
            continue
        tags = each.get("tags") or ()
        if TAG not in tags or not _ID.fullmatch(each["id"]):
            continue
        pairs = (str(tag).partition("=") for tag in tags)
        values = {
            key: unquote(value, errors="surrogateescape") for key, found, value in pairs if found
        }
        time = datetime.fromisoformat(each["time"])
        time = time if time.tzinfo else time.replace(tzinfo=UTC)
        yield _Entry(time, each["id"], values, is_changed=not _CHANGED.isdisjoint(tags))


def _stream_record(values: Mapping[str, str], stream: str) -> StreamRecord:
    dataset, name = values["dataset"], values["snapshot"]
    if not (is_dataset(dataset) and is_snapshot(name) and _ID.fullmatch(values["sha256"])):
        raise ValueError("no record")
    created = datetime.fromtimestamp(_number(values["created"]), UTC)
    snapshot = PoolSnapshot(dataset, name, _number(values["guid"]), _number(values["txg"]), created)
    return StreamRecord(
        snapshot,
        base=_number(values["base"]),
        bytes=_number(values["bytes"]),
        sha256=values["sha256"],
        raw=values["raw"] == "1",
        kind=DatasetKind(values["type"]),
        referenced=_number(values["referenced"]),
        upload=values["upload"],
        stream=stream,
    )


def _bundle_record(values: Mapping[str, str], directory: str) -> BundleRecord:
    reference, place = values["bundle"], PurePosixPath(values["place"])
    if not re.fullmatch(f"{UUID_NAME}/{RUN_NAME}", reference):
        raise ValueError("no reference")
    if not place.is_absolute() or ".." in place.parts:
        raise ValueError("no directory")
    files = {}
    for key, value in values.items():
        if key.startswith("file."):
            name, match = key.removeprefix("file."), _FILE.fullmatch(value)
            if match is None or not _NAME.fullmatch(name):
                raise ValueError("no file")
            files[name] = (int(match[1]), match[2])
    return BundleRecord(reference, str(place), files, values["upload"], directory)


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ValueError("no number")
    return int(text)


def _marked(record: StreamRecord, marks: Mapping[str, str]) -> StreamRecord:
    valid = {key: value for key, value in marks.items() if value and is_mark(key, value)}
    return replace(record, snapshot=replace(record.snapshot, properties=valid))


def _chain(
    streams: Mapping[tuple[str, int], StreamRecord], key: tuple[str, int]
) -> list[StreamRecord] | None:
    """See :meth:`Contents.chain`; None if a stream of it is missing."""
    found: list[StreamRecord] = []
    seen = set()
    while key in streams and key not in seen:
        seen.add(key)
        found.insert(0, streams[key])
        if not streams[key].base:
            return found
        key = (key[0], streams[key].base)
    return None


class NextStream(NamedTuple):
    """A stream that a repository lacks."""

    snapshot: PoolSnapshot
    base: str
    """The full name of the snapshot or bookmark at which it begins; empty for a full stream."""
    base_guid: int
    """0 for a full stream."""
    first: int
    """The GUID of the snapshot of the chain's full stream."""


def next_streams(
    ours: Originals, newest: int | None, chain: Iterable[StreamRecord], *, raw: bool, limit: int
) -> list[NextStream]:
    """The streams that a repository needs of a dataset, in this order.

    A new chain begins if the present one has ``limit`` increments, or already has a snapshot of the
    same name, or has streams of another kind.

    Args:
        ours: what this host has of the dataset.
        newest: the GUID of the newest snapshot of the repository that this host has, or has a
            bookmark of; None for none.
        chain: the streams that bring that one back.
        raw: whether streams are raw now.
        limit: the most increments that follow a full stream.
    """
    names = {mark.guid: name for name, mark in ours.bookmarks.items()}
    names |= {each.guid: each.full_name for each in ours.snapshots}
    present = list(chain)
    used = [each.snapshot.name for each in present]
    first = present[0].snapshot.guid if present and all(e.raw == raw for e in present) else 0
    base, found = newest or 0, []
    for each in later(ours, newest):
        if not first or len(used) > limit or each.name in used:
            base, first, used = 0, each.guid, []
        found.append(NextStream(each, names[base] if base else "", base, first))
        used.append(each.name)
        base = each.guid
    return found


def ordered(streams: Sequence[StreamRecord], births: Mapping[int, int]) -> list[PoolSnapshot]:
    """The copies of a dataset; the last one is the newest that a stream of this host can follow.

    Those that this host knows come last, by their age here. If it knows none, a new chain begins,
    and none counts: after a restore the repository keeps what was discarded here, in its own chain.

    Args:
        streams: of one dataset.
        births: the txg of each snapshot and bookmark that this host has, by GUID.
    """
    known = sorted(
        (each.snapshot for each in streams if each.snapshot.guid in births),
        key=lambda each: births[each.guid],
    )
    if not known:
        return []
    return [*(e.snapshot for e in streams if e.snapshot.guid not in births), *known]
