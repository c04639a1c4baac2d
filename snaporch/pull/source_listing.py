"""On the machine that pulls: what a source lists, which is input, is checked before any write.

What a source lists is decided there, by :mod:`snaporch.pull.send_permissions`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from snaporch.bundle.store import copy_name
from snaporch.errors import RefusedError
from snaporch.model import DatasetKind, PoolSnapshot, moment_at
from snaporch.pull.send_request import MAX_GUID
from snaporch.replication.receive_request import is_mark
from snaporch.replication.stream_header import CLOCK_SECONDS
from snaporch.zfs_names import is_dataset, is_snapshot, quoted

_VERSION = re.compile(r"[0-9A-Za-z.+~-]{1,40}", re.ASCII)
MAX_GUESTS = 1000
MAX_DATASETS = 200
"""Of a source: no limit of ZFS's own binds root (zfsprops(7), ``filesystem_limit``)."""
MAX_SNAPSHOTS = 20_000
"""Of a source, as :data:`MAX_DATASETS` (``snapshot_limit``)."""


@dataclass(frozen=True, slots=True)
class OfferedDataset:
    """A dataset of a guest on the source."""

    name: str
    kind: DatasetKind
    raw: bool
    """It is encrypted, and its blocks come as they are."""
    policy: str
    snapshots: tuple[PoolSnapshot, ...]
    """Oldest first."""
    bookmarks: Mapping[int, int] = field(default_factory=dict)
    """The txg of each bookmarked snapshot, by GUID."""

    @property
    def births(self) -> dict[int, int]:
        """The txg of each snapshot and bookmark, by GUID."""
        return {**self.bookmarks, **{each.guid: each.createtxg for each in self.snapshots}}


@dataclass(frozen=True, slots=True)
class OfferedGuest:
    """A guest on the source."""

    uuid: str
    domain: str
    datasets: tuple[OfferedDataset, ...]
    waiting: tuple[str, ...]
    """Snapshots that come when the runs before them have ended."""
    shared: tuple[str, ...]
    """Datasets that the source does not send, since another guest uses them, too."""
    unmarked: Mapping[str, frozenset[tuple[str, int]]] = field(default_factory=dict)
    """The dataset and the GUID of the snapshots of each run that did not mark them, by run."""


@dataclass(frozen=True, slots=True)
class SourceAnswer:
    """What a source says of itself; a source of an earlier version says only its guests."""

    guests: Mapping[str, str]
    """The names of the guests that it sends, by UUID."""
    version: str = ""
    """Of snaporch there; empty if it is not known."""
    time: float | None = None
    """Its clock, in seconds since the epoch."""


def parse_answer(document: Mapping[str, Any]) -> SourceAnswer:
    """What a source says of itself.

    Raises:
        ArithmeticError, LookupError, TypeError, ValueError: the answer is not of the form.
        RefusedError: a value is not permitted.
    """
    version, clock = document.get("version", ""), document.get("time")
    is_version = isinstance(version, str) and _VERSION.fullmatch(version)
    return SourceAnswer(
        parse_guests(document),
        version if is_version else "",
        None if clock is None else float(clock),
    )


def parse_guests(document: Mapping[str, Any]) -> dict[str, str]:
    """The names of the guests that a source sends, by UUID.

    Raises:
        ArithmeticError, LookupError, TypeError, ValueError: the answer is not of the form.
        RefusedError: a value is not permitted.
    """
    found: dict[str, str] = {}
    for each in _some(document["guests"], MAX_GUESTS, "guests"):
        uuid, domain = each["uuid"], each["domain"]
        if not (_is_mark("uuid", uuid) and _is_mark("domain", domain)):
            raise RefusedError(quoted(str(domain)), "is no guest's name, or has no valid UUID")
        found[uuid] = domain
    return found


def parse_guest(
    uuid: str, domain: str, document: Mapping[str, Any], root: str, now: float
) -> OfferedGuest:
    """What a source has of a guest.

    Args:
        uuid: of the guest.
        domain: its name.
        document: the source's answer.
        root: the dataset of this machine below which the copies are.
        now: seconds since the epoch.

    Raises:
        ArithmeticError, LookupError, TypeError, ValueError: the answer is not of the form.
        RefusedError: a value is not permitted.
    """
    some = _some(document["datasets"], MAX_DATASETS, "datasets")
    datasets = tuple(_dataset(each, root, now) for each in some)
    copies = [copy_name(each.name) for each in datasets]
    for name, each in zip(copies, datasets, strict=True):
        if copies.count(name) > 1:
            raise RefusedError(each.name, "has a copy of the same name as another dataset")
    if sum(len(each.snapshots) for each in datasets) > MAX_SNAPSHOTS:
        raise RefusedError(domain, f"has more than {MAX_SNAPSHOTS} snapshots")
    waiting = _names(document["waiting"], _is_full_name)
    shared = _names(document["shared"], is_dataset)
    return OfferedGuest(uuid, domain, datasets, waiting, shared, _runs(document["unmarked"]))


