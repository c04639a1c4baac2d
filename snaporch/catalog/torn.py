"""Snapshots of no instant: taken while overlays were committed into the disks they are of.

A commit copies in the order of offsets. Until the pivot the base is a state that the guest never
had: what was written first may be old, and what was written last new. Which snapshots somebody took
meanwhile is told by transaction groups and not by a clock: those that are newer than the newest
that was there when the commit began, and no newer than the newest when it had ended.
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
    """When overlays were committed, by the ``createtxg`` of each dataset's newest snapshot."""

    after: Mapping[str, int]
    """When it began; 0 if there was no snapshot."""
    until: Mapping[str, int] | None = None
    """When it had ended; ``None`` if nobody knows that it has."""
    run: str = ""
    """Whose it was, if nobody could say which snapshots there were; then ``after`` is 0."""
    began: datetime | None = None
    """When it began, by the clock, if nobody could say that either."""

    def tears(self, snapshot: PoolSnapshot) -> bool:
        """Whether it was taken meanwhile."""
        dataset, txg = snapshot.dataset, snapshot.createtxg
        if dataset not in self.after or txg <= self.after[dataset]:
            return False
        return self.until is None or txg <= self.until.get(dataset, txg)

    def among(self, there: Collection[PoolSnapshot]) -> Commit:
        """The same, as soon as somebody can say: after the run's own snapshots.

        Where there is none of these, after what is older than the commit by the clock.
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


def _newest(pool: Pool, datasets: Collection[str]) -> dict[str, int]:
    newest = dict.fromkeys(datasets, 0)
    for snapshot in pool.snapshots(tuple(datasets)):
        newest[snapshot.dataset] = max(newest[snapshot.dataset], snapshot.createtxg)
    return newest


def note_commit(pool: Pool, datasets: Collection[str], journal: Path) -> Commit:
    """Before a commit begins: note in the run's journal which snapshots there are, if it can be.

    Returns: the same, for who has no journal to read it from.

    Raises:
        PoolError: nobody can say.
    """
    begun = Commit(_newest(pool, datasets))
    with suppress(OSError):  # a full disk must not keep the guest on its overlays
        append_line(journal, event=_BEGUN, after=begun.after)
    return begun


@contextmanager
def noted_commit(pool: Pool, datasets: Collection[str], journal: Path) -> Iterator[list[Commit]]:
    """Around a commit; one that raises is noted as begun, and never as ended.

    A pool that does not answer must not keep the guest on its overlays.

    Yields: the commit as far as it is known, for who has no journal to read it from.
    """
    try:
        noted = [note_commit(pool, datasets, journal)]
    except PoolError:
        noted = [Commit(dict.fromkeys(datasets, 0), None, journal.stem, datetime.now(UTC))]
        with suppress(OSError):
            append_line(journal, event=_BEGUN, after=noted[0].after, run=noted[0].run)
    yield noted
    with suppress(OSError, PoolError):  # then more counts as torn than is
        pool.sync(datasets)  # some may be under way that hold what the commit wrote half
        noted[:] = [replace(noted[0], until=_newest(pool, datasets))]
        append_line(journal, event=_ENDED, until=noted[0].until)


def commits_in(journal: Path) -> list[Commit]:
    """What was noted of each commit of a run, by itself, its guardian or a recovery."""
    found: list[Commit] = []
    with suppress(OSError):
        for text in journal.read_text("utf-8", "replace").splitlines():
            with suppress(ValueError):  # a line that was cut short
                line = json.loads(text)
                if line.get("event") == _BEGUN:
                    run = line.get("run", "")
                    began = datetime.fromisoformat(line["at"]) if run else None
                    found.append(Commit(line["after"], None, run, began))
                if line.get("event") == _ENDED:  # the last of one or more tries
                    found = [replace(each, until=each.until or line["until"]) for each in found]
    return found


def commits_of_all(directory: Path) -> list[Commit]:
    """Those of all runs with a journal: others' overlays may be over files of the same dataset.

    Ask before listing snapshots: who ends a run marks what is torn, then removes its journal.
    """
    return [commit for path in sorted(directory.glob("*.jsonl")) for commit in commits_in(path)]


def is_torn(snapshot: PoolSnapshot) -> bool:
    """Whether it is marked so.

    By a property of its own, for the level is also written by who has taken the snapshot.
    """
    return _TORN in snapshot.properties or snapshot.properties.get("level") == Level.TORN


def mark_torn(
    pool: Pool, datasets: Collection[str], commits: Collection[Commit]
) -> list[PoolSnapshot]:
    """Mark the snapshots that were taken during commits, whoever's they are.

    Returns: all that are torn by these.

    Raises:
        PoolError: they cannot be marked.
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
