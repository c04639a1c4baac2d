"""What is wrong with a copy on a replica: pure decisions on listings and manifests.

What the replica lists is input. The manifest of this host is believed, where this host has one. The
manifest on the replica proves only that a copy is whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from snaporch.bundle.manifest import MANIFEST_NAME, Manifest, PagesEntry, Role, SnapshotEntry
from snaporch.bundle.store import COPY_NAME, copy_name
from snaporch.catalog.records import is_one_instant
from snaporch.catalog.torn import is_torn
from snaporch.model import Level, PoolSnapshot, iso
from snaporch.rebuild.plan import guids_of, members_of
from snaporch.replication.interface import BundleCopy
from snaporch.zfs_names import is_snapshot

Copies = Mapping[str, Sequence[PoolSnapshot]]
"""The snapshots of each copy of a dataset, by :func:`~snaporch.bundle.store.copy_name`."""
_Wanted = SnapshotEntry | PagesEntry | PoolSnapshot
MAX_PARTS = 64
"""Of a bundle: far more than any has. Their names are in one command on the replica."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A snapshot of a domain on a replica."""

    domain: str
    uuid: str
    run: str
    snapshot: str
    is_here: bool = False
    """This host has a record of the snapshot, whether its bundle is whole here or not."""
    is_promised: bool = False
    """This host has marked the snapshot as replicated there."""
    is_dropped: bool = False
    """This host has recorded that the replica lacks a part, and cannot get it any more."""
    has_bundle: bool = False
    """The snapshot has a bundle, by the marks here or there."""

    @property
    def full_name(self) -> str:
        """``DOMAIN@SNAPSHOT``."""
        return f"{self.domain}@{self.snapshot}"

    @property
    def reference(self) -> str:
        """Of its bundle: ``uuid/run``."""
        return f"{self.uuid}/{self.run}"

    @property
    def key(self) -> str:
        """Identifies the copy on its replica."""
        return f"{self.reference}@{self.snapshot}"

    def is_named(self, text: str) -> bool:
        """Whether ``DOMAIN``, or ``DOMAIN@SNAPSHOT``, names it; a UUID or a run is a name, too."""
        return text in {
            name
            for domain in (self.domain, self.uuid)
            for name in (domain, f"{domain}@{self.snapshot}", f"{domain}@{self.run}")
        }


def copies_named_by(manifest: Manifest, copies: Copies, verified: Collection[str]) -> list[Copy]:
    """The copies that a bundle names, if all of their ZFS snapshots are there: else they may come.

    Args:
        manifest: of the bundle.
        copies: all snapshots on the replica.
        verified: the keys of copies that have a result: of these, one snapshot is enough.
    """
    datasets = {entry.dataset for entry in manifest.snapshots}
    found = []
    for name in sorted({entry.name for entry in manifest.snapshots if is_snapshot(entry.name)}):
        copy = Copy(manifest.domain, manifest.uuid, manifest.run, name, has_bundle=True)
        members = members_of(manifest, name, copies)
        has_one = name in {each.name for each in members}
        is_whole = {each.dataset for each in members} == datasets
        found += [copy] if has_one and (is_whole or copy.key in verified) else []
    return found


class Source(StrEnum):
    """What a copy was compared with."""

    HERE = "here"
    """The manifest, or the ZFS snapshots, of this host."""
    LAST = "last-verification"
    """The replica's manifest, which is the one of the last verification that passed."""
    REPLICA = "replica"
    """Only the replica's own manifest."""


class KnownManifest(NamedTuple):
    """A valid manifest, and the SHA-256 of its file."""

    manifest: Manifest
    sha256: str


class PassedBefore(NamedTuple):
    """What the last verification that passed has recorded."""

    at: datetime
    manifest: str
    """The SHA-256 of the manifest; empty without one."""
    has_pages: bool
    """The RAM was in pages."""
    without_ram: str = ""
    """See :func:`digest_without_ram`; empty without a manifest."""


def passed_now(at: datetime, there: KnownManifest | None) -> PassedBefore:
    """What is recorded of a copy that passed, with the manifest on the replica."""
    if there is None:
        return PassedBefore(at, "", has_pages=False)
    has_pages = there.manifest.pages is not None
    return PassedBefore(at, there.sha256, has_pages, digest_without_ram(there.manifest))


