"""Copy a domain's snapshots and bundles to a replica.

Which streams are needed is decided by :mod:`snaporch.replication.needed_streams`; whether RAM
must not be there in clear, by :mod:`snaporch.replication.ram_in_clear`.

GUIDs show which snapshots have arrived. A snapshot is marked as replicated on this host only when
the replica has every ZFS snapshot of its run, and its bundle. So a transfer that was interrupted at
any point is incomplete, and the next one continues. A mark is removed when the replica no longer
has all of its snapshot.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property

from snaporch import default_paths
from snaporch.bundle.age import COMMAND
from snaporch.bundle.manifest import Manifest
from snaporch.bundle.store import copy_name
from snaporch.catalog.records import COPY, by_dataset, marked_by
from snaporch.context import Context
from snaporch.errors import InterruptedRunError, RefusedError, SnaporchError
from snaporch.journal import read_journals
from snaporch.locks import (
    REPLICATING,
    REPLICATION,
    domain_lock,
    held_by,
    readers_lock,
    replication_lock_name,
)
from snaporch.model import BundleState, PoolSnapshot, SnapshotRecord
from snaporch.remote_host import check_installed
from snaporch.replication.bookmarks import ReplicaBookmarks
from snaporch.replication.bundle_copies import BundleCopies
from snaporch.replication.interface import Destination, ReplicaError
from snaporch.replication.marks import (
    COPIED,
    DROPPED,
    OF_PAGES,
    REPLICATED,
    record_presence,
    replicas,
)
from snaporch.replication.members import Originals, nesting_reason
from snaporch.replication.ram_in_clear import encrypted_disks, secrets_in


@dataclass(frozen=True, slots=True)
class ReplicationResult:
    """The result of copying a domain's snapshots to a replica."""

    arrived: tuple[SnapshotRecord, ...]
    """Snapshots that the replica has completely now, and did not have before."""
    missing: tuple[SnapshotRecord, ...]
    """Snapshots that cannot be replicated, since their bundles on this host are not whole."""
    damaged: tuple[SnapshotRecord, ...] = ()
    """Snapshots whose bundles on the replica were missing or damaged; those that were copied again
    are also among ``arrived``."""
    read: int = 0
    """How many bundles on the replica were read again, and are whole."""
    encrypted: tuple[SnapshotRecord, ...] = ()
    """Snapshots whose bundles were there in clear, and were replaced by encrypted ones."""


