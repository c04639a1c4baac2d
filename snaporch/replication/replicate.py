"""Copy a domain's snapshots and bundles to a replica.

GUIDs show which snapshots have arrived. A snapshot is marked as replicated on this host only when
the replica has every ZFS snapshot of its run, and its bundle. So a transfer that was interrupted at
any point is incomplete, and the next one continues.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from snaporch import default_paths
from snaporch.bundle.manifest import Manifest
from snaporch.bundle.store import copy_name
from snaporch.catalog.records import by_dataset, marked_by, one_per_dataset, run_members
from snaporch.context import Context
from snaporch.errors import InterruptedRunError, RefusedError, SnaporchError
from snaporch.locks import domain_lock, held_by
from snaporch.model import BundleState, PoolSnapshot, SnapshotRecord
from snaporch.replication.target import Destination, ReplicaError
from snaporch.systemd.low_priority import lower_priority
from snaporch.zfs import PREFIX

REPLICATED = "replicated"
REPLICATION = "replication"
"""The name of the lock that lets one replication run at a time on a host."""
_COPIED_PROPERTIES = ("run", "level", "bundle", "uuid", "domain", "verified", "retention", "group")
"""Properties of a snapshot that are set on its copy."""
_PAGE_PROPERTIES = ("ram", "ram-pools")


@dataclass(frozen=True, slots=True)
class ReplicationResult:
    """The result of copying a domain's snapshots to a replica."""

    arrived: tuple[SnapshotRecord, ...]
    """Snapshots that the replica has completely now, and did not have before."""
    missing: tuple[SnapshotRecord, ...]
    """Snapshots that cannot be replicated, since their bundles on this host are not whole."""


def replication_lock_name(uuid: str) -> str:
    """The name of the lock that keeps retention from deleting snapshots while they are copied."""
    return f"{uuid}-replication"


@contextmanager
def host_lock(context: Context) -> Iterator[None]:
    """Allow one replication at a time on this host, at low priority.

    Raises:
        BusyError: another replication runs.
    """
    runtime, interrupt = context.config.paths.runtime, context.interrupt
    with domain_lock(runtime, REPLICATION, REPLICATION, "replicate", wait=0, interrupt=interrupt):
        lower_priority("replicate")
        yield


def replicate(
    context: Context,
    records: Sequence[SnapshotRecord],
    name: str,
    destination: Destination,
    *,
    recheck: bool = False,
) -> ReplicationResult:
    """Copy the finished snapshots of a domain that the replica lacks.

    Args:
        records: all finished snapshots of one domain, oldest first.
        name: the replica's name in the configuration.
        destination: the replica.
        recheck: check all snapshots, also those that are marked as replicated.

    Raises:
        BusyError: the snapshots are being copied, or deleted.
        ReplicaError, PoolError, CommandError: a transfer failed; what had arrived stays.
        InterruptedRunError: a signal came.
    """
    first = records[0]
    with domain_lock(
        default_paths.LOCKS,
        first.domain,
        replication_lock_name(first.uuid),
        "replicate",
        wait=0,
        interrupt=context.interrupt,
    ):
        if held_by(default_paths.LOCKS, first.uuid) is not None:
            records = records[:-1]  # its RAM may be moved into pages, which changes its bundle
        wanted = [record for record in records if recheck or name not in record.replicated]
        if not wanted:
            return ReplicationResult((), ())
        names = {dataset for record in records for dataset in record.datasets}
        transfer = _Transfer(context, wanted, name, destination, names)
        if not recheck:
            transfer.require_last_bundle(
                [record for record in records if name in record.replicated]
            )
        return transfer.run()


