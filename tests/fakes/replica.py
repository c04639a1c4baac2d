"""A replica in memory, its bundles in a directory."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

from fakes.hooks import Hooks
from fakes.pool import FakePool
from snaporch.bundle.manifest import MANIFEST_NAME
from snaporch.bundle.store import COPY_NAME, COPYING_SUFFIX
from snaporch.model import PoolSnapshot
from snaporch.private_files import sha256_of
from snaporch.replication.interface import BundleCopy, ReplicaError


class FakeReplica:
    """A :class:`~snaporch.replication.interface.Destination` for the datasets of a fake pool."""

    def __init__(self, pool: FakePool, root: Path, hooks: Hooks | None = None) -> None:
        self.hooks = hooks or Hooks()
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self._pool = pool
        self._copies: dict[str, list[PoolSnapshot]] = {}
        self.policies: dict[str, str] = {}
        self.late: list[str] = []
        """What :meth:`mark` returns."""
        self.encrypts = self.has_vault = False
        """The dataset of the copies is encrypted; the directory of the bundles is."""
        self.room = [1 << 40, 1 << 40]
        self.is_there = False
        """Its pool is imported, and has the dataset of the copies."""

    def names(self) -> list[str]:
        """The full name of every snapshot."""
        return [each.full_name for copies in self._copies.values() for each in copies]

    def drop(self, name: str) -> None:
        """``zfs destroy`` on the replica."""
        dataset = name.partition("@")[0]
        self._copies[dataset] = [s for s in self._copies[dataset] if s.full_name != name]

    def put(self, copies: Sequence[PoolSnapshot]) -> None:
        """Have all of these snapshots of a dataset, and no others of it."""
        self._copies[copies[0].dataset] = list(copies)

    def create(self) -> None:
        """See the protocol."""
        self.hooks.reach("replica.create")
        self.is_there = True

    def snapshots(self, datasets: Sequence[str]) -> list[PoolSnapshot]:
        """See the protocol."""
        self.hooks.reach("replica.snapshots")
        if not self.is_there:
            raise ReplicaError("nas: backup/kvm", "dataset does not exist", "is its pool imported?")
        return [each for name in datasets for each in self._copies.get(name, [])]

    def send(self, dataset: str, *, raw: bool, until: int) -> None:
        """See the protocol."""
        self.hooks.act("replica.send", dataset, *(["raw"] if raw else []))
        if not self.is_there:
            raise ReplicaError(dataset, "dataset does not exist")
        ours = [e for e in self._pool.snapshots([dataset]) if e.createtxg <= until]
        if not ours:
            raise ReplicaError(dataset, "no snapshots exist on source")
        there = self._copies.setdefault(dataset, [])
        known = dict(self._pool.bookmarks(dataset).values())
        known |= {each.guid: each.createtxg for each in ours}
        if there and there[-1].guid not in known:
            raise ReplicaError(dataset, "most recent snapshot does not match", "see the docs")
        begin = known[there[-1].guid] if there else -1
        names = {each.name for each in there}
        if any(each.createtxg > begin and each.name in names for each in ours):
            raise ReplicaError(dataset, "destination already exists", "rename the copy's")
        for each in ours:
            if each.createtxg > begin:
                there.append(replace(each, properties={}))
                self.hooks.reach("replica.received")

    def diverged(self, dataset: str, only_there: Sequence[str]) -> ReplicaError:
        """See the protocol."""
        return ReplicaError(dataset, f"has diverged: {', '.join(only_there)}", "see the docs")

    def mark(self, properties: Mapping[str, Mapping[str, str]]) -> Collection[str]:
        """See the protocol."""
        self.hooks.act("replica.mark", *properties)
        for name, values in properties.items():
            copies = self._copies[name.partition("@")[0]]
            place = next(i for i, each in enumerate(copies) if each.full_name == name)
            copies[place] = replace(
                copies[place], properties={**copies[place].properties, **values}
            )
        return self.late

    def is_encrypted(self) -> bool:
        """See the protocol."""
        return self.encrypts

    def has_encrypted_bundles(self) -> bool:
        """See the protocol."""
        self.hooks.reach("replica.has_encrypted_bundles")
        return self.has_vault

    def free_bytes(self) -> list[int]:
        """See the protocol."""
        self.hooks.reach("replica.free_bytes")
        return self.room

    def set_policies(self, policies: Mapping[str, str]) -> None:
        """See the protocol."""
        self.hooks.reach("replica.set_policies")
        self.policies |= policies

    def bundles(self, uuid: str) -> dict[str, BundleCopy]:
        """See the protocol."""
        if not self.root.is_dir():
            raise ReplicaError(str(self.root), "is not there")
        found = {}
        for path in (self.root / uuid).glob("[!.]*"):
            sizes = {file.name: file.stat().st_size for file in path.iterdir()}
            noted = path / COPY_NAME
            unread = time.time() - noted.stat().st_mtime if noted.exists() else inf
            found[path.name] = BundleCopy(sizes, unread)
        return found

    def damaged(self, reference: str, sums: Mapping[str, str]) -> list[str]:
        """See the protocol."""
        self.hooks.act("replica.damaged", reference)
        found = self._differing(self.root / reference, sums)
        if not found:
            (self.root / reference / COPY_NAME).touch()
        return found

    def manifest(self, reference: str) -> str:
        """See the protocol."""
        path = self.root / reference / MANIFEST_NAME
        return path.read_text(errors="surrogateescape") if path.exists() else ""

    @staticmethod
    def _differing(directory: Path, sums: Mapping[str, str]) -> list[str]:
        digests = {path.name: sha256_of(path) for path in directory.iterdir()}
        return [name for name, digest in sums.items() if digests.get(name) != digest]

    def store(self, directory: Path, reference: str, sums: Mapping[str, str]) -> list[str]:
        """See the protocol."""
        self.hooks.act("replica.store", reference)
        if not self.root.is_dir():
            raise ReplicaError(reference, f"{self.root} is not there")
        uuid, _, run = reference.partition("/")
        partial = self.root / uuid / f".{run}{COPYING_SUFFIX}"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            shutil.copytree(directory, partial)
            damaged = self._differing(partial, sums)
            if damaged:
                shutil.rmtree(partial)
                return damaged
            (partial / COPY_NAME).write_text('{"dataset": "backup/kvm"}')
            self.hooks.reach("replica.stored")
        except OSError as error:
            raise ReplicaError(reference, str(error)) from error
        shutil.rmtree(partial.with_name(run), ignore_errors=True)
        partial.rename(partial.with_name(run))
        return []
