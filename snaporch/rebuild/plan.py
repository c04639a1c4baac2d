"""Which snapshot a guest is rebuilt from, and what has to come from the replica for it.

The manifest there names the guest's datasets and the GUIDs of their snapshots. A snapshot counts
only if the replica has all of them, the pages of RAM, and each file of the bundle. What on this
host is in the way is decided by :mod:`snaporch.rebuild.local_checks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import PurePosixPath

from snaporch.bundle.encrypted_bundles import plain_manifest
from snaporch.bundle.manifest import MANIFEST_NAME, Manifest, ManifestError, parse_manifest
from snaporch.bundle.store import COPY_NAME, copy_name
from snaporch.catalog.records import one_per_dataset
from snaporch.catalog.torn import is_torn
from snaporch.errors import NotFoundError, RefusedError, UnavailableError
from snaporch.model import DatasetKind, Level, PoolSnapshot
from snaporch.rebuild.replica_source import Source
from snaporch.replication.interface import BundleCopy
from snaporch.zfs_names import is_dataset

Copies = Mapping[str, Sequence[PoolSnapshot]]
"""The snapshots of each copy, oldest first."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A dataset of the guest, and the snapshots that come back."""

    dataset: str
    copy: str
    snapshots: tuple[PoolSnapshot, ...]
    """Of the copy, oldest first; the last one belongs to the chosen snapshot."""
    mountpoint: str
    """Where its images must be; empty for a volume, pages, or if that is not known."""
    raw: bool
    """The copy is encrypted, so its blocks come as they are."""
    kind: DatasetKind
    is_pages: bool
    """It has pages of RAM, and no disk."""
    base: str = ""
    """The name there of the snapshot that this host has, on which an increment begins."""


@dataclass(frozen=True, slots=True)
class RebuildPlan:
    """How a guest is brought back."""

    manifest: Manifest
    name: str
    """Of the chosen snapshot."""
    incoming: tuple[Incoming, ...]
    sent: Manifest | None = None
    """The manifest on the replica, if the bundle is encrypted there."""
    skipped: tuple[str, ...] = field(default=(), compare=False)
    """Of each newer snapshot, the newest first: why it is not taken."""

    @property
    def thing(self) -> str:
        """``DOMAIN@SNAPSHOT``."""
        return f"{self.manifest.domain}@{self.name}"

    def notes(self, *, history: bool) -> tuple[str, ...]:
        """Return notes on what does not come: newer snapshots, and bundles of older ones.

        Args:
            history: the bundles of the older snapshots come back, too.
        """
        found = []
        if self.skipped:
            more = f" (and {len(self.skipped) - 1} more)" if len(self.skipped) > 1 else ""
            found.append(f"a newer snapshot is not taken: {self.skipped[0]}{more}")
        older = max(len(each.snapshots) for each in self.incoming) - 1
        if older and not history:
            text = "older snapshots come without their bundles; --history brings these, too"
            found.append(f"{older} {text}")
        return tuple(found)

    @property
    def reference(self) -> str:
        """Of the bundle: ``uuid/run``."""
        return f"{self.manifest.uuid}/{self.manifest.run}"


@dataclass(frozen=True, slots=True)
class BundledGuest:
    """A guest that a replica has a bundle of."""

    name: str
    """As its newest bundle says, or an older one; its UUID if all that were read are damaged."""
    datasets: frozenset[str]
    """Of this host, of which the replica has the snapshots that the bundle names."""


_SHOWN = 3
"""Guests that a note names."""
OLDER_BUNDLES = 3
"""So many bundles of a guest are read if its newest one names no snapshots of the replica."""

Guests = Mapping[str, BundledGuest]
"""By UUID."""


def bundled_guests(source: Source, copies: Copies) -> Guests:
    """The guests whose newest bundles name snapshots that a replica has, or are damaged.

    A snapshot has the marks of one guest, also if several guests have disks in it. If the newest
    bundle of a guest names none of its snapshots, :data:`OLDER_BUNDLES` more are read.

    Args:
        source: the replica.
        copies: what the replica has.

    Raises:
        SnaporchError: the bundles cannot be listed.
    """
    found = {}
    for reference, text in source.newest_manifests().items():
        uuid, _, run = reference.partition("/")
        newest = manifest_of_copy(text.encode("utf-8", "surrogateescape"), uuid, run)
        for manifest in chain([newest], _older(source, uuid, run)):
            entries = manifest.snapshots if manifest else ()
            datasets = {e.dataset for e in entries if e.guid in guids_of(copies, e.dataset)}
            if datasets:
                break
        if newest is None or datasets:
            known = newest or manifest
            found[uuid] = BundledGuest(known.domain if known else uuid, frozenset(datasets))
    return found


def note_of_damage(guests: Guests) -> str:
    """A note on guests of which no bundle could be read; empty without any."""
    unknown = sorted(uuid for uuid, guest in guests.items() if not guest.datasets)
    if not unknown:
        return ""
    more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
    names = f"{', '.join(unknown[:_SHOWN])}{more}"
    return f"the newest bundles of {names} are damaged: which datasets they share is not known"


