"""Verify the copies on a replica where they are, without libvirt.

What is wrong with a copy is decided by :mod:`snaporch.verify.copy_decision`.

The listings are taken again for each domain, and after a bundle that seems damaged: what was pruned
in between is gone, and not damaged. A result is recorded only when all of a copy was read.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

from snaporch.bundle.encrypted_bundles import EncryptedBundles
from snaporch.bundle.manifest import MANIFEST_NAME, Manifest, parse_manifest
from snaporch.bundle.store import RUN_NAME, UUID_NAME, BundleStore
from snaporch.catalog.records import all_records, by_dataset, snapshots_of_record
from snaporch.config import Config, ResticReplica
from snaporch.errors import InterruptedRunError, NotFoundError, SnaporchError, UnavailableError
from snaporch.interrupt import Interrupt
from snaporch.locks import REPLICATION, domain_lock
from snaporch.model import BundleState, PoolSnapshot, SnapshotRecord
from snaporch.progress import Progress
from snaporch.rebuild.plan import guids_of, manifest_of_copy
from snaporch.replication.interface import BundleCopy
from snaporch.verify.copy_decision import (
    MAX_PARTS,
    Copies,
    Copy,
    CopyFacts,
    KnownManifest,
    Seen,
    copies_named_by,
    find_faults,
    is_gone,
    passed_now,
    reason_to_skip,
    seen,
)
from snaporch.verify.copy_results import CopyListing, CopyResult, CopyResults
from snaporch.verify.copy_source import CopySource
from snaporch.zfs import Pool
from snaporch.zfs_names import is_snapshot

_SHOWN = 3
"""Faults that a message names."""
_FAULT_CHARACTERS = 300
"""A fault may have names from the replica, of any length."""
_DOMAIN_CHARACTERS = 255
MAX_UNMARKED = 200
"""Bundles of a guest: more than most retention keeps. A command of its own reads each manifest."""
_REMOVED = "it was removed from the replica meanwhile"


@dataclass(frozen=True, slots=True)
class SkippedCopy:
    """A copy that was not verified, and why; it neither passed nor failed."""

    copy: Copy
    reason: str

    def as_json(self, replica: str) -> dict[str, object]:
        """The documented JSON object.

        Args:
            replica: its name in the configuration.
        """
        return {
            "replica": replica,
            "domain": self.copy.domain,
            "uuid": self.copy.uuid,
            "snapshot": self.copy.snapshot,
            "run": self.copy.run,
            "at": None,
            "passed": None,
            "compared_with": None,
            "failure": None,
            "skipped": self.reason,
            "streams_read": None,
        }


@dataclass(frozen=True, slots=True)
class VerifiedCopy:
    """A copy that was verified."""

    copy: Copy
    result: CopyResult
    files: int
    """Files of its bundle that have their SHA-256."""
    unrecorded: SnaporchError | None = None
    """Why the result could not be recorded."""
    has_streams: bool = False
    """It is in object storage, as streams, of which only the records were read."""

    def as_json(self) -> dict[str, object]:
        """The documented JSON object."""
        streams_read = False if self.has_streams else None
        return {**self.result.as_json(), "skipped": None, "streams_read": streams_read}

    @property
    def problem(self) -> SnaporchError | None:
        """The error to print; None if it passed."""
        result = self.result
        if result.passed:
            return None
        step = "this host has no record of it: restore from another copy"
        if self.copy.is_here:
            words = ["snaporch", "replicate", self.copy.domain, "--to", result.replica, "--recheck"]
            step = f"if this host has it still, copy it again: {shlex.join(words)}"
        thing = f"{result.replica}: {result.full_name}"
        return SnaporchError(thing, f"verification of the copy failed: {result.reason}", step)


@dataclass(frozen=True, slots=True)
class CopyHost:
    """What this host has for a verification."""

    config: Config
    pool: Pool
    progress: Progress
    interrupt: Interrupt
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    @property
    def store(self) -> BundleStore:
        """The bundle store of this host."""
        return BundleStore(self.config.paths.bundles)


@contextmanager
def copies_lock(host: CopyHost, wait: float) -> Iterator[None]:
    """Keep this host from replicating meanwhile: a bundle may be replaced while it is read.

    Args:
        host: this host.
        wait: seconds to wait for a replication.

    Raises:
        BusyError: a replication still runs after ``wait`` seconds.
    """
    runtime = host.config.paths.runtime
    with domain_lock(
        runtime, REPLICATION, REPLICATION, "verify --on", wait=wait, interrupt=host.interrupt
    ):
        yield


class CopyVerifier:
    """Verifies the copies on one replica.

    Args:
        host: this host.
        name: the replica's name in the configuration.
        source: the replica.
        unmarked: how many bundles of a guest are looked at that no mark names.
    """

    def __init__(
        self, host: CopyHost, name: str, source: CopySource, *, unmarked: int = MAX_UNMARKED
    ) -> None:
        self._host = host
        self._name = name
        self._source = source
        self._most_unmarked = unmarked
        self._results = CopyResults(host.config.paths.schedule)
        self._ours: list[PoolSnapshot] = []
        self._by_dataset: Copies = {}
        self._records: dict[str, SnapshotRecord] = {}
        self._listed: Copies = {}
        self.lost: list[SnaporchError] = []

    def find(self) -> list[Copy]:
        """All copies that the replica has, or should have by the marks of this host, oldest first.

        Copies that were verified, and are not on the replica any more, are in :attr:`lost`, and why
        that could not be recorded.

        Raises:
            SnaporchError: a listing failed.
        """
        self._ours = self._host.pool.snapshots()  # first: what arrives meanwhile is no loss
        self._by_dataset = by_dataset(self._ours)
        records = all_records(self._host.store, self._ours)
        own = [each for each in records if not self._is_copy(each) or self._is_named(each)]
        there = self._source.snapshots()
        self._listed = by_dataset(there)
        found: dict[str, Copy] = {}
        for copy in map(_copy_of, there):
            if copy is not None and not (copy.key in found and found[copy.key].has_bundle):
                found[copy.key] = copy
        recorded = {each.key: each for each in self._results.all([self._name])[0]}
        found |= {copy.key: copy for copy in self._unmarked(found.values(), recorded)}
        listed = {copy.uuid for copy in found.values()}
        for record in own:
            key = f"{record.uuid}/{record.run}@{record.snapshot}"
            self._records[key] = record
            is_expected = self._name in (*record.replicated, *record.dropped) or key in recorded
            if key in found or is_expected or self._has_one(record):
                found[key] = self._joined(record, found.get(key))
        self._find_lost(found, listed)
        return sorted(found.values(), key=lambda copy: copy.domain)  # as they are listed

    def _unmarked(
        self, marked: Collection[Copy], verified: Mapping[str, CopyResult]
    ) -> Iterator[Copy]:
        """The copies that bundles name, and that have no mark.

        If guests share a dataset, each of its snapshots has the marks of one of them. Of a guest's
        bundles without a result only the newest are read, as many as the limit.

        Args:
            marked: the copies that the marks name.
            verified: the results, by the keys of their copies.
        """
        known = {copy.reference for copy in marked}
        results: dict[str, list[CopyResult]] = {}
        for result in verified.values():
            results.setdefault(f"{result.uuid}/{result.run}", []).append(result)
        for newest, text in self._source.newest_manifests().items():
            uuid = newest.partition("/")[0]
            runs = [f"{uuid}/{run}" for run in sorted(self._source.bundles(uuid))]
            unknown = [reference for reference in runs if reference not in known]
            others = [reference for reference in unknown if reference not in results]
            left_out = set(others[: -self._most_unmarked])
            if left_out:
                note = f"older bundles that no mark names, and are not looked at: {len(left_out)}"
                self._host.progress.note(f"{self._name}: {uuid}", note)
            manifests: list[Manifest] = []
            for reference in unknown:
                if reference in left_out:
                    continue
                read = text if reference == newest and text else self._source.manifest(reference)
                run = reference.partition("/")[2]
                manifest = manifest_of_copy(read.encode("utf-8", "surrogateescape"), uuid, run)
                if manifest is not None:
                    manifests.append(manifest)
                    continue
                for each in results.get(reference, ()):  # it was whole once
                    yield Copy(each.domain, uuid, run, each.snapshot, has_bundle=True)
            for manifest in sorted(manifests, key=lambda each: each.created):
                yield from copies_named_by(manifest, self._listed, verified)

    def _has_one(self, record: SnapshotRecord) -> bool:
        """Whether the replica has a ZFS snapshot of a record.

        If guests share a dataset, the snapshots have the marks of only one of their runs.
        """
        return any(
            each.name == record.snapshot
            for dataset in record.datasets
            for each in self._by_dataset.get(dataset, ())
            if each.guid in guids_of(self._listed, dataset)
        )

    def _find_lost(self, found: Collection[str], listed: Collection[str]) -> None:
        replica = self._host.config.zfs_replicas.get(self._name)
        is_complete = replica is None or not replica.append_only
        listing = CopyListing({*found, *self._records}, listed, is_complete)
        lost: dict[tuple[str, bool], list[CopyResult]] = {}
        gone, errors = self._results.sort_out(self._name, listing, self._host.now())
        for result, was_listed in gone:
            lost.setdefault((result.domain, was_listed), []).append(result)
        self.lost = [
            self._lost(domain, results, is_known=is_known)
            for (domain, is_known), results in lost.items()
        ]
        self.lost += errors

    def _lost(self, domain: str, results: Sequence[CopyResult], *, is_known: bool) -> SnaporchError:
        """The error for results of copies that are known to be gone, or cannot be listed."""
        names = ", ".join(f"@{each.snapshot}" for each in results[:_SHOWN])
        more = f" and {len(results) - _SHOWN} more" if len(results) > _SHOWN else ""
        if is_known:
            reason = f"copies that were verified before are not on the replica any more: {names}"
            history = "zpool history, on the replica"
            if self._has_streams:
                history = "docs/how-to/object-storage.md"
            step = f"if they were not deleted on purpose, see: {history}"
        else:
            reason = f"copies that failed cannot be listed: {names}"
            step = "an append-only replica lists only datasets that this host knows"
        return SnaporchError(f"{self._name}: {domain}", f"{reason}{more}", step)

    def _is_named(self, record: SnapshotRecord) -> bool:
        """Whether the manifest of this host names a dataset of the record."""
        here = self._manifest_here(f"{record.uuid}/{record.run}")
        named = {entry.dataset for entry in here.manifest.snapshots} if here is not None else set()
        return not named.isdisjoint(record.datasets)

    def _is_copy(self, record: SnapshotRecord) -> bool:
        """Whether all that this host has of a record are copies on a replica in its own pools.

        Another host may be this one by another name, so its replicas count, too.
        """
        roots = {replica.dataset for replica in self._host.config.zfs_replicas.values()}
        places = (each.rpartition("/") for each in record.datasets)
        return all(above in roots and ":" in name for above, _, name in places)

    def _joined(self, record: SnapshotRecord, there: Copy | None) -> Copy:
        has_one = record.state not in (BundleState.MISSING, BundleState.NONE)
        return Copy(
            record.domain,
            record.uuid,
            record.run,
            record.snapshot,
            is_here=True,
            is_promised=self._name in record.replicated,
            is_dropped=self._name in record.dropped,
            has_bundle=has_one or (there is not None and there.has_bundle),
        )

    def verify_sample(
        self, copies: Sequence[Copy], count: int
    ) -> Iterator[VerifiedCopy | SkippedCopy | SnaporchError]:
        """Verify copies until ``count`` were verified: those whose verification is longest ago.

        What was skipped or could not be read does not count: without a result it comes first again.

        Yields, Raises:
            As :meth:`verify`.
        """
        for _, some in groupby(self.longest_ago(copies), key=lambda copy: copy.uuid):
            for outcome in self.verify(list(some)):
                yield outcome
                count -= isinstance(outcome, VerifiedCopy)
                if count <= 0:
                    return

    def longest_ago(self, copies: Sequence[Copy]) -> list[Copy]:
        """Copies by the time of their last verification; those without one first."""
        never = datetime.min.replace(tzinfo=UTC)
        ages: dict[str, datetime] = {}
        for uuid in {copy.uuid for copy in copies}:
            with suppress(UnavailableError):  # which is reported with each of its copies
                results = self._results.of_domain(self._name, uuid)
                ages |= {key: result.at for key, result in results.items()}
        return sorted(copies, key=lambda copy: ages.get(copy.key, never))

    def verify(
        self, copies: Sequence[Copy]
    ) -> Iterator[VerifiedCopy | SkippedCopy | SnaporchError]:
        """Verify copies, which :meth:`find` has found, domain by domain.

        Yields:
            The result, or the error that kept a bundle from being read.

        Raises:
            SnaporchError: the replica cannot be listed any more; the rest is not verified.
            InterruptedRunError: a signal came; nothing is recorded of the copy under way.
        """
        for uuid in dict.fromkeys(copy.uuid for copy in copies):
            self._host.interrupt.check(self._name)
            now = by_dataset(self._source.snapshots())
            bundles = self._source.bundles(uuid)
            read: dict[str, tuple[str, ...]] = {}
            for copy in copies:
                if copy.uuid == uuid:
                    try:
                        yield self._verify(copy, now, bundles.get(copy.run), read)
                    except InterruptedRunError:
                        raise
                    except SnaporchError as error:
                        yield error
                        bundles = self._source.bundles(uuid)  # does it answer?

    def _verify(
        self,
        copy: Copy,
        copies: Copies,
        bundle: BundleCopy | None,
        read: dict[str, tuple[str, ...]],
    ) -> VerifiedCopy | SkippedCopy:
        """Verify a copy.

        Args:
            copy: the copy.
            copies: the present listing.
            bundle: its bundle there.
            read: the damaged files of the bundles that were read; several names have one bundle.
        """
        self._host.interrupt.check(self._name)
        facts = self._facts(copy, copies, bundle)
        manifest = facts.manifest.manifest if facts.manifest is not None else None
        before = seen(copy, manifest, self._listed, None)
        present = seen(copy, manifest, copies, bundle)
        if is_gone(before, present):
            return SkippedCopy(copy, _REMOVED)
        if reason := reason_to_skip(copy, facts):
            return SkippedCopy(copy, reason)
        faults = find_faults(copy, facts)
        sums = _sums(facts.there) if not faults and facts.there is not None else {}
        if sums:
            try:
                faults = [f"{name} is damaged" for name in self._read(copy, sums, read)]
            except InterruptedRunError:
                raise
            except SnaporchError:
                if self._is_gone_now(copy, facts, present):
                    return SkippedCopy(copy, _REMOVED)
                raise
            if faults and self._is_gone_now(copy, facts, present):
                return SkippedCopy(copy, _REMOVED)
        self._host.interrupt.check(self._name)
        result = self._result(copy, facts, faults)
        try:
            self._results.record(result)
        except SnaporchError as error:
            return VerifiedCopy(copy, result, len(sums), error, has_streams=self._has_streams)
        return VerifiedCopy(copy, result, len(sums), has_streams=self._has_streams)

    @property
    def _has_streams(self) -> bool:
        return isinstance(self._host.config.replica.get(self._name), ResticReplica)

    def _facts(self, copy: Copy, copies: Copies, bundle: BundleCopy | None) -> CopyFacts:
        there = None
        if bundle is not None and MANIFEST_NAME in bundle.sizes:
            text = self._source.manifest(copy.reference).encode("utf-8", "surrogateescape")
            manifest = manifest_of_copy(text, copy.uuid, copy.run)
            if manifest is not None and len(manifest.parts) <= MAX_PARTS:
                there = KnownManifest(manifest, hashlib.sha256(text).hexdigest())
        record = self._records.get(copy.key)
        own = snapshots_of_record(self._host.store, self._ours, record) if record else []
        last = self._results.of_domain(self._name, copy.uuid).get(copy.key)
        before = last.before if last is not None else None
        return CopyFacts(
            copies,
            bundle,
            self._manifest_here(copy.reference),
            there,
            tuple(own),
            before,
            last is not None,
            self._has_streams,
        )

    def _manifest_here(self, reference: str) -> KnownManifest | None:
        """The manifest of this host; None if it is missing or damaged.

        Of a bundle that was encrypted for the replica, it is the record of what was sent.
        """
        try:
            here = _known_manifest(self._host.store.path(reference), reference)
            encrypted = EncryptedBundles(self._host.store, self._name)
            manifest = here.manifest if here is not None else None
            if encrypted.record_of(reference, manifest) is not None:
                return _known_manifest(encrypted.path(reference), reference)
        except SnaporchError:
            return None
        return here

    def _read(
        self, copy: Copy, sums: Mapping[str, str], read: dict[str, tuple[str, ...]]
    ) -> tuple[str, ...]:
        """The damaged files of a bundle, which is read unless it was already."""
        if copy.reference not in read:
            self._host.progress.step(self._name, f"reading the bundle of {copy.full_name}")
            named = self._source.damaged(copy.reference, sums)
            # The names are input; an append-only replica also names files of its own record.
            known = [name for name in sums if name in named]
            read[copy.reference] = tuple(
                known or (["a file beside those of the manifest"] if named else [])
            )
        return read[copy.reference]

    def _is_gone_now(self, copy: Copy, facts: CopyFacts, before: Seen) -> bool:
        manifest = facts.manifest.manifest if facts.manifest is not None else None
        copies = by_dataset(self._source.snapshots())
        bundle = self._source.bundles(copy.uuid).get(copy.run)
        return is_gone(before, seen(copy, manifest, copies, bundle))

    def _result(self, copy: Copy, facts: CopyFacts, faults: Sequence[str]) -> CopyResult:
        now, before = self._host.now(), facts.before
        if not faults:
            before = passed_now(now, facts.there)
        more = f", and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        return CopyResult(
            self._name,
            copy.domain,
            copy.uuid,
            copy.run,
            copy.snapshot,
            now,
            passed=not faults,
            source=facts.source,
            reason=f"{'; '.join(each[:_FAULT_CHARACTERS] for each in faults[:_SHOWN])}{more}",
            before=before,
        )


def _known_manifest(directory: Path, thing: str) -> KnownManifest | None:
    try:
        data = (directory / MANIFEST_NAME).read_bytes()
        return KnownManifest(parse_manifest(data, thing), hashlib.sha256(data).hexdigest())
    except (OSError, SnaporchError):
        return None


def _copy_of(snapshot: PoolSnapshot) -> Copy | None:
    """The copy that a snapshot on the replica is a part of; None without valid marks."""
    marks = snapshot.properties
    domain, uuid, run = (marks.get(key, "") for key in ("domain", "uuid", "run"))
    is_valid = (
        0 < len(domain) <= _DOMAIN_CHARACTERS
        and domain.isprintable()
        and re.fullmatch(UUID_NAME, uuid)
        and re.fullmatch(RUN_NAME, run)
        and is_snapshot(snapshot.name)
    )
    has_bundle = marks.get("bundle", "") == f"{uuid}/{run}"
    return Copy(domain, uuid, run, snapshot.name, has_bundle=has_bundle) if is_valid else None


def _sums(known: KnownManifest) -> dict[str, str]:
    """The SHA-256 of each file of a bundle."""
    found = {part.name: part.sha256 for part in known.manifest.parts}
    return {**found, MANIFEST_NAME: known.sha256}


def choose_copies(copies: Sequence[Copy], replica: str, names: Sequence[str]) -> list[Copy]:
    """The copies that ``DOMAIN`` and ``DOMAIN@SNAPSHOT`` name; all without names.

    Raises:
        NotFoundError: the replica has none of this name, and should have none.
    """
    for name in names:
        if not any(copy.is_named(name) for copy in copies):
            known = ", ".join(sorted({copy.domain for copy in copies})) or "no guest"
            reason = f"replica {replica} has no copy of it, but of: {known}"
            domain = shlex.quote(name.partition("@")[0])
            step = f"see: snaporch replicate {domain} --to {replica}"
            raise NotFoundError(name, reason, step)
    return [copy for copy in copies if not names or any(map(copy.is_named, names))]
