"""Pages of RAM that no bundle names any more, and what a move into pages that was killed left.

A snapshot of a page dataset goes only when that is certain: a bundle of its run is there and does
not name it, or there is none and the guest's snapshots of the run are gone too, with their pools
imported and the domain's directory in the store, so that it is not the store that is missing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from snaporch import default_paths
from snaporch.bundle.manifest import ManifestError, read_manifest
from snaporch.bundle.store import (
    FRESH_MANIFEST_NAME,
    LEFTOVERS,
    RAM_NAME,
    REST_NAME,
    RUN_NAME,
    UUID_NAME,
)
from snaporch.config import Config
from snaporch.context import Interrupt
from snaporch.errors import BusyError, SnaporchError
from snaporch.locks import PRUNING, domain_lock
from snaporch.model import PoolSnapshot
from snaporch.prune.decision import ItemKind, PruneAction, PruneDecision, StoreItem
from snaporch.prune.scan import TRASH_NAME
from snaporch.zfs import RAM_PROPERTY, MountedError, Pool

_REFERENCE = re.compile(f"{UUID_NAME}/{RUN_NAME}")


class PageReference(StrEnum):
    """What the bundle of a run says of the pages."""

    NAMED = "named"
    OTHER = "other"
    """It is there, and does not name them."""
    UNREADABLE = "unreadable"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class PageFacts:
    """What is known of a snapshot of a page dataset."""

    standing: PageReference
    store_there: bool
    """The domain has a directory in the store."""
    pools_there: bool
    """Every pool that the guest's snapshots are in is imported."""
    living: str
    """A snapshot of the guest that the run took and that exists."""


def judge_pages(facts: PageFacts) -> tuple[PruneAction, str]:
    """Whether they stay, and why."""
    match facts.standing:
        case PageReference.NAMED:
            return PruneAction.KEEP, "its bundle needs it"
        case PageReference.UNREADABLE:
            return PruneAction.KEEP, "the manifest of its bundle cannot be read"
        case PageReference.OTHER:
            return PruneAction.DELETE, "its bundle has its RAM elsewhere"
    if not facts.store_there:
        return PruneAction.KEEP, "the store has no directory of its domain"
    if not facts.pools_there:
        return PruneAction.KEEP, "a pool of its guest is not imported"
    if facts.living:
        return PruneAction.KEEP, f"its bundle is gone, but {facts.living} exists"
    return PruneAction.DELETE, "its bundle and its snapshots are gone"


@dataclass
class PageSnapshotsRemoved:
    """What came of it."""

    verdicts: list[PruneDecision]
    failures: list[SnaporchError]


def sweep_pages(
    config: Config,
    pool: Pool,
    found: Sequence[StoreItem],
    under_way: Collection[str],
    going: Collection[Path] = (),
    *,
    domain: str | None = None,
    dry_run: bool = False,
) -> PageSnapshotsRemoved:
    """Destroy page snapshots that nothing needs, and delete what killed moves left in bundles.

    Args:
        config: where the store is.
        pool: ZFS.
        found: what is in the store, for the domains' names.
        under_way: runs that have a journal, and domains with an unfinished restore.
        going: bundles that are deleted, or would be: they need nothing any more.
        domain: name or UUID of the one domain to look after; all when ``None``.
        dry_run: decide, and do nothing.

    Raises:
        PoolError: ZFS could not be asked; nothing was destroyed.
    """
    done = PageSnapshotsRemoved([], [])
    names = {each.uuid: each.domain for each in found if each.domain}
    for each in found:
        if not dry_run and each.kind is ItemKind.BUNDLE and not each.trouble:
            _tidy(each)
    marked = _marked(pool)
    if not marked:
        return done
    sight = _Scan.of(pool, going)
    for pages in marked:
        uuid, run = pages.properties["ram"].split("/")
        if domain not in (None, uuid, names.get(uuid)):
            continue
        thing = _as_found(pages, uuid, run, names.get(uuid, ""))
        if run in under_way or uuid in under_way:
            done.verdicts.append(
                PruneDecision(thing, PruneAction.KEEP, "its run is under way", usual=True)
            )
            continue
        fate, reason = judge_pages(_facts(config, pages, sight))
        verdict = PruneDecision(thing, fate, reason, usual=fate is PruneAction.KEEP)
        if fate is PruneAction.DELETE and not dry_run:
            verdict = _destroy(config, pool, pages, verdict, sight, done)
        elif fate is PruneAction.DELETE:
            verdict = replace(verdict, found=_sized(pool, thing))
        done.verdicts.append(verdict)
    return done


