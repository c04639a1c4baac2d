"""Decides which chains of streams in a repository of restic are deleted: pure functions.

Which snapshots are kept is decided by :mod:`snaporch.schedule.received_copies_retention`. A chain
goes as a whole, when none of its snapshots is kept. The newest chain of each dataset always stays,
and the one in which the next copy begins. :mod:`snaporch.schedule.prune_chains` carries it out,
after it has read what :func:`to_read` names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, tzinfo

from snaporch.bundle.manifest import Manifest
from snaporch.catalog.torn import is_torn
from snaporch.config.policy import Keep
from snaporch.model import Level, PoolSnapshot, VerificationResult
from snaporch.replication.restic_records import Contents, Kind, StreamRecord
from snaporch.schedule.received_copies_retention import (
    CopiedRun,
    CopyDecision,
    decide_copies,
    owner_of,
)

NEWEST = "the newest chain of its dataset"
CONTINUED = "the next copy begins in it"


@dataclass(frozen=True, slots=True)
class ChainDecision:
    """Whether a chain is deleted, and why."""

    streams: tuple[StreamRecord, ...]
    """All of them, the full one first."""
    delete: bool
    reason: str
    is_newest: bool = False
    """The chain of its dataset that ends last; what is dated ahead of the clock does not count."""

    @property
    def dataset(self) -> str:
        """The dataset on the host that was copied."""
        return self.streams[0].snapshot.dataset

    @property
    def uploads(self) -> frozenset[str]:
        """The tag ``upload`` of each stream."""
        return frozenset(each.upload for each in self.streams)

    @property
    def bytes(self) -> int:
        """The bytes of its streams, before restic compresses them."""
        return sum(each.bytes for each in self.streams)


@dataclass(frozen=True, slots=True)
class RepositoryDecision:
    """What is deleted in a repository."""

    runs: list[CopyDecision]
    """By the rules: which runs are needed."""
    chains: list[ChainDecision]
    without_streams: frozenset[str]
    """Bundles of which no ZFS snapshot is there any more: ``uuid/run``."""

    def newest_chain(self, dataset: str) -> ChainDecision:
        """The one that stays of a dataset, from which its newest snapshot comes back."""
        return next(e for e in self.chains if e.dataset == dataset and e.is_newest)

    def only(self, uploads: Collection[frozenset[str]], reason: str) -> RepositoryDecision:
        """The same, but of the chains that would go only some do.

        Args:
            uploads: those of each chain that goes.
            reason: why the others stay.
        """
        chains = [
            e if not e.delete or e.uploads in uploads else replace(e, delete=False, reason=reason)
            for e in self.chains
        ]
        return replace(self, chains=chains)

    @property
    def bundles(self) -> list[str]:
        """The bundles that go, ``uuid/run``: without streams, or with one in a chain that goes."""
        gone = {record.key for each in self.chains if each.delete for record in each.streams}
        with_one = (
            each.run.key
            for each in self.runs
            if any((member.dataset, member.guid) in gone for member in each.run.members)
        )
        return sorted({*self.without_streams, *with_one})


def decide_repository(
    contents: Contents,
    manifests: Mapping[str, Manifest],
    continued: Collection[tuple[str, int]],
    keep: Keep,
    now: datetime,
    zone: tzinfo,
) -> RepositoryDecision:
    """Decide which chains and bundles are deleted.

    A run is whole if its bundle is there, and each stream that its manifest names. One that is not
    may still be repaired, or is not complete yet. It takes no other's place, and stays as long as
    it would stay beside the whole ones if it were whole.

    Args:
        contents: of the repository.
        manifests: by ``uuid/run``, those of bundles in the repository or on this host that can be
            read. While one of a bundle in the repository is missing, its run is not whole; no chain
            goes if no stream is marked with that run.
        continued: dataset and GUID of the snapshots at which the next streams begin.
        keep: the rules.
        now: the time, with a time zone.
        zone: the time zone of hours, days, weeks, months and years.
    """
    in_order = [_in_order(each.snapshot) for each in contents.streams.values()]
    found = _runs(contents, manifests)
    runs = _judge(found, lambda some: decide_copies(some, in_order, keep, timedelta(), now, zone))
    needed: dict[tuple[str, int], str] = {}
    for each in (each for each in runs if not each.delete):
        whole = "" if each.run.is_whole else "is not whole, "
        for member in each.run.members:
            reason = f"{each.run.domain}@{each.run.snapshot}: {whole}{each.reason}"
            needed[member.dataset, member.guid] = reason
    known = {each.key for each in found}
    chains = _decide_chains(contents.chains(), needed, continued, now)
    without = {key for key in contents.bundles.keys() - known if key in manifests}
    if unknown := sorted(contents.bundles.keys() - known - without):
        reason = f"the manifest of the bundle {unknown[0]} cannot be read"
        chains = [replace(e, delete=False, reason=reason) if e.delete else e for e in chains]
    return RepositoryDecision(runs, chains, frozenset(without))


def _judge(
    runs: Sequence[CopiedRun], judge: Callable[[Iterable[CopiedRun]], list[CopyDecision]]
) -> list[CopyDecision]:
    """Judge the whole runs, and each other one beside them; what is kept by any of this stays."""
    by_key = {each.key: each for each in runs}
    whole = [each for each in runs if each.is_whole]
    together: dict[str, list[CopiedRun]] = defaultdict(list)
    for each in runs:
        if not each.is_whole:
            together[each.group_run or each.key].append(replace(each, is_whole=True))
    judged = [*judge(whole), *(e for own in together.values() for e in judge([*whole, *own]))]
    found: dict[str, CopyDecision] = {}
    for verdict in judged:
        key = verdict.run.key
        if key not in found or (found[key].delete and not verdict.delete):
            found[key] = replace(verdict, run=by_key[key])
    return list(found.values())


def _decide_chains(
    chains: Sequence[Sequence[StreamRecord]],
    needed: Mapping[tuple[str, int], str],
    continued: Collection[tuple[str, int]],
    now: datetime,
) -> list[ChainDecision]:
    by_dataset: dict[str, list[ChainDecision]] = defaultdict(list)
    for streams in chains:
        kept = [f"has {needed[each.key]}" for each in streams if each.key in needed]
        kept += [CONTINUED for each in streams if each.key in continued]
        reason = kept[0] if kept else f"no rule keeps any of its {len(streams)} snapshots"
        decision = ChainDecision(tuple(streams), delete=not kept, reason=reason)
        by_dataset[decision.dataset].append(decision)
    found = []
    for _, own in sorted(by_dataset.items()):
        *older, last = sorted(own, key=lambda each: _last(each, now))
        found += [*older, replace(last, delete=False, reason=NEWEST, is_newest=True)]
    return found


def _last(chain: ChainDecision, now: datetime) -> tuple[bool, datetime, int]:
    times = ((each.snapshot.created <= now, each.snapshot.created) for each in chain.streams)
    return *max(times), chain.streams[0].snapshot.guid


def to_read(
    contents: Contents, decision: RepositoryDecision, now: datetime
) -> tuple[list[StreamRecord], list[CopiedRun]]:
    """What must be whole before a chain goes: of each guest that loses one, its newest snapshot.

    That is the newest whole run that stays and is not dated ahead: the streams of all of its
    datasets, of its pages of RAM too, and its bundle. Besides them, the newest chain of each
    dataset that loses one: it may have snapshots that are no guest's.

    Args:
        contents: of the repository.
        decision: what would go.
        now: the time, with a time zone.

    Returns:
        The streams, and the runs whose bundles are read; nothing if no chain would go.
    """
    going = [each for each in decision.chains if each.delete]
    gone = {record.key for each in going for record in each.streams}
    newest: dict[str, CopiedRun] = {}
    losing = set()
    for run, stays in sorted(
        ((each.run, not each.delete) for each in decision.runs),
        key=lambda each: (each[0].created, each[0].run),
    ):
        if not gone.isdisjoint((each.dataset, each.guid) for each in run.members):
            losing.add(run.uuid)
        elif stays and run.is_whole and run.created <= now:
            newest[run.uuid] = run
    runs = [newest[uuid] for uuid in sorted(losing & newest.keys())]
    streams = [
        e for name in {e.dataset: 0 for e in going} for e in decision.newest_chain(name).streams
    ]
    members = [(each.dataset, each.guid) for run in runs for each in run.members]
    streams += [record for key in members for record in contents.chain(key)]
    return list({each.key: each for each in streams}.values()), runs


def _runs(contents: Contents, manifests: Mapping[str, Manifest]) -> list[CopiedRun]:
    """The runs of which a stream is there: by the marks of streams, and by manifests."""
    members: dict[str, dict[tuple[str, int], PoolSnapshot]] = defaultdict(dict)
    for key, record in contents.streams.items():
        uuid, _, run = (owner := owner_of(record.snapshot)).partition("/")
        if uuid and run:
            members[owner][key] = record.snapshot
    for reference, manifest in manifests.items():
        there = [each for each in _wanted(manifest) if each in contents.streams]
        if there:
            members[reference] |= {each: contents.streams[each].snapshot for each in there}
    return [
        _run(key, own, manifests.get(key), has_bundle=key in contents.bundles)
        for key, own in members.items()
    ]


def _wanted(manifest: Manifest) -> set[tuple[str, int]]:
    """Dataset and GUID of each snapshot that a run needs."""
    found = {(each.dataset, each.guid) for each in manifest.snapshots}
    if manifest.pages is not None:
        found.add((manifest.pages.dataset, manifest.pages.guid))
    return found


def _run(
    key: str,
    own: Mapping[tuple[str, int], PoolSnapshot],
    manifest: Manifest | None,
    *,
    has_bundle: bool,
) -> CopiedRun:
    """A run, by its marks; its manifest says what it needs."""
    uuid, _, run = key.partition("/")
    disks = [each for each in own.values() if "ram" not in each.properties]
    marked = [each.properties for each in disks if owner_of(each) == key]
    marks = marked[0] if marked else {}
    result = VerificationResult.parse(marks.get("verified"))
    domain, level, is_whole = marks.get("domain", ""), marks.get("level", ""), False
    if manifest is not None:
        domain, level = manifest.domain, marks.get("level", manifest.level)
        is_torn_one = manifest.level is Level.TORN or any(map(is_torn, disks))
        has_all = bool(disks and manifest.snapshots) and _wanted(manifest) <= own.keys()
        is_whole = has_bundle and has_all and not is_torn_one
    return CopiedRun(
        uuid=uuid,
        run=run,
        domain=domain or uuid,
        snapshot=next(iter(disks or own.values())).name,
        members=tuple(map(_in_order, own.values())),
        is_whole=is_whole,
        by_policy=True,
        received=min(each.created for each in own.values()),
        good_ram=level == Level.RAM,
        passed=result.passed if result is not None else None,
        group_run=marks.get("group", ""),
    )


def _in_order(snapshot: PoolSnapshot) -> PoolSnapshot:
    """A snapshot in the order of its time: a txg says nothing beside those of other pools."""
    return replace(snapshot, createtxg=int(snapshot.created.timestamp()))


def in_steps(contents: Contents, decision: RepositoryDecision) -> list[list[str]]:
    """What is forgotten, one list after the other; an interruption leaves only whole chains.

    Bundles come first: a run without its bundle takes no other's place. Of a chain, the full stream
    comes last, so that the next prune finds the rest of it. Data come before the record that names
    them.

    Args:
        contents: of the repository.
        decision: what goes.

    Returns:
        IDs of restic snapshots.
    """
    steps: dict[int, list[str]] = {number: [] for number in range(5)}
    bundles, chains = frozenset(decision.bundles), decision.chains
    needed = frozenset[str]().union(*(each.uploads for each in chains if not each.delete))
    going = [each for each in chains if each.delete]
    uploads = frozenset[str]().union(*(each.uploads for each in going))
    tags = {f"{e.dataset}@{e.streams[0].snapshot.guid}" for e in going}
    first = {each.streams[0].upload for each in going}
    for each in contents.stored:
        if each.kind in (Kind.BUNDLE, Kind.BUNDLE_RECORD) and each.bundle in bundles:
            steps[each.kind == Kind.BUNDLE_RECORD].append(each.id)
        elif each.kind not in (Kind.STREAM, Kind.STREAM_RECORD) or each.upload in needed:
            continue
        elif each.upload in first:
            steps[3 + (each.kind == Kind.STREAM_RECORD)].append(each.id)
        elif each.upload in uploads or each.chain in tags:
            steps[2].append(each.id)
    return [each for each in steps.values() if each]
