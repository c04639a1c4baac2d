"""Prune the store: compare it with the snapshots that exist, and remove what is not needed.

The order matters. The store is read first: a bundle is sealed after its snapshots were taken, so
each bundle that was found had snapshots before the listing. Nothing is removed after one listing
alone: a second one must agree, or a pool that is exported meanwhile would look as if it had lost
all its snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from snaporch import default_paths
from snaporch.bundle.encrypted_bundles import ENCRYPTED_NAME, sweep
from snaporch.bundle.manifest import ManifestError
from snaporch.bundle.store import RAW_NAME, BundleStore
from snaporch.catalog.safety_copy_holds import release_bases
from snaporch.config import Config
from snaporch.errors import AttentionError, BusyError, ExitCode, SnaporchError
from snaporch.interrupt import Interrupt
from snaporch.journal import SnapshotJournal, list_journals
from snaporch.locks import PRUNING, REPLICATION, domain_lock
from snaporch.model import SnapshotListing
from snaporch.private_files import store_errors
from snaporch.prune.ages import Ages, ClockReading
from snaporch.prune.decision import (
    GracePeriods,
    ItemKind,
    PruneAction,
    PruneDecision,
    StoreItem,
    decide,
    in_use_reason,
)
from snaporch.prune.page_snapshots import prune_page_snapshots
from snaporch.prune.scan import items_with_age, scan_store
from snaporch.prune.trash import Trash, remove
from snaporch.zfs import Pool, PoolError


@dataclass
class PruneResult:
    """The result of a prune."""

    decisions: list[PruneDecision] = field(default_factory=list)
    """The decision for each item, as it was carried out."""
    failures: list[SnaporchError] = field(default_factory=list)

    def of(self, *actions: PruneAction) -> list[PruneDecision]:
        """The decisions with one of these actions."""
        return [verdict for verdict in self.decisions if verdict.action in actions]

    @property
    def undecided_items(self) -> list[AttentionError]:
        """The items that prune cannot decide about; they stay until the admin acts."""
        step = "it is kept; check it, then move or delete it yourself"
        troubled = (each.found for each in self.decisions if each.found.problem)
        return [AttentionError(found.title, found.problem, step) for found in troubled]

    @property
    def freed(self) -> int:
        """The bytes that were freed."""
        return sum(verdict.found.bytes for verdict in self.of(PruneAction.DELETE))

    @property
    def exit_code(self) -> ExitCode:
        """FAILED after a failure, ATTENTION if prune could not decide about an item, or OK."""
        if self.failures:
            return ExitCode.FAILED
        return ExitCode.ATTENTION if self.undecided_items else ExitCode.OK


class PruneError(SnaporchError):
    """An item could not be moved or deleted; it is in its place, or marked for deletion."""


def prune(
    config: Config,
    pool: Pool,
    *,
    domain: str | None = None,
    only: Collection[str] | None = None,
    dry_run: bool = False,
    without: Collection[str] = (),
    may_be_barred: Callable[[str], bool] = lambda _uuid: False,
    stopped: Callable[[], bool] = lambda: False,
    with_pages: bool = True,
    read_clocks: Callable[[], ClockReading] = ClockReading.now,
) -> PruneResult:
    """Move bundles that no snapshot needs to the trash; delete items whose time is over.

    Args:
        config: has the path of the store and the times that items stay.
        pool: ZFS.
        domain: name or UUID of the only domain to prune; all when ``None``.
        only: references of the only bundles to prune; their own datasets are checked first.
        dry_run: decide, and change nothing.
        without: in a dry run, full names of snapshots that count as destroyed.
        may_be_barred: whether an unfinished undo may keep the guest with this UUID from starting;
            then its safety copy is needed to finish the undo.
        stopped: whether to stop before the next item; the rest is left to the next prune.
        with_pages: whether to destroy page snapshots that no bundle needs; not for a store of
            copies, which does not have the bundles of the pages of this host.
        read_clocks: reads the host's clocks.

    Raises:
        PoolError: ZFS does not answer, or lists nothing; nothing was changed.
        RefusedError, UnavailableError: the store or the journal cannot be read; nothing was
            changed.
    """
    ages = Ages(config.paths.bundles, read_clocks())
    seen = _of_domain(scan_store(config.paths.bundles, only), domain)
    found = [replace(each, age=ages.of(each.path)) for each in seen]
    done = _prune_store(
        config, pool, found, only, may_be_barred, stopped, dry_run=dry_run, without=without
    )
    if with_pages and (only is None or done.of(PruneAction.DELETE)) and not stopped():
        deleted = {verdict.found.path for verdict in done.of(PruneAction.DELETE)}
        swept = prune_page_snapshots(
            config,
            pool,
            found,
            _under_way(config),
            deleted,
            domain=domain,
            dry_run=dry_run,
            without=without,
        )
        done.decisions += swept.decisions
        done.failures += swept.failures
    if not dry_run:
        _write_ages(ages, config.paths.bundles, done)
        if only is None and not stopped():
            _sweep_encrypted(config, done)
    return done


def _sweep_encrypted(config: Config, done: PruneResult) -> None:
    """Remove what was encrypted for replicas of bundles that are not here any more."""
    if not (config.paths.bundles / ENCRYPTED_NAME).is_dir():
        return
    trashed = [
        f"{each.uuid}/{each.name}"
        for each in scan_store(config.paths.bundles, ())
        if each.kind is ItemKind.TRASHED
    ]
    try:
        with domain_lock(
            config.paths.runtime, REPLICATION, REPLICATION, PRUNING, wait=0, interrupt=Interrupt()
        ):
            encrypted = [name for name, each in config.replica.items() if each.encrypt_to]
            sweep(BundleStore(config.paths.bundles), encrypted, trashed)
    except BusyError:
        return  # it may be encrypting, or a rebuild decrypting; the next prune does it
    except SnaporchError as error:
        done.failures.append(error)


def _write_ages(ages: Ages, store: Path, done: PruneResult) -> None:
    """Write the ages of all items, also of those that were moved to the trash just now."""
    try:
        with store_errors(store):
            ages.write(items_with_age(store))
    except SnaporchError as error:
        done.failures.append(error)


def _prune_store(
    config: Config,
    pool: Pool,
    found: Sequence[StoreItem],
    only: Collection[str] | None,
    may_be_barred: Callable[[str], bool],
    stopped: Callable[[], bool],
    *,
    dry_run: bool,
    without: Collection[str],
) -> PruneResult:
    if not found:
        return PruneResult()
    now = datetime.now(UTC)
    first = pool.snapshot_listing() if only is None else _listing_of_bundles(pool, found)
    first = first.without(without)
    verdicts = _decide_all(config, found, first, now)
    if any(verdict.action is not PruneAction.KEEP for verdict in verdicts):
        verdicts = _decide_all(
            config, found, first.agreed(pool.snapshot_listing().without(without)), now
        )
    done = PruneResult()
    for verdict in (_unless_barred(each, may_be_barred) for each in verdicts):
        if stopped():
            break
        if dry_run or verdict.action is PruneAction.KEEP:
            done.decisions.append(verdict)
        else:
            _execute(config, pool, verdict, now, done)
    return done


def _unless_barred(verdict: PruneDecision, may_be_barred: Callable[[str], bool]) -> PruneDecision:
    if verdict.found.kind is not ItemKind.SAFETY or verdict.action is PruneAction.KEEP:
        return verdict
    if not may_be_barred(verdict.found.uuid):
        return verdict
    return replace(
        verdict,
        action=PruneAction.KEEP,
        reason="may be needed to finish an interrupted undo",
    )


def _of_domain(found: Sequence[StoreItem], domain: str | None) -> list[StoreItem]:
    return [each for each in found if domain in (None, each.domain, each.uuid)]


def _listing_of_bundles(pool: Pool, found: Sequence[StoreItem]) -> SnapshotListing:
    """A listing of only the datasets that the bundles name: it shows whether they are needed."""
    references = [r for each in found if each.kind is ItemKind.BUNDLE for r in each.references]
    snapshots = pool.snapshots(sorted({reference.dataset for reference in references}))
    every_pool = frozenset(r.pool for each in found for r in each.references)
    return SnapshotListing(every_pool, {s.guid: (s.full_name,) for s in snapshots})


def _decide_all(
    config: Config, found: Sequence[StoreItem], listing: SnapshotListing, now: datetime
) -> list[PruneDecision]:
    grace = GracePeriods(
        trash=config.prune.trash_keep,
        safety=config.prune.safety_keep,
    )
    under_way = _under_way(config)
    return [decide(each, listing, under_way, grace, now) for each in found]


def _under_way(config: Config) -> set[str]:
    """Runs with a journal, by the file's name, whatever its kind and version.

    With the UUIDs of domains that have a journal of another kind, which may need a safety copy, and
    the files of RAM of the others.
    """
    directory = config.paths.journal
    with store_errors(directory):
        names = {path.stem for path in directory.iterdir()} if directory.is_dir() else set()
    journals = list_journals(directory, sweep=False)
    others = [each for each in journals if not isinstance(each, SnapshotJournal)]
    ram_files = {f"{each.uuid}/{RAW_NAME}" for each in journals if each.uuid}
    return names | {each.uuid for each in others if each.uuid} | ram_files


def _execute(
    config: Config, pool: Pool, verdict: PruneDecision, now: datetime, done: PruneResult
) -> None:
    """Carry out a decision and record the result; an item that is missing by now is skipped."""
    found = verdict.found
    try:
        with _held(found):
            if reason := in_use_reason(found, _under_way(config)):
                done.decisions.append(replace(verdict, action=PruneAction.KEEP, reason=reason))
                return
            if found.kind is ItemKind.SAFETY:
                release_bases(pool, found.path)
            moved = _move(Trash(config.paths.bundles), verdict, now)
        if verdict.action is PruneAction.DELETE:
            remove(moved)
    except FileNotFoundError:
        return
    except BusyError as error:
        verdict = replace(verdict, action=PruneAction.KEEP, reason=f"its domain is {error.reason}")
    except (OSError, PoolError, ManifestError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        reason = f"cannot be moved or deleted: {why}"
        step = "nothing is lost; fix the cause and run `snaporch prune` again"
        done.failures.append(PruneError(str(found.path), reason, step))
        verdict = replace(verdict, action=PruneAction.KEEP, reason=reason)
    done.decisions.append(verdict)


def _held(found: StoreItem) -> AbstractContextManager[None]:
    """The domain's lock, held for one rename; not needed for items in the trash."""
    if found.kind in (ItemKind.TRASHED, ItemKind.REMAINS):
        return nullcontext()
    name = found.domain or found.uuid
    return domain_lock(
        default_paths.LOCKS, name, found.uuid, PRUNING, wait=0, interrupt=Interrupt()
    )


def _move(trash: Trash, verdict: PruneDecision, now: datetime) -> Path:
    match verdict.action:
        case PruneAction.TRASH:
            return trash.put(verdict.found, now)
        case PruneAction.PUT_BACK:
            return trash.put_back(verdict.found)
        case _ if verdict.found.kind is ItemKind.RAM_FILE:
            verdict.found.path.unlink()
            return verdict.found.path
        case _:
            return trash.mark_deleting(verdict.found, now)