def _dataset(document: Mapping[str, Any], root: str, now: float) -> OfferedDataset:
    name = document["name"]
    if not (isinstance(name, str) and is_dataset(name) and is_dataset(f"{root}/{copy_name(name)}")):
        raise RefusedError(quoted(str(name)), "cannot be the name of a dataset that is copied")
    some = _some(document["snapshots"], MAX_SNAPSHOTS, "snapshots")
    snapshots = [_snapshot(name, each, now) for each in some]
    for kind, values in (
        ("name", [each.name for each in snapshots]),
        ("GUID", [each.guid for each in snapshots]),
        ("txg", [each.createtxg for each in snapshots]),
    ):
        if len({*values}) != len(values):
            raise RefusedError(name, f"has two snapshots of the same {kind}")
    marks = _some(document["bookmarks"], MAX_SNAPSHOTS, "bookmarks")
    policy = document["policy"]
    return OfferedDataset(
        name,
        DatasetKind(document["kind"]),
        bool(document["raw"]),
        policy if _is_mark("note", policy) else "",
        tuple(sorted(snapshots, key=lambda each: each.createtxg)),
        {_number(guid): _number(txg) for guid, txg in marks},
    )


def _snapshot(dataset: str, document: Mapping[str, Any], now: float) -> PoolSnapshot:
    name, created = document["name"], document["created"]
    if not isinstance(name, str) or not is_snapshot(name):
        raise RefusedError(f"{dataset}@{quoted(str(name))}", "cannot be the name of a snapshot")
    thing = f"{dataset}@{name}"
    if not 0 <= float(created) <= now + CLOCK_SECONDS:
        raise RefusedError(thing, "was taken in the future", "check the clocks of both machines")
    if not (guid := _number(document["guid"])):
        raise RefusedError(thing, "has no GUID")
    properties = {
        key: value for key, value in dict(document["properties"]).items() if _is_mark(key, value)
    }
    if properties.get("bundle", "") not in (
        "",
        f"{properties.get('uuid')}/{properties.get('run')}",
    ):
        del properties["bundle"]
    txg = _number(document["createtxg"])
    return PoolSnapshot(dataset, name, guid, txg, moment_at(float(created)), properties)


def _runs(document: object) -> dict[str, frozenset[tuple[str, int]]]:
    found: dict[str, frozenset[tuple[str, int]]] = {}
    count = 0
    for each in _some(document, MAX_SNAPSHOTS, "runs"):
        if not _is_mark("run", run := each["run"]):
            raise RefusedError(quoted(str(run)), "is no name of a run")
        some = _some(each["snapshots"], MAX_SNAPSHOTS, f"snapshots of {run}")
        count += len(some)
        if count > MAX_SNAPSHOTS:
            raise RefusedError("runs", f"have more than {MAX_SNAPSHOTS} snapshots")
        found[run] = frozenset((str(dataset), _number(guid)) for dataset, guid in some)
    return found


def _is_mark(key: object, value: object) -> bool:
    """Whether a property of a copy can have this value, which has no surrogates."""
    if not isinstance(key, str) or not isinstance(value, str) or not value:
        return False
    return value.isprintable() and is_mark(key, value)


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_GUID:
        raise ValueError(value)
    return value


def _some(values: object, most: int, what: str) -> Sequence[Any]:
    if not isinstance(values, list):
        raise TypeError(values)
    if len(values) > most:
        raise RefusedError(what, f"are more than {most}")
    return values


def _names(values: object, is_name: Callable[[str], bool]) -> tuple[str, ...]:
    some = _some(values, MAX_SNAPSHOTS, "names")
    for each in some:
        if not (isinstance(each, str) and is_name(each)):
            raise RefusedError(quoted(str(each)), "is no name of a dataset or snapshot")
    return tuple(some)


def _is_full_name(text: str) -> bool:
    dataset, _, snapshot = text.partition("@")
    return is_dataset(dataset) and is_snapshot(snapshot)
