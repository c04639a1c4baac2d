"""Which guests a source sends, and which of their ZFS snapshots: pure decisions.

- A guest is allowed by its UUID, or by the name that its newest snapshot has.
- A dataset that also has snapshots or disks of a guest that is not allowed is not sent: its blocks
  are those of both guests.
- Of a dataset, only the snapshots before the first one of an unfinished run are sent: that run may
  still change its marks, and a copy gets its marks only once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from snaporch.model import PoolSnapshot


@dataclass(frozen=True, slots=True)
class Defined:
    """A domain of libvirt."""

    uuid: str
    name: str
    datasets: Collection[str]
    """Where it has disks."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A guest that a source sends."""

    uuid: str
    domain: str
    """The name that its newest snapshot has."""
    snapshots: Mapping[str, Sequence[PoolSnapshot]]
    """What may be sent, by dataset, each oldest first; datasets may have none yet."""
    waiting: tuple[str, ...]
    """Full names of snapshots that may be sent when the runs before them have ended."""
    shared: tuple[str, ...]
    """Datasets that are not sent, since a guest that is not allowed uses them, too."""

    @property
    def runs(self) -> set[str]:
        """The runs whose bundles may be sent."""
        sent = (each for some in self.snapshots.values() for each in some)
        return {each.properties["run"] for each in sent if "run" in each.properties}


def owner_of(snapshot: PoolSnapshot) -> str:
    """The UUID of the guest whose disks or pages of RAM a snapshot has; empty for none."""
    ram = snapshot.properties.get("ram", "").partition("/")[0]
    return snapshot.properties.get("uuid", "") or ram


def make_offers(
    snapshots: Iterable[PoolSnapshot],
    allowed: Collection[str] | None,
    unfinished: Collection[str],
    domains: Iterable[Defined] = (),
) -> list[Offer]:
    """The guests that a machine may copy.

    Args:
        snapshots: all snapshots of this host that are no copies, oldest first.
        allowed: names and UUIDs of guests; None for all.
        unfinished: runs that have not ended.
        domains: those of this host, whether or not they have snapshots.
    """
    by_dataset: dict[str, list[PoolSnapshot]] = defaultdict(list)
    names: dict[str, str] = {}
    for each in snapshots:
        owner = owner_of(each)
        if not owner:
            continue
        by_dataset[each.dataset].append(each)
        if each.properties.get("domain"):
            names[owner] = each.properties["domain"]  # the newest one is the last
    permitted = {
        uuid for uuid, name in names.items() if allowed is None or {uuid, name} & {*allowed}
    }
    private = {
        dataset
        for each in domains
        if allowed is not None
        and each.uuid not in permitted
        and (each.uuid in names or not {each.uuid, each.name} & {*allowed})
        for dataset in each.datasets
    }
    found = {uuid: Offer(uuid, names[uuid], {}, (), ()) for uuid in names if uuid in permitted}
    sent: dict[str, dict[str, list[PoolSnapshot]]] = defaultdict(dict)
    waiting: dict[str, list[str]] = defaultdict(list)
    shared: dict[str, list[str]] = defaultdict(list)
    for dataset, own in by_dataset.items():
        owners = {owner_of(each) for each in own}
        if dataset in private or not owners <= permitted:
            for uuid in owners & permitted:
                shared[uuid].append(dataset)
            continue
        first = min(
            (each.createtxg for each in own if each.properties.get("run") in unfinished),
            default=None,
        )
        ended = [each for each in own if first is None or each.createtxg < first]
        for uuid in owners:
            sent[uuid][dataset] = sorted(ended, key=lambda each: each.createtxg)
            waiting[uuid] += [
                each.full_name for each in own if each not in ended and owner_of(each) == uuid
            ]
    return [
        Offer(uuid, each.domain, sent[uuid], tuple(waiting[uuid]), tuple(sorted(shared[uuid])))
        for uuid, each in sorted(found.items())
    ]
