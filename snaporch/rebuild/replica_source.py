"""A replica that guests are brought back from: read by ``zfs send`` and ``cat``, over ssh.

What it answers is input. Only a stream of one snapshot is received: a package (``zfs send -R``)
could also create datasets, and set properties of them, such as where they are mounted.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import IO, Protocol

from snaporch.bundle.manifest import Part
from snaporch.config import Replica
from snaporch.errors import NotFoundError, RefusedError
from snaporch.interrupt import Interrupt
from snaporch.model import DatasetKind, PoolSnapshot
from snaporch.progress import Progress
from snaporch.remote_host import Host
from snaporch.replication.interface import BundleCopy, ReplicaError, readable
from snaporch.replication.marks import MARKS
from snaporch.replication.needed_streams import RAW
from snaporch.replication.receive_limits import LimitedStream
from snaporch.replication.receive_request import is_mark
from snaporch.replication.received_bundles import ReceivedBundles
from snaporch.replication.remote_output import AGAIN, remote_output
from snaporch.replication.replica_bundles import ReplicaBundles
from snaporch.replication.resume_transfer import NO_TOKEN, is_token
from snaporch.replication.stall_detector import STALL_SECONDS
from snaporch.replication.stream_header import HEADER_BYTES, sent_snapshot
from snaporch.replication.transfer import Transfers, buffer_words, expected_bytes
from snaporch.replication.unsent_files import UnsentFiles
from snaporch.zfs.interface import PoolError
from snaporch.zfs.remote import RemoteZfs
from snaporch.zfs_names import is_snapshot


class Source(Protocol):
    """A replica that guests are brought back from."""

    @property
    def name(self) -> str:
        """Its name in the configuration."""

    @property
    def resumes(self) -> bool:
        """Whether an interrupted transfer of a snapshot can be continued by its token."""

    def needed(
        self, copies: Sequence[PoolSnapshot], wanted: PoolSnapshot, *, history: bool
    ) -> list[PoolSnapshot]:
        """The snapshots of a copy that must come for one of them, oldest first; it is the last.

        Args:
            copies: all snapshots of the copy, oldest first.
            wanted: one of them.
            history: the older ones come back, too.
        """

    def snapshots(self) -> list[PoolSnapshot]:
        """The snapshots of all copies, oldest first; copies are named without the dataset above.

        Raises:
            SnaporchError: they cannot be listed.
        """

    def bundles(self, uuid: str) -> Mapping[str, BundleCopy]:
        """The bundles of a domain, by run."""

    def manifest(self, reference: str) -> str:
        """The text of the manifest of a bundle; any text, or none."""

    def newest_manifests(self) -> Mapping[str, str]:
        """The text of the newest manifest of each domain that has bundles, by ``uuid/run``.

        It may be any text, or none.

        Raises:
            SnaporchError: the bundles cannot be listed.
        """

    def damaged(self, reference: str, sums: Mapping[str, str]) -> list[str]:
        """Read a bundle on the replica.

        Args:
            reference: ``uuid/run``.
            sums: the SHA-256 of each file.

        Returns:
            The files that are missing, cannot be read or differ.
        """

    def text(self, reference: str, part: Part) -> str:
        """The text of a small part of a bundle."""

    def policies(self, copies: Collection[str]) -> Mapping[str, str]:
        """The value of ``snaporch:policy`` of those copies that have one."""

    def encrypted(self, wanted: Collection[PoolSnapshot]) -> frozenset[str]:
        """The copies of these snapshots that are encrypted, or were then."""

    def kinds(self, wanted: Collection[PoolSnapshot]) -> Mapping[str, DatasetKind]:
        """The kind of each copy of these snapshots, as it was then."""

    def sizes(self, snapshots: Sequence[PoolSnapshot]) -> Mapping[str, int]:
        """The bytes that come with each of these snapshots, by its full name, without a history."""

    def receive(
        self, snapshot: PoolSnapshot, base: str, token: str, receiver: Sequence[str], *, raw: bool
    ) -> None:
        """Receive a snapshot.

        Args:
            snapshot: of a copy.
            base: the name of the copy's snapshot that the receiver has; empty for none.
            token: continues an interrupted transfer.
            receiver: the command that receives.
            raw: send encrypted blocks as they are.

        Raises:
            ReplicaError: the transfer failed.
            RefusedError: something else came than this snapshot.
        """

    def fetch(self, reference: str, unsent: UnsentFiles, received: ReceivedBundles) -> list[str]:
        """Fetch a bundle.

        Returns:
            The files that are damaged.

        Raises:
            ReplicaError: the transfer failed.
        """


def up_to(copies: Sequence[PoolSnapshot], wanted: PoolSnapshot) -> list[PoolSnapshot]:
    """Snapshots up to one of them, by its GUID."""
    last = next(number for number, each in enumerate(copies) if each.guid == wanted.guid)
    return list(copies[: last + 1])


def _possible(properties: Mapping[str, str]) -> dict[str, str]:
    """The properties of a copy's snapshot without marks of snaporch that are none."""
    return {k: v for k, v in properties.items() if k not in MARKS or is_mark(k, v)}


