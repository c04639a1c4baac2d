"""The copies that this machine has of one source: extended, marked, and never taken back."""

from __future__ import annotations

import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from snaporch.bundle.store import copy_name
from snaporch.catalog.records import COPY
from snaporch.errors import RefusedError, UnavailableError
from snaporch.model import DatasetKind, PoolSnapshot
from snaporch.pull.source_listing import MAX_DATASETS, MAX_SNAPSHOTS, OfferedDataset
from snaporch.replication.interface import ReplicaError
from snaporch.replication.mark_rules import decide_marks
from snaporch.replication.receive_limits import LimitedStream
from snaporch.replication.receiver import INHERITED, AppendableCopies
from snaporch.replication.remote_output import AGAIN
from snaporch.replication.resume_transfer import NO_TOKEN
from snaporch.replication.stream_header import HEADER_BYTES, check_sent, sent_snapshot
from snaporch.replication.stream_key import key_digest, key_in, payload_bytes, payload_of
from snaporch.zfs import POLICY_PROPERTY, PREFIX
from snaporch.zfs.pulled import Counts

NEW_KEY = f"{PREFIX}new-key"
"""On a copy: the digest of another key that the admin of this machine accepts for it."""
_OPTIONS = {DatasetKind.FILESYSTEM: ("-o", "canmount=noauto"), DatasetKind.VOLUME: ()}
"""Of ``zfs receive``: no boot mounts a copy, also when its mount point is changed."""


class Pulled(AppendableCopies, Protocol):
    """ZFS on this machine; :class:`~snaporch.zfs.pulled.PulledZfs` is the real one."""

    def exists(self, dataset: str) -> bool:
        """Whether a dataset exists."""

    def make_root(self, dataset: str) -> None:
        """Create the dataset of all copies."""

    def counts(self, dataset: str) -> Counts:
        """How much is below the dataset of all copies."""

    def beginning(self, snapshot: str) -> bytes:
        """The first record of a raw stream of a snapshot, with its payload."""

    def is_encrypted(self, place: str) -> bool:
        """Whether a dataset, or the one that has a directory, is encrypted by ZFS."""