def _marked(pool: Pool) -> list[PoolSnapshot]:
    """Snapshots that a run took of a page dataset; whoever else took one may keep it."""
    datasets = sorted(pool.local_properties([RAM_PROPERTY]))
    snapshots = pool.snapshots(datasets) if datasets else []
    return [s for s in snapshots if _REFERENCE.fullmatch(s.properties.get("ram", ""))]


@dataclass(frozen=True, slots=True)
class _Scan:
    """What there is in the pools."""

    pools: frozenset[str]
    runs: Mapping[str, str]
    """A snapshot of each run."""
    going: Collection[Path]
    """Bundles that do not count."""

    @classmethod
    def of(cls, pool: Pool, going: Collection[Path]) -> _Scan:
        runs = {s.properties.get("run", ""): s.full_name for s in pool.snapshots()}
        return cls(pool.census().pools, runs, going)


def _facts(config: Config, pages: PoolSnapshot, sight: _Scan) -> PageFacts:
    store = config.paths.bundles
    uuid, run = pages.properties["ram"].split("/")
    pools = set(filter(None, pages.properties.get("ram-pools", "").split(",")))
    return PageFacts(
        standing=_standing(store, uuid, run, pages.guid, sight.going),
        store_there=(store / uuid).is_dir(),
        pools_there=bool(pools) and pools <= sight.pools,
        living=sight.runs.get(run, ""),
    )


def _standing(
    store: Path, uuid: str, run: str, guid: int, going: Collection[Path]
) -> PageReference:
    places = {store / uuid / run, *(store / TRASH_NAME).glob(f"*.{uuid}.{run}")}
    standings = [_said(place, guid) for place in places.difference(going) if place.is_dir()]
    for standing in (PageReference.NAMED, PageReference.UNREADABLE, PageReference.OTHER):
        if standing in standings:
            return standing
    return PageReference.NONE


def _said(directory: Path, guid: int) -> PageReference:
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
    sight: _Scan,
    done: PageSnapshotsRemoved,
) -> PruneDecision:
    """Under the domain's lock, and only if the bundle still says the same."""
    found = _sized(pool, verdict.found)
    try:
        with _locked(found):
            fate, reason = judge_pages(_facts(config, pages, sight))
            if fate is PruneAction.DELETE:
                pool.destroy_snapshots([pages.full_name])
            return replace(verdict, found=found, fate=fate, reason=reason)
    except BusyError as error:
        return replace(verdict, fate=PruneAction.KEEP, reason=f"its domain is {error.reason}")
    except MountedError as error:
        return replace(verdict, fate=PruneAction.KEEP, reason=error.reason)
    except SnaporchError as error:
        done.failures.append(error)
        return replace(
            verdict, fate=PruneAction.KEEP, reason=f"cannot be destroyed: {error.reason}"
        )


def _locked(found: StoreItem) -> AbstractContextManager[None]:
    name = found.domain or found.uuid
    return domain_lock(
        default_paths.LOCKS, name, found.uuid, PRUNING, wait=0, interrupt=Interrupt()
    )


def _as_found(pages: PoolSnapshot, uuid: str, run: str, domain: str) -> StoreItem:
    return StoreItem(ItemKind.PAGES, Path(pages.full_name), uuid, run, domain=domain)


def _sized(pool: Pool, found: StoreItem) -> StoreItem:
    """With the bytes that only this snapshot holds."""
    name = str(found.path)
    return replace(found, bytes=pool.sizes([name]).get(name, (0, 0))[0])


def _tidy(found: StoreItem) -> None:
    """Delete what a killed move into pages left: parts that the manifest does not name."""
    there = {name for name in (*LEFTOVERS, RAM_NAME) if (found.path / name).exists()}
    if FRESH_MANIFEST_NAME not in there and not there.issuperset({RAM_NAME, REST_NAME}):
        return
    with suppress(SnaporchError, OSError), _locked(found):
        known = {part.name for part in read_manifest(found.path).parts}
        for name in {*LEFTOVERS, RAM_NAME} - known:
            (found.path / name).unlink(missing_ok=True)
