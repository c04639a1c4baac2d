"""Destroy snapshots of page datasets that no bundle needs, and delete leftovers of killed moves.

A snapshot of a page dataset is destroyed only if it is certainly not needed. Either the bundle of
its run exists and does not name it; or the run has neither a bundle nor snapshots, all its pools
are imported, and the store has the domain's directory (so the store itself is not missing).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from snaporch import default_paths
from snaporch.bundle.manifest import ManifestError, read_manifest
from snaporch.bundle.store import (
    COPY_NAME,
    LEFTOVERS,
    NEW_MANIFEST_NAME,
    RAM_NAME,
    REST_NAME,
    RUN_NAME,
    UUID_NAME,
)
from snaporch.config import Config
from snaporch.errors import BusyError, SnaporchError
from snaporch.interrupt import Interrupt
from snaporch.locks import PRUNING, domain_lock
from snaporch.model import PoolSnapshot
from snaporch.prune.decision import ItemKind, PruneAction, PruneDecision, StoreItem
from snaporch.prune.scan import TRASH_NAME
from snaporch.zfs import RAM_PROPERTY, MountedError, Pool

_REFERENCE = re.compile(f"{UUID_NAME}/{RUN_NAME}")


class PageReference(StrEnum):
    """Whether the bundle of a run names the pages."""

    NAMED = "named"
    UNREADABLE = "unreadable"
    COPY = "copy"
    """The bundle is a copy that another host sent, which may be hostile."""
    OTHER = "other"
    """The bundle exists, and does not name the pages."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class PageFacts:
    """The facts about a snapshot of a page dataset."""

    reference: PageReference
    store_there: bool
    """The store has a directory of the domain."""
    pools_there: bool
    """All pools with snapshots of the run are imported."""
    existing: str
    """A snapshot of the run that still exists; empty for none."""


def decide_pages(facts: PageFacts) -> tuple[PruneAction, str]:
    """Decide whether the pages stay; the action and its reason."""
    match facts.reference:
        case PageReference.NAMED:
            return PruneAction.KEEP, "its bundle needs it"
        case PageReference.UNREADABLE:
            return PruneAction.KEEP, "the manifest of its bundle cannot be read"
        case PageReference.COPY:
            return PruneAction.KEEP, "its bundle there is a copy of another host's"
        case PageReference.OTHER:
            return PruneAction.DELETE, "its bundle has its RAM elsewhere"
    if not facts.store_there:
        return PruneAction.KEEP, "the store has no directory of its domain"
    if not facts.pools_there:
        return PruneAction.KEEP, "a pool of its guest is not imported"
    if facts.existing:
        return PruneAction.KEEP, f"its bundle is missing, but {facts.existing} exists"
    return PruneAction.DELETE, "its bundle and its snapshots no longer exist"


@dataclass
class PageSnapshotsRemoved:
    """The result of pruning page snapshots."""

    decisions: list[PruneDecision]
    failures: list[SnaporchError]


def prune_page_snapshots(
    config: Config,
    pool: Pool,
    found: Sequence[StoreItem],
    under_way: Collection[str],
    deleted: Collection[Path] = (),
    *,
    domain: str | None = None,
    dry_run: bool = False,
    without: Collection[str] = (),
) -> PageSnapshotsRemoved:
    """Destroy page snapshots that no bundle needs; delete leftovers of killed moves in bundles.

    Args:
        config: has the path of the store.
        pool: ZFS.
        found: the items of the store, for the domains' names.
        under_way: runs that have a journal, and domains with an unfinished restore.
        deleted: bundles that were deleted, or would be: they no longer count.
        domain: name or UUID of the only domain to prune; all when ``None``.
        dry_run: decide, and change nothing.
        without: full names of snapshots that count as destroyed.

    Raises:
        PoolError: ZFS does not answer; nothing was destroyed.
    """
    done = PageSnapshotsRemoved([], [])
    names = {each.uuid: each.domain for each in found if each.domain}
    for each in found:
        if not dry_run and each.kind is ItemKind.BUNDLE and not each.problem:
            _delete_leftover_parts(each)
    marked = _marked(pool)
    if not marked:
        return done
    scan = _Scan.of(pool, deleted, without)
    for pages in marked:
        uuid, run = pages.properties["ram"].split("/")
        if domain not in (None, uuid, names.get(uuid)):
            continue
        thing = _store_item(pages, uuid, run, names.get(uuid, ""))
        if run in under_way or uuid in under_way:
            done.decisions.append(
                PruneDecision(thing, PruneAction.KEEP, "its run is under way", usual=True)
            )
            continue
        action, reason = decide_pages(_facts(config, pages, scan))
        verdict = PruneDecision(thing, action, reason, usual=action is PruneAction.KEEP)
        if action is PruneAction.DELETE and not dry_run:
            verdict = _destroy(config, pool, pages, verdict, scan, done)
        elif action is PruneAction.DELETE:
            verdict = replace(verdict, found=_with_bytes(pool, thing))
        done.decisions.append(verdict)
    return done