class LocalCopies:
    """The copies below the dataset of a source.

    Args:
        name: the source's name in the configuration, which each copy records.
        root: the dataset.
        zfs: ZFS on this machine.
        now: the seconds since the epoch.
    """

    def __init__(
        self, name: str, root: str, zfs: Pulled, now: Callable[[], float] = time.time
    ) -> None:
        self._name = name
        self._root = root
        self._zfs = zfs
        self._now = now
        self._counts = Counts(0, 0)

    def prepare(self) -> None:
        """Create the dataset of all copies, unless it exists; check what copies inherit from it.

        Raises:
            SnaporchError: copies would be mounted or changed, or it cannot be created.
        """
        if not self._zfs.exists(self._root):
            self._zfs.make_root(self._root)
        self._check_inherited()
        self._counts = self._zfs.counts(self._root)

    def check(self) -> None:
        """Check, without a change, that :meth:`prepare` has nothing to refuse.

        Raises:
            SnaporchError: copies would be mounted or changed, or there is no such pool.
        """
        if self._zfs.exists(self._root):
            self._check_inherited()
        elif not self._zfs.exists(pool := self._root.partition("/")[0]):
            step = "is it imported? see: zpool import"
            raise UnavailableError(pool, "there is no such pool", step)

    def _check_inherited(self) -> None:
        found = self._zfs.values(self._root, [*INHERITED])
        wrong = {key: value for key, value in INHERITED.items() if found.get(key) != value}
        if wrong:
            settings = " ".join(f"{key}={value}" for key, value in wrong.items())
            raise UnavailableError(
                self._root,
                "copies would inherit other properties than they need",
                f"if it is only for copies: zfs set {settings} {shlex.quote(self._root)}",
            )

    def copy_of(self, dataset: str) -> str:
        """The full name of a dataset's copy."""
        return f"{self._root}/{copy_name(dataset)}"

    def snapshots(self, datasets: Iterable[str]) -> dict[str, list[PoolSnapshot]]:
        """The copies' snapshots by the source's dataset, oldest first."""
        names = {self.copy_of(each): each for each in datasets}
        found: dict[str, list[PoolSnapshot]] = {each: [] for each in names.values()}
        for each in self._zfs.copies(self._root, [*names]):
            if each.dataset in names:
                found[names[each.dataset]].append(each)
        return found

    def token(self, dataset: str) -> str:
        """What continues an interrupted transfer of a dataset."""
        name = self.copy_of(dataset)
        if not self._zfs.exists(name):
            return NO_TOKEN
        return self._zfs.values(name, ["receive_resume_token"])["receive_resume_token"]

    def discard_partial(self, dataset: str) -> None:
        """Discard the part of a snapshot that an interrupted transfer has left."""
        self._zfs.discard_partial(self.copy_of(dataset))

    def receive(self, dataset: OfferedDataset, wanted: PoolSnapshot, stream: LimitedStream) -> None:
        """Receive a snapshot that follows the newest one of its copy.

        Args:
            dataset: as the source describes it.
            wanted: the snapshot on the source.
            stream: what the source sends.

        Raises:
            RefusedError: something else came, with another key, or there are too many snapshots.
            ReplicaError: nothing came.
            PoolError: ZFS refused it, or the stream is incomplete.
        """
        name = self.copy_of(dataset.name)
        full = f"{name}@{wanted.name}"
        there = [e for e in self._zfs.copies(self._root, [name]) if e.dataset == name]
        is_new = not there and not self._zfs.exists(name)
        self._check_room(full, is_new=is_new)
        header = stream.exactly(HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            raise ReplicaError(full, "the stream ended early", AGAIN)
        sent = sent_snapshot(header)
        if sent[:2] != (wanted.name, wanted.guid):
            raise RefusedError(full, "another snapshot was sent")
        if sent.is_raw != dataset.raw:
            raise RefusedError(full, "the source did not say whether it is encrypted")
        check_sent(full, sent, there, self._now())
        if sent.is_raw and there:
            header += self._payload_with_known_key(full, header, there[-1].full_name, stream)
        # Before it: a stream that is cut has made the dataset, too.
        self._counts = Counts(self._counts.datasets + is_new, self._counts.snapshots + 1)
        self._zfs.append(full, header, stream, _OPTIONS[dataset.kind])

    def _payload_with_known_key(
        self, full: str, header: bytes, newest: str, stream: LimitedStream
    ) -> bytes:
        """Read the payload of the first record, whose key must be that of the copy.

        Or the one that the admin has accepted for this dataset.
        """
        payload = stream.exactly(payload_bytes(header))
        own = key_in(payload_of(self._zfs.beginning(newest)))
        digest = key_digest(key_in(payload), own)
        name = full.partition("@")[0]
        if digest and self._zfs.values(name, [NEW_KEY])[NEW_KEY] != digest:
            raise RefusedError(
                full,
                "the stream has another key, which all snapshots of the copy would get: the key "
                "was changed on the source, or it is an attack",
                f"if it was changed on purpose: zfs set {NEW_KEY}={digest} {shlex.quote(name)}; "
                "then pull again: see docs/how-to/pull.md, 'When the key changes'",
            )
        return payload

    def is_encrypted(self, place: Path | None = None) -> bool:
        """Whether a directory is on an encrypted dataset; without it, whether all copies are."""
        return self._zfs.is_encrypted(str(place or self._root))

    def _check_room(self, full: str, *, is_new: bool) -> None:
        """Check the limits of a source, which ``snapshot_limit`` does not set for root."""
        if self._counts.snapshots >= MAX_SNAPSHOTS:
            reason = f"there are {MAX_SNAPSHOTS} snapshots of this source already"
            raise RefusedError(full, reason, "destroy old ones: see docs/how-to/pull.md")
        if is_new and self._counts.datasets >= MAX_DATASETS:
            reason = f"there are {MAX_DATASETS} datasets of this source already"
            raise RefusedError(full, reason, "see docs/how-to/pull.md")

    def mark(self, offered: OfferedDataset, copies: Sequence[PoolSnapshot]) -> None:
        """Set the marks of the copies, by the rules of an append-only replica.

        Args:
            offered: the dataset on the source, with its marks.
            copies: all snapshots of its copy, oldest first.
        """
        guids = {each.name: each.guid for each in copies}
        wanted = {
            each.name: {**each.properties, COPY: self._name}
            for each in offered.snapshots
            if each.properties and guids.get(each.name) == each.guid
        }
        changes: dict[tuple[tuple[str, str], ...], list[str]] = defaultdict(list)
        for name, values in decide_marks(copies, wanted).new.items():
            full = f"{self.copy_of(offered.name)}@{name}"
            changes[tuple(sorted(values.items()))].append(full)
        for pairs, names in changes.items():
            properties = {PREFIX + key: value for key, value in pairs}
            self._zfs.set_properties(names, properties)

    def set_policy(self, dataset: str, policy: str) -> None:
        """Set the policy of a copy, which has no effect here, and comes back with it."""
        name = self.copy_of(dataset)
        there = self._zfs.policies([name]).get(name, "")
        if policy and policy != there:
            self._zfs.set_properties([name], {POLICY_PROPERTY: policy})
        elif there and not policy:
            self._zfs.clear_properties([name], [POLICY_PROPERTY])