@dataclass(frozen=True, slots=True)
class CopyFacts:
    """What is known of a copy, before its bundle is read."""

    copies: Copies
    """All snapshots on the replica."""
    bundle: BundleCopy | None
    """The files of its bundle there."""
    here: KnownManifest | None
    """The manifest of this host."""
    there: KnownManifest | None
    """The manifest on the replica, if it is valid."""
    own: tuple[PoolSnapshot, ...] = ()
    """The ZFS snapshots of this host."""
    before: PassedBefore | None = None
    was_verified: bool = False
    """It passed or failed before, so it was there."""
    has_streams: bool = False
    """The replica is object storage: it has streams, each with a record, and no ZFS snapshots."""

    @property
    def manifest(self) -> KnownManifest | None:
        """The manifest that the copy is compared with."""
        return self.here or self.there

    @property
    def source(self) -> Source:
        """What the copy is compared with."""
        if self.here is not None or (self.there is None and self.own):
            return Source.HERE
        recorded = self.before.manifest if self.before is not None else ""
        same = self.there is not None and self.there.sha256 == recorded
        return Source.LAST if same else Source.REPLICA


def reason_to_skip(copy: Copy, facts: CopyFacts) -> str:
    """Why a copy cannot be verified now, though nothing may be wrong; empty if it can be."""
    if _torn(copy, facts):
        return "it is torn, as on the host that took it"
    if _ram_moved_here(facts) and not _snapshot_faults(copy, facts):
        return "its RAM was moved into pages on this host; the next replication copies it again"
    was_there = copy.is_promised or facts.was_verified
    if copy.is_dropped and not was_there and not _has_any(copy, facts):
        return "the replica has nothing of it, and cannot get it any more"
    is_whole = facts.bundle is not None and COPY_NAME in facts.bundle.sizes
    has_arrived = was_there or copy.is_dropped or not find_faults(copy, facts)
    has_arrived |= is_whole and not _snapshot_faults(copy, facts)  # it was damaged later
    if copy.is_here and not has_arrived:
        return "it has not arrived completely; see: snaporch status"
    if not _had_bundle(copy, facts) and facts.manifest is None and not facts.own:
        return "it has no bundle, and this host has nothing to compare it with"
    return ""


def _has_any(copy: Copy, facts: CopyFacts) -> bool:
    """Whether the replica has a part of a copy, by its marks or its GUIDs, or a bundle of it."""
    manifest = facts.manifest.manifest if facts.manifest is not None else None
    there = seen(copy, manifest, facts.copies, facts.bundle)
    own = any(each.guid in guids_of(facts.copies, each.dataset) for each in facts.own)
    return bool(there.snapshots) or there.has_bundle or own


def _ram_moved_here(facts: CopyFacts) -> bool:
    """Whether this host has moved the RAM into pages, and the replica has the bundle of before."""
    here, there = facts.here, facts.there
    if here is None or there is None:
        return False
    if here.manifest.pages is None or there.manifest.pages is not None:
        return False
    return digest_without_ram(here.manifest) == digest_without_ram(there.manifest)


def _torn(copy: Copy, facts: CopyFacts) -> bool:
    known = facts.manifest
    if known is not None and known.manifest.level is Level.TORN:
        return True
    marked = (each for snapshots in facts.copies.values() for each in snapshots)
    return any(is_torn(each) and is_of_copy(each, copy) for each in marked)


def is_of_copy(snapshot: PoolSnapshot, copy: Copy) -> bool:
    """Whether a snapshot on the replica has the marks of a copy, under its name."""
    marks = snapshot.properties
    return (marks.get("run"), marks.get("uuid")) == (copy.run, copy.uuid) and (
        snapshot.name == copy.snapshot
    )


def find_faults(copy: Copy, facts: CopyFacts) -> list[str]:
    """What is wrong with a copy, by the listings and the manifests alone; empty if nothing is."""
    found = _snapshot_faults(copy, facts)
    if _ram_moved_here(facts):
        return found  # the bundle is copied again, and the pages are sent
    if _had_bundle(copy, facts) or facts.here is not None:
        found += _bundle_faults(facts)
    return found


def _had_bundle(copy: Copy, facts: CopyFacts) -> bool:
    """Whether a copy has a bundle, or had one, by the marks or the last verification."""
    recorded = facts.before is not None and bool(facts.before.manifest)
    marked = any(each.properties.get("bundle") == copy.reference for each in facts.own)
    return copy.has_bundle or recorded or marked