class ReplicaSource:
    """:class:`Source` by ssh, or a pool of this host.

    Args:
        name: the replica's name in the configuration.
        replica: its section.
        interrupt: a signal ends a transfer.
        progress: gets the bytes.

    Raises:
        RefusedError: the replica is append-only, so this host may not read from it.
    """

    resumes = True
    """See :class:`Source`."""

    def __init__(
        self, name: str, replica: Replica, interrupt: Interrupt, progress: Progress
    ) -> None:
        if replica.append_only:
            raise RefusedError(
                f"replica {name}",
                "is append-only: this host's key may not read from it",
                "name a user who may: --host root@HOST",
            )
        self._name = name
        self._replica = replica
        self._interrupt = interrupt
        self._progress = progress
        self._host = Host(replica.host, lambda: interrupt.check(name))
        self._pool = RemoteZfs(self._host)
        self._transfers = Transfers(name, self._host.label, interrupt, progress)
        self._bundles = ReplicaBundles(name, replica, self._host, self._transfers)

    @property
    def name(self) -> str:
        """See :class:`Source`."""
        return self._name

    def snapshots(self) -> list[PoolSnapshot]:
        """See :class:`Source`."""
        root = f"{self._replica.dataset}/"
        with readable(self._name, self._host.label):
            try:
                found = self._pool.all_copies(self._replica.dataset)
            except PoolError as error:
                if self._replica.dataset in {each.name for each in self._pool.datasets()}:
                    raise
                reason = f"{self._host.label} has no dataset {self._replica.dataset}"
                copy = f"snaporch replicate DOMAIN --to {self._name}"
                step = f"is its pool imported? before the first copy, where the guest is: {copy}"
                raise NotFoundError(f"replica {self._name}", reason, step) from error
        return [
            replace(each, dataset=copy, properties=_possible(each.properties))
            for each in found
            for copy in [each.dataset.removeprefix(root)]
            if each.dataset.startswith(root) and "/" not in copy and is_snapshot(each.name)
        ]

    def needed(
        self, copies: Sequence[PoolSnapshot], wanted: PoolSnapshot, *, history: bool
    ) -> list[PoolSnapshot]:
        """See :class:`Source`."""
        return up_to(copies, wanted) if history else [wanted]

    def bundles(self, uuid: str) -> Mapping[str, BundleCopy]:
        """See :class:`Source`."""
        return self._bundles.bundles(uuid)

    def manifest(self, reference: str) -> str:
        """See :class:`Source`."""
        return self._bundles.manifest(reference)

    def newest_manifests(self) -> Mapping[str, str]:
        """See :class:`Source`."""
        return self._bundles.newest_manifests()

    def damaged(self, reference: str, sums: Mapping[str, str]) -> list[str]:
        """See :class:`Source`."""
        return self._bundles.damaged(reference, sums)

    def text(self, reference: str, part: Part) -> str:
        """See :class:`Source`."""
        path = shlex.quote(f"{self._replica.bundles}/{reference}/{part.name}")
        return self._host.script(f"head -c {part.bytes} {path}", what=part.name)

    def policies(self, copies: Collection[str]) -> Mapping[str, str]:
        """See :class:`Source`."""
        root = f"{self._replica.dataset}/"
        with readable(self._name, self._host.label):
            found = self._pool.policies([f"{root}{each}" for each in copies])
        return {name.removeprefix(root): policy for name, policy in found.items()}

    def encrypted(self, wanted: Collection[PoolSnapshot]) -> frozenset[str]:
        """See :class:`Source`; a copy keeps what it is."""
        root = f"{self._replica.dataset}/"
        with readable(self._name, self._host.label):
            return frozenset(name.removeprefix(root) for name in self._pool.encrypted())

    def kinds(self, wanted: Collection[PoolSnapshot]) -> Mapping[str, DatasetKind]:
        """See :class:`Source`; a copy keeps what it is."""
        root = f"{self._replica.dataset}/"
        with readable(self._name, self._host.label):
            return {each.name.removeprefix(root): each.kind for each in self._pool.datasets()}

    def sizes(self, snapshots: Sequence[PoolSnapshot]) -> Mapping[str, int]:
        """See :class:`Source`."""
        root = f"{self._replica.dataset}/"
        with readable(self._name, self._host.label):
            found = self._pool.sizes([f"{root}{each.full_name}" for each in snapshots])
        return {name.removeprefix(root): referenced for name, (_, referenced) in found.items()}

    def receive(
        self, snapshot: PoolSnapshot, base: str, token: str, receiver: Sequence[str], *, raw: bool
    ) -> None:
        """See :class:`Source`."""
        full = f"{self._replica.dataset}/{snapshot.full_name}"
        options = f"-{RAW}" if raw else "-Lc"
        begin = ["-i", f"@{base}"] if base else []
        words = ["zfs", "send", options, *begin, full]
        if token != NO_TOKEN:
            if not is_token(token):
                raise RefusedError(full, "the token of its interrupted transfer has no valid form")
            words = ["zfs", "send", *(["-w"] if raw else []), "-t", token]
        size = expected_bytes(self._host.run(*words[:2], "-nP", *words[2:]))
        thing = f"{self._name}: {full}"
        with self._reading(shlex.join(words), thing) as stream:
            header = self._limited(stream).exactly(HEADER_BYTES)
            if len(header) < HEADER_BYTES:
                return  # its exit status says why
            if sent_snapshot(header)[:2] != (snapshot.name, snapshot.guid):
                raise RefusedError(thing, "another snapshot was sent")
            with tempfile.NamedTemporaryFile() as begun:
                begun.write(header)
                begun.flush()
                status, lines = self._transfers.run(
                    ["cat", begun.name, "-"],
                    buffer_words(self._replica.rate),
                    receiver,
                    through=1,
                    size=size,
                    source=stream,
                )
            if status != 0:
                reason = next((line for line in lines if line.startswith("cannot ")), "")
                reason = reason or (lines or ["zfs receive failed without output"])[-1]
                raise ReplicaError(thing, reason, AGAIN)

    def fetch(self, reference: str, unsent: UnsentFiles, received: ReceivedBundles) -> list[str]:
        """See :class:`Source`."""
        directory = shlex.quote(f"{self._replica.bundles}/{reference}")
        commands = []
        if unsent.partial is not None:
            skipped = unsent.partial.offset
            commands.append(f"tail -c +{skipped + 1} -- {shlex.quote(unsent.partial.name)}")
        if unsent.whole:
            commands.append(shlex.join(["cat", "--", *unsent.whole]))
        script = " && ".join([f"cd {directory}", *commands])
        uuid, _, run = reference.partition("/")
        thing = f"{self._name}: bundle {reference}"
        with self._reading(script, thing) as stream:
            limited = self._limited(stream, unsent.bytes)
            return received.store(uuid, run, unsent.files, limited)

    def _limited(self, stream: IO[bytes], size: int = 0) -> LimitedStream:
        """A stream that waits for the replica as long as other transfers do; with progress."""

        def check() -> None:
            self._interrupt.check(self._name)

        def report(done: int) -> None:
            if size:
                self._progress.amount(self._name, done, size)

        return LimitedStream(stream, check, report, STALL_SECONDS)

    def _reading(self, script: str, thing: str) -> AbstractContextManager[IO[bytes]]:
        """The output of a script on the replica; see :func:`remote_output`."""
        return remote_output(self._host, script, thing, self._interrupt)