@contextmanager
def host_lock(context: Context) -> Iterator[None]:
    """Allow one replication at a time on this host, at low priority.

    Raises:
        BusyError: another replication runs.
    """
    runtime, interrupt = context.config.paths.runtime, context.interrupt
    with domain_lock(runtime, REPLICATION, REPLICATION, "replicate", wait=0, interrupt=interrupt):
        context.lower_priority("replicate")
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
        recheck: read all bundles on the replica, and copy them again even if it has lost all.

    Raises:
        UnavailableError: a command is not installed.
        BusyError: the snapshots are being copied, or deleted.
        ReplicaError, PoolError, CommandError: a transfer failed, or a damaged bundle on the replica
            could not be replaced; what had arrived stays.
        InterruptedRunError: a signal came.
    """
    first = records[0]
    if context.config.replica[name].encrypt_to:
        check_installed(COMMAND)
    with domain_lock(
        default_paths.LOCKS,
        first.domain,
        replication_lock_name(first.uuid),
        REPLICATING,
        wait=0,
        interrupt=context.interrupt,
        replica=name,
    ):
        if held_by(default_paths.LOCKS, first.uuid) is not None:
            records = records[:-1]  # its RAM may be moved into pages, which changes its bundle
        if not records:
            return ReplicationResult((), ())
        names = {dataset for record in records for dataset in record.datasets}
        transfer = _Transfer(context, records, name, destination, names)
        return transfer.run(recheck=recheck)


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
        self._originals = Originals(context.config, records, self._manifests, names)
        self._bundles = BundleCopies(context, destination, name, records, self._manifests)
        self._bookmarks = ReplicaBookmarks(context.pool, name)
        self._failures: list[SnaporchError] = []
        self._members: dict[SnapshotRecord, tuple[PoolSnapshot, ...]] = {}
        self._damaged: list[SnapshotRecord] = []
        self._encrypted: list[SnapshotRecord] = []
        self._unmarked: set[str] = set()
        """Snapshots of this host whose copies may lack properties."""
        self._read = 0
        replica = context.config.replica[name]
        self._marks_stay = replica.append_only
        """The replica never changes a property that it has set."""
        self._encrypts = bool(replica.encrypt_to)
        self._is_held_back = False
        """Snapshots were not sent because of an unfinished run."""
        self._under_way: frozenset[str] = frozenset()
        """Runs that were under way before this host's snapshots were listed."""

    def run(self, *, recheck: bool) -> ReplicationResult:
        pool = self._context.pool
        known = [each.name for each in pool.datasets()]
        datasets = self._originals.datasets(known)
        self._refuse_nested(datasets)
        self._refuse_same_copies(datasets, known)
        if not recheck:
            self._require_bundles()
        if not self._has_copies():
            self._destination.create()
        arrived = self._destination.snapshots(datasets)
        self._members = self._originals.members(pool.snapshots(datasets))
        # First, in one step: sending may be stopped, and what was pruned there does not wait here.
        self._mark_dropped(by_dataset(arrived), _by_guid(arrived))
        self._remove_false_marks(_by_guid(arrived))
        if self._send_all(datasets, by_dataset(arrived)):
            arrived = self._destination.snapshots(datasets)
        self._under_way = _runs_under_way(self._context)
        ours, theirs = pool.snapshots(datasets), _by_guid(arrived)
        self._members = self._originals.members(ours)
        self._tidy_bookmarks(by_dataset(arrived))
        self._mark_copies(ours, theirs)
        with self._collect_failure():
            self._set_policies({dataset for dataset, _ in theirs})
        whole = [r for r in self._records if self._members[r] and not self._lacking(r, theirs)]
        self._bundles.note_in_clear(whole)
        marked, missing = self._copy_bundles(whole, recheck=recheck)
        self._bundles.note_left_in_clear(self._records[-1].domain)
        self._mark_dropped(by_dataset(arrived), theirs)
        self._require_newest(whole, missing)
        self._raise_failures()
        return ReplicationResult(
            tuple(marked),
            tuple(missing),
            tuple(self._damaged),
            self._read,
            tuple(self._encrypted),
        )

    def _require_bundles(self) -> None:
        """Check that the replica has bundles, if it got any: its file system may not be mounted."""
        before = [r for r in self._records if self._name in r.replicated and r.bundle is not None]
        if before and not self._bundles.has_any(before):
            last = before[-1]
            raise ReplicaError(
                f"{self._name}: {last.full_name}",
                "its bundle is missing on the replica, and so are all others",
                "is the file system of the replica's bundles mounted? if it is: "
                f"snaporch replicate {shlex.quote(last.domain)} --to {self._name} --recheck",
            )

    def _has_copies(self) -> bool:
        """Whether the replica got any snapshot of this host, of whichever domain."""
        known = any(self._name in (*each.replicated, *each.dropped) for each in self._records)
        return known or any(
            self._name in replicas(each, REPLICATED) | replicas(each, DROPPED)
            for each in self._context.pool.snapshots()
        )

    def _remove_false_marks(self, theirs: Collection[tuple[str, int]]) -> None:
        """Remove the mark of each snapshot of which the replica has lost anything."""
        for record in self._records:
            members = self._members[record]
            if not self._is_marked(record):
                continue
            if self._lacking(record, theirs):  # as after retention there; its bundle goes, too
                self._record(record, replicated=False)
                continue
            differing = self._bundles.differing(record) if _has_bundle(record, members) else ()
            if differing and not self._bundles.is_in_clear(record):
                self._report_damage(record, differing)
                self._record(record, replicated=False)

    def _report_damage(self, record: SnapshotRecord, files: Sequence[str]) -> None:
        self._damaged.append(record)
        text = f"its bundle there is missing or damaged: {', '.join(files)}"
        self._context.progress.note(f"{self._name}: {record.full_name}", text)

    def _record(self, record: SnapshotRecord, *, replicated: bool, dropped: bool = False) -> bool:
        """Record on the snapshots of a run whether the replica has them.

        Returns:
            False if that failed; the failure is collected.
        """
        with self._collect_failure():
            self._members[record] = record_presence(
                self._context.pool,
                self._members[record],
                record.run,
                self._name,
                replicated=replicated,
                dropped=dropped,
            )
            return True
        return False

    def _is_marked(self, record: SnapshotRecord) -> bool:
        """Whether all snapshots of a run are marked as replicated."""
        own = [each for each in self._members[record] if marked_by(each, record.run)]
        return bool(own) and all(self._name in replicas(each, REPLICATED) for each in own)

    def _lacking(
        self, record: SnapshotRecord, theirs: Collection[tuple[str, int]]
    ) -> list[tuple[str, int]]:
        return self._originals.lacking(record, self._members[record], theirs)

    def _send_all(
        self, datasets: Sequence[str], copies: Mapping[str, Sequence[PoolSnapshot]]
    ) -> bool:
        """Send each dataset; return whether anything was, or may have been."""
        for dataset in datasets:  # the last one may be sent hours later
            with self._collect_failure():
                self._bookmark(dataset, copies[dataset])
        sent = False
        for dataset in datasets:
            self._context.interrupt.check(self._name)
            with self._collect_failure(), self._reading():
                sent |= self._send(dataset, copies[dataset])
        return sent

    def _reading(self) -> AbstractContextManager[None]:
        """Keep the domain's datasets from being rolled back: ZFS holds what it sends."""
        newest, context = self._records[-1], self._context
        return readers_lock(
            default_paths.LOCKS,
            newest.domain,
            newest.uuid,
            alone=False,
            interrupt=context.interrupt,
        )

    @contextmanager
    def _collect_failure(self) -> Iterator[None]:
        """Continue with the rest after a failure; see :meth:`_raise_failures`."""
        try:
            yield
        except InterruptedRunError:
            raise
        except SnaporchError as error:
            self._failures.append(error)

    def _raise_failures(self) -> None:
        """Raise the first of the collected failures, and report the others."""
        failures = list({failure.line(): failure for failure in self._failures}.values())
        for other in failures[1:]:
            self._context.progress.note(other.thing, other.explanation)
        for first in failures:
            raise first

    def _bookmark(self, dataset: str, copies: Sequence[PoolSnapshot]) -> None:
        """Bookmark the replica's newest snapshot, and all that it would get next."""
        self._bookmarks.keep(dataset, self._from_newest(dataset, copies))

    def _from_newest(self, dataset: str, copies: Sequence[PoolSnapshot]) -> list[PoolSnapshot]:
        """This host's snapshots of a dataset from the replica's newest on; see :meth:`_birth`."""
        ours = self._context.pool.snapshots([dataset])
        birth = self._birth(dataset, ours, copies)
        return [each for each in ours if each.createtxg >= birth]

    def _birth(
        self, dataset: str, ours: Sequence[PoolSnapshot], copies: Sequence[PoolSnapshot]
    ) -> int:
        """The txg on this host of the replica's newest snapshot; 0 if the replica has none.

        Raises:
            ReplicaError: this host has neither that snapshot nor a bookmark of it.
        """
        if not copies:
            return 0
        births = dict(self._context.pool.bookmarks(dataset).values())
        births |= {each.guid: each.createtxg for each in ours}
        if copies[-1].guid in births:
            return births[copies[-1].guid]
        common = [each.guid in births for each in copies]
        newest = len(common) - 1 - common[::-1].index(True) if any(common) else -1
        raise self._destination.diverged(dataset, [each.name for each in copies[newest + 1 :]])

    def _send(self, dataset: str, copies: Sequence[PoolSnapshot]) -> bool:
        """Send a dataset if it has snapshots that its copy lacks; return whether it has."""
        found = self._from_newest(dataset, copies)
        with self._collect_failure():
            self._bookmarks.keep(dataset, found)
        if self._marks_stay:
            found = self._before_unfinished(found)
        if {each.guid for each in found} <= {each.guid for each in copies[-1:]}:
            return False
        self._context.progress.step(self._name, f"sending {dataset}")
        with self._collect_failure():
            # Asked now: hours after the first one, another dataset may have this name.
            raw = dataset in self._context.pool.encrypted()
            if not raw and dataset in self._originals.pages():
                self._refuse_clear_pages(dataset)
            self._destination.send(dataset, raw=raw, until=found[-1].createtxg)
        return True

    def _before_unfinished(self, found: Sequence[PoolSnapshot]) -> list[PoolSnapshot]:
        """The snapshots before the first one of an unfinished run, which gets other marks later.

        An append-only replica sets no marks on a snapshot once a newer one has its marks.
        """
        unfinished = _runs_under_way(self._context)
        begun = [e.createtxg for e in found if e.properties.get("run") in unfinished]
        self._is_held_back |= bool(begun)
        return [each for each in found if not begun or each.createtxg < min(begun)]

    def _tidy_bookmarks(self, copies: Mapping[str, Sequence[PoolSnapshot]]) -> None:
        """Bookmark the replica's newest snapshots, and destroy the bookmarks of older ones."""
        for dataset, there in copies.items():
            with self._collect_failure():
                self._bookmark(dataset, there)
                self._bookmarks.tidy(dataset, there)

    def _require_newest(
        self, whole: Sequence[SnapshotRecord], missing: Sequence[SnapshotRecord]
    ) -> None:
        """Count it as a failure if the newest snapshot has not arrived."""
        newest = self._records[-1]
        thing = f"{self._name}: {newest.full_name}"
        members = self._members[newest]
        dropped = any(self._name in replicas(each, DROPPED) for each in members)
        if not self._originals.of(newest):
            reason = f"{', '.join(newest.datasets)} looks like a copy, and its manifest is missing"
            step = "if they are the guest's own, take another snapshot"
            self._failures.append(ReplicaError(thing, reason, step))
        elif newest in missing:
            show = shlex.join(["snaporch", "show", newest.full_name])
            step = f"see: {show}; take another snapshot"
            self._failures.append(ReplicaError(thing, "its bundle here is not whole", step))
        elif not members or newest in whole or dropped or self._failures:
            return
        elif gone := self._originals.destroyed(newest, members):
            names = ", ".join(sorted(each[0][0] for each in gone))
            reason = f"its ZFS snapshot of {names} does not exist any more"
            self._failures.append(ReplicaError(thing, reason, "take another snapshot"))
        elif self._is_held_back:
            reason = "was not sent, because a run before it has not ended"
            step = "try again later; or, if that run was interrupted: snaporch recover"
            self._failures.append(ReplicaError(thing, reason, step))
        else:
            step = f"try again: snaporch replicate {shlex.quote(newest.domain)}"
            self._failures.append(ReplicaError(thing, "did not arrive", step))

    def _mark_dropped(
        self,
        copies: Mapping[str, Sequence[PoolSnapshot]],
        theirs: Collection[tuple[str, int]],
    ) -> None:
        """Record which snapshots the replica cannot get any more, since it has newer ones.

        Only snapshots that exist now count: what came back has another txg than its manifest names,
        and pages of RAM that are missing here may come back.
        """
        births: dict[str, int] = {}
        live: dict[tuple[str, int], int] = {}
        for dataset, there in copies.items():
            ours = self._context.pool.snapshots([dataset])
            live |= {(dataset, each.guid): each.createtxg for each in ours}
            with suppress(ReplicaError):  # the copy has diverged, which was reported
                births[dataset] = self._birth(dataset, ours, there)
        for record in self._records:
            if not self._members[record]:
                continue
            lacking = self._lacking(record, theirs)
            known = [key for key in lacking if key in live and key[0] in births]
            if any(live[key] < births[key[0]] for key in known):
                self._record(record, replicated=False, dropped=True)
            elif self._name in record.dropped and (known or not lacking):
                self._record(record, replicated=self._is_marked(record))

    def _refuse_nested(self, datasets: Iterable[str]) -> None:
        """Refuse a replica that would get copies of copies, or of what it has."""
        reason = nesting_reason(self._context.config.replica[self._name], datasets)
        if reason:
            step = "give the replica another dataset, best in another pool"
            raise RefusedError(f"replica.{self._name}", reason, step)

    def _refuse_same_copies(self, datasets: Iterable[str], known: Iterable[str]) -> None:
        """Refuse a dataset whose copy would have the name of another known dataset's copy."""
        for dataset in datasets:
            for other in known:
                if other != dataset and copy_name(other) == copy_name(dataset):
                    raise RefusedError(
                        f"{self._name}: {dataset}",
                        f"its copy would have the same name as that of {other}",
                        f"rename one of them, such as: zfs rename {shlex.quote(other)} NEW",
                    )

    def _mark_copies(
        self,
        ours: Iterable[PoolSnapshot],
        theirs: Mapping[tuple[str, int], PoolSnapshot],
    ) -> None:
        """Set the properties of the copies: a stream that was resumed does not carry them."""
        marks = {}
        unfinished = self._under_way | _runs_under_way(self._context)
        for snapshot in ours:
            if snapshot.properties.get("run") in unfinished:
                continue  # its level changes, and not every replica changes a property again
            other = theirs.get((snapshot.dataset, snapshot.guid))
            wanted = {
                key: value
                for key, value in snapshot.properties.items()
                if key in (*COPIED, *OF_PAGES)
            }
            if wanted:
                wanted[COPY] = self._name
            if other is None:
                continue
            if self._marks_stay:
                missing = wanted.keys() - other.properties.keys()
                with_bundle = {"uuid", "run"} if "bundle" in missing else set()  # go together
                wanted = {k: v for k, v in wanted.items() if k in missing | with_bundle}
            if not wanted.items() <= other.properties.items():
                marks[other.full_name] = wanted
        if not marks:
            return
        self._unmarked = {*marks}
        with self._collect_failure():
            self._unmarked = {*self._destination.mark(marks)}

    def _set_policies(self, datasets: Collection[str]) -> None:
        """Set the policies of the datasets on their copies: a stream does not carry properties."""
        found = self._context.pool.policies(sorted(datasets))
        self._destination.set_policies({name: found.get(name, "") for name in sorted(datasets)})

    def _copy_bundles(
        self, whole: Sequence[SnapshotRecord], *, recheck: bool
    ) -> tuple[list[SnapshotRecord], list[SnapshotRecord]]:
        """Copy the missing bundles and read those that are due; mark what arrived completely.

        New bundles are copied first: reading the others may take long.

        Returns:
            The snapshots that were marked, and those whose bundles here are not whole.
        """
        marked = [record for record in whole if self._is_marked(record)]
        due = {record.run for record in marked} if recheck else self._bundles.due(marked)
        arrived, missing = [], []
        for record in sorted(whole, key=self._is_marked):
            self._context.interrupt.check(self._name)
            with self._collect_failure():
                if not self._bring_bundle(record, must_read=record.run in due):
                    missing.append(record)
                elif self._has_arrived(record) and self._record(record, replicated=True):
                    arrived.append(record)
        return arrived, missing

    def _bring_bundle(self, record: SnapshotRecord, *, must_read: bool) -> bool:
        """Copy a bundle if the replica lacks it, or its copy is damaged.

        Returns:
            False if the replica lacks it, and it is not whole on this host.
        """
        bundles, marked = self._bundles, self._is_marked(record)
        if not _has_bundle(record, self._members[record]) or bundles.is_read(record):
            return True
        in_clear = bundles.is_in_clear(record)
        if in_clear and self._replace_clear_bundle(record):
            return True
        if in_clear or not bundles.differing(record):
            if marked and not must_read:
                return True
            damaged = bundles.read(record, in_clear=in_clear)
            if not damaged:
                self._read += marked
                return True
            for each in self._same_run(record):
                if self._is_marked(each):
                    self._report_damage(each, damaged)
                    self._record(each, replicated=False)
        self._refuse_clear_bundle(record)
        if bundles.copy(record):
            return True
        if record in self._damaged:
            reason = "its bundle there is damaged, and the one on this host is not whole"
            step = f"see: {shlex.join(['snaporch', 'show', record.full_name])}"
            raise ReplicaError(f"{self._name}: {record.full_name}", reason, step)
        return False

    def _replace_clear_bundle(self, record: SnapshotRecord) -> bool:
        """Replace a bundle that is there in clear by an encrypted one.

        Returns:
            False if it is not whole on this host.
        """
        if not self._bundles.copy(record):
            return False
        if self._bundles.is_read(record):
            self._encrypted += self._same_run(record)
        return True

    def _refuse_clear_bundle(self, record: SnapshotRecord) -> None:
        """Refuse to send secrets in clear of a guest whose disks are sent encrypted.

        Raises:
            ReplicaError: with the ways to send it.
        """
        manifest = self._manifests[record.run]
        if self._encrypts or manifest is None:
            return
        if not (secrets := secrets_in(manifest)):
            return
        locked = self._encrypted_disks
        if locked and not self._has_encrypted_bundles:
            raise ReplicaError(
                f"{self._name}: {record.domain}",
                f"{locked[0]}, and its {' and '.join(secrets)} would be there in clear: the "
                "bundles are not sent",
                f"set encrypt_to in [replica.{self._name}], or have its bundles on an encrypted "
                "dataset: docs/how-to/replication.md, 'Encrypt bundles'",
            )

    @cached_property
    def _has_encrypted_bundles(self) -> bool:
        return self._destination.has_encrypted_bundles()

    @cached_property
    def _encrypted_disks(self) -> list[str]:
        return encrypted_disks(self._context, self._originals.disks(), self._manifests.values())

    def _refuse_clear_pages(self, dataset: str) -> None:
        """Refuse to send pages of RAM in clear where the RAM in a bundle would not be.

        Raises:
            ReplicaError: with the ways to send it.
        """
        if not self._encrypts and not self._encrypted_disks:
            return
        if self._encrypts or not self._destination.is_encrypted():
            raise ReplicaError(
                f"{self._name}: {dataset}",
                "its pages of RAM would be there in clear: the snapshots with them are not sent",
                "set ram_pages.dataset to one below an encrypted dataset, or ram_store to image",
            )

    def _same_run(self, record: SnapshotRecord) -> list[SnapshotRecord]:
        """The records of a run: it may have several names, and they have the same bundle."""
        return [each for each in self._records if each.run == record.run]

    def _has_arrived(self, record: SnapshotRecord) -> bool:
        """Whether the replica has all of a snapshot now, and it is not marked yet."""
        if self._is_marked(record) or not self._is_unchanged(record):
            return False
        return self._unmarked.isdisjoint(each.full_name for each in self._members[record])

    def _is_unchanged(self, record: SnapshotRecord) -> bool:
        """Whether the bundle is still the one that was copied.

        If its RAM was moved into pages meanwhile, the next replication copies these.
        """
        return _manifest(self._context, record) == self._manifests[record.run]


def _runs_under_way(context: Context) -> frozenset[str]:
    return frozenset(each.facts.run for each in read_journals(context.config.paths.journal))


def _by_guid(snapshots: Iterable[PoolSnapshot]) -> dict[tuple[str, int], PoolSnapshot]:
    return {(each.dataset, each.guid): each for each in snapshots}


def _has_bundle(record: SnapshotRecord, members: Iterable[PoolSnapshot]) -> bool:
    """Whether a snapshot has a bundle, or had one; not every snapshot has."""
    return record.state not in (BundleState.MISSING, BundleState.NONE) or any(
        each.properties.get("bundle") for each in members
    )


def _manifest(context: Context, record: SnapshotRecord) -> Manifest | None:
    return context.store.state(f"{record.uuid}/{record.run}")[1]
