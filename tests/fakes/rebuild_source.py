"""A replica that guests are brought back from, in memory, and the datasets of the host."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path

from fakes.hooks import Hooks
from fakes.pool import FakePool, Taken
from fakes.replica import FakeReplica
from snaporch.bundle.manifest import Part
from snaporch.bundle.store import copy_name
from snaporch.hypervisor import HostObject
from snaporch.model import DatasetKind, PoolSnapshot
from snaporch.rebuild.local_datasets import RECEIVED, LocalState
from snaporch.rebuild.missing_networks import HostNetworks, subnets_of
from snaporch.rebuild.replica_source import up_to
from snaporch.replication.interface import BundleCopy, ReplicaError
from snaporch.replication.received_bundles import ReceivedBundles
from snaporch.replication.resume_transfer import NO_TOKEN
from snaporch.replication.unsent_files import UnsentFiles
from snaporch.zfs import REBUILD_PROPERTY, PoolError


class FakeSource:
    """A :class:`~snaporch.rebuild.replica_source.Source` of what a fake replica has."""

    name = "nas"
    resumes = True

    def __init__(self, pool: FakePool, replica: FakeReplica, hooks: Hooks) -> None:
        self._pool = pool
        self._replica = replica
        self._lost: dict[str, Taken] = {}
        self.hooks = hooks
        self.ciphers: set[str] = set()
        self.bytes_of_a_snapshot = 1 << 20

    def lose(self, *datasets: str) -> None:
        """The host loses datasets, which the replica has."""
        self._lost |= {each: self._pool.take_out(each) for each in datasets}

    def snapshots(self) -> list[PoolSnapshot]:
        """See the protocol."""
        found = self._replica.snapshots([each.partition("@")[0] for each in self._replica.names()])
        unique = {each.full_name: each for each in found}
        ordered = sorted(unique.values(), key=lambda each: each.createtxg)
        return [replace(each, dataset=copy_name(each.dataset)) for each in ordered]

    def needed(
        self, copies: Sequence[PoolSnapshot], wanted: PoolSnapshot, *, history: bool
    ) -> list[PoolSnapshot]:
        """See the protocol."""
        return up_to(copies, wanted) if history else [wanted]

    def bundles(self, uuid: str) -> Mapping[str, BundleCopy]:
        """See the protocol."""
        return self._replica.bundles(uuid)

    def manifest(self, reference: str) -> str:
        """See the protocol."""
        return self._replica.manifest(reference)

    def newest_manifests(self) -> Mapping[str, str]:
        """See the protocol."""
        domains = self._replica.root.glob("[!.]*")
        runs = {path.name: max(found) for path in domains if (found := [*path.glob("[!.]*")])}
        return {
            f"{uuid}/{run.name}": self.manifest(f"{uuid}/{run.name}") for uuid, run in runs.items()
        }

    def damaged(self, reference: str, sums: Mapping[str, str]) -> list[str]:
        """See the protocol."""
        return self._replica.damaged(reference, sums)

    def text(self, reference: str, part: Part) -> str:
        """See the protocol."""
        return self._path(reference, part.name).read_bytes().decode("utf-8", "surrogateescape")

    def _path(self, reference: str, name: str) -> Path:
        return self._replica.root / reference / name

    def policies(self, copies: Collection[str]) -> Mapping[str, str]:
        """See the protocol."""
        named = {copy_name(name): policy for name, policy in self._replica.policies.items()}
        return {name: policy for name, policy in named.items() if name in copies}

    def encrypted(self, _wanted: Collection[PoolSnapshot]) -> frozenset[str]:
        """See the protocol."""
        return frozenset(self.ciphers)

    def kinds(self, _wanted: Collection[PoolSnapshot]) -> Mapping[str, DatasetKind]:
        """See the protocol."""
        present = {copy_name(each.name): each.kind for each in self._pool.datasets()}
        return present | {copy_name(n): each.dataset.kind for n, each in self._lost.items()}

    def sizes(self, snapshots: Sequence[PoolSnapshot]) -> Mapping[str, int]:
        """See the protocol."""
        self.hooks.reach("source.sizes")
        return {each.full_name: self.bytes_of_a_snapshot for each in snapshots}

    def receive(
        self, snapshot: PoolSnapshot, base: str, token: str, receiver: Sequence[str], *, raw: bool
    ) -> None:
        """See the protocol."""
        how = [*(["raw"] if raw else []), *([token] if token != NO_TOKEN else [])]
        self.hooks.act("source.receive", snapshot.full_name, base, *how)
        dataset, _, name = receiver[-1].partition("@")
        if dataset not in self._lost:
            raise ReplicaError(snapshot.full_name, "destination exists")
        options = dict(word.split("=") for word in receiver if "=" in word)
        try:
            self._pool.put_in(self._lost[dataset], dataset, name, base, options)
        except PoolError as error:
            raise ReplicaError(snapshot.full_name, error.reason) from error

    def fetch(self, reference: str, unsent: UnsentFiles, received: ReceivedBundles) -> list[str]:
        """See the protocol."""
        sent = b"".join(
            self._path(reference, each.name).read_bytes()[each.offset :] for each in unsent.files
        )
        self.hooks.act("source.fetch", reference)
        uuid, _, run = reference.partition("/")
        if len(sent) < unsent.bytes:
            raise ReplicaError(reference, "the stream ended early")
        return received.store(uuid, run, unsent.files, BytesIO(sent))


class FakeLocal:
    """A :class:`~snaporch.rebuild.local_datasets.Local` of a fake pool."""

    def __init__(self, pool: FakePool, hooks: Hooks) -> None:
        self._pool = pool
        self.hooks = hooks
        self.tokens: dict[str, str] = {}
        self.inherited: dict[str, str] = {}
        self.host_networks = HostNetworks((), (), ())

    def networks(self, defined: Sequence[HostObject]) -> HostNetworks:
        """See the protocol."""
        self.hooks.reach("local.networks")
        subnets = [(each.name, net) for each in defined for net in subnets_of(each.xml)]
        return self.host_networks._replace(reached=[*self.host_networks.reached, *subnets])

    def state(self, dataset: str) -> LocalState:
        """See the protocol."""
        exists = dataset in {each.name for each in self._pool.datasets()}
        snapshots = tuple(self._pool.snapshots([dataset]))
        marks = self._pool.local_properties([REBUILD_PROPERTY])
        stage = marks.get(dataset, {}).get(REBUILD_PROPERTY, "")
        return LocalState(exists, self.tokens.get(dataset, NO_TOKEN), snapshots, stage)

    def receiver(
        self, dataset: str, name: str, kind: DatasetKind, *, resumable: bool = True
    ) -> list[str]:
        """See the protocol."""
        mark = f"{REBUILD_PROPERTY}={RECEIVED}"
        return [
            "zfs",
            "receive",
            *(["-s"] if resumable else []),
            "-u",
            "-o",
            mark,
            f"{dataset}@{name}",
        ]

    def make_parents(self, dataset: str) -> None:
        """See the protocol."""

    def mountpoint_to_set(self, dataset: str, wanted: str) -> str:
        """See the protocol."""
        self.hooks.reach("local.mountpoint")
        return "" if self.inherited.get(dataset, "") == wanted else wanted

    def mount(self, dataset: str, kind: DatasetKind, mountpoint: str) -> None:
        """See the protocol."""
        self.hooks.act("local.mount", dataset, mountpoint)
