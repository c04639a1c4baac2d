"""Find the snapshots to delete, and the facts that decide whether they may be deleted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from snaporch import default_paths
from snaporch.catalog.records import all_records, snapshots_of_record
from snaporch.clone.find_clones import CloneArtifacts, find_artifacts
from snaporch.context import Context
from snaporch.delete.decision import SnapshotFacts, refusal
from snaporch.errors import NotFoundError, RefusedError
from snaporch.fence import Fence
from snaporch.journal import UnreadableJournal, list_journals
from snaporch.locks import held_by
from snaporch.model import PoolSnapshot, SnapshotRecord
from snaporch.restore.select import of_group, select_records, split_name
from snaporch.schedule.forecast import retention_snapshot
from snaporch.schedule.retention import last_good


@dataclass(frozen=True, slots=True)
class DeleteRequest:
    """The options of ``snaporch delete``."""

    names: tuple[str, ...]
    """``DOMAIN@SNAPSHOT`` or ``DOMAIN@RUN``, each."""
    group: bool = False
    """Also delete what the consistency group took at the same instant."""
    also_newest: bool = False
    """Also delete the last good snapshots of a domain."""


@dataclass(frozen=True, slots=True)
class DeleteItem:
    """A snapshot to delete."""

    domain: str
    uuid: str
    snapshot: str
    run: str
    zfs_names: tuple[str, ...] = ()
    """The full names of its ZFS snapshots. Empty if only its bundle is left, after an interrupted
    delete."""
    guids: tuple[int, ...] = ()
    """The GUID of each of its ZFS snapshots."""

    @property
    def name(self) -> str:
        """``DOMAIN@SNAPSHOT``."""
        return f"{self.domain}@{self.snapshot}"

    @property
    def reference(self) -> str:
        """The reference of its bundle, which need not exist."""
        return f"{self.uuid}/{self.run}"


@dataclass(frozen=True, slots=True)
class DeletePlan:
    """What a request would delete."""

    items: tuple[DeleteItem, ...]
    refusals: tuple[RefusedError, ...]
    """Why snapshots must not be deleted; then none is."""
    left: tuple[str, ...]
    """Snapshots of a group's instants that stay, as ``DOMAIN@SNAPSHOT``."""


def make_delete_plan(context: Context, request: DeleteRequest) -> DeletePlan:
    """Plan to delete snapshots; only reads.

    Args:
        context: the configuration and ZFS.
        request: what to delete.

    Raises:
        UsageError: a name has the wrong form.
        NotFoundError: a snapshot does not exist, and no bundle of it is left.
        RefusedError: a name stands for several instants.
    """
    snapshots = context.pool.snapshots()
    records = all_records(context.store, snapshots, renamed_too=True)
    chosen: list[SnapshotRecord] = []
    without: list[DeleteItem] = []
    for text in request.names:
        try:
            chosen += select_records(records, text)
        except NotFoundError:
            left = list(_bundles_left(context, records, text))
            if not left:
                raise
            without += left
    others = of_group(records, chosen)
    if request.group:
        chosen, others = chosen + others, []
    facts = _Facts(context, snapshots, records, list(dict.fromkeys(chosen)))
    refusals = [refusal(each, also_newest=request.also_newest) for each in facts.all()]
    return DeletePlan(
        tuple(dict.fromkeys([*without, *facts.items])),
        tuple(each for each in refusals if each is not None),
        tuple(each.full_name for each in others),
    )


def check_again(
    context: Context, plan: DeletePlan, uuid: str, *, also_newest: bool
) -> list[DeleteItem]:
    """The items of one domain as they are now, checked under the domain's lock.

    Of one whose ZFS snapshots no longer exist, the bundle is left.

    Args:
        context: the configuration and ZFS.
        plan: made before, without the lock.
        uuid: the domain's, whose lock the caller holds.
        also_newest: see :class:`DeleteRequest`.

    Raises:
        RefusedError: one must not be deleted any more, or consists of other ZFS snapshots.
    """
    snapshots = context.pool.snapshots()
    records = all_records(context.store, snapshots, renamed_too=True)
    shown = {(item.uuid, item.run, item.snapshot): item for item in plan.items}
    chosen = [each for each in records if (each.uuid, each.run, each.snapshot) in shown]
    facts = _Facts(context, snapshots, records, chosen, locked=uuid)
    found = []
    for item, each in zip(facts.items, facts.all(), strict=True):
        if item.uuid != uuid:
            continue
        if (error := refusal(each, also_newest=also_newest)) is not None:
            raise error
        if not {*item.guids} <= {*shown[item.uuid, item.run, item.snapshot].guids}:
            raise RefusedError(item.name, "was changed meanwhile", "try again")
        found.append(item)
    there = {item.reference for item in found}
    gone = [each for each in plan.items if each.uuid == uuid and each.reference not in there]
    return found + [replace(each, zfs_names=(), guids=()) for each in gone]


def _bundles_left(
    context: Context, records: Iterable[SnapshotRecord], text: str
) -> Iterable[DeleteItem]:
    """Bundles in the store that have this name and no ZFS snapshot."""
    domain, name = split_name(text)
    known = {f"{record.uuid}/{record.run}" for record in records}
    for reference in context.store.references():
        if reference in known:
            continue
        _, manifest = context.store.state(reference)
        if manifest is None or reference != f"{manifest.uuid}/{manifest.run}":
            continue
        if domain in (manifest.domain, manifest.uuid) and name in (manifest.snapshot, manifest.run):
            yield DeleteItem(manifest.domain, manifest.uuid, manifest.snapshot, manifest.run)