def _marked(pool: Pool) -> list[PoolSnapshot]:
    """Snapshots that a run took of a page dataset; those of other programs stay."""
    datasets = sorted(pool.local_properties([RAM_PROPERTY]))
    snapshots = pool.snapshots(datasets) if datasets else []
    return [s for s in snapshots if _REFERENCE.fullmatch(s.properties.get("ram", ""))]


@dataclass(frozen=True, slots=True)
class _Scan:
    """The imported pools and the runs that have snapshots."""

    pools: frozenset[str]
    runs: Mapping[str, str]
    """A snapshot of each run."""
    deleted: Collection[Path]
    """Bundles that do not count."""

    @classmethod
    def of(cls, pool: Pool, deleted: Collection[Path], without: Collection[str]) -> _Scan:
        existing = [s for s in pool.snapshots() if s.full_name not in without]
        runs = {s.properties.get("run", ""): s.full_name for s in existing}
        return cls(pool.snapshot_listing().pools, runs, deleted)


def _facts(config: Config, pages: PoolSnapshot, scan: _Scan) -> PageFacts:
    store = config.paths.bundles
    uuid, run = pages.properties["ram"].split("/")
    pools = set(filter(None, pages.properties.get("ram-pools", "").split(",")))
    return PageFacts(
        reference=_reference_of(store, uuid, run, pages.guid, scan.deleted),
        store_there=(store / uuid).is_dir(),
        pools_there=bool(pools) and pools <= scan.pools,
        existing=scan.runs.get(run, ""),
    )


def _reference_of(
    store: Path, uuid: str, run: str, guid: int, deleted: Collection[Path]
) -> PageReference:
    places = {store / uuid / run, *(store / TRASH_NAME).glob(f"*.{uuid}.{run}")}
    references = [
        _reference_in(place, guid) for place in places.difference(deleted) if place.is_dir()
    ]
    for reference in PageReference:  # in this order
        if reference in references:
            return reference
    return PageReference.NONE


def _reference_in(directory: Path, guid: int) -> PageReference:
    if os.path.lexists(directory / COPY_NAME):
        return PageReference.COPY
    try:
        manifest = read_manifest(directory)
    except ManifestError:
        return PageReference.UNREADABLE
    named = manifest.pages is not None and manifest.pages.guid == guid
    return PageReference.NAMED if named else PageReference.OTHER


def _destroy(
    config: Config,
    pool: Pool,
    pages: PoolSnapshot,
    verdict: PruneDecision,
    scan: _Scan,
    done: PageSnapshotsRemoved,
) -> PruneDecision:
    """Destroy a page snapshot under the domain's lock, if the decision is still the same."""
    found = _with_bytes(pool, verdict.found)
    try:
        with _locked(found):
            action, reason = decide_pages(_facts(config, pages, scan))
            if action is PruneAction.DELETE:
                pool.destroy_snapshots([pages.full_name])
            return replace(verdict, found=found, action=action, reason=reason)
    except BusyError as error:
        return replace(verdict, action=PruneAction.KEEP, reason=f"its domain is {error.reason}")
    except MountedError as error:
        return replace(verdict, action=PruneAction.KEEP, reason=error.reason)
    except SnaporchError as error:
        done.failures.append(error)
        return replace(
            verdict, action=PruneAction.KEEP, reason=f"cannot be destroyed: {error.reason}"
        )


def _locked(found: StoreItem) -> AbstractContextManager[None]:
    name = found.domain or found.uuid
    return domain_lock(
        default_paths.LOCKS, name, found.uuid, PRUNING, wait=0, interrupt=Interrupt()
    )


def _store_item(pages: PoolSnapshot, uuid: str, run: str, domain: str) -> StoreItem:
    return StoreItem(ItemKind.PAGES, Path(pages.full_name), uuid, run, domain=domain)


def _with_bytes(pool: Pool, found: StoreItem) -> StoreItem:
    """The item with its size: the bytes that only this snapshot holds."""
    name = str(found.path)
    return replace(found, bytes=pool.sizes([name]).get(name, (0, 0))[0])


def _delete_leftover_parts(found: StoreItem) -> None:
    """Delete the parts that a killed move into pages left and the manifest does not name."""
    there = {name for name in (*LEFTOVERS, RAM_NAME) if (found.path / name).exists()}
    if NEW_MANIFEST_NAME not in there and not there.issuperset({RAM_NAME, REST_NAME}):
        return
    with suppress(SnaporchError, OSError), _locked(found):
        known = {part.name for part in read_manifest(found.path).parts}
        for name in {*LEFTOVERS, RAM_NAME} - known:
            (found.path / name).unlink(missing_ok=True)