def _older(source: Source, uuid: str, newest: str) -> Iterator[Manifest | None]:
    """The manifests of a guest before its newest one; none for what is damaged."""
    runs = sorted(run for run in source.bundles(uuid) if run < newest)
    for run in reversed(runs[-OLDER_BUNDLES:]):
        yield _manifest(source, uuid, run)


def find_domains(snapshots: Sequence[PoolSnapshot], guests: Guests) -> dict[str, str]:
    """The domains that a replica has snapshots of: their newest names, by UUID."""
    found = {}
    for each in snapshots:
        if (uuid := each.properties.get("uuid")) and (name := each.properties.get("domain")):
            found[uuid] = name
    return {uuid: guest.name for uuid, guest in guests.items()} | found


def no_guest(thing: str, source: Source) -> NotFoundError:
    """The error of a replica without any snapshot of a guest.

    Args:
        thing: what was to be found there.
        source: the replica.
    """
    step = f"check host and dataset of [replica.{source.name}], and what was copied to it"
    return NotFoundError(thing, f"replica {source.name} has no snapshot of a guest", step)


def find_uuid(
    source: Source, snapshots: Sequence[PoolSnapshot], domain: str, guests: Guests
) -> str:
    """The UUID of a domain that a replica has snapshots of.

    Args:
        source: the replica.
        snapshots: all of its copies.
        domain: a name, also a former one, or a UUID.
        guests: those that it has bundles of, for one that no snapshot is marked with.

    Raises:
        NotFoundError: the replica has no snapshot of it.
        RefusedError: several domains had this name.
    """
    marks = [each.properties for each in snapshots]
    known_marks = [each for each in marks if "uuid" in each]
    named = sorted({e["uuid"] for e in known_marks if domain in (e.get("domain"), e["uuid"])})
    if not named:
        named = sorted(uuid for uuid, guest in guests.items() if domain in (guest.name, uuid))
    if not named:
        known = ", ".join(sorted(find_domains(snapshots, guests).values()))
        if not known:
            raise no_guest(domain, source)
        reason = f"replica {source.name} has no snapshot of it, but of: {known}"
        raise NotFoundError(domain, reason)
    if len(named) > 1:
        step = f"name one by its UUID: {', '.join(named)}"
        reason = f"replica {source.name} has snapshots of {len(named)} guests of this name"
        raise RefusedError(domain, reason, step)
    return named[0]


def choose_snapshot(
    source: Source, copies: Copies, uuid: str, name: str = ""
) -> tuple[Manifest, str, tuple[str, ...]]:
    """The manifest and the name of the snapshot to bring back, and why no newer one.

    Args:
        source: the replica.
        copies: all snapshots of its copies.
        uuid: of the domain.
        name: of the snapshot; empty for the newest one of which nothing is missing.

    Raises:
        NotFoundError: there is none.
        UnavailableError: the replica lacks a part of the named one, or of all.
    """
    bundles = source.bundles(uuid)
    reasons = []
    for run in reversed(in_order(copies, bundles)):
        if name and not _may_be(copies, uuid, run, name):
            continue
        manifest = _manifest(source, uuid, run)
        if manifest is None:
            reasons.append(f"the manifest of {run} is damaged")
            continue
        chosen = name or manifest.snapshot
        if name and name not in {each.name for each in manifest.snapshots}:
            continue
        if reason := lacking(manifest, chosen, copies, bundles[run]):
            reasons.append(f"@{chosen}: {reason}")
            continue
        return manifest, chosen, tuple(reasons)
    what = f"@{name}" if name else "any snapshot"
    if not reasons:
        raise NotFoundError(uuid, f"replica {source.name} has no bundle of {what}")
    reason = f"replica {source.name} does not have all of {what}: {reasons[0]}"
    raise UnavailableError(uuid, reason, "name an older snapshot: DOMAIN@SNAPSHOT")


def in_order(copies: Copies, runs: Iterable[str]) -> list[str]:
    """Runs, oldest first: by the second in their names, then as their snapshots have arrived."""
    arrived = {
        each.properties.get("run", ""): each.createtxg
        for snapshots in copies.values()
        for each in snapshots
    }
    return sorted(runs, key=lambda run: (run.partition("-")[0], arrived.get(run, 0), run))


def _may_be(copies: Copies, uuid: str, run: str, name: str) -> bool:
    """Whether a run may have the named snapshot: by its mark, or it has none on the replica."""
    marks = [
        (each.name, each.properties.get("run"))
        for snapshots in copies.values()
        for each in snapshots
        if each.properties.get("uuid") == uuid
    ]
    return (name, run) in marks or name not in {each for each, _ in marks}


def _manifest(source: Source, uuid: str, run: str) -> Manifest | None:
    text = source.manifest(f"{uuid}/{run}").encode("utf-8", "surrogateescape")
    return manifest_of_copy(text, uuid, run)


