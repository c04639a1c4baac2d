"""Deletes old chains of streams, and their bundles, in repositories of restic.

:mod:`snaporch.schedule.chain_retention` decides. Before a chain goes, all of the newest snapshot
of each guest that loses one is read: the streams of all of its datasets, and its bundle. If any of
it is damaged, nothing of the repository goes. Only then the lock of replications is taken, and all
is listed and decided again: reading may take hours, and no copy waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from snaporch.bundle.manifest import MANIFEST_NAME, Manifest, ManifestError, parse_manifest
from snaporch.bundle.store import BundleStore
from snaporch.config import Config, ResticReplica
from snaporch.config.policy import Keep
from snaporch.errors import InterruptedRunError, SnaporchError, UnavailableError
from snaporch.interrupt import Interrupt
from snaporch.locks import REPLICATION, domain_lock
from snaporch.private_files import (
    private_directory,
    replace_private,
    store_errors,
    sync_directory,
)
from snaporch.prune.decision import ItemKind, PruneAction, PruneDecision, StoreItem
from snaporch.prune.prune import PruneResult
from snaporch.replication.interface import ReplicaError
from snaporch.replication.needed_streams import Originals
from snaporch.replication.restic import SEE, ResticRepository
from snaporch.replication.restic_bundles import ResticBundles
from snaporch.replication.restic_records import (
    STREAM_FILE,
    BundleRecord,
    Contents,
    StreamRecord,
    ordered,
)
from snaporch.replication.restic_stream import Wanted, command
from snaporch.schedule.cached_manifests import CachedManifests
from snaporch.schedule.chain_retention import (
    ChainDecision,
    RepositoryDecision,
    decide_repository,
    in_steps,
    to_read,
)
from snaporch.schedule.recurrence import read_zone_again, zone_of
from snaporch.zfs import Pool

_CHANGED = "changed at this moment; the next prune decides"
_DAMAGED = "stays, because what would stay cannot be read"


def prune_chains(
    config: Config,
    pool: Pool,
    opened: Callable[[str, ResticReplica], ResticRepository],
    interrupt: Interrupt,
    *,
    dry_run: bool = False,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> PruneResult:
    """Delete the chains that no rule keeps, in each repository that has ``keep``.

    A failure of one repository does not stop the others.

    Args:
        config: has the replicas.
        pool: ZFS.
        opened: opens a repository.
        interrupt: a signal ends it.
        dry_run: decide, read no chain, and change nothing.
        now: the clock.

    Raises:
        InterruptedRunError: a signal came; what is left goes with the next prune.
    """
    done = PruneResult()
    for name, replica in config.replica.items():
        if not isinstance(replica, ResticReplica) or replica.keep is None:
            continue
        read_zone_again()
        repository = opened(name, replica)
        pruning = _Pruning(config, pool, repository, replica.keep, interrupt, now)
        try:
            pruning.run(done, dry_run=dry_run)
        except InterruptedRunError:
            raise
        except SnaporchError as error:
            done.failures.append(error)
    return done


class _Pruning:
    """The prune of one repository."""

    def __init__(
        self,
        config: Config,
        pool: Pool,
        repository: ResticRepository,
        keep: Keep,
        interrupt: Interrupt,
        now: Callable[[], datetime],
    ) -> None:
        self._config = config
        self._pool = pool
        self._repository = repository
        self._keep = keep
        self._interrupt = interrupt
        self._now = now
        self._bundles = ResticBundles(repository)
        self._due = config.paths.schedule / f"reclaim-{repository.name}"
        """Exists from before the first ``restic forget`` until ``restic prune`` has succeeded."""
        self._store = BundleStore(config.paths.bundles)
        self._manifests: dict[str, Manifest | None] = {}
        """Those in the repository that were read, by the uploads of their bundles."""
        self._cached = CachedManifests(repository.cache / f"manifests-{repository.name}")

    def run(self, done: PruneResult, *, dry_run: bool) -> None:
        """Prune it; what happens to each chain is added to ``done``.

        Raises:
            SnaporchError: it cannot be listed, or not all could be deleted.
        """
        if not self._store.is_known():
            path, reason = str(self._store.root), "there is no bundle in it; is it mounted?"
            raise UnavailableError(path, reason, "see paths.bundles in snaporch.toml")
        contents = self._repository.contents(again=True)
        self._cached.only({_digest(each) for each in contents.bundles.values()})
        found = self._decide(contents)
        if not dry_run:
            try:
                read = self._read(contents, found)
            except ReplicaError as error:
                done.failures.append(error)
                found = found.only((), _DAMAGED)
            else:
                if self._due.exists() or found.bundles or any(e.delete for e in found.chains):
                    with self._no_replication():
                        contents = self._repository.contents(again=True)
                        found = _agreed(contents, found, self._decide(contents), read)
                        self._delete(contents, found)
        done.decisions += [self._line(each) for each in found.chains]

    def _decide(self, contents: Contents) -> RepositoryDecision:
        manifests = {}
        for reference in sorted({*self._store.references(), *contents.bundles}):
            manifest = self._manifest(reference, contents.bundles.get(reference))
            if manifest is not None:
                manifests[reference] = manifest
        continued, zone = self._continued(contents), zone_of(self._config)
        return decide_repository(contents, manifests, continued, self._keep, self._now(), zone)

    def _manifest(self, reference: str, record: BundleRecord | None) -> Manifest | None:
        """The manifest of a bundle, from this host or else the repository; None if unreadable."""
        _, manifest = self._store.state(reference)
        if manifest is not None or record is None:
            return manifest
        if record.upload not in self._manifests:  # restic takes seconds for each
            self._interrupt.check(self._repository.name)
            self._manifests[record.upload] = None
            with suppress(ManifestError):
                text = self._read_manifest(reference, record)
                self._manifests[record.upload] = parse_manifest(text, reference)
        return self._manifests[record.upload]

    def _read_manifest(self, reference: str, record: BundleRecord) -> bytes:
        digest = _digest(record)
        if (known := self._cached.get(digest)) is not None:
            return known
        self._repository.progress.step(self._repository.name, f"reading bundle {reference}")
        text = self._bundles.manifest(reference).encode("utf-8", "surrogateescape")
        self._cached.put(digest, text)
        return text

    def _continued(self, contents: Contents) -> set[tuple[str, int]]:
        """The snapshots at which this host's next streams begin."""
        streams: dict[str, list[StreamRecord]] = {}
        for each in contents.streams.values():
            streams.setdefault(each.snapshot.dataset, []).append(each)
        found, here = set(), {each.name for each in self._pool.datasets()}
        for dataset, own in ((each, streams[each]) for each in streams if each in here):
            snapshots, bookmarks = self._pool.snapshots([dataset]), self._pool.bookmarks(dataset)
            copies = ordered(own, Originals(dataset, snapshots, bookmarks).births)
            found |= {(dataset, each.guid) for each in copies[-1:]}
        return found

    def _read(self, contents: Contents, found: RepositoryDecision) -> set[str]:
        """Read what would stay.

        Returns:
            The tags ``upload`` of what was read.

        Raises:
            ReplicaError: some of it is damaged.
        """
        streams, runs = to_read(contents, found, self._now())
        for record in streams:
            self._read_stream(record)
        bundles = [contents.bundles[each.key] for each in runs]
        for run, bundle in zip(runs, bundles, strict=True):
            self._read_bundle(bundle, f"{run.domain}@{run.snapshot}")
        return {each.upload for each in streams} | {each.upload for each in bundles}

    def _read_stream(self, record: StreamRecord) -> None:
        repository, snapshot = self._repository, record.snapshot
        repository.progress.step(repository.name, f"reading {snapshot.full_name}")
        check = ("--check", str(record.bytes), record.sha256)
        status, lines = repository.transfers.run(
            repository.dump(record.stream, STREAM_FILE),
            command(Wanted(snapshot.name, snapshot.guid, record.base), *check),
            through=1,
            size=record.bytes,
        )
        if status != 0:
            reason = f"cannot be read: {repository.reason(lines, reads=True)}"
            self._refuse(snapshot.full_name, f"{reason}; no chain is deleted")

    def _read_bundle(self, record: BundleRecord, name: str) -> None:
        sums = {name: digest for name, (_, digest) in record.files.items()}
        if differing := self._bundles.differing(record, sums):
            reason = f"its bundle is damaged ({', '.join(differing)}); no chain is deleted"
            self._refuse(name, reason)

    def _refuse(self, thing: str, reason: str) -> None:
        name = self._repository.name
        step = f"see: {self._repository.by_hand('check', '--read-data')}; {SEE}"
        raise ReplicaError(f"{name}: {thing}", reason, step)

    @contextmanager
    def _no_replication(self) -> Iterator[None]:
        runtime, interrupt = self._config.paths.runtime, self._interrupt
        with domain_lock(runtime, REPLICATION, REPLICATION, "prune", wait=0, interrupt=interrupt):
            yield

    def _delete(self, contents: Contents, found: RepositoryDecision) -> None:
        steps = in_steps(contents, found)
        if steps:
            with store_errors(self._due.parent):
                private_directory(self._due.parent)
                replace_private(self._due, b"")
                sync_directory(self._due.parent)
        for number, step in enumerate(steps, 1):
            self._interrupt.check(self._repository.name)
            text = f"forgetting old chains, step {number} of {len(steps)}"
            self._repository.progress.step(self._repository.name, text)
            self._repository.forget(step)
        if self._due.exists():
            self._repository.progress.step(self._repository.name, "restic prune")
            self._repository.reclaim()
            self._due.unlink()

    def _line(self, chain: ChainDecision) -> PruneDecision:
        first, last = chain.streams[0].snapshot, chain.streams[-1].snapshot
        text = first.full_name if first == last else f"{first.full_name} to {last.name}"
        name = Path(self._repository.name)
        item = StoreItem(ItemKind.CHAIN, name, "", "", chain.bytes, snapshot=text)
        action = PruneAction.DELETE if chain.delete else PruneAction.KEEP
        usual = not chain.delete and chain.reason not in (_CHANGED, _DAMAGED)
        return PruneDecision(item, action, chain.reason, usual)


def _digest(record: BundleRecord) -> str:
    """The SHA-256 of the manifest of a bundle, as its record has it."""
    return record.files.get(MANIFEST_NAME, (0, "none"))[1]


def _agreed(
    contents: Contents, before: RepositoryDecision, now: RepositoryDecision, read: set[str]
) -> RepositoryDecision:
    """What goes by both decisions, if all that was read between them stays."""
    stays = {record.upload for e in now.chains if not e.delete for record in e.streams}
    stays |= {e.upload for key, e in contents.bundles.items() if key not in now.bundles}
    agreed = {each.uploads for each in before.chains if each.delete and read <= stays}
    without = now.without_streams & before.without_streams
    return replace(now.only(agreed, _CHANGED), without_streams=without)
