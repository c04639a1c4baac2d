"""Find and mark torn snapshots: those taken while overlays were committed into their disks.

A commit copies blocks in the order of offsets. Until the pivot, the base has a state that the guest
never had: an early write may be missing while a later one is there. Transaction groups show which
snapshots were taken meanwhile, not clocks. A torn snapshot is newer than the newest snapshot at the
beginning of the commit, and no newer than the newest one at its end.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from snaporch.journal import append_line
from snaporch.model import Level, PoolSnapshot
from snaporch.zfs import PREFIX, Pool, PoolError

_BEGUN, _ENDED = "commit", "commit-ended"
_TORN = "torn"


@dataclass(frozen=True, slots=True)
class Commit:
    """The time of a commit, by the ``createtxg`` of each dataset's newest snapshot."""

    after: Mapping[str, int]
    """The beginning, by dataset; 0 if there was no snapshot."""
    until: Mapping[str, int] | None = None
    """The end, by dataset; None if no process has recorded one."""
    run: str = ""
    """The run, if the snapshots could not be listed at the beginning; then ``after`` is 0."""
    began: datetime | None = None
    """The beginning by the clock, if the snapshots could not be listed."""

    def tears(self, snapshot: PoolSnapshot) -> bool:
        """Whether the snapshot was taken during the commit."""
        dataset, txg = snapshot.dataset, snapshot.createtxg
        if dataset not in self.after or txg <= self.after[dataset]:
            return False
        return self.until is None or txg <= self.until.get(dataset, txg)

    def among(self, there: Collection[PoolSnapshot]) -> Commit:
        """Find out ``after`` later, if the snapshots could not be listed at the beginning.

        The commit began after the run's own snapshots. In a dataset without these, it began after
        the snapshots that are older by the clock.
        """
        if self.began is None:
            return self
        older: dict[str, int] = {}
        for snapshot in there:
            if snapshot.created < self.began.replace(microsecond=0):
                older[snapshot.dataset] = max(older.get(snapshot.dataset, 0), snapshot.createtxg)
        own = {s.dataset: s.createtxg for s in there if s.properties.get("run") == self.run}
        found = older | own
        return replace(self, after={each: found.get(each, 0) for each in self.after})


def _newest_txgs(pool: Pool, datasets: Collection[str]) -> dict[str, int]:
    newest = dict.fromkeys(datasets, 0)
    for snapshot in pool.snapshots(tuple(datasets)):
        newest[snapshot.dataset] = max(newest[snapshot.dataset], snapshot.createtxg)
    return newest


def record_commit(pool: Pool, datasets: Collection[str], journal: Path) -> Commit:
    """Record the newest snapshots in the run's journal before a commit begins.

    Returns:
        The record, for a caller whose journal cannot be written.

    Raises:
        PoolError: the snapshots cannot be listed.
    """
    begun = Commit(_newest_txgs(pool, datasets))
    with suppress(OSError):  # commit even if the disk is full
        append_line(journal, event=_BEGUN, after=begun.after)
    return begun


@contextmanager
def recorded_commit(pool: Pool, datasets: Collection[str], journal: Path) -> Iterator[list[Commit]]:
    """Record the beginning and end of a commit; if the block raises, no end is recorded.

    A commit begins even if the pool does not answer: the guest must not stay on its overlays.

    Yields:
        A list with the record of the commit, for a caller whose journal cannot be written.
    """
    try:
        noted = [record_commit(pool, datasets, journal)]
    except PoolError:
        noted = [Commit(dict.fromkeys(datasets, 0), None, journal.stem, datetime.now(UTC))]
        with suppress(OSError):
            append_line(journal, event=_BEGUN, after=noted[0].after, run=noted[0].run)
    yield noted
    with suppress(OSError, PoolError):  # without an end, later snapshots count as torn, too
        pool.sync(datasets)  # a snapshot under way may contain a part of the commit
        noted[:] = [replace(noted[0], until=_newest_txgs(pool, datasets))]
        append_line(journal, event=_ENDED, until=noted[0].until)


def commits_in(journal: Path) -> list[Commit]:
    """The commits in a run's journal: recorded by the run, its guardian or a recovery."""
    found: list[Commit] = []
    with suppress(OSError):
        for text in journal.read_text("utf-8", "replace").splitlines():
            with suppress(ValueError):  # a line whose writing was interrupted
                line = json.loads(text)
                if line.get("event") == _BEGUN:
                    run = line.get("run", "")
                    began = datetime.fromisoformat(line["at"]) if run else None
                    found.append(Commit(line["after"], None, run, began))
                if line.get("event") == _ENDED:  # after one or more attempts
                    found = [replace(each, until=each.until or line["until"]) for each in found]
    return found


def commits_of_all(directory: Path) -> list[Commit]:
    """The commits in the journals of all runs: other guests' disks may be in the same dataset.

    Call this before listing snapshots: the end of a run marks torn snapshots, then removes the
    journal.
    """
    return [commit for path in sorted(directory.glob("*.jsonl")) for commit in commits_in(path)]


def is_torn(snapshot: PoolSnapshot) -> bool:
    """Whether the snapshot is marked as torn.

    The mark is a property of its own, since the program that took the snapshot may set the level.
    """
    return _TORN in snapshot.properties or snapshot.properties.get("level") == Level.TORN


def mark_torn(
    pool: Pool, datasets: Collection[str], commits: Collection[Commit]
) -> list[PoolSnapshot]:
    """Mark all snapshots that were taken during commits, also those of other programs.

    Returns:
        The torn snapshots.

    Raises:
        PoolError: the snapshots cannot be listed or marked.
    """
    if not commits:
        return []
    there = pool.snapshots(tuple(datasets))
    commits = [commit.among(there) for commit in commits]
    torn = [snapshot for snapshot in there if any(each.tears(snapshot) for each in commits)]
    if torn:
        names = [snapshot.full_name for snapshot in torn]
        marks = {f"{PREFIX}level": Level.TORN.value, f"{PREFIX}{_TORN}": "yes"}
        pool.set_properties(names, marks)
    return torn
