"""The ZFS snapshots of a domain's runs: on this host, and on a replica."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from snaporch.bundle.manifest import Manifest
from snaporch.bundle.store import copy_name
from snaporch.catalog.records import missing_datasets, one_per_dataset, run_members
from snaporch.config import AnyReplica, Config, Replica
from snaporch.model import PoolSnapshot, SnapshotRecord


class Originals:
    """The datasets and ZFS snapshots of a domain's records, without the copies on this host.

    A manifest names the originals, wherever they are. Copies carry the same properties, so a run
    without a manifest cannot distinguish them from originals. Then a dataset is an original if any
    of the manifests names it. Others are copies if they are below a configured replica of this
    host, or below a source, or are named as snaporch names the copy of a dataset of any record: the
    original's snapshot may have been destroyed.

    Args:
        config: names the replicas.
        records: the snapshots to replicate.
        manifests: of the bundles, by run.
        datasets: those of all snapshots of the domain.
    """

    def __init__(
        self,
        config: Config,
        records: Sequence[SnapshotRecord],
        manifests: Mapping[str, Manifest | None],
        datasets: Collection[str],
    ) -> None:
        self._records = records
        self._manifests = manifests
        replicas = [each.dataset for each in config.zfs_replicas.values() if not each.host]
        sources = [each.dataset for each in config.source.values()]
        self._local = tuple(f"{each}/" for each in (*replicas, *sources))
        self._copies = tuple(f"/{copy_name(each)}" for each in datasets if "/" in each)
        known = [manifest for manifest in manifests.values() if manifest is not None]
        self._named = {entry.dataset for manifest in known for entry in manifest.snapshots}

    def of(self, record: SnapshotRecord) -> set[str]:
        """The record's datasets; empty if all of them seem to be copies."""
        if self._manifests[record.run] is not None:
            return set(record.datasets)
        return {each for each in record.datasets if each in self._named or not self._is_copy(each)}

    def _is_copy(self, dataset: str) -> bool:
        """Whether a dataset is named, or lies, as a copy does."""
        return dataset.startswith(self._local) or dataset.endswith(self._copies)

    def datasets(self, present: Collection[str]) -> list[str]:
        """The datasets of the guest's disks, then those of its pages of RAM.

        Args:
            present: the datasets that exist.
        """
        disks = self._with_snapshots() | self._named & set(present)  # the last one may be destroyed
        return [*sorted(disks), *sorted((self.pages() & set(present)) - disks)]

    def _with_snapshots(self) -> set[str]:
        return {dataset for record in self._records for dataset in self.of(record)}

    def disks(self) -> set[str]:
        """The datasets of the guest's disks, also those whose snapshots were destroyed here."""
        return self._with_snapshots() | self._named

    def pages(self) -> set[str]:
        """The datasets of the guest's pages of RAM."""
        return {m.pages.dataset for m in self._manifests.values() if m is not None and m.pages}

    def members(
        self, ours: Iterable[PoolSnapshot]
    ) -> dict[SnapshotRecord, tuple[PoolSnapshot, ...]]:
        """The ZFS snapshots of each record; empty if one of them is missing."""
        by_run: dict[str, list[PoolSnapshot]] = defaultdict(list)
        by_guid = {}
        for each in ours:
            by_run[each.properties.get("run", "")].append(each)
            by_guid[each.dataset, each.guid] = each
        found = {}
        for record in self._records:
            manifest = self._manifests[record.run]
            known = [(e.dataset, e.guid) for e in manifest.snapshots] if manifest else []
            near = {each.full_name: each for each in by_run[record.run]}
            near |= {by_guid[key].full_name: by_guid[key] for key in known if key in by_guid}
            members = run_members(manifest, record.run, near.values())
            chosen = one_per_dataset(manifest, members, record.snapshot)
            wanted = self.of(record)
            chosen = [each for each in chosen if each.dataset in wanted]
            found[record] = tuple(chosen) if len(chosen) == len(wanted) else ()
        return found

    def lacking(
        self,
        record: SnapshotRecord,
        members: Iterable[PoolSnapshot],
        theirs: Collection[tuple[str, int]],
    ) -> list[tuple[str, int]]:
        """What the replica lacks of a record's ZFS snapshots, and of that of its pages of RAM.

        ZFS snapshots that were destroyed on this host count, too.

        Args:
            record: the record.
            members: its ZFS snapshots.
            theirs: the dataset and the GUID of each snapshot that the replica has.

        Returns:
            The dataset and the GUID of each.
        """
        wanted = [(each.dataset, each.guid) for each in members]
        manifest = self._manifests[record.run]
        if manifest is not None and (pages := manifest.pages) is not None:
            wanted.append((pages.dataset, pages.guid))
        for same in self.destroyed(record, members):
            wanted += [] if any(each in theirs for each in same) else same
        return [each for each in wanted if each not in theirs]

    def destroyed(
        self, record: SnapshotRecord, members: Iterable[PoolSnapshot]
    ) -> list[list[tuple[str, int]]]:
        """The dataset and the GUIDs of a record's ZFS snapshots that this host has destroyed.

        Args:
            record: the record.
            members: its ZFS snapshots.

        Returns:
            For each dataset that has none of them any more: all of them, of which one would do.
        """
        manifest = self._manifests[record.run]
        if manifest is None:
            return []
        known = [(entry.dataset, entry.guid) for entry in manifest.snapshots]
        gone = missing_datasets(manifest, members)
        found = ([each for each in known if each[0] == dataset] for dataset in gone)
        return [each for each in found if each]


def nesting_reason(replica: AnyReplica, datasets: Iterable[str]) -> str:
    """Why datasets of this host cannot be copied to a replica, by their names; empty if they can.

    Below a dataset to copy, each copy would be copied, too, for ever. Above one, a replica would
    get copies of what is inside it.
    """
    if not isinstance(replica, Replica) or replica.host:
        return ""
    for dataset in datasets:
        if f"{replica.dataset}/".startswith(f"{dataset}/"):
            return f"{replica.dataset} is inside {dataset}, which is copied to it"
        if dataset.startswith(f"{replica.dataset}/"):
            return f"{dataset} is inside {replica.dataset}, to which it is copied"
    return ""
