"""A replica in a repository of restic: streams of ``zfs send`` in chains, and bundles.

What counts as stored is decided by :mod:`snaporch.replication.restic_records`.

No ZFS and no shell is needed at the other end. What was stored is never changed or deleted here, so
the server may permit only additions.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from snaporch.catalog.records import COPY
from snaporch.model import PoolSnapshot
from snaporch.private_files import sha256_of
from snaporch.remote_host import LIMIT_SECONDS
from snaporch.replication.interface import BundleCopy, ReplicaError
from snaporch.replication.marks import MARKS
from snaporch.replication.needed_streams import RAW, Originals
from snaporch.replication.restic import SEE, ResticRepository, new_upload
from snaporch.replication.restic_bundles import ResticBundles
from snaporch.replication.restic_records import (
    STREAM_FILE,
    BundleRecord,
    Kind,
    NextStream,
    StreamRecord,
    bundle_tags,
    chain_tag,
    marks_tags,
    next_streams,
    ordered,
    stream_tags,
    upload_tags,
)
from snaporch.replication.restic_stream import Digest, Wanted, command, read_report
from snaporch.replication.transfer import expected_bytes
from snaporch.zfs import Pool

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_AT_ONCE = 500
"""Snapshots of which one record has the marks: its tags are in a command line."""
_AGAIN = "try again: what has arrived is not sent again"


class ResticDestination:
    """:class:`~snaporch.replication.interface.Destination` by restic.

    Args:
        repository: its cache, and what ends a transfer and gets notes.
        pool: the pools of this host.
    """

    def __init__(self, repository: ResticRepository, pool: Pool) -> None:
        self._name = repository.name
        self._here = pool
        self._repository = repository
        self._bundles = ResticBundles(repository)
        self._damaged: set[str] = set()
        """References of bundles of which a damaged copy was found."""

    def create(self) -> None:
        """See the protocol; only an admin makes a repository, so this only asks for it."""
        self._repository.contents()

    def snapshots(self, datasets: Sequence[str]) -> list[PoolSnapshot]:
        """See the protocol."""
        found = []
        for dataset in datasets:
            ordered_here = ordered(self._streams(dataset), self._originals(dataset).births)
            found += [replace(each, properties=self._shown(each)) for each in ordered_here]
        return found

    def _shown(self, snapshot: PoolSnapshot) -> dict[str, str]:
        """The properties of a copy; whose copy it is need not be stored."""
        found = dict(snapshot.properties)
        return {**found, COPY: self._name} if found else found

    def _streams(self, dataset: str) -> list[StreamRecord]:
        streams = self._repository.contents().streams.values()
        return [each for each in streams if each.snapshot.dataset == dataset]

    def _originals(self, dataset: str) -> Originals:
        pool = self._here
        return Originals(dataset, pool.snapshots([dataset]), pool.bookmarks(dataset))

    def send(self, dataset: str, *, raw: bool, until: int) -> None:
        """See the protocol."""
        ours = self._originals(dataset)
        if not ours.snapshots:
            raise ReplicaError(f"{self._name}: {dataset}", "has no snapshots")
        copies = ordered(self._streams(dataset), ours.births)
        newest = copies[-1].guid if copies else None
        chain = self._repository.contents().chain((dataset, newest)) if newest is not None else []
        wanted = [each for each in ours.snapshots if each.createtxg <= until]
        plan = next_streams(
            ours._replace(snapshots=wanted),
            newest,
            chain,
            raw=raw,
            limit=self._repository.replica.chain,
        )
        for each in plan:
            self._send(each, raw=raw)

    def _send(self, stream: NextStream, *, raw: bool) -> None:
        """Store a stream, and then its record."""
        snapshot, upload = stream.snapshot, new_upload()
        options = f"-{RAW}" if raw else "-Lc"
        words = [options, *(["-i", stream.base] if stream.base else []), snapshot.full_name]
        chain = chain_tag(snapshot.dataset, stream.first)
        what = {"dataset": snapshot.dataset, "snapshot": snapshot.name}
        tags = [*upload_tags(Kind.STREAM, upload, what), chain]
        known = {each.name: each.kind for each in self._here.datasets()}
        if snapshot.dataset not in known:
            reason = "was renamed or destroyed meanwhile"
            raise ReplicaError(f"{self._name}: {snapshot.dataset}", reason, "try again")
        _, referenced = self._here.sizes([snapshot.full_name]).get(snapshot.full_name, (0, 0))
        transfers = self._repository.transfers
        _, report = transfers.output("zfs", "send", "-nP", *words, limit=LIMIT_SECONDS)
        with transfers.local_errors(), tempfile.TemporaryDirectory() as directory:
            counted = Path(directory) / "stream"
            status, lines = transfers.run(
                ["zfs", "send", *words],
                command(
                    Wanted(snapshot.name, snapshot.guid, stream.base_guid),
                    "--report",
                    str(counted),
                ),
                self._repository.backup(tags, "--stdin", "--stdin-filename", STREAM_FILE),
                through=1,
                size=expected_bytes(report),
            )
            if status != 0:
                reason = self._repository.reason(lines)
                step = self._repository.step(reason, _AGAIN)
                raise ReplicaError(f"{self._name}: {snapshot.full_name}", reason, step)
            digest = read_report(counted)
        if not stream.base:
            self._read_full_stream(snapshot, upload, digest)
        marks = {k: v for k, v in snapshot.properties.items() if k in MARKS and k != COPY}
        record = StreamRecord(
            replace(snapshot, properties=marks),
            stream.base_guid,
            *digest,
            raw=raw,
            kind=known[snapshot.dataset],
            referenced=referenced,
            upload=upload,
        )
        self._repository.record([*stream_tags(record), chain])

    def _read_full_stream(self, snapshot: PoolSnapshot, upload: str, digest: Digest) -> None:
        """Read a full stream that was just stored: restic may have found its data in damaged packs.

        Raises:
            ReplicaError: it is damaged: the repository must be repaired first.
        """
        self._repository.progress.step(self._name, f"reading {snapshot.full_name} back")
        latest = self._repository.dump("latest", STREAM_FILE)
        status, lines = self._repository.transfers.run(
            [*latest, "--tag", f"upload={upload}"],
            command(
                Wanted(snapshot.name, snapshot.guid, 0),
                "--check",
                str(digest.bytes),
                digest.sha256,
            ),
            through=1,
            size=digest.bytes,
        )
        if status != 0:
            thing = f"{self._name}: {snapshot.full_name}"
            reason = f"was stored, and cannot be read: {self._repository.reason(lines, reads=True)}"
            step = f"see: {self._repository.by_hand('check', '--read-data')}; {SEE}"
            raise ReplicaError(thing, reason, step)

    def diverged(self, dataset: str, only_there: Sequence[str]) -> ReplicaError:
        """See the protocol; :meth:`snapshots` lists none that could diverge."""
        reason = f"snapshots were destroyed meanwhile ({', '.join(only_there[:5])})"
        return ReplicaError(f"{self._name}: {dataset}", reason, "try again")

    def mark(self, properties: Mapping[str, Mapping[str, str]]) -> Collection[str]:
        """See the protocol."""
        names = {name.partition("@")[0] for name in properties}
        guids = {each.full_name: each.guid for each in self.snapshots(sorted(names))}
        marks = {
            guids[name]: {key: value for key, value in values.items() if key != COPY}
            for name, values in properties.items()
            if name in guids
        }
        for some in _batches(marks):
            self._repository.record(marks_tags(some, {}))
        return [name for name in properties if name not in guids]

    def is_encrypted(self) -> bool:
        """Whether all is stored encrypted: restic does that."""
        return True

    def has_encrypted_bundles(self) -> bool:
        """Whether bundles are stored encrypted: restic does that."""
        return True

    def free_bytes(self) -> list[int]:
        """Nothing: restic does not say how much its repository can still store."""
        return []

    def set_policies(self, policies: Mapping[str, str]) -> None:
        """See the protocol."""
        there = self._repository.contents().policies
        changed = {name: text for name, text in policies.items() if there.get(name, "") != text}
        for some in _batches(changed):
            self._repository.record(marks_tags({}, some))

    def bundles(self, uuid: str) -> dict[str, BundleCopy]:
        """See the protocol; nothing makes it read a bundle again, which could be expensive."""
        return self._bundles.bundles(uuid)

    def damaged(self, reference: str, sums: Mapping[str, str]) -> list[str]:
        """See the protocol."""
        found = self._bundles.damaged(reference, sums)
        if found:
            self._damaged.add(reference)
        return found

    def manifest(self, reference: str) -> str:
        """See the protocol."""
        return self._bundles.manifest(reference)

    def store(self, directory: Path, reference: str, sums: Mapping[str, str]) -> list[str]:
        """See the protocol.

        restic stores only data that its index lacks. So if the former copy was damaged, the new one
        is read before it counts.
        """
        transfers, upload = self._repository.transfers, new_upload()
        with transfers.local_errors():
            before = _state(directory, sums)
            damaged = [name for name in sums if sha256_of(directory / name) != sums[name]]
            if damaged:
                return damaged
            tags = upload_tags(Kind.BUNDLE, upload, {"bundle": reference})
            words = self._repository.backup(tags, str(directory))
            size = sum(size for size, _ in before.values())
            status, lines = transfers.run(words, through=0, size=size)
            if status != 0:
                reason = self._repository.reason(lines)
                step = self._repository.step(reason, _AGAIN)
                raise ReplicaError(f"{self._name}: bundle {reference}", reason, step)
            if _state(directory, sums) != before:
                return list(sums)
        files = {name: (before[name][0], digest) for name, digest in sums.items()}
        record = BundleRecord(reference, str(directory), files, upload)
        if reference in self._damaged:
            self._read_back(record)
        self._repository.record(bundle_tags(record))
        return []

    def _read_back(self, record: BundleRecord) -> None:
        """Read a bundle that was just stored.

        Raises:
            ReplicaError: it is damaged: the repository must be repaired first.
        """
        sums = {name: digest for name, (_, digest) in record.files.items()}
        if found := self._bundles.differing(record, sums):
            step = f"repair it: {self._repository.by_hand('check', '--read-data')}; {SEE}"
            raise ReplicaError(
                f"{self._name}: bundle {record.reference}",
                f"is damaged in the repository, also as it was stored again: {', '.join(found)}",
                step,
            )


def _state(directory: Path, names: Collection[str]) -> dict[str, tuple[int, int]]:
    """The size and the time of writing of files."""
    found = {name: (directory / name).stat() for name in names}
    return {name: (each.st_size, each.st_mtime_ns) for name, each in found.items()}


def _batches(found: Mapping[_Key, _Value]) -> Iterator[dict[_Key, _Value]]:
    """The items of a mapping, :data:`_AT_ONCE` at a time."""
    items = list(found.items())
    for begin in range(0, len(items), _AT_ONCE):
        yield dict(items[begin : begin + _AT_ONCE])
