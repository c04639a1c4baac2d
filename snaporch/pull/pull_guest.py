"""On the machine that pulls: copy the snapshots and bundles of one guest from a source.

GUIDs show what has arrived. A run is here when its bundle is, and a ZFS snapshot of each dataset:
any one of the instant, as for ``rebuild``. A failure of one dataset or bundle does not stop the
others.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Protocol

from snaporch.bundle.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestError,
    PagesEntry,
    SnapshotEntry,
    parse_manifest,
)
from snaporch.bundle.store import COPY_NAME, copy_name
from snaporch.errors import InterruptedRunError, RefusedError, SnaporchError, UnavailableError
from snaporch.model import PoolSnapshot
from snaporch.progress import Progress
from snaporch.pull.local_copies import LocalCopies
from snaporch.pull.send_request import MAX_FILES
from snaporch.pull.source import PullSource
from snaporch.pull.source_listing import MAX_DATASETS, OfferedDataset, OfferedGuest
from snaporch.rebuild.plan import guids_of, members_of
from snaporch.replication.interface import ReplicaError, readable
from snaporch.replication.ram_in_clear import secrets_in
from snaporch.replication.receive_request import SentFile, parse_request, request_command
from snaporch.replication.receive_request import Verb as ReceiveVerb
from snaporch.replication.received_bundles import ReceivedBundles
from snaporch.replication.resume_transfer import NO_TOKEN, is_refusal
from snaporch.replication.unsent_files import unsent_files
from snaporch.zfs import PoolError
from snaporch.zfs_names import is_dataset


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int, /) -> bytes:
        """Some of the next bytes."""


class _Nothing:
    def read(self, _size: int, /) -> bytes:
        return b""


@dataclass
class GuestResult:
    """The result of pulling a guest."""

    uuid: str
    domain: str
    arrived: list[str] = field(default_factory=list)
    """Names of snapshots of which all is here now, and was not before."""
    waiting: tuple[str, ...] = ()
    """Snapshots that wait until a run on the source has ended."""
    skipped: list[str] = field(default_factory=list)
    """Snapshots that are not here with all of their run; each has a failure."""
    dropped: list[str] = field(default_factory=list)
    """Snapshots that cannot come any more, because the copy has a newer one."""
    failures: list[SnaporchError] = field(default_factory=list)
    newest: datetime | None = None
    """When the newest snapshot of which all is here was taken."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A run on the source: its snapshots of all datasets."""

    name: str
    run: str
    created: datetime
    members: tuple[PoolSnapshot, ...]
    reference: str
    """Its bundle; empty if it has none."""


