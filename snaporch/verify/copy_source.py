"""The replica whose copies are verified: by ssh, in a pool here, or by ``snaporch receive``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from snaporch.bundle.store import BundleStore, copy_name
from snaporch.config import Config, ResticReplica
from snaporch.interrupt import Interrupt
from snaporch.model import PoolSnapshot
from snaporch.progress import Progress
from snaporch.rebuild.replica_source import ReplicaSource
from snaporch.rebuild.restic_source import ResticSource
from snaporch.replication.append_only import AppendOnlyDestination
from snaporch.replication.interface import BundleCopy, Destination, find_replica
from snaporch.replication.restic import ResticRepository
from snaporch.zfs import Pool
from snaporch.zfs_names import is_dataset, is_snapshot


class CopySource(Protocol):
    """What is read of a replica; :class:`~snaporch.rebuild.replica_source.Source` has it, too."""

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
        """The text of the newest manifest of each domain that can be listed, by ``uuid/run``."""

    def damaged(self, reference: str, sums: Mapping[str, str]) -> list[str]:
        """Read a bundle on the replica; return the files that differ from their SHA-256."""


class AppendOnlyCopies:
    """:class:`CopySource` of an append-only replica, which lists only copies that are named.

    Args:
        destination: the replica.
        datasets: of this host.
    """

    def __init__(self, destination: Destination, datasets: Sequence[str]) -> None:
        self._destination = destination
        self._datasets = datasets

    def snapshots(self) -> list[PoolSnapshot]:
        """See :class:`CopySource`."""
        found = self._destination.snapshots(self._datasets)
        return [
            replace(each, dataset=copy_name(each.dataset))
            for each in found
            if is_snapshot(each.name)
        ]

    def bundles(self, uuid: str) -> Mapping[str, BundleCopy]:
        """See :class:`CopySource`."""
        return self._destination.bundles(uuid)

    def manifest(self, reference: str) -> str:
        """See :class:`CopySource`."""
        return self._destination.manifest(reference)

    def newest_manifests(self) -> Mapping[str, str]:
        """See :class:`CopySource`: none, since domains cannot be listed."""
        return {}

    def damaged(self, reference: str, sums: Mapping[str, str]) -> list[str]:
        """See :class:`CopySource`."""
        return self._destination.damaged(reference, sums)


def open_copies(
    config: Config, name: str, pool: Pool, interrupt: Interrupt, progress: Progress
) -> CopySource:
    """The replica with this name in the configuration.

    Args:
        config: the configuration.
        name: of the replica.
        pool: the pools of this host.
        interrupt: a signal ends a request.
        progress: gets notes.

    Raises:
        NotFoundError: there is no such replica.
        SnaporchError: the snapshots of this host cannot be listed.
    """
    here = config.copies_here.get(name)
    replica = here if here is not None else find_replica(config, name)
    if isinstance(replica, ResticReplica):
        return ResticSource(ResticRepository(name, replica, interrupt, progress))
    if not replica.append_only:
        return ReplicaSource(name, replica, interrupt, progress)
    datasets = [
        each
        for each in known_datasets(BundleStore(config.paths.bundles), pool)
        if is_dataset(f"{replica.dataset}/{copy_name(each)}")  # else the request is refused
    ]
    return AppendOnlyCopies(
        AppendOnlyDestination(name, replica, pool, interrupt, progress), datasets
    )


def known_datasets(store: BundleStore, pool: Pool) -> list[str]:
    """The datasets of this host's snapshots, and those that the manifests here name."""
    marked = {
        each.dataset
        for each in pool.snapshots()
        if not each.properties.keys().isdisjoint(("run", "ram"))
    }
    manifests = (store.state(reference)[1] for reference in store.references())
    for manifest in manifests:
        if manifest is not None:
            marked |= {entry.dataset for entry in manifest.snapshots}
            marked |= {manifest.pages.dataset} if manifest.pages else set()
    return sorted(marked)