def manifest_of_copy(data: bytes, uuid: str, run: str) -> Manifest | None:
    """The valid manifest of a bundle; None if it is damaged, or has names that cannot be.

    Args:
        data: what the replica sent as the manifest.
        uuid: of the domain.
        run: of the bundle.
    """
    try:
        manifest = parse_manifest(data, f"{uuid}/{run}")
        files = [part.name for each in (manifest, plain_manifest(manifest)) for part in each.parts]
    except ManifestError:
        return None
    names = [each.dataset for each in manifest.snapshots]
    names += [manifest.pages.dataset] if manifest.pages else []
    known = (manifest.uuid, manifest.run) == (uuid, run) and _is_name(manifest.domain)
    is_possible = all(map(is_dataset, names)) and not {COPY_NAME, MANIFEST_NAME} & {*files}
    return manifest if known and is_possible else None


def _is_name(domain: str) -> bool:
    """Whether libvirt may have a guest of this name, and a command takes it for one."""
    return domain.isprintable() and domain == domain.strip() and domain[:1] not in ("", "-")


def lacking(manifest: Manifest, name: str, copies: Copies, bundle: BundleCopy) -> str:
    """What a replica lacks of a snapshot; empty if it has all.

    Args:
        manifest: of its bundle.
        name: of the snapshot.
        copies: what the replica has.
        bundle: the files of the bundle that it has.
    """
    if manifest.level is Level.TORN:
        return "it is torn"
    wanted = {part.name: part.bytes for part in manifest.parts}
    for part, size in wanted.items():
        if bundle.sizes.get(part) != size:
            return f"{part} of its bundle is missing"
    if COPY_NAME not in bundle.sizes:
        return "its bundle was not copied whole"
    members = members_of(manifest, name, copies)
    if any(map(is_torn, members)):
        return "it is torn"
    chosen = {each.dataset for each in members}
    absent = sorted({each.dataset for each in manifest.snapshots} - chosen)
    if absent:
        return f"the snapshot of {absent[0]} is missing"
    pages = manifest.pages
    if pages and pages.guid not in guids_of(copies, pages.dataset):
        return f"the pages of its RAM are missing ({pages.full_name})"
    return ""


def guids_of(copies: Copies, dataset: str) -> set[int]:
    """The GUIDs of the snapshots that the replica has of a dataset of this host."""
    return {each.guid for each in copies.get(copy_name(dataset), ())}


def members_of(manifest: Manifest, name: str, copies: Copies) -> list[PoolSnapshot]:
    """The snapshots on the replica that make up a copy, with this host's dataset names."""
    known = {(each.dataset, each.guid) for each in manifest.snapshots}
    members = [
        replace(each, dataset=dataset)
        for dataset in {dataset for dataset, _ in known}
        for each in copies.get(copy_name(dataset), ())
        if (dataset, each.guid) in known
    ]
    return one_per_dataset(manifest, members, name)


def make_plan(
    source: Source, copies: Copies, manifest: Manifest, name: str, *, history: bool
) -> RebuildPlan:
    """Plan how a snapshot comes back; :func:`lacking` says that the replica has all of it.

    Args:
        source: the replica.
        copies: what the replica has.
        manifest: of the bundle, as the replica has it.
        name: of the snapshot.
        history: the older snapshots of the datasets come back, too.

    Raises:
        UnavailableError: the replica does not list one of the datasets.
    """
    wanted = {each.dataset: each.guid for each in members_of(manifest, name, copies)}
    if manifest.pages:
        wanted[manifest.pages.dataset] = manifest.pages.guid
    newest = {
        dataset: next(each for each in copies[copy_name(dataset)] if each.guid == guid)
        for dataset, guid in sorted(wanted.items())
    }
    encrypted, kinds = source.encrypted(newest.values()), source.kinds(newest.values())
    incoming = []
    for dataset, last in newest.items():
        copy = copy_name(dataset)
        found = list(copies[copy])
        is_pages = manifest.pages is not None and dataset == manifest.pages.dataset
        if copy not in kinds:
            reason = f"replica {source.name} lists its snapshots, and not the dataset"
            raise UnavailableError(dataset, reason, "try again")
        incoming.append(
            Incoming(
                dataset,
                copy,
                snapshots=tuple(source.needed(found, last, history=history)),
                mountpoint="" if is_pages else _mountpoint(manifest, dataset),
                raw=copy in encrypted,
                kind=kinds[copy],
                is_pages=is_pages,
            )
        )
    sent = manifest if manifest.is_encrypted else None
    return RebuildPlan(plain_manifest(manifest), name, tuple(incoming), sent)


def _mountpoint(manifest: Manifest, dataset: str) -> str:
    """Where a file system was mounted: the path of an image without its part inside; or empty."""
    for disk in manifest.disks:
        if disk.dataset == dataset and disk.inside and disk.source:
            above = disk.source.removesuffix(f"/{disk.inside.lstrip('/')}")
            path = PurePosixPath(above)
            is_usable = path.is_absolute() and ".." not in path.parts and above.isprintable()
            if above != disk.source and is_usable:
                return str(path)
    return ""