class GuestPull:
    """Pulls one guest.

    Args:
        name: the source's name in the configuration.
        source: the host.
        copies: the copies of its datasets.
        bundles: the bundles of the source here.
        directory: where they are, for its free space.
        progress: gets steps and notes.
    """

    def __init__(
        self,
        name: str,
        source: PullSource,
        copies: LocalCopies,
        bundles: ReceivedBundles,
        directory: Path,
        progress: Progress,
    ) -> None:
        self._name = name
        self._source = source
        self._copies = copies
        self._bundles = bundles
        self._directory = directory
        self._progress = progress

    def pull(self, guest: OfferedGuest) -> GuestResult:
        """Copy what is missing.

        Raises:
            InterruptedRunError: a signal came; the next pull continues.
        """
        result = GuestResult(guest.uuid, guest.domain, waiting=guest.waiting)
        thing = f"{self._name}: {guest.domain}"
        for each in guest.shared:
            reason = f"{each} is not sent, because a guest that may not be copied uses it, too"
            step = "on the source: let the key have that guest, too, or move its disk away"
            result.failures.append(ReplicaError(thing, reason, step))
        before = self._guids(guest)
        for dataset in guest.datasets:
            with _collecting(result):
                try:
                    self._refuse_clear_pages(guest, dataset)
                    self._bring(guest.uuid, dataset)
                finally:  # also after a signal: without its marks, a snapshot has no run
                    self._mark(dataset)
        there = self._there(guest)
        with _collecting(result):
            self._bring_runs(guest, there, before, result)
        return result

    def _there(self, guest: OfferedGuest) -> Mapping[str, Sequence[PoolSnapshot]]:
        return self._copies.snapshots([each.name for each in guest.datasets])

    def _guids(self, guest: OfferedGuest) -> set[int]:
        return {each.guid for some in self._there(guest).values() for each in some}

    def _mark(self, dataset: OfferedDataset) -> None:
        if copies := self._copies.snapshots([dataset.name])[dataset.name]:
            self._copies.mark(dataset, copies)
            self._copies.set_policy(dataset.name, dataset.policy)

    # -- snapshots -------------------------------------------------------------------------------

    def _bring(self, uuid: str, dataset: OfferedDataset) -> None:
        """Receive what the copy of a dataset lacks, one snapshot after another."""
        copies = self._copies.snapshots([dataset.name])[dataset.name]
        base = self._base(dataset, copies)
        birth = dataset.births[base] if base else -1
        missing = [each for each in dataset.snapshots if each.createtxg > birth]
        self._refuse_same_names(dataset, missing, copies)
        for number, wanted in enumerate(missing, 1):
            text = f"{wanted.full_name} ({number} of {len(missing)})"
            self._progress.step(self._name, f"receiving {text}")
            self._receive(uuid, dataset, wanted, base)
            base = wanted.guid

    def _base(self, dataset: OfferedDataset, copies: Sequence[PoolSnapshot]) -> int:
        """The GUID of the copy's newest snapshot; 0 without one.

        Raises:
            ReplicaError: the source has neither that snapshot nor a bookmark of it.
        """
        if not copies:
            return 0
        if copies[-1].guid in dataset.births:
            return copies[-1].guid
        copy = self._copies.copy_of(dataset.name)
        raise ReplicaError(
            f"{self._name}: {dataset.name}",
            f"the source has neither {copies[-1].full_name} nor a bookmark of it, as after a "
            "restore there",
            f"keep what is here: {_rename(copy, f'{copy}-kept-{copies[-1].guid}')}; then the next "
            "pull brings a full copy: see docs/how-to/pull.md",
        )

    def _refuse_same_names(
        self,
        dataset: OfferedDataset,
        missing: Sequence[PoolSnapshot],
        copies: Sequence[PoolSnapshot],
    ) -> None:
        known = {each.name: each.guid for each in copies}
        for each in missing:
            if each.name in known:
                old = f"{self._copies.copy_of(dataset.name)}@{each.name}"
                raise ReplicaError(
                    f"{self._name}: {each.full_name}",
                    f"{old} is another snapshot of the same name, which was used again",
                    f"keep it under another name: {_rename(old, f'{old}-kept-{known[each.name]}')}",
                )

    def _receive(self, uuid: str, dataset: OfferedDataset, wanted: PoolSnapshot, base: int) -> None:
        """Receive a snapshot; continue its interrupted transfer, or begin again."""
        token = self._copies.token(dataset.name)
        refused = ""
        if token != NO_TOKEN:
            try:
                with self._source.stream(uuid, wanted, base, token) as incoming:
                    refused = incoming.refused
                    if not refused:
                        self._copies.receive(dataset, wanted, incoming.stream)
            except PoolError as error:
                if not is_refusal(error.reason) or self._copies.token(dataset.name) != token:
                    raise
                refused = error.reason
            if not refused:
                return
            text = f"an interrupted transfer is not continued, but begins again: {refused}"
            self._progress.note(f"{self._name}: {dataset.name}", text)
            self._copies.discard_partial(dataset.name)
        with self._source.stream(uuid, wanted, base, NO_TOKEN) as incoming:
            if incoming.refused:
                raise ReplicaError(f"{self._name}: {wanted.full_name}", "was not sent")
            self._copies.receive(dataset, wanted, incoming.stream)

    # -- bundles ---------------------------------------------------------------------------------

    def _bring_runs(
        self,
        guest: OfferedGuest,
        there: Mapping[str, Sequence[PoolSnapshot]],
        before: set[int],
        result: GuestResult,
    ) -> None:
        """Fetch the bundles of the runs whose snapshots are here; find which runs are complete."""
        present = self._bundles.bundles(guest.uuid)
        whole = {
            run for run, each in present.items() if {COPY_NAME, MANIFEST_NAME} <= each.sizes.keys()
        }
        had_bundles = {*whole}
        guids = {each.guid for some in there.values() for each in some}
        failed = {error.thing for error in result.failures}
        waiting = {each.partition("@")[2] for each in guest.waiting}
        for run in _runs(guest):
            if run.name in waiting:
                continue  # another of its datasets has a run that has not ended
            lacking = [each for each in run.members if each.guid not in guids]
            if lacking:
                newer = [each for each in lacking if _is_dropped(each, guest, there)]
                if newer == lacking:
                    result.dropped.append(run.name)
                else:
                    result.skipped.append(run.name)
                    if not failed:
                        reason = f"@{run.name} did not arrive with all of its snapshots"
                        thing = f"{self._name}: {guest.domain}"
                        result.failures.append(ReplicaError(thing, reason, "pull again"))
                continue
            had = run.run in had_bundles or not run.reference
            try:
                if run.reference:
                    self._bring_bundle(guest, run, there, fetch=run.run not in whole)
                    whole.add(run.run)
            except InterruptedRunError:
                raise
            except SnaporchError as error:
                result.failures.append(error)
                result.skipped.append(run.name)
                continue
            if not (had and {each.guid for each in run.members} <= before):
                result.arrived.append(run.name)
            result.newest = max(filter(None, (result.newest, run.created)))

    def _bring_bundle(
        self,
        guest: OfferedGuest,
        run: _Run,
        there: Mapping[str, Sequence[PoolSnapshot]],
        *,
        fetch: bool,
    ) -> None:
        """Fetch a bundle, or read the manifest of the one that is here.

        Raises:
            SnaporchError: the bundle is not here, or a ZFS snapshot of its manifest is not.
        """
        thing = f"{self._name}: bundle {run.reference} of @{run.name}"
        uuid, _, name = run.reference.partition("/")
        if fetch:
            text = self._source.manifest(run.reference)
            if not text:
                step = "take another snapshot; see on the source: snaporch list"
                raise ReplicaError(thing, "is not whole on the source, and was skipped", step)
        else:
            text = self._bundles.manifest(uuid, name).encode("utf-8", "surrogateescape")
        manifest = _parsed(text, thing, run)
        if gone := _lacking(manifest, run.name, {**self._former(manifest, there), **there}):
            raise _not_here(thing, gone[0], there)
        if fetch:
            self._refuse_clear(guest, manifest)
            self._progress.step(self._name, f"receiving the bundle of @{run.name}")
            self._fetch(thing, run.reference, manifest, text)

    def _refuse_clear(self, guest: OfferedGuest, manifest: Manifest) -> None:
        """Refuse to store in clear here what is as secret as disks that are encrypted.

        Raises:
            ReplicaError: with the way to store it.
        """
        locked, secrets = _locked_datasets(guest.datasets, manifest), secrets_in(manifest)
        if secrets and locked and not self._copies.is_encrypted(self._directory):
            raise ReplicaError(
                f"{self._name}: {guest.domain}",
                f"{locked[0]} is encrypted, and its {' and '.join(secrets)} would be here in "
                "clear: the bundles are not pulled",
                f"have the bundles of [source.{self._name}] on an encrypted dataset: "
                "docs/how-to/pull.md, 'Encrypted guests'",
            )

    def _refuse_clear_pages(self, guest: OfferedGuest, dataset: OfferedDataset) -> None:
        """Refuse pages of RAM in clear where the RAM in a bundle would be refused.

        Raises:
            ReplicaError: with the ways to store them.
        """
        has_pages = any("ram" in each.properties for each in dataset.snapshots)
        if not has_pages or dataset.raw or not _locked_datasets(guest.datasets, None):
            return
        if not self._copies.is_encrypted():
            raise ReplicaError(
                f"{self._name}: {dataset.name}",
                "its pages of RAM would be here in clear: the snapshots with them are not pulled",
                "on the source: set ram_pages.dataset to one below an encrypted dataset, or "
                "ram_store to image",
            )

    def _former(
        self, manifest: Manifest, there: Mapping[str, Sequence[PoolSnapshot]]
    ) -> Mapping[str, Sequence[PoolSnapshot]]:
        """The copies of datasets that the guest has no more, such as from before a rename."""
        names = {each.dataset for each in manifest.snapshots}
        names |= {manifest.pages.dataset} if manifest.pages else set()
        possible = [each for each in names - there.keys() if is_dataset(self._copies.copy_of(each))]
        return self._copies.snapshots(possible[:MAX_DATASETS]) if possible else {}

    def _fetch(self, thing: str, reference: str, manifest: Manifest, text: bytes) -> None:
        """Fetch the files of a bundle, and store it when all have their SHA-256."""
        uuid, _, run = reference.partition("/")
        sizes = {each.name: each.bytes for each in manifest.parts} | {MANIFEST_NAME: len(text)}
        sums = {each.name: each.sha256 for each in manifest.parts}
        sums[MANIFEST_NAME] = hashlib.sha256(text).hexdigest()
        unsent = unsent_files(sizes, sums, self._bundles.begun(uuid, run))
        files = _checked_files(thing, reference, unsent.files)
        self._check_room(thing, unsent.bytes)
        if unsent.bytes:
            with self._source.bundle(reference, unsent) as stream:
                damaged = self._store(reference, files, stream)
        else:
            damaged = self._store(reference, files, _Nothing())
        if damaged:
            reason = f"arrived damaged, and was discarded: {', '.join(damaged)}"
            step = f"pull again; if it comes again, on the source: snaporch verify (bundle {run})"
            raise ReplicaError(thing, reason, step)

    def _store(self, reference: str, files: Sequence[SentFile], stream: Readable) -> list[str]:
        uuid, _, run = reference.partition("/")
        return self._bundles.store(uuid, run, files, stream)

    def _check_room(self, thing: str, size: int) -> None:
        found = os.statvfs(self._directory)
        if size > (free := found.f_bavail * found.f_frsize):
            reason = f"needs {size} bytes, and {self._directory} has {free} free"
            raise UnavailableError(thing, reason, "make room there, and pull again")


