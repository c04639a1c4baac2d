"""Destroys old received copies in this machine's pools, and prunes their bundles.

:mod:`snaporch.schedule.received_copies_retention` decides. A copy counts by its bundle, whose
manifest names the snapshots by dataset and GUID, and by ``copy.json``, which names the dataset of
the copies. What no bundle names is never destroyed. What arrives meanwhile is newer, so a pull
needs no lock; a copy that is read by a test restore stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from snaporch import default_paths
from snaporch.bundle.manifest import MANIFEST_NAME
from snaporch.bundle.store import BundleStore, copy_name
from snaporch.catalog.records import COPY, VERIFIED_HERE, by_dataset, genuine, is_marked
from snaporch.catalog.torn import is_torn
from snaporch.config import Config, Copies
from snaporch.errors import BusyError, SnaporchError, UnavailableError
from snaporch.interrupt import Interrupt
from snaporch.locks import readers_lock
from snaporch.model import (
    BundleState,
    Level,
    PoolSnapshot,
    VerificationResult,
)
from snaporch.private_files import private_directory
from snaporch.prune.decision import ItemKind, PruneAction, PruneDecision, StoreItem
from snaporch.prune.prune import PruneResult, prune
from snaporch.prune.scan import scan_store
from snaporch.schedule.received_copies_retention import (
    CopiedRun,
    CopyDecision,
    decide_copies,
    newest_of_each,
)
from snaporch.schedule.recurrence import read_zone_again, zone_of
from snaporch.schedule.retention import FUTURE
from snaporch.verify.copy_results import CopyResult, CopyResults
from snaporch.zfs import InUseError, MountedError, Pool, PoolError

_MARK = "pruned-copies"
"""A file whose mtime is the time of the last daily prune of copies."""
_DAY_SECONDS = 86_400


def prune_copies(
    config: Config,
    pool: Pool,
    *,
    domain: str | None = None,
    dry_run: bool = False,
    stopped: Callable[[], bool] = lambda: False,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> PruneResult:
    """Destroy the copies that no rule keeps, and prune the bundles of all copies with retention.

    A failure of one section of the configuration does not stop the others.

    Args:
        config: has the sections, and the times that the trash stays.
        pool: ZFS.
        domain: name or UUID of the only domain whose copies are pruned; all when ``None``.
        dry_run: decide, and change nothing.
        stopped: whether to stop before the next copy; the rest is left to the next prune.
        now: the clock.
    """
    done = PruneResult()
    if config.pruned_copies:
        read_zone_again()
    for name, copies in config.pruned_copies.items():
        pruning = _Pruning(config, pool, name, copies, domain, stopped, now)
        try:
            pruning.run(done, dry_run=dry_run)
        except SnaporchError as error:
            done.failures.append(error)
    return done


def prune_copies_daily(config: Config, pool: Pool, stopped: Callable[[], bool]) -> PruneResult:
    """Prune the copies if the last daily prune of copies is a day old.

    It runs once a day even if it fails: errors are reported, and retried the next day.

    Args:
        config: has the sections.
        pool: ZFS.
        stopped: see :func:`prune_copies`.
    """
    if not config.pruned_copies or stopped() or not begin_day(config.paths.schedule / _MARK):
        return PruneResult()
    return prune_copies(config, pool, stopped=stopped)


def begin_day(mark: Path) -> bool:
    """Whether a file was touched a day ago; then it is touched, unless it cannot be.

    Also if it is from the future: the clock was set back. Also if it does not exist.
    """
    with suppress(OSError):
        if 0 <= time.time() - mark.stat().st_mtime < _DAY_SECONDS:
            return False
    with suppress(OSError):
        private_directory(mark.parent)
        mark.touch(mode=0o600)
    return True


@dataclass
class _Pruning:
    """The prune of one section."""

    config: Config
    pool: Pool
    name: str
    copies: Copies
    domain: str | None
    stopped: Callable[[], bool]
    now: Callable[[], datetime]
    _gone: list[str] = field(default_factory=list)

    def run(self, done: PruneResult, *, dry_run: bool) -> None:
        """Prune the section.

        Raises:
            SnaporchError: its place is not there, or cannot be read; nothing was destroyed.
        """
        self._check_place()
        decisions = self._decide()
        if not dry_run and any(each.delete for each in decisions):
            decisions = self._agreed(decisions)
        sizes = self._sizes([m.full_name for each in decisions for m in each.run.members])
        for decision in decisions:
            if self.domain not in (None, decision.run.domain, decision.run.uuid):
                continue
            if self.stopped():
                return
            found = self._carry_out(decision, sizes, done, dry_run=dry_run)
            done.decisions.append(found)
        paths = self.config.paths.model_copy(update={"bundles": Path(self.copies.bundles)})
        pruned = prune(
            self.config.model_copy(update={"paths": paths}),
            self.pool,
            domain=self.domain,
            dry_run=dry_run,
            without=self._gone if dry_run else (),
            stopped=self.stopped,
            with_pages=False,
        )
        done.decisions += pruned.decisions
        done.failures += pruned.failures

    def _check_place(self) -> None:
        bundles, root = Path(self.copies.bundles), self.copies.dataset
        step = "is its file system mounted, and its pool imported?"
        if not bundles.is_dir():
            raise UnavailableError(f"{self.name}: {bundles}", "is no directory", step)
        if all(each.name != root for each in self.pool.datasets()):
            raise UnavailableError(f"{self.name}: {root}", "there is no such dataset", step)

    def _decide(self) -> list[CopyDecision]:
        """The decisions, by what is there now. The bundles are listed first, as by ``prune``."""
        items = scan_store(Path(self.copies.bundles))
        view = self.pool.policy_view()
        root = self.copies.dataset
        there = [each for each in view.snapshots if each.dataset.rpartition("/")[0] == root]
        results = CopyResults(self.config.paths.schedule)
        runs = copied_runs(
            items,
            self.copies,
            there,
            view.pinned,
            lambda uuid: results.of_domain(self.name, uuid),
        )
        self._check_bundles(items, there)
        zone, keep = zone_of(self.config), self.copies
        return decide_copies(runs, there, keep.keep, keep.keep_all, self.now(), zone)

    def _check_bundles(self, items: Iterable[StoreItem], there: Iterable[PoolSnapshot]) -> None:
        """Copies without a single bundle are no reason to be silent: nothing can be pruned."""
        root = self.copies.dataset
        has_bundle = any(
            item.kind is ItemKind.BUNDLE
            and (item.problem or any(e.dataset.rpartition("/")[0] == root for e in item.references))
            for item in items
        )
        has_copies = any("bundle" in each.properties for each in there)
        if has_copies and not has_bundle:
            raise UnavailableError(
                f"{self.name}: {self.copies.bundles}",
                f"has no bundle of the snapshots below {root}",
                "is it the directory of their bundles, and is its file system mounted? Of copies "
                "that arrive for the first time, wait for the end of the replication",
            )

    def _sizes(self, names: Sequence[str]) -> Mapping[str, tuple[int, int]]:
        """Their sizes, for the output; without those that went meanwhile."""
        with suppress(PoolError):
            return self.pool.sizes(names)
        there = {each.full_name for each in self.pool.snapshots()}
        with suppress(PoolError):
            return self.pool.sizes([each for each in names if each in there])
        return {}

    def _agreed(self, decisions: Sequence[CopyDecision]) -> list[CopyDecision]:
        """Decide again: only copies on which two listings agree are destroyed."""
        before = {each.run.key: each.run.members for each in decisions if each.delete}
        agreed = []
        for each in self._decide():
            changed = each.delete and before.get(each.run.key) != each.run.members
            reason = "changed at this moment; the next prune decides" if changed else each.reason
            agreed.append(CopyDecision(each.run, each.delete and not changed, reason))
        return agreed

    def _carry_out(
        self,
        decision: CopyDecision,
        sizes: Mapping[str, tuple[int, int]],
        done: PruneResult,
        *,
        dry_run: bool,
    ) -> PruneDecision:
        run = decision.run
        names = [each.full_name for each in run.members]
        item = StoreItem(
            ItemKind.COPY,
            Path(self.copies.dataset),
            run.uuid,
            run.run,
            bytes=sum(sizes[name][0] for name in names if name in sizes),
            domain=run.domain,
            snapshot=run.snapshot,
        )
        action, reason = PruneAction.KEEP, decision.reason
        if decision.delete:
            try:
                if not dry_run:
                    with self._unread(run):
                        reason = self._destroy(run, reason)
                action = PruneAction.DELETE if reason == decision.reason else action
            except MountedError as error:
                reason = error.reason
            except BusyError as error:
                reason = f"in use ({error.reason}); the next prune tries again"
            except InUseError as error:  # since the decision, such as by a send
                reason = f"in use ({error.reason}); the next prune tries again"
            except SnaporchError as error:
                done.failures.append(error)
                reason = f"cannot be destroyed: {error.reason}"
        if action is PruneAction.DELETE:
            self._gone += names
        usual = not decision.delete and decision.reason != FUTURE
        return PruneDecision(item, action, reason, usual)

    def _unread(self, run: CopiedRun) -> AbstractContextManager[None]:
        """Destroy nothing that a test restore reads: it would count as damaged."""
        return readers_lock(
            default_paths.LOCKS, run.domain, run.uuid, alone=True, interrupt=Interrupt()
        )

    def _destroy(self, run: CopiedRun, reason: str) -> str:
        """Destroy the copies of a run, if they still are what was decided about.

        Returns:
            The reason; another one if they were not destroyed.
        """
        datasets = sorted({each.dataset for each in run.members})
        there = self.pool.snapshots(datasets)
        newest = newest_of_each(there)
        current = {each.full_name: each.guid for each in there}
        for each in run.members:
            if current.get(each.full_name) != each.guid or each.full_name in newest:
                return "changed at this moment; the next prune decides"
        self.pool.destroy_snapshots([each.full_name for each in run.members])
        return reason


def copied_runs(
    items: Iterable[StoreItem],
    copies: Copies,
    there: Sequence[PoolSnapshot],
    pinned: Mapping[str, str],
    results_of: Callable[[str], Mapping[str, CopyResult]],
) -> list[CopiedRun]:
    """The runs whose bundles are here, by their manifests.

    Args:
        items: of the store, without those that prune cannot decide about.
        copies: where the copies are.
        there: all snapshots below the dataset of the copies.
        pinned: by a snapshot's full name, why it cannot be destroyed.
        results_of: the recorded results of verifying the copies of a domain, by its UUID.
    """
    store = BundleStore(Path(copies.bundles))
    of_dataset = {
        dataset: {each.guid: each for each in genuine(own)}
        for dataset, own in by_dataset(there).items()
    }
    found = []
    results: dict[str, Mapping[str, CopyResult]] = {}
    for item in items:
        if item.kind is not ItemKind.BUNDLE or item.problem:
            continue
        if any(e.dataset.rpartition("/")[0] != copies.dataset for e in item.references):
            continue  # of the machine's own, or of copies elsewhere
        if item.uuid not in results:
            results[item.uuid] = results_of(item.uuid)
        found.append(_run(store, item, copies.dataset, of_dataset, pinned, results[item.uuid]))
    return found


def _run(
    store: BundleStore,
    item: StoreItem,
    root: str,
    of_dataset: Mapping[str, Mapping[int, PoolSnapshot]],
    pinned: Mapping[str, str],
    results: Mapping[str, CopyResult],
) -> CopiedRun:
    """The run of a bundle, with those of its copies that exist."""
    state, manifest = store.state(f"{item.uuid}/{item.name}")
    wanted = [(each.dataset, each.name, each.guid) for each in item.references]
    pages = manifest.pages if manifest else None
    if pages is not None:
        wanted.append((f"{root}/{copy_name(pages.dataset)}", pages.name, pages.guid))
    members = []
    for dataset, name, guid in wanted:
        found = of_dataset.get(dataset, {}).get(guid)
        if found is not None and found.name == name and COPY in found.properties:
            members.append(found)
    disks = [each for each in members if "ram" not in each.properties]
    is_whole = len(members) == len(wanted) > 0 and state is BundleState.COMPLETE
    is_whole &= manifest is not None and manifest.level is not Level.TORN
    result = results.get(f"{item.uuid}/{item.name}@{item.snapshot}")
    return CopiedRun(
        uuid=item.uuid,
        run=item.name,
        domain=item.domain,
        snapshot=item.snapshot,
        members=tuple(members),
        is_whole=is_whole and not any(map(is_torn, members)),
        by_policy=bool(disks) and all(map(_is_of_policy, disks)),
        received=_received(item.path),
        good_ram=is_whole and manifest is not None and manifest.level is Level.RAM,
        passed=_passed(disks, result),
        passed_here=_is_result(result) or _test_restore(disks) is not None,
        pinned=_pin(members, pinned),
        group_run=next((g for each in disks if (g := each.properties.get("group", ""))), ""),
    )


def _is_of_policy(member: PoolSnapshot) -> bool:
    return is_marked(member, member.properties.get("retention", ""))


def _passed(members: Sequence[PoolSnapshot], result: CopyResult | None) -> bool | None:
    """Whether the last verification passed: of the copy itself, or else that of the original.

    Of a copy that failed here by its checksums or by its test restore, it did not.
    """
    tested = _test_restore(members)
    if result is not None and _is_result(result):
        return result.passed and tested is not False
    if tested is not None:
        return tested
    texts = {each.properties.get("verified") for each in members}
    verified = VerificationResult.parse(texts.pop()) if len(texts) == 1 else None
    return verified.passed if verified else None


def _test_restore(members: Iterable[PoolSnapshot]) -> bool | None:
    """Whether the test restore on this machine passed; ``None`` if nothing is proven.

    That is so if no clone ran, or a member has no result. One member that failed is a failure.
    """
    results = [VerificationResult.parse(each.properties.get(VERIFIED_HERE)) for each in members]
    if any(each is not None and not each.passed for each in results):
        return False
    restored = [each is not None and each.is_restored for each in results]
    return True if restored and all(restored) else None


def _is_result(result: CopyResult | None) -> bool:
    return result is not None and result.absent is None


def _received(bundle: Path) -> datetime:
    """When a bundle got its name here, or its manifest later: the ctime, which no program sets.

    Not that of ``copy.json``, which a replication touches each week. The latest time if it went.
    """
    try:
        times = [each.lstat().st_ctime for each in (bundle, bundle / MANIFEST_NAME)]
    except OSError:
        return datetime.max.replace(tzinfo=UTC)
    return datetime.fromtimestamp(max(times), UTC)


def _pin(members: Iterable[PoolSnapshot], pinned: Mapping[str, str]) -> str:
    """Why one of the copies may not be destroyed; empty if nothing is known."""
    for each in members:
        if reason := pinned.get(each.full_name, "kept" if "kept" in each.properties else ""):
            return reason
    return ""
