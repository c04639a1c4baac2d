"""Decide about each item of the store: keep it, move it to or from the trash, or delete it.

After which time is set by the options of ``[prune]`` (:mod:`snaporch.config.schema`), which
:mod:`snaporch.prune.prune` hands in.

Which snapshots are deleted is decided by :mod:`snaporch.schedule.retention`.

A pure function of the item, the snapshots that exist, the runs under way, and the time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path

from snaporch.model import SnapshotListing, iso


class ItemKind(StrEnum):
    """The kind of an item of the store."""

    BUNDLE = "bundle"
    PARTIAL = "partial"
    """An unfinished bundle."""
    RAM_FILE = "ram-file"
    """RAM that a killed run saved into a file."""
    SAFETY = "safety"
    """A safety copy: the data that a restore discarded."""
    TRASHED = "trashed"
    """A bundle in the trash."""
    PAGES = "pages"
    """A snapshot of a page dataset."""
    COPY = "copy"
    """The copies of the snapshots of a run, in a pool of the machine that keeps copies."""
    CHAIN = "chain"
    """A chain of streams in a repository of restic."""
    REMAINS = "remains"
    """A directory that is partly deleted."""


class PruneAction(StrEnum):
    """The action for an item."""

    KEEP = "keep"
    TRASH = "trash"
    DELETE = "delete"
    PUT_BACK = "put-back"

    @property
    def done(self) -> str:
        """The past participle, for messages."""
        return {"keep": "kept", "trash": "trashed", "delete": "deleted", "put-back": "put back"}[
            self.value
        ]


@dataclass(frozen=True, slots=True)
class SnapshotReference:
    """A ZFS snapshot that a bundle belongs to."""

    dataset: str
    name: str
    guid: int

    @property
    def pool(self) -> str:
        """The pool it was taken in."""
        return self.dataset.partition("/")[0]

    @property
    def full_name(self) -> str:
        """``dataset@name``."""
        return f"{self.dataset}@{self.name}"


@dataclass(frozen=True, slots=True)
class StoreItem:
    """An item of the store: a directory, a file of RAM, or ZFS snapshots of pages or copies."""

    kind: ItemKind
    path: Path
    """Of copies, the dataset that they are below; of a chain, the replica's name."""
    uuid: str
    """The domain's."""
    name: str
    """The run's name; the directory's name if there is no run."""
    bytes: int = 0
    domain: str = ""
    snapshot: str = ""
    references: tuple[SnapshotReference, ...] = ()
    age: timedelta = timedelta()
    """How long the item has been in its place; for items in the trash, and safety copies."""
    problem: str = ""
    """Why prune cannot decide about the item; empty if it can."""
    wanted: bool = False
    """An undo may need the bundle: a safety copy has its snapshot, or its record is unreadable."""
    place_taken: bool = False
    """The item is in the trash, and there is a new item in its former place."""

    @property
    def title(self) -> str:
        """The item's name for messages: its snapshot, or its directory."""
        if self.kind is ItemKind.PAGES:
            return str(self.path)
        if self.kind is ItemKind.COPY:
            return f"{self.domain}@{self.snapshot} in {self.path}"
        if self.kind is ItemKind.CHAIN:
            return f"chain {self.snapshot} in {self.path}"
        if self.domain and self.snapshot:
            return f"{self.domain}@{self.snapshot}"
        return f"{self.domain or self.uuid}/{self.path.name}"


@dataclass(frozen=True, slots=True)
class GracePeriods:
    """How long items stay that are no longer needed."""

    trash: timedelta
    safety: timedelta


@dataclass(frozen=True, slots=True)
class PruneDecision:
    """The action for an item, and the reason."""

    found: StoreItem
    action: PruneAction
    reason: str
    usual: bool = False
    """The item is kept for the usual reason; only ``--kept`` prints it."""

    @property
    def kind_now(self) -> ItemKind | None:
        """The item's kind after the decision was carried out; None if it was deleted."""
        match self.action:
            case PruneAction.DELETE:
                return None
            case PruneAction.TRASH:
                return ItemKind.TRASHED
            case PruneAction.PUT_BACK:
                return ItemKind.BUNDLE
            case _:
                return self.found.kind

    def as_json(self) -> dict[str, object]:
        """The documented JSON object."""
        return {
            "kind": self.found.kind.value,
            "domain": self.found.domain or None,
            "uuid": self.found.uuid,
            "snapshot": self.found.snapshot or None,
            "path": str(self.found.path),
            "bytes": self.found.bytes,
            "action": self.action.value,
            "reason": self.reason,
        }


