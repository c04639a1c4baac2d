"""What becomes of each thing in the store: a pure function from what is known of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path

from snaporch.model import Census, iso


class ItemKind(StrEnum):
    """What a directory of the store is."""

    BUNDLE = "bundle"
    PARTIAL = "partial"
    """A bundle that was being written."""
    SAFETY = "safety"
    """What a restore discarded."""
    TRASHED = "trashed"
    """A bundle in the trash."""
    PAGES = "pages"
    """A snapshot of a page dataset."""
    REMAINS = "remains"
    """Something whose removal has begun."""


class PruneAction(StrEnum):
    """What is to be done with it."""

    KEEP = "keep"
    TRASH = "trash"
    DELETE = "delete"
    PUT_BACK = "put-back"

    @property
    def done(self) -> str:
        """The word for it afterwards."""
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
        """The name it was given: ``dataset@name``."""
        return f"{self.dataset}@{self.name}"


@dataclass(frozen=True, slots=True)
class StoreItem:
    """Something in the store."""

    kind: ItemKind
    path: Path
    uuid: str
    """The domain's."""
    name: str
    """The run's name, or the directory's where no run is known."""
    bytes: int = 0
    domain: str = ""
    snapshot: str = ""
    references: tuple[SnapshotReference, ...] = ()
    age: timedelta = timedelta()
    """How long prune has seen it where it is; of what is in the trash, and of safety copies."""
    trouble: str = ""
    """Why nothing can be said about it; empty when something can."""
    wanted: bool = False
    """A safety copy holds the snapshot that it belongs to, or does not say what it holds."""
    place_taken: bool = False
    """In the trash, and where it came from is something again."""

    @property
    def title(self) -> str:
        """What people call it: the snapshot it belongs to, or its place."""
        if self.kind is ItemKind.PAGES:
            return str(self.path)
        if self.domain and self.snapshot:
            return f"{self.domain}@{self.snapshot}"
        return f"{self.domain or self.uuid}/{self.path.name}"


@dataclass(frozen=True, slots=True)
class GracePeriods:
    """How long things stay that are not needed any more."""

    trash: timedelta
    safety: timedelta


@dataclass(frozen=True, slots=True)
class PruneDecision:
    """What is to be done with a thing, and why."""

    found: StoreItem
    fate: PruneAction
    reason: str
    usual: bool = False
    """The item is kept for the usual reason; only ``--verbose`` prints it."""

    @property
    def kind_now(self) -> ItemKind | None:
        """The item's kind after the decision was carried out; None if it was deleted."""
        match self.fate:
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
            "action": self.fate.value,
            "reason": self.reason,
        }


def judge(
    found: StoreItem, census: Census, under_way: Collection[str], grace: GracePeriods, now: datetime
) -> PruneDecision:
    """Decide about one thing.

    Args:
        found: the thing, looked at *before* the census was taken.
        census: the snapshots that exist, and the pools that were asked.
        under_way: runs that have a journal, and domains with an unfinished restore, by UUID.
        grace: how long trash and safety copies stay.
        now: the time, to say until when things stay; nothing is decided by it.
    """
    if found.trouble:
        return PruneDecision(found, PruneAction.KEEP, found.trouble)
    if reason := worked_on(found, under_way):
        return PruneDecision(found, PruneAction.KEEP, reason)
    match found.kind:
        case ItemKind.REMAINS:
            return PruneDecision(found, PruneAction.DELETE, "its removal was cut short")
        case ItemKind.PARTIAL:
            return PruneDecision(
                found, PruneAction.DELETE, "its run is gone, and did not finish it"
            )
        case ItemKind.SAFETY:
            return _aged(found, "undoes a restore", grace.safety, now)
        case _:
            return _judge_bundle(found, census, grace, now)


def worked_on(found: StoreItem, under_way: Collection[str]) -> str:
    """Who needs the thing as it is; empty when nobody does. See :func:`judge`."""
    if found.name in under_way:
        return "its run is under way"
    if found.kind is ItemKind.SAFETY and found.uuid in under_way:
        return "a restore of its domain is not finished"
    return ""


def _judge_bundle(
    found: StoreItem, census: Census, grace: GracePeriods, now: datetime
) -> PruneDecision:
    trashed = found.kind is ItemKind.TRASHED
    living = living_as(found, census)
    if living:
        if not trashed:
            return PruneDecision(found, PruneAction.KEEP, _how_it_lives(found, living), usual=True)
        if found.place_taken:
            return PruneDecision(
                found, PruneAction.KEEP, f"{living} is back, but so is another bundle of it"
            )
        return PruneDecision(found, PruneAction.PUT_BACK, f"{living} is back")
    if not found.references:
        return PruneDecision(found, PruneAction.KEEP, "its manifest names no snapshot")
    hidden = sorted({r.pool for r in found.references} - census.pools)
    if hidden:
        return PruneDecision(
            found, PruneAction.KEEP, f"the pool {', '.join(hidden)} is not imported"
        )
    if trashed and found.wanted:
        return PruneDecision(
            found, PruneAction.KEEP, f"{_gone(found)}; an undo may bring it back", usual=True
        )
    if trashed:
        return _aged(found, _gone(found), grace.trash, now)
    into_trash = grace.trash or found.wanted
    return PruneDecision(
        found, PruneAction.TRASH if into_trash else PruneAction.DELETE, _gone(found)
    )


def living_as(found: StoreItem, census: Census) -> str:
    """A snapshot the bundle still serves, its own rather than a copy; empty when there is none."""
    names = [(r, name) for r in found.references for name in census.snapshots.get(r.guid, ())]
    own = [name for reference, name in names if name == reference.full_name]
    return min(own or [name for _, name in names], default="")


def _how_it_lives(found: StoreItem, living: str) -> str:
    own = {reference.full_name for reference in found.references}
    return f"{living} exists" if living in own else f"its snapshot lives on as {living}"


def _gone(found: StoreItem) -> str:
    names = [reference.full_name for reference in found.references]
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} gone"


def _aged(found: StoreItem, what: str, grace: timedelta, now: datetime) -> PruneDecision:
    until = now + (grace - found.age)
    if found.age < grace:
        return PruneDecision(
            found, PruneAction.KEEP, f"{what}; stays until {iso(until)}", usual=True
        )
    return PruneDecision(found, PruneAction.DELETE, f"{what}; its time was over at {iso(until)}")
