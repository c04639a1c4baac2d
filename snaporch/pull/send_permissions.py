"""On a source: which guests it lets another machine copy, and which snapshots: pure decisions.

A request for anything else is refused by :mod:`snaporch.pull.sender`.

Which requests are accepted at all is decided by :mod:`snaporch.pull.send_request`.

- A guest is allowed by its UUID, or by the name that its newest snapshot has.
- A dataset that also has snapshots or disks of a guest that is not allowed is not sent: its blocks
  are those of both guests.
- Guests that share a dataset also share its snapshots, and only one run can mark these. The bundles
  of the other runs name them by their GUIDs.
- Of a dataset, only the snapshots before the first one of an unfinished run are sent: that run may
  still change its marks, and a copy gets its marks only once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from snaporch.model import PoolSnapshot


@dataclass(frozen=True, slots=True)
class Defined:
    """A domain of libvirt."""

    uuid: str
    name: str
    datasets: Collection[str]
    """Where it has disks."""


@dataclass(frozen=True, slots=True)
class UnmarkedRun:
    """A run of a guest whose ZFS snapshots have the marks of another run."""

    uuid: str
    domain: str
    run: str
    snapshots: tuple[PoolSnapshot, ...]

    @property
    def created(self) -> datetime:
        """When the newest of its snapshots was taken."""
        return max(each.created for each in self.snapshots)


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
    unmarked: Mapping[str, Sequence[PoolSnapshot]]
    """What may be sent of its runs whose snapshots have the marks of others, by run."""

    @property
    def runs(self) -> set[str]:
        """The runs whose bundles may be sent."""
        sent = (each for some in self.snapshots.values() for each in some)
        marked = {each.properties["run"] for each in sent if "run" in each.properties}
        return marked.union(self.unmarked)


@dataclass(frozen=True, slots=True)
class _Owned:
    """A snapshot, the guests whose it is, and the runs that took it."""

    snapshot: PoolSnapshot
    owners: frozenset[str]
    runs: frozenset[str]


def owner_of(snapshot: PoolSnapshot) -> str:
    """The UUID of the guest whose disks or pages of RAM a snapshot has; empty for none."""
    ram = snapshot.properties.get("ram", "").partition("/")[0]
    return snapshot.properties.get("uuid", "") or ram


def make_offers(
    snapshots: Sequence[PoolSnapshot],
    allowed: Collection[str] | None,
    unfinished: Collection[str],
    domains: Iterable[Defined] = (),
    unmarked: Collection[UnmarkedRun] = (),
) -> list[Offer]:
    """The guests that a machine may copy.

    Args:
        snapshots: all snapshots of this host that are no copies, oldest first.
        allowed: names and UUIDs of guests; None for all.
        unfinished: runs that have not ended.
        domains: those of this host, whether or not they have snapshots.
        unmarked: the runs whose snapshots have the marks of others.
    """
    names = _names(snapshots, unmarked)
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
    sent: dict[str, dict[str, list[PoolSnapshot]]] = defaultdict(dict)
    waiting: dict[str, list[str]] = defaultdict(list)
    shared: dict[str, list[str]] = defaultdict(list)
    for dataset, own in _by_dataset(snapshots, unmarked).items():
        owners = {uuid for each in own for uuid in each.owners}
        if dataset in private or not owners <= permitted:
            for uuid in owners & permitted:
                shared[uuid].append(dataset)
            continue
        first = min(
            (each.snapshot.createtxg for each in own if not each.runs.isdisjoint(unfinished)),
            default=None,
        )
        ended = [e.snapshot for e in own if first is None or e.snapshot.createtxg < first]
        for uuid in owners:
            sent[uuid][dataset] = sorted(ended, key=lambda each: each.createtxg)
            waiting[uuid] += [
                each.snapshot.full_name
                for each in own
                if each.snapshot not in ended and uuid in each.owners
            ]
    return [
        Offer(
            uuid,
            names[uuid],
            sent[uuid],
            tuple(waiting[uuid]),
            tuple(sorted(shared[uuid])),
            _offered_runs(uuid, sent[uuid], unmarked),
        )
        for uuid in sorted(permitted)
    ]


def _names(snapshots: Iterable[PoolSnapshot], unmarked: Iterable[UnmarkedRun]) -> dict[str, str]:
    """The name of each guest in its newest snapshot, by UUID."""
    found: dict[str, tuple[datetime, str]] = {}
    for each in snapshots:
        if (owner := owner_of(each)) and each.properties.get("domain"):
            found[owner] = each.created, each.properties["domain"]  # the newest one is the last
    for run in sorted(unmarked, key=lambda each: each.created):
        if run.uuid not in found or found[run.uuid][0] <= run.created:
            found[run.uuid] = run.created, run.domain
    return {uuid: name for uuid, (_, name) in found.items()}


def _by_dataset(
    snapshots: Iterable[PoolSnapshot], unmarked: Iterable[UnmarkedRun]
) -> Mapping[str, list[_Owned]]:
    """The snapshots that are of any guest."""
    sharing: dict[str, list[UnmarkedRun]] = defaultdict(list)
    for run in unmarked:
        for each in run.snapshots:
            sharing[each.full_name].append(run)
    found: dict[str, list[_Owned]] = defaultdict(list)
    for each in snapshots:
        others = sharing[each.full_name]
        owners = {owner_of(each), *(run.uuid for run in others)} - {""}
        runs = {each.properties.get("run", ""), *(run.run for run in others)} - {""}
        if owners:
            found[each.dataset].append(_Owned(each, frozenset(owners), frozenset(runs)))
    return found


def _offered_runs(
    uuid: str, sent: Mapping[str, Sequence[PoolSnapshot]], unmarked: Iterable[UnmarkedRun]
) -> dict[str, list[PoolSnapshot]]:
    """What is sent of a guest's runs whose snapshots have the marks of others."""
    names = {each.full_name for some in sent.values() for each in some}
    found = {
        run.run: [each for each in run.snapshots if each.full_name in names]
        for run in unmarked
        if run.uuid == uuid
    }
    return {run: own for run, own in found.items() if own}