class _Facts:
    """The facts about the chosen snapshots."""

    def __init__(
        self,
        context: Context,
        snapshots: Sequence[PoolSnapshot],
        records: Sequence[SnapshotRecord],
        chosen: Sequence[SnapshotRecord],
        locked: str = "",
    ) -> None:
        self._context = context
        self._records = records
        self._chosen = chosen
        self.items = [_item(context, snapshots, record) for record in chosen]
        self._names = [name for item in self.items for name in item.zfs_names]
        self._clones = context.pool.clones(self._names) if self._names else {}
        self._ends = _ends_of_clones(context) if self._clones else {}
        self._mounts = context.pool.blocking_mounts(self._names) if self._names else []
        self._unfinished = _unfinished(context, locked)
        self._last = _last(records, {record.uuid for record in chosen})

    def all(self) -> Iterable[SnapshotFacts]:
        """The facts about each, in order."""
        shared = self._shared()
        staying = {each.run for each in self._records if each not in self._chosen}
        all_tags = self._context.pool.holds_of(self._names)
        for record, item in zip(self._chosen, self.items, strict=True):
            names = item.zfs_names
            tags = {name: all_tags[name] for name in names}
            yield SnapshotFacts(
                domain=item.domain,
                snapshot=item.snapshot,
                holds={name: own for name, own in tags.items() if own},
                clones={
                    clone: self._ends.get(clone, ["zfs", "destroy", clone])
                    for name in names
                    for clone in self._clones.get(name, ())
                },
                mounts=[m.program for m in self._mounts if m.name in names],
                kept=record.kept is not None,
                shared_with=shared.get(item, []),
                copies=[] if self._has_manifest(item) else _copies(item),
                unfinished=item.uuid in self._unfinished,
                moving=self._moving(item),
                last=[] if item.run in staying else self._last.get(item.reference, []),
            )

    def _moving(self, item: DeleteItem) -> Fence | None:
        fence = self._context.fences.find(item.uuid)
        is_last = fence is not None and item.run == fence.run and not fence.delivered
        return fence if is_last else None

    def _has_manifest(self, item: DeleteItem) -> bool:
        """Whether a manifest shows which ZFS snapshots are the run's own, and which are copies."""
        return self._context.store.state(item.reference)[1] is not None

    def _shared(self) -> Mapping[DeleteItem, list[str]]:
        """Snapshots of other guests that have a ZFS snapshot of an item, and are not chosen."""
        found: dict[DeleteItem, list[str]] = {}
        for item in self.items:
            names = {*item.zfs_names}
            found[item] = [
                other.full_name
                for other in self._records
                if other.uuid != item.uuid
                and other not in self._chosen
                and not names.isdisjoint(f"{each}@{other.snapshot}" for each in other.datasets)
            ]
        return found


def _item(
    context: Context, snapshots: Sequence[PoolSnapshot], record: SnapshotRecord
) -> DeleteItem:
    members = snapshots_of_record(context.store, snapshots, record)
    return DeleteItem(
        record.domain,
        record.uuid,
        record.snapshot,
        record.run,
        tuple(member.full_name for member in members),
        tuple(member.guid for member in members),
    )


def _ends_of_clones(context: Context) -> dict[str, list[str]]:
    """The command that deletes each clone that snaporch made, by its dataset.

    A recovery deletes what a killed command left. One that runs deletes its own when it is ended.
    """
    return {dataset: _end_of(each) for each in find_artifacts(context) for dataset in each.datasets}


def _end_of(clone: CloneArtifacts) -> list[str]:
    if not clone.is_disposable:
        return ["snaporch", "clone", "--delete", clone.name or clone.uuid]
    worker = held_by(default_paths.LOCKS, clone.uuid)
    return ["kill", str(worker.pid)] if worker is not None else ["snaporch", "recover"]


def _copies(item: DeleteItem) -> list[str]:
    """The ZFS snapshots of an item of which one is a copy of another: their GUIDs are equal."""
    count = Counter(item.guids)
    pairs = zip(item.zfs_names, item.guids, strict=True)
    return sorted(name for name, guid in pairs if count[guid] > 1)


def _unfinished(context: Context, locked: str) -> set[str]:
    """UUIDs of the domains with the journal of an interrupted run.

    Args:
        context: has the journals.
        locked: the UUID of the domain whose lock the caller holds: no run works on it. On any other
            domain a run may, if the lock is held.
    """
    found: set[str] = set()
    for journal in list_journals(context.config.paths.journal, sweep=False):
        if isinstance(journal, UnreadableJournal) and journal.uuid is None:
            raise journal.error
        uuid = journal.uuid or ""
        if uuid == locked or held_by(default_paths.LOCKS, uuid) is None:
            found.add(uuid)
    return found


def _last(records: Iterable[SnapshotRecord], uuids: Collection[str]) -> dict[str, list[str]]:
    """What snapshots of these domains are the last of, by the references of their bundles."""
    now = datetime.now(UTC)
    found = {}
    for uuid in uuids:
        own = [retention_snapshot(record, {}) for record in records if record.uuid == uuid]
        found.update({f"{uuid}/{run}": each for run, each in last_good(own, now).items()})
    return found