class _Transfer:
    def __init__(
        self,
        context: Context,
        records: Sequence[SnapshotRecord],
        name: str,
        destination: Destination,
        names: Collection[str],
    ) -> None:
        self._context = context
        self._records = records
        self._name = name
        self._destination = destination
        self._manifests = {record.run: _manifest(context, record) for record in records}
        self._failures: list[SnaporchError] = []
        replicas = context.config.replica.values()
        self._local = tuple(f"{each.dataset}/" for each in replicas if not each.host)
        self._copies = tuple(f"/{copy_name(each)}" for each in names if "/" in each)

    def require_last_bundle(self, before: Sequence[SnapshotRecord]) -> None:
        """Check that the replica still has the last bundle: its file system may not be mounted."""
        last = next((each for each in reversed(before) if each.bundle is not None), None)
        if last is not None and last.run not in self._destination.bundles(last.uuid):
            raise ReplicaError(
                f"{self._name}: {last.full_name}",
                "its bundle is missing on the replica",
                "is the file system of the replica's bundles mounted? if it is: "
                f"snaporch replicate {shlex.quote(last.domain)} --to {self._name} --recheck",
            )

    def run(self) -> ReplicationResult:
        datasets = self._datasets()
        self._refuse_nested(datasets)
        encrypted = self._context.pool.encrypted()
        copies = by_dataset(self._destination.snapshots(datasets))
        originals = by_dataset(self._context.pool.snapshots(datasets))
        for dataset in datasets:
            self._context.interrupt.check(self._name)
            self._context.progress.step(self._name, f"sending {dataset}")
            with self._collect_failure():
                self._send(originals[dataset], copies[dataset], dataset, raw=dataset in encrypted)
        ours = self._context.pool.snapshots(datasets)
        theirs = {(each.dataset, each.guid): each for each in self._destination.snapshots(datasets)}
        self._bookmark_newest(ours, theirs)
        self._mark_copies(ours, theirs)
        members = self._members(ours)
        whole = [record for record in self._records if self._has_arrived(record, members, theirs)]
        arrived, missing = self._copy_bundles(whole, members)
        self._require_newest(members, whole, missing)
        for failure in self._failures:
            raise failure
        return ReplicationResult(tuple(arrived), tuple(missing))

    @contextmanager
    def _collect_failure(self) -> Iterator[None]:
        """Continue with the rest after a failure; the first failure is raised at the end."""
        try:
            yield
        except InterruptedRunError:
            raise
        except SnaporchError as error:
            self._failures.append(error)

    def _send(
        self,
        ours: Sequence[PoolSnapshot],
        copies: Sequence[PoolSnapshot],
        dataset: str,
        *,
        raw: bool,
    ) -> None:
        if copies and copies[-1].guid not in {each.guid for each in ours}:
            marks = self._context.pool.bookmarks(dataset)
            mark = f"{dataset}#{_bookmark_prefix(self._name)}{copies[-1].guid}"
            later = [each for each in ours if each.createtxg > marks.get(mark, each.createtxg)]
            if later:
                self._destination.send_from_bookmark(mark, later[0].full_name, raw=raw)
        self._destination.send(dataset, raw=raw)

    def _require_newest(
        self,
        members: Mapping[SnapshotRecord, Sequence[PoolSnapshot]],
        whole: Sequence[SnapshotRecord],
        missing: Sequence[SnapshotRecord],
    ) -> None:
        """Count it as a failure if the newest snapshot has not arrived."""
        newest = self._records[-1]
        thing = f"{self._name}: {newest.full_name}"
        if newest in missing:
            step = "see: snaporch show; take another snapshot"
            self._failures.append(ReplicaError(thing, "its bundle here is not whole", step))
        elif members[newest] and newest not in whole:
            step = "see: zfs get -r syncoid:sync, for each of its datasets"
            self._failures.append(ReplicaError(thing, "did not arrive", step))

    def _members(
        self, ours: Sequence[PoolSnapshot]
    ) -> dict[SnapshotRecord, tuple[PoolSnapshot, ...]]:
        """The ZFS snapshots of each record; empty if one of them is missing."""
        by_run: dict[str, list[PoolSnapshot]] = defaultdict(list)
        by_guid = {}
        for each in ours:
            by_run[each.properties.get("run", "")].append(each)
            by_guid[each.dataset, each.guid] = each
        found = {}
        for record in self._records:
            manifest = self._manifests[record.run]
            known = [(e.dataset, e.guid) for e in manifest.snapshots] if manifest else []
            near = {each.full_name: each for each in by_run[record.run]}
            near |= {by_guid[key].full_name: by_guid[key] for key in known if key in by_guid}
            members = run_members(manifest, record.run, near.values())
            chosen = one_per_dataset(manifest, members, record.snapshot)
            wanted = self._originals(record)
            chosen = [each for each in chosen if each.dataset in wanted]
            found[record] = tuple(chosen) if len(chosen) == len(wanted) else ()
        return found

    def _originals(self, record: SnapshotRecord) -> set[str]:
        """The record's datasets, without the copies that are on this host.

        Copies carry the same properties, so a run without a manifest cannot distinguish them
        from originals. A copy is below a configured replica of this host, or is named as snaporch
        names the copy of a dataset of any record: the original's snapshot may have been destroyed.
        """
        return {
            each
            for each in record.datasets
            if not each.startswith(self._local) and not each.endswith(self._copies)
        }

    def _has_arrived(
        self,
        record: SnapshotRecord,
        members: Mapping[SnapshotRecord, Sequence[PoolSnapshot]],
        theirs: Collection[tuple[str, int]],
    ) -> bool:
        """Whether the replica has all ZFS snapshots of a record, and that of its pages of RAM."""
        manifest = self._manifests[record.run]
        wanted = [(each.dataset, each.guid) for each in members[record]]
        if manifest is not None and manifest.pages is not None:
            wanted.append((manifest.pages.dataset, manifest.pages.guid))
        return bool(members[record]) and all(each in theirs for each in wanted)

    def _datasets(self) -> list[str]:
        """The datasets of the guest's disks, then those of its pages of RAM."""
        disks = {dataset for record in self._records for dataset in self._originals(record)}
        pages = {m.pages.dataset for m in self._manifests.values() if m is not None and m.pages}
        present = {known.name for known in self._context.pool.datasets()}
        return [*sorted(disks), *sorted((pages & present) - disks)]

    def _refuse_nested(self, datasets: Iterable[str]) -> None:
        """Refuse a replica below a dataset to copy: each copy would be copied, too, for ever."""
        replica = self._context.config.replica[self._name]
        for dataset in datasets if not replica.host else ():
            if f"{replica.dataset}/".startswith(f"{dataset}/"):
                raise RefusedError(
                    f"replica.{self._name}",
                    f"{replica.dataset} is inside {dataset}, which is copied to it",
                    "give it another dataset, best in another pool",
                )

    def _mark_copies(
        self,
        ours: Iterable[PoolSnapshot],
        theirs: Mapping[tuple[str, int], PoolSnapshot],
    ) -> None:
        """Set the properties of the copies: a stream that was resumed does not carry them."""
        marks = {}
        for snapshot in ours:
            other = theirs.get((snapshot.dataset, snapshot.guid))
            wanted = {
                key: value
                for key, value in snapshot.properties.items()
                if key in (*_COPIED_PROPERTIES, *_PAGE_PROPERTIES)
            }
            if other is not None and not wanted.items() <= other.properties.items():
                marks[other.full_name] = wanted
        if marks:
            self._destination.mark(marks)

    def _copy_bundles(
        self,
        whole: Iterable[SnapshotRecord],
        members: Mapping[SnapshotRecord, Sequence[PoolSnapshot]],
    ) -> tuple[list[SnapshotRecord], list[SnapshotRecord]]:
        """Copy the missing bundles; mark the snapshots that have arrived completely.

        Returns:
            The snapshots that have arrived now, and those whose bundles here are not whole.
        """
        there = self._destination.bundles(self._records[0].uuid)
        arrived, missing = [], []
        for record in whole:
            self._context.interrupt.check(self._name)
            with self._collect_failure():
                has = record.run in there or not _has_bundle(record, members[record])
                if not has and not self._copy_bundle(record):
                    missing.append(record)
                    continue
                there |= {record.run}
                if self._is_unchanged(record):
                    self._mark_originals(members[record], record.run)
                    arrived.append(record)
        return arrived, missing

    def _is_unchanged(self, record: SnapshotRecord) -> bool:
        """Whether the bundle is still the one that was copied.

        If its RAM was moved into pages meanwhile, the next replication copies these.
        """
        return _manifest(self._context, record) == self._manifests[record.run]

    def _copy_bundle(self, record: SnapshotRecord) -> bool:
        """Copy a bundle; False if it is not whole, or was pruned meanwhile."""
        store, reference = self._context.store, f"{record.uuid}/{record.run}"
        if store.state(reference)[0] is not BundleState.COMPLETE:
            return False
        self._context.progress.step(self._name, f"copying the bundle of @{record.snapshot}")
        try:
            self._destination.store(store.path(reference), reference)
        except ReplicaError:
            if store.path(reference).is_dir():
                raise
            return False
        return True

    def _mark_originals(self, members: Iterable[PoolSnapshot], run: str) -> None:
        """Mark the snapshots of the run as replicated.

        Snapshots with another run's mark are shared with other guests, and stay as they are.
        """
        names: dict[str, list[str]] = {}
        for snapshot in members:
            replicas = set(snapshot.properties.get(REPLICATED, "").split(",")) - {""}
            if self._name not in replicas and marked_by(snapshot, run):
                text = ",".join(sorted(replicas | {self._name}))
                names.setdefault(text, []).append(snapshot.full_name)
        for text, marked in names.items():
            self._context.pool.set_properties(marked, {PREFIX + REPLICATED: text})

    def _bookmark_newest(
        self,
        ours: Sequence[PoolSnapshot],
        theirs: Mapping[tuple[str, int], PoolSnapshot],
    ) -> None:
        """Bookmark the newest common snapshot: a later stream can begin there (zfs-send(8)).

        So retention may delete that snapshot on this host, however long the replica is away.
        """
        pool, prefix = self._context.pool, _bookmark_prefix(self._name)
        originals, copies = by_dataset(ours), by_dataset(theirs.values())
        for dataset, there in copies.items():
            last = max(there, key=lambda each: each.createtxg).guid
            here = [each for each in originals[dataset] if each.guid == last]
            if not here:  # the snapshot is destroyed here; keep a bookmark of it if there is one
                continue
            mark = f"{prefix}{last}"
            known = [name for name in pool.bookmarks(dataset) if _is_bookmark(name, prefix)]
            if f"{dataset}#{mark}" not in known:
                pool.bookmark(here[0].full_name, mark)
            for name in known:
                if name != f"{dataset}#{mark}":
                    pool.destroy_bookmark(name)


def _has_bundle(record: SnapshotRecord, members: Iterable[PoolSnapshot]) -> bool:
    """Whether a snapshot has a bundle, or had one; not every snapshot has."""
    return record.state is not BundleState.MISSING or any(
        each.properties.get("bundle") for each in members
    )


def _bookmark_prefix(name: str) -> str:
    """The beginning of the names of a replica's bookmarks."""
    return f"snaporch-{name}-"


def _is_bookmark(name: str, prefix: str) -> bool:
    """Whether a bookmark is this replica's: another replica's name may begin with this one's."""
    rest = name.partition("#")[2]
    return rest.startswith(prefix) and rest[len(prefix) :].isdecimal()


def _manifest(context: Context, record: SnapshotRecord) -> Manifest | None:
    return context.store.state(f"{record.uuid}/{record.run}")[1]
