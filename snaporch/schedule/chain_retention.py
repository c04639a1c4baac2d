"""Decides which chains of streams in a repository of restic are deleted: pure functions.

Which snapshots are kept is decided by :mod:`snaporch.schedule.received_copies_retention`. A chain
goes as a whole, when none of its snapshots is kept. The newest chain of each dataset always stays,
and the one in which the next copy begins. :mod:`snaporch.schedule.prune_chains` carries it out,
after it has read the newest chain of each dataset that loses one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
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
        return max((e for e in self.chains if e.dataset == dataset), key=_newest)

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


def unmarked_bundles(contents: Contents) -> list[str]:
    """The bundles that no stream is marked with; only their manifests say what they belong to.

    Such as those of guests that share a dataset: its snapshots have the marks of one of them.
    """
    marked = {owner_of(each.snapshot) for each in contents.streams.values()}
    return sorted(contents.bundles.keys() - marked)


def decide_repository(
    contents: Contents,
    manifests: Mapping[str, Manifest],
    continued: Collection[tuple[str, int]],
    keep: Keep,
    now: datetime,
    zone: tzinfo,
) -> RepositoryDecision:
    """Decide which chains and bundles are deleted.

    A run that lacks a stream or its bundle cannot be brought back, and keeps no chain.

    Args:
        contents: of the repository.
        manifests: by ``uuid/run``, those of :func:`unmarked_bundles` that can be read; a bundle
            without one stays.
        continued: dataset and GUID of the snapshots at which the next streams begin.
        keep: the rules.
        now: the time, with a time zone.
        zone: the time zone of hours, days, weeks, months and years.
    """
    in_order = [_in_order(each.snapshot) for each in contents.streams.values()]
    runs = decide_copies(_runs(contents, manifests), in_order, keep, timedelta(), now, zone)
    needed: dict[tuple[str, int], str] = {}
    for run in (each for each in runs if not each.delete and each.run.is_whole):
        for member in run.run.members:
            reason = f"{run.run.domain}@{run.run.snapshot}: {run.reason}"
            needed[member.dataset, member.guid] = reason
    chains = _decide_chains(contents.chains(), needed, continued)
    known = {each.run.key for each in runs}
    without = {key for key, each in manifests.items() if each.snapshots and key not in known}
    return RepositoryDecision(runs, chains, frozenset(without))


def _decide_chains(
    chains: Sequence[Sequence[StreamRecord]],
    needed: Mapping[tuple[str, int], str],
    continued: Collection[tuple[str, int]],
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
        *older, last = sorted(own, key=_newest)
        found += [*older, replace(last, delete=False, reason=NEWEST)]
    return found


def _newest(chain: ChainDecision) -> tuple[datetime, int]:
    last = max(each.snapshot.created for each in chain.streams)
    return last, chain.streams[0].snapshot.guid


def _runs(contents: Contents, manifests: Mapping[str, Manifest]) -> list[CopiedRun]:
    """The runs that the marks of streams name, and those of manifests."""
    members: dict[str, list[PoolSnapshot]] = defaultdict(list)
    for record in contents.streams.values():
        uuid, _, run = (owner := owner_of(record.snapshot)).partition("/")
        if uuid and run:
            members[owner].append(record.snapshot)
    found = [_marked_run(key, own, contents) for key, own in members.items()]
    for key, manifest in manifests.items():
        wanted = [(each.dataset, each.guid) for each in manifest.snapshots]
        if manifest.pages is not None:
            wanted.append((manifest.pages.dataset, manifest.pages.guid))
        there = [contents.streams[each].snapshot for each in wanted if each in contents.streams]
        is_whole = len(there) == len(wanted) > 0 and manifest.level is not Level.TORN
        name, ram = manifest.domain, manifest.level is Level.RAM
        if there:
            found.append(_run(key, name, there, is_whole=is_whole, good_ram=ram))
    return found


def _marked_run(key: str, own: Sequence[PoolSnapshot], contents: Contents) -> CopiedRun:
    disks = [each for each in own if "ram" not in each.properties]
    marks = disks[0].properties if disks else {}
    has_bundle = key in contents.bundles or not any("bundle" in e.properties for e in disks)
    run = _run(
        key,
        marks.get("domain", ""),
        own,
        is_whole=bool(disks) and has_bundle and not any(map(is_torn, disks)),
        good_ram=marks.get("level") == Level.RAM,
    )
    result = VerificationResult.parse(marks.get("verified"))
    passed = result.passed if result is not None else None
    return replace(run, passed=passed, group_run=marks.get("group", ""))


def _run(
    key: str, domain: str, own: Sequence[PoolSnapshot], *, is_whole: bool, good_ram: bool
) -> CopiedRun:
    uuid, _, run = key.partition("/")
    return CopiedRun(
        uuid=uuid,
        run=run,
        domain=domain or uuid,
        snapshot=own[0].name,
        members=tuple(map(_in_order, own)),
        is_whole=is_whole,
        by_policy=True,
        received=min(each.created for each in own),
        good_ram=good_ram,
    )


def _in_order(snapshot: PoolSnapshot) -> PoolSnapshot:
    """A snapshot in the order of its time: a txg says nothing beside those of other pools."""
    return replace(snapshot, createtxg=int(snapshot.created.timestamp()))


def in_steps(contents: Contents, decision: RepositoryDecision) -> list[list[str]]:
    """What is forgotten, one list after the other; an interruption leaves only whole chains.

    Bundles come first: a run without its bundle keeps no chain. Of a chain, the full stream comes
    last, so that the next prune finds the rest of it. Data come before the record that names them.

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