def _locked_datasets(
    datasets: Iterable[OfferedDataset], manifest: Manifest | None
) -> Sequence[str]:
    """The encrypted datasets of a guest: as they are sent, or as its bundle has them."""
    around = manifest.surroundings if manifest is not None else None
    then = {e.dataset for e in around.datasets if e.encryption_root} if around else set()
    return sorted(then | {each.name for each in datasets if each.raw})


def _runs(guest: OfferedGuest) -> Iterator[_Run]:
    """The runs of a guest's disks, the oldest first; a run with several names comes for each."""
    everything = [each for dataset in guest.datasets for each in dataset.snapshots]
    found: dict[tuple[str, str], list[PoolSnapshot]] = defaultdict(list)
    for each in everything:
        if each.properties.get("uuid") == guest.uuid and "run" in each.properties:
            found[each.properties["run"], each.name].append(each)
    marked = {run for run, _ in found}
    sharing: dict[tuple[str, int], list[str]] = defaultdict(list)
    for run in guest.unmarked.keys() - marked:
        for key in guest.unmarked[run]:
            sharing[key].append(run)
    for each in everything:
        for run in sharing.get((each.dataset, each.guid), ()):
            found[run, each.name].append(each)
    for (run, name), members in sorted(found.items(), key=lambda pair: pair[1][0].created):
        reference = f"{guest.uuid}/{run}"
        if run in marked and not any("bundle" in each.properties for each in members):
            reference = ""
        yield _Run(name, run, members[0].created, tuple(members), reference)


