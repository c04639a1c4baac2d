"""A repository of restic that guests are brought back from.

A snapshot comes by the streams of its chain: a full one, and each increment up to it. ZFS gets the
end of a stream only if the stream is as its record says.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from snaporch.bundle.manifest import Part
from snaporch.bundle.store import copy_name
from snaporch.errors import RefusedError
from snaporch.model import DatasetKind, PoolSnapshot
from snaporch.replication.interface import BundleCopy, ReplicaError
from snaporch.replication.receive_limits import LimitedStream
from snaporch.replication.received_bundles import ReceivedBundles
from snaporch.replication.remote_output import remote_output
from snaporch.replication.restic import ResticRepository
from snaporch.replication.restic_bundles import ResticBundles
from snaporch.replication.restic_records import STREAM_FILE, StreamRecord
from snaporch.replication.restic_stream import Wanted, command
from snaporch.replication.resume_transfer import NO_TOKEN
from snaporch.replication.stall_detector import STALL_SECONDS
from snaporch.replication.unsent_files import UnsentFiles

_DAMAGED = (
    "name an older snapshot: DOMAIN@SNAPSHOT; before that, rename or destroy the datasets with "
    "snaporch:rebuild=transfer, if there are any; see docs/how-to/object-storage.md"
)


class ResticSource:
    """:class:`~snaporch.rebuild.replica_source.Source` by restic.

    Args:
        repository: its cache, and what ends a transfer and gets the bytes.
    """

    resumes = False
    """An interrupted stream begins again: none of its data stays."""

    def __init__(self, repository: ResticRepository) -> None:
        self._name = repository.name
        self._repository = repository
        self._bundles = ResticBundles(repository)

    @property
    def name(self) -> str:
        """See the protocol."""
        return self._name

    def _streams(self) -> dict[tuple[str, int], StreamRecord]:
        """The streams, by the copy's name and GUID."""
        found = self._repository.contents().streams.values()
        return {(copy_name(each.snapshot.dataset), each.snapshot.guid): each for each in found}

    def snapshots(self) -> list[PoolSnapshot]:
        """See the protocol; the repository is listed again."""
        return [
            replace(each.snapshot, dataset=copy_name(each.snapshot.dataset))
            for each in self._repository.contents(again=True).streams.values()
        ]

    def needed(
        self, copies: Sequence[PoolSnapshot], wanted: PoolSnapshot, *, history: bool
    ) -> list[PoolSnapshot]:
        """See the protocol; the history is that of the chain."""
        record = self._streams()[wanted.dataset, wanted.guid]
        chain = self._repository.contents().chain(record.key)
        return [replace(each.snapshot, dataset=wanted.dataset) for each in chain]

    def bundles(self, uuid: str) -> Mapping[str, BundleCopy]:
        """See the protocol."""
        return self._bundles.bundles(uuid)

    def manifest(self, reference: str) -> str:
        """See the protocol."""
        return self._bundles.manifest(reference)

    def newest_manifests(self) -> Mapping[str, str]:
        """See the protocol; each is read from the repository."""
        return self._bundles.newest_manifests()

    def damaged(self, reference: str, sums: Mapping[str, str]) -> list[str]:
        """See the protocol."""
        return self._bundles.damaged(reference, sums)

    def text(self, reference: str, part: Part) -> str:
        """See the protocol."""
        record = self._bundles.record(reference)
        return "" if record is None else self._bundles.text(record, part.name, part.bytes)

    def policies(self, copies: Collection[str]) -> Mapping[str, str]:
        """See the protocol."""
        found = self._repository.contents().policies
        return {copy_name(name): text for name, text in found.items() if copy_name(name) in copies}

    def encrypted(self, wanted: Collection[PoolSnapshot]) -> frozenset[str]:
        """See the protocol."""
        return frozenset(each.dataset for each, record in self._records(wanted) if record.raw)

    def kinds(self, wanted: Collection[PoolSnapshot]) -> Mapping[str, DatasetKind]:
        """See the protocol: a dataset of this name may have been another one before."""
        return {each.dataset: record.kind for each, record in self._records(wanted)}

    def sizes(self, snapshots: Sequence[PoolSnapshot]) -> Mapping[str, int]:
        """See the protocol; all streams of the chain come."""
        contents = self._repository.contents()
        return {
            each.full_name: max(
                record.referenced, sum(stream.bytes for stream in contents.chain(record.key))
            )
            for each, record in self._records(snapshots)
        }

    def _records(
        self, snapshots: Collection[PoolSnapshot]
    ) -> list[tuple[PoolSnapshot, StreamRecord]]:
        """Snapshots of copies with the records of their streams."""
        streams = self._streams()
        keys = ((each, (each.dataset, each.guid)) for each in snapshots)
        return [(each, streams[key]) for each, key in keys if key in streams]

    def receive(
        self, snapshot: PoolSnapshot, base: str, token: str, receiver: Sequence[str], *, raw: bool
    ) -> None:
        """See the protocol."""
        thing = f"{self._name}: {snapshot.full_name}"
        if token != NO_TOKEN:
            raise RefusedError(thing, "a transfer from another replica was interrupted")
        record = self._streams().get((snapshot.dataset, snapshot.guid))
        if record is None:
            raise ReplicaError(thing, "is not in the repository any more", _DAMAGED)
        expected = ("--expect", str(record.bytes), record.sha256)
        status, lines = self._repository.transfers.run(
            self._repository.dump(record.stream, STREAM_FILE),
            command(Wanted(snapshot.name, snapshot.guid, record.base), *expected),
            receiver,
            through=1,
            size=record.bytes,
        )
        if status != 0:
            reason = f"did not come back: {self._repository.reason(lines, reads=True)}"
            raise ReplicaError(thing, reason, _DAMAGED)

    def fetch(self, reference: str, unsent: UnsentFiles, received: ReceivedBundles) -> list[str]:
        """See the protocol."""
        record = self._bundles.record(reference)
        thing = f"{self._name}: bundle {reference}"
        if record is None:
            raise ReplicaError(thing, "is not in the repository any more", _DAMAGED)
        commands = []
        if unsent.partial is not None:
            dump = shlex.join(self._bundles.file(record, unsent.partial.name))
            commands.append(f"{dump} | tail -c +{unsent.partial.offset + 1}")
        commands += [shlex.join(self._bundles.file(record, name)) for name in unsent.whole]
        uuid, _, run = reference.partition("/")
        script = " && ".join(["true", *commands])

        def report(done: int) -> None:
            self._repository.progress.amount(self._name, done, unsent.bytes)

        def check() -> None:
            self._repository.interrupt.check(self._name)

        with remote_output(
            self._repository.host, script, thing, self._repository.interrupt
        ) as stream:
            limited = LimitedStream(stream, check, report, STALL_SECONDS)
            return received.store(uuid, run, unsent.files, limited)