def _snapshot_faults(copy: Copy, facts: CopyFacts) -> list[str]:
    known = facts.manifest
    if known is None:
        lost = [e for e in facts.own if e.guid not in guids_of(facts.copies, e.dataset)]
        return [_snapshot_fault(each, [each], facts) for each in lost]
    manifest = known.manifest
    present = {each.dataset for each in members_of(manifest, copy.snapshot, facts.copies)}
    found = []
    for dataset in sorted({entry.dataset for entry in manifest.snapshots} - present):
        own = [entry for entry in manifest.snapshots if entry.dataset == dataset]
        wanted = next((each for each in own if each.name == copy.snapshot), own[0])
        same = own if is_one_instant(manifest) else [wanted]
        found.append(_snapshot_fault(wanted, same, facts))
    pages = manifest.pages if not _ram_moved_here(facts) else None
    if pages is not None and pages.guid not in guids_of(facts.copies, pages.dataset):
        found.append(f"of the pages of its RAM: {_snapshot_fault(pages, [pages], facts)}")
    if facts.here is None:  # the replica's manifest may be of another run
        named = {entry.guid for entry in manifest.snapshots}
        lost = [each for each in facts.own if each.guid not in named]
        lost = [each for each in lost if each.guid not in guids_of(facts.copies, each.dataset)]
        found += [_snapshot_fault(each, [each], facts) for each in lost]
    return found


def _snapshot_fault(wanted: _Wanted, same: Iterable[_Wanted], facts: CopyFacts) -> str:
    """Describe a missing ZFS snapshot, of which ``same`` would do, too."""
    names, copy = {each.name for each in same}, copy_name(wanted.dataset)
    for each in facts.copies.get(copy, ()):
        if each.name in names:
            text = f"{copy}@{each.name} is another snapshot of this name"
            return f"{text} (its GUID is {each.guid}, and not {wanted.guid})"
    if facts.has_streams:
        return f"a stream of the chain of {wanted.dataset}@{wanted.name} has no record"
    return f"the ZFS snapshot {copy}@{wanted.name} is missing"


def _bundle_faults(facts: CopyFacts) -> list[str]:
    bundle, here, there, before = facts.bundle, facts.here, facts.there, facts.before
    if bundle is None:
        return ["its bundle is missing"]
    if there is None:
        return [f"the bundle's {MANIFEST_NAME} is missing or damaged"]
    if here is not None and here.sha256 != there.sha256:
        return [f"the bundle's {MANIFEST_NAME} is not the one of this host"]
    if here is None and _was_replaced(there, before):
        at = iso(before.at) if before is not None else ""
        return [f"the bundle's {MANIFEST_NAME} is not the one that was verified {at}"]
    wanted = {part.name: part.bytes for part in there.manifest.parts}
    found = [
        f"{name} has {bundle.sizes[name]} bytes instead of {size}"
        if name in bundle.sizes
        else f"{name} is missing"
        for name, size in wanted.items()
        if bundle.sizes.get(name) != size
    ]
    return [*found, *(["its bundle was not copied whole"] if COPY_NAME not in bundle.sizes else [])]


def _was_replaced(there: KnownManifest, before: PassedBefore | None) -> bool:
    """Whether the manifest differs from the one that was verified, and its RAM was not moved."""
    if before is None or not before.manifest:
        return False
    has_pages = there.manifest.pages is not None and not before.has_pages
    has_moved = has_pages and digest_without_ram(there.manifest) == before.without_ram
    return there.sha256 != before.manifest and not has_moved


def digest_without_ram(manifest: Manifest) -> str:
    """The SHA-256 of all of a manifest but its RAM, which may be moved into pages later."""
    parts = tuple(each for each in manifest.parts if each.role is not Role.RAM)
    rest = manifest.model_copy(update={"parts": parts})
    return hashlib.sha256(rest.model_dump_json(exclude_defaults=True).encode()).hexdigest()


class Seen(NamedTuple):
    """What a listing of the replica has of a copy."""

    snapshots: frozenset[tuple[str, int]]
    has_bundle: bool


def seen(copy: Copy, manifest: Manifest | None, copies: Copies, bundle: BundleCopy | None) -> Seen:
    """What a listing has of a copy: the snapshots with its marks, or with its manifest's GUIDs."""
    known = {(copy_name(e.dataset), e.guid) for e in manifest.snapshots} if manifest else set()
    if manifest is not None and (pages := manifest.pages) is not None:
        known.add((copy_name(pages.dataset), pages.guid))
    found = {
        (each.dataset, each.guid)
        for snapshots in copies.values()
        for each in snapshots
        if is_of_copy(each, copy) or (each.dataset, each.guid) in known
    }
    return Seen(frozenset(found), bundle is not None)


def is_gone(before: Seen, after: Seen) -> bool:
    """Whether a part of a copy was there, and was removed between two listings, as by a prune."""
    return not before.snapshots <= after.snapshots or (before.has_bundle and not after.has_bundle)