def _is_dropped(
    snapshot: PoolSnapshot,
    guest: OfferedGuest,
    there: Mapping[str, Sequence[PoolSnapshot]],
) -> bool:
    """Whether the copy has a newer snapshot than this one, so that no stream brings it any more."""
    copies = there.get(snapshot.dataset, ())
    dataset = next(each for each in guest.datasets if each.name == snapshot.dataset)
    birth = dataset.births.get(copies[-1].guid) if copies else None
    return birth is not None and snapshot.createtxg < birth


def _lacking(
    manifest: Manifest, name: str, there: Mapping[str, Sequence[PoolSnapshot]]
) -> list[SnapshotEntry | PagesEntry]:
    """The ZFS snapshots of a bundle that are not here, by the rules of ``rebuild``.

    Args:
        manifest: of the bundle.
        name: of the snapshot; of each dataset, another one of the same instant will do.
        there: the copies' snapshots by the source's dataset.
    """
    copies = {copy_name(dataset): some for dataset, some in there.items()}
    has = {each.dataset for each in members_of(manifest, name, copies)}
    found: dict[str, SnapshotEntry | PagesEntry] = {}
    for each in manifest.snapshots:
        if each.dataset not in has and (each.dataset not in found or each.name == name):
            found[each.dataset] = each
    pages = manifest.pages
    if pages and pages.guid not in guids_of(copies, pages.dataset):
        found[pages.dataset] = pages
    return [found[dataset] for dataset in sorted(found)]


