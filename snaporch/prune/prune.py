"""Reconciling the store with the snapshots that exist.

The order of looking matters. The store is surveyed first: a bundle is sealed after its snapshots
were taken, so what the survey saw had snapshots before the census. Nothing goes by one listing
alone: a second one must say the same, or a pool that is exported meanwhile would look like one that
has lost everything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from snaporch import default_paths
from snaporch.bundle.manifest import ManifestError
from snaporch.bundle.store import explained_store
from snaporch.catalog.holds import let_bases_go
from snaporch.config import Config
from snaporch.context import Interrupt
from snaporch.errors import AttentionError, BusyError, ExitCode, SnaporchError
from snaporch.journal import SnapshotJournal, list_journals
from snaporch.locks import PRUNING, domain_lock
from snaporch.model import Census
from snaporch.prune.ages import Ages, Reading
from snaporch.prune.decision import (
    GracePeriods,
    ItemKind,
    PruneAction,
    PruneDecision,
    StoreItem,
    judge,
    worked_on,
)
from snaporch.prune.page_snapshots import sweep_pages
from snaporch.prune.scan import aging, survey
from snaporch.prune.trash import Trash, remove
from snaporch.zfs import Pool, PoolError


@dataclass
class Pruned:
    """What came of it."""

    verdicts: list[PruneDecision] = field(default_factory=list)
    """Of everything that was looked at, as it was carried out."""
    failures: list[SnaporchError] = field(default_factory=list)

    def of(self, *fates: PruneAction) -> list[PruneDecision]:
        """The verdicts with one of these fates."""
        return [verdict for verdict in self.verdicts if verdict.fate in fates]

    @property
    def unjudged(self) -> list[AttentionError]:
        """What nothing can be said about, and stays until somebody has looked at it."""
        step = "it is kept; look at it and move or delete it yourself"
        troubled = (each.found for each in self.verdicts if each.found.trouble)
        return [AttentionError(found.title, found.trouble, step) for found in troubled]

    @property
    def freed(self) -> int:
        """Bytes that are free again."""
        return sum(verdict.found.bytes for verdict in self.of(PruneAction.DELETE))

    @property
    def exit_code(self) -> ExitCode:
        """FAILED after a failure, ATTENTION if there is an item that prune cannot judge."""
        if self.failures:
            return ExitCode.FAILED
        return ExitCode.ATTENTION if self.unjudged else ExitCode.OK


class PruneError(SnaporchError):
    """Something could not be moved or deleted; it is where it was, or marked as going."""


def prune(
    config: Config,
    pool: Pool,
    *,
    domain: str | None = None,
    only: Collection[str] | None = None,
    dry_run: bool = False,
    may_be_barred: Callable[[str], bool] = lambda _uuid: False,
    stopped: Callable[[], bool] = lambda: False,
    read_clocks: Callable[[], Reading] = Reading.now,
) -> Pruned:
    """Move bundles that no snapshot needs to the trash, and delete what has been there long enough.

    Args:
        config: where the store is, and how long things stay.
        pool: ZFS.
        domain: name or UUID of the one domain to look after; all when ``None``.
        only: of the bundles, these references alone, and only after a look at their own datasets.
        dry_run: decide, and do nothing.
        may_be_barred: whether nobody knows that the guest with a UUID can be started: one that an
            undo has left so needs a safety copy.
        stopped: whether to end before the next thing; the rest waits for the next prune.
        read_clocks: what the host's clocks show.

    Raises:
        PoolError: ZFS could not be asked, or lists nothing; nothing was touched.
        RefusedError, UnavailableError: the store or the journal cannot be read; nothing was
            touched.
    """
    ages = Ages(config.paths.bundles, read_clocks())
    seen = _of_domain(survey(config.paths.bundles, only), domain)
    found = [replace(each, age=ages.of(each.path)) for each in seen]
    done = _prune_store(config, pool, found, only, may_be_barred, stopped, dry_run=dry_run)
    if (only is None or done.of(PruneAction.DELETE)) and not stopped():
        going = {verdict.found.path for verdict in done.of(PruneAction.DELETE)}
        swept = sweep_pages(
            config, pool, found, _under_way(config), going, domain=domain, dry_run=dry_run
        )
        done.verdicts += swept.verdicts
        done.failures += swept.failures
    if not dry_run:
        _remember(ages, config.paths.bundles, done)
    return done


def _remember(ages: Ages, store: Path, done: Pruned) -> None:
    """Write down how old things are, those that went to the trash just now, too."""
    try:
        with explained_store(store):
            ages.write(aging(store))
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
) -> Pruned:
    if not found:
        return Pruned()
    now = datetime.now(UTC)
    first = pool.census() if only is None else _at_hand(pool, found)
    verdicts = _judge(config, found, first, now)
    if any(verdict.fate is not PruneAction.KEEP for verdict in verdicts):
        verdicts = _judge(config, found, first.agreed(pool.census()), now)
    done = Pruned()
    for verdict in (_unless_barred(each, may_be_barred) for each in verdicts):
        if stopped():
            break
        if dry_run or verdict.fate is PruneAction.KEEP:
            done.verdicts.append(verdict)
        else:
            _carry_out(config, pool, verdict, now, done)
    return done


def _unless_barred(verdict: PruneDecision, may_be_barred: Callable[[str], bool]) -> PruneDecision:
    if verdict.found.kind is not ItemKind.SAFETY or verdict.fate is PruneAction.KEEP:
        return verdict
    if not may_be_barred(verdict.found.uuid):
        return verdict
    return replace(
        verdict,
        fate=PruneAction.KEEP,
        reason="may be all that can finish an undo that was cut short",
    )


def _of_domain(found: Sequence[StoreItem], domain: str | None) -> list[StoreItem]:
    return [each for each in found if domain in (None, each.domain, each.uuid)]


def _at_hand(pool: Pool, found: Sequence[StoreItem]) -> Census:
    """A census of the datasets alone that the bundles name: enough to see that they are needed."""
    references = [r for each in found if each.kind is ItemKind.BUNDLE for r in each.references]
    snapshots = pool.snapshots(sorted({reference.dataset for reference in references}))
    every_pool = frozenset(r.pool for each in found for r in each.references)
    return Census(every_pool, {s.guid: (s.full_name,) for s in snapshots})


def _judge(
    config: Config, found: Sequence[StoreItem], census: Census, now: datetime
) -> list[PruneDecision]:
    grace = GracePeriods(
        trash=timedelta(days=config.prune.trash_days),
        safety=timedelta(days=config.prune.safety_days),
    )
    under_way = _under_way(config)
    return [judge(each, census, under_way, grace, now) for each in found]


def _under_way(config: Config) -> set[str]:
    """Runs with a journal, by its file's name alone: it counts whoever wrote it.

    With the UUIDs of domains that have one of another kind, which may need a safety copy.
    """
    directory = config.paths.journal
    with explained_store(directory):
        names = {path.stem for path in directory.iterdir()} if directory.is_dir() else set()
    journals = list_journals(directory, sweep=False)
    others = [each for each in journals if not isinstance(each, SnapshotJournal)]
    return names | {each.uuid for each in others if each.uuid}


def _carry_out(
    config: Config, pool: Pool, verdict: PruneDecision, now: datetime, done: Pruned
) -> None:
    """Do it, and note what was done; something that is gone by now was somebody else's doing."""
    found = verdict.found
    try:
        with _held(found):
            if reason := worked_on(found, _under_way(config)):
                done.verdicts.append(replace(verdict, fate=PruneAction.KEEP, reason=reason))
                return
            if found.kind is ItemKind.SAFETY:
                let_bases_go(pool, found.path)
            moved = _move(Trash(config.paths.bundles), verdict, now)
        if verdict.fate is PruneAction.DELETE:
            remove(moved)
    except FileNotFoundError:
        return
    except BusyError as error:
        verdict = replace(verdict, fate=PruneAction.KEEP, reason=f"its domain is {error.reason}")
    except (OSError, PoolError, ManifestError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        reason = f"cannot be moved or deleted: {why}"
        step = "nothing is lost; mend that and prune again"
        done.failures.append(PruneError(str(found.path), reason, step))
        verdict = replace(verdict, fate=PruneAction.KEEP, reason=reason)
    done.verdicts.append(verdict)


def _held(found: StoreItem) -> AbstractContextManager[None]:
    """The domain's lock, for a rename's time; nobody works with what is in the trash."""
    if found.kind in (ItemKind.TRASHED, ItemKind.REMAINS):
        return nullcontext()
    name = found.domain or found.uuid
    return domain_lock(
        default_paths.LOCKS, name, found.uuid, PRUNING, wait=0, interrupt=Interrupt()
    )


def _move(trash: Trash, verdict: PruneDecision, now: datetime) -> Path:
    match verdict.fate:
        case PruneAction.TRASH:
            return trash.put(verdict.found, now)
        case PruneAction.PUT_BACK:
            return trash.put_back(verdict.found)
        case _:
            return trash.condemn(verdict.found, now)
