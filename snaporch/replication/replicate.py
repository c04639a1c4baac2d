"""Copying a domain's snapshots to a replica, with all that belongs to them.

What has arrived is told by GUIDs, and written down on this host's snapshots only when the replica
has every ZFS snapshot of a run and its bundle. So a transfer that is cut short, at any point, is
just not complete, and the next one goes on.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from snaporch import default_paths
from snaporch.bundle.manifest import Manifest
from snaporch.bundle.store import copy_of
from snaporch.catalog.records import by_dataset, marked_by, one_of_each, run_members
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
_OWN = ("run", "level", "bundle", "uuid", "domain", "verified", "retention", "group")
"""Properties of a snapshot that its copy has too."""
_OF_PAGES = ("ram", "ram-pools")


@dataclass(frozen=True, slots=True)
class Shipped:
    """What came of it."""

    arrived: tuple[SnapshotRecord, ...]
    """Those of which the replica has everything now, and had not before."""
    missing: tuple[SnapshotRecord, ...]
    """Those it cannot have: something of them is gone here."""


def replication_lock_name(uuid: str) -> str:
    """The lock of a domain's snapshots while they are copied; retention leaves them alone then."""
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


def ship(
    context: Context,
    records: Sequence[SnapshotRecord],
    name: str,
    destination: Destination,
    *,
    recheck: bool = False,
) -> Shipped:
    """Copy what the replica lacks of a domain's finished snapshots.

    Args:
        records: all of one domain, oldest first.
        name: the replica's, as the configuration has it.
        recheck: check all of them, also those that are marked as replicated.

    Raises:
        BusyError: they are being copied, or deleted.
        ReplicaError, PoolError, CommandError: it failed; what had arrived by then stays.
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
            records = records[:-1]  # its bundle may still change: RAM is moved into pages last
        wanted = [record for record in records if recheck or name not in record.replicated]
        if not wanted:
            return Shipped((), ())
        names = {dataset for record in records for dataset in record.datasets}
        shipment = _Shipment(context, wanted, name, destination, names)
        if not recheck:
            shipment.refuse_lost([record for record in records if name in record.replicated])
        return shipment.run()


class _Shipment:
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
        self._copies = tuple(f"/{copy_of(each)}" for each in names if "/" in each)

    def refuse_lost(self, before: Sequence[SnapshotRecord]) -> None:
        """See that the replica still has what it got last: another store may lie in its place."""
        last = next((each for each in reversed(before) if each.bundle is not None), None)
        if last is not None and last.run not in self._destination.bundles(last.uuid):
            raise ReplicaError(
                f"{self._name}: {last.full_name}",
                "its bundle is not there any more",
                "is the file system of the replica's bundles mounted? if it is: "
                f"snaporch replicate {shlex.quote(last.domain)} --to {self._name} --recheck",
            )

    def run(self) -> Shipped:
        datasets = self._datasets()
        self._refuse_inside(datasets)
        encrypted = self._context.pool.encrypted()
        copies = by_dataset(self._destination.snapshots(datasets))
        originals = by_dataset(self._context.pool.snapshots(datasets))
        for dataset in datasets:
            self._context.interrupt.check(self._name)
            self._context.progress.step(self._name, f"sending {dataset}")
            with self._going_on():
                self._send(originals[dataset], copies[dataset], dataset, raw=dataset in encrypted)
        ours = self._context.pool.snapshots(datasets)
        theirs = {(each.dataset, each.guid): each for each in self._destination.snapshots(datasets)}
        self._keep_place(ours, theirs)
        self._mark_theirs(ours, theirs)
        members = self._members(ours)
        whole = [record for record in self._records if self._is_there(record, members, theirs)]
        arrived, missing = self._bundles(whole, members)
        self._refuse_less(members, whole, missing)
        for failure in self._failures:
            raise failure
        return Shipped(tuple(arrived), tuple(missing))

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """What fails does not keep the rest from being copied; the first failure is told."""
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
            mark = f"{dataset}#{_prefix(self._name)}{copies[-1].guid}"
            later = [each for each in ours if each.createtxg > marks.get(mark, each.createtxg)]
            if later:
                self._destination.go_on(mark, later[0].full_name, raw=raw)
        self._destination.send(dataset, raw=raw)

    def _refuse_less(
        self,
        members: Mapping[SnapshotRecord, Sequence[PoolSnapshot]],
        whole: Sequence[SnapshotRecord],
        missing: Sequence[SnapshotRecord],
    ) -> None:
        """The newest at least must have arrived."""
        newest = self._records[-1]
        thing = f"{self._name}: {newest.full_name}"
        if newest in missing:
            step = "see: snaporch show, and take another one"
            self._failures.append(ReplicaError(thing, "its bundle here is not whole", step))
        elif members[newest] and newest not in whole:
            step = "see: zfs get -r syncoid:sync, for each of its datasets"
            self._failures.append(ReplicaError(thing, "did not arrive", step))

    def _members(
        self, ours: Sequence[PoolSnapshot]
    ) -> dict[SnapshotRecord, tuple[PoolSnapshot, ...]]:
        """The ZFS snapshots of each record; none if one of them is gone."""
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
            chosen = one_of_each(manifest, members, record.snapshot)
            wanted = self._originals(record)
            chosen = [each for each in chosen if each.dataset in wanted]
            found[record] = tuple(chosen) if len(chosen) == len(wanted) else ()
        return found

    def _originals(self, record: SnapshotRecord) -> set[str]:
        """The record's datasets, without the copies that are on this host.

        Copies carry the same properties, so a run without a manifest cannot tell them from
        originals. A copy is below a configured replica of this host, or is named as snaporch names
        the copy of a dataset of any record: the original's snapshot may have been destroyed.
        """
        return {
            each
            for each in record.datasets
            if not each.startswith(self._local) and not each.endswith(self._copies)
        }

    def _is_there(
        self,
        record: SnapshotRecord,
        members: Mapping[SnapshotRecord, Sequence[PoolSnapshot]],
        theirs: Collection[tuple[str, int]],
    ) -> bool:
        """Whether the replica has all its ZFS snapshots, and the one of its RAM's pages."""
        manifest = self._manifests[record.run]
        wanted = [(each.dataset, each.guid) for each in members[record]]
        if manifest is not None and manifest.pages is not None:
            wanted.append((manifest.pages.dataset, manifest.pages.guid))
        return bool(members[record]) and all(each in theirs for each in wanted)

    def _datasets(self) -> list[str]:
        """Those of the guest's disks, then those of its RAM's pages."""
        disks = {dataset for record in self._records for dataset in self._originals(record)}
        pages = {m.pages.dataset for m in self._manifests.values() if m is not None and m.pages}
        present = {known.name for known in self._context.pool.datasets()}
        return [*sorted(disks), *sorted((pages & present) - disks)]

    def _refuse_inside(self, datasets: Iterable[str]) -> None:
        """A copy below its original would be copied with it, for ever."""
        replica = self._context.config.replica[self._name]
        for dataset in datasets if not replica.host else ():
            if f"{replica.dataset}/".startswith(f"{dataset}/"):
                raise RefusedError(
                    f"replica.{self._name}",
                    f"{replica.dataset} lies in {dataset}, which is to be copied there",
                    "give it another dataset, best in another pool",
                )

    def _mark_theirs(
        self,
        ours: Iterable[PoolSnapshot],
        theirs: Mapping[tuple[str, int], PoolSnapshot],
    ) -> None:
        """Properties do not travel with a stream that goes on after a break; so none do."""
        marks = {}
        for snapshot in ours:
            other = theirs.get((snapshot.dataset, snapshot.guid))
            wanted = {
                key: value
                for key, value in snapshot.properties.items()
                if key in (*_OWN, *_OF_PAGES)
            }
            if other is not None and not wanted.items() <= other.properties.items():
                marks[other.full_name] = wanted
        if marks:
            self._destination.mark(marks)

    def _bundles(
        self,
        whole: Iterable[SnapshotRecord],
        members: Mapping[SnapshotRecord, Sequence[PoolSnapshot]],
    ) -> tuple[list[SnapshotRecord], list[SnapshotRecord]]:
        """Copy the bundles they lack: those that have arrived with all, and those that cannot."""
        there = self._destination.bundles(self._records[0].uuid)
        arrived, missing = [], []
        for record in whole:
            self._context.interrupt.check(self._name)
            with self._going_on():
                has = record.run in there or not _has_bundle(record, members[record])
                if not has and not self._bundle(record):
                    missing.append(record)
                    continue
                there |= {record.run}
                if self._is_unchanged(record):
                    self._mark_ours(members[record], record.run)
                    arrived.append(record)
        return arrived, missing

    def _is_unchanged(self, record: SnapshotRecord) -> bool:
        """Whether it still is what was copied; RAM that went into pages meanwhile comes next."""
        return _manifest(self._context, record) == self._manifests[record.run]

    def _bundle(self, record: SnapshotRecord) -> bool:
        """Copy a bundle; False when it is not whole, or is pruned meanwhile."""
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

    def _mark_ours(self, members: Iterable[PoolSnapshot], run: str) -> None:
        """Those that are marked by the run: other guests may have a part in the others."""
        names: dict[str, list[str]] = {}
        for snapshot in members:
            said = set(snapshot.properties.get(REPLICATED, "").split(",")) - {""}
            if self._name not in said and marked_by(snapshot, run):
                text = ",".join(sorted(said | {self._name}))
                names.setdefault(text, []).append(snapshot.full_name)
        for text, marked in names.items():
            self._context.pool.set_properties(marked, {PREFIX + REPLICATED: text})

    def _keep_place(
        self,
        ours: Sequence[PoolSnapshot],
        theirs: Mapping[tuple[str, int], PoolSnapshot],
    ) -> None:
        """A bookmark of the newest that both have: from it a later stream can go on (zfs-send(8)).

        So retention may delete that snapshot here however long the replica is away.
        """
        pool, prefix = self._context.pool, _prefix(self._name)
        originals, copies = by_dataset(ours), by_dataset(theirs.values())
        for dataset, there in copies.items():
            last = max(there, key=lambda each: each.createtxg).guid
            here = [each for each in originals[dataset] if each.guid == last]
            if not here:  # a bookmark of it, if there is one, is all there is of it here
                continue
            mark = f"{prefix}{last}"
            known = [name for name in pool.bookmarks(dataset) if _is_place(name, prefix)]
            if f"{dataset}#{mark}" not in known:
                pool.bookmark(here[0].full_name, mark)
            for name in known:
                if name != f"{dataset}#{mark}":
                    pool.destroy_bookmark(name)


def _has_bundle(record: SnapshotRecord, members: Iterable[PoolSnapshot]) -> bool:
    """Whether there is one, or was: not every snapshot has one."""
    said = any(each.properties.get("bundle") for each in members)
    return said or record.state is not BundleState.MISSING


def _prefix(name: str) -> str:
    """What the names of a replica's bookmarks begin with."""
    return f"snaporch-{name}-"


def _is_place(name: str, prefix: str) -> bool:
    """Whether it is a bookmark of ours: another replica's name may begin with this one's."""
    rest = name.partition("#")[2]
    return rest.startswith(prefix) and rest[len(prefix) :].isdecimal()


def _manifest(context: Context, record: SnapshotRecord) -> Manifest | None:
    return context.store.state(f"{record.uuid}/{record.run}")[1]