def decide(
    found: StoreItem,
    listing: SnapshotListing,
    under_way: Collection[str],
    grace: GracePeriods,
    now: datetime,
) -> PruneDecision:
    """Decide about one item.

    Args:
        found: the item, read *before* the listing was taken.
        listing: the snapshots that exist, and the imported pools.
        under_way: runs that have a journal, UUIDs of domains with an unfinished restore, and
            ``UUID/NAME`` of the files of RAM that belong to runs with a journal.
        grace: how long the trash and safety copies stay.
        now: the time, only to print until when an item stays.
    """
    if found.problem:
        return _keep(found, found.problem)
    if reason := in_use_reason(found, under_way):
        return _keep(found, reason)
    match found.kind:
        case ItemKind.REMAINS:
            return PruneDecision(found, PruneAction.DELETE, "its removal was interrupted")
        case ItemKind.PARTIAL | ItemKind.RAM_FILE:
            return PruneDecision(found, PruneAction.DELETE, "its run ended without finishing it")
        case ItemKind.SAFETY:
            return _decide_by_age(found, "undoes a restore", grace.safety, now)
        case _:
            return _decide_bundle(found, listing, grace, now)


def _keep(found: StoreItem, reason: str, *, usual: bool = False) -> PruneDecision:
    return PruneDecision(found, PruneAction.KEEP, reason, usual)


def in_use_reason(found: StoreItem, under_way: Collection[str]) -> str:
    """Why a run or restore under way needs the item; empty if none does. See :func:`decide`."""
    if found.name in under_way or f"{found.uuid}/{found.name}" in under_way:
        return "its run is under way"
    if found.kind is ItemKind.SAFETY and found.uuid in under_way:
        return "a restore of its domain is not finished"
    return ""


def _decide_bundle(
    found: StoreItem, listing: SnapshotListing, grace: GracePeriods, now: datetime
) -> PruneDecision:
    trashed = found.kind is ItemKind.TRASHED
    existing = existing_snapshot(found, listing)
    if existing:
        if not trashed:
            return _keep(found, _existing_text(found, existing), usual=True)
        if found.place_taken:
            return _keep(found, f"{existing} is back, but so is another bundle of it")
        return PruneDecision(found, PruneAction.PUT_BACK, f"{existing} is back")
    if not found.references:
        return _keep(found, "its manifest names no snapshot")
    hidden = sorted({r.pool for r in found.references} - listing.pools)
    if hidden:
        return _keep(found, f"the pool {', '.join(hidden)} is not imported")
    if trashed and found.wanted:
        return _keep(found, f"{_destroyed_text(found)}; an undo may bring it back", usual=True)
    if trashed:
        return _decide_by_age(found, _destroyed_text(found), grace.trash, now)
    into_trash = grace.trash or found.wanted
    return PruneDecision(
        found, PruneAction.TRASH if into_trash else PruneAction.DELETE, _destroyed_text(found)
    )


def existing_snapshot(found: StoreItem, listing: SnapshotListing) -> str:
    """A snapshot that needs the bundle, preferably its own rather than a copy; empty for none."""
    names = [(r, name) for r in found.references for name in listing.snapshots.get(r.guid, ())]
    own = [name for reference, name in names if name == reference.full_name]
    return min(own or [name for _, name in names], default="")


def _existing_text(found: StoreItem, existing: str) -> str:
    own = {reference.full_name for reference in found.references}
    return f"{existing} exists" if existing in own else f"its snapshot exists as {existing}"


def _destroyed_text(found: StoreItem) -> str:
    names = [reference.full_name for reference in found.references]
    return f"{' and '.join(names)} no longer exist{'s' if len(names) == 1 else ''}"


def _decide_by_age(found: StoreItem, what: str, grace: timedelta, now: datetime) -> PruneDecision:
    until = now + (grace - found.age)
    if found.age < grace:
        return _keep(found, f"{what}; stays until {iso(until)}", usual=True)
    return PruneDecision(found, PruneAction.DELETE, f"{what}; its time ended at {iso(until)}")