def _rename(old: str, new: str) -> str:
    """The command that renames a dataset or snapshot; a shell reads no part of the names."""
    return shlex.join(["zfs", "rename", old, new])


def _not_here(
    thing: str, wanted: SnapshotEntry | PagesEntry, there: Mapping[str, Sequence[PoolSnapshot]]
) -> ReplicaError:
    """The error for a bundle, of which a ZFS snapshot is not here."""
    for dataset, some in there.items():
        if wanted.guid in {each.guid for each in some}:
            reason = f"its snapshot of {wanted.dataset} is one of {dataset} now, and is not whole"
            step = f"on the source: {_rename(dataset, wanted.dataset)}; or take another snapshot"
            return ReplicaError(thing, reason, step)
    name = f"{wanted.dataset}@{wanted.name}"
    reason = f"its ZFS snapshot {name} is not here, so the snapshot is not whole"
    return ReplicaError(thing, reason, "take another snapshot on the source")


def _parsed(text: bytes, thing: str, run: _Run) -> Manifest:
    """The manifest of a run's bundle.

    Raises:
        ManifestError: it is damaged, or of another bundle.
    """
    with readable(thing, "the source"):
        manifest = parse_manifest(text, thing)
        if f"{manifest.uuid}/{manifest.run}" != run.reference:
            raise ManifestError(thing, "its manifest is of another bundle")
        if len(manifest.parts) >= MAX_FILES:
            reason = f"has {len(manifest.parts)} parts, and at most {MAX_FILES - 1} are accepted"
            raise ManifestError(thing, reason)
        names = [MANIFEST_NAME, *(part.name for part in manifest.parts)]
        if len({*names}) != len(names):
            raise ManifestError(thing, "names a file twice")
    return manifest


def _checked_files(thing: str, reference: str, files: Sequence[SentFile]) -> Sequence[SentFile]:
    """The files, whose names and sizes an append-only replica would accept, too.

    Raises:
        RefusedError: it would not.
    """
    uuid, _, run = reference.partition("/")
    described = [
        {"name": e.name, "bytes": e.bytes, "sha256": e.sha256, "offset": e.offset} for e in files
    ]
    values = {"uuid": uuid, "run": run, "files": described}
    try:
        return parse_request(request_command(ReceiveVerb.STORE, values)).files
    except RefusedError as error:
        raise RefusedError(thing, error.reason) from error


@contextmanager
def _collecting(result: GuestResult) -> Iterator[None]:
    """Continue with the rest after a failure."""
    try:
        yield
    except InterruptedRunError:
        raise
    except SnaporchError as error:
        result.failures.append(error)
