"""Snapshots of no instant: taken while overlays were committed into the disks they are of.

A commit copies in the order of offsets. Until the pivot the base is a state that the guest never
had: what was written first may be old, and what was written last new. Which snapshots somebody took
meanwhile is told by transaction groups and not by a clock: those that are newer than the newest
that was there when the commit began.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from snaporch.model import Level, PoolSnapshot
from snaporch.pool import PREFIX, Pool
from snaporch.run.context import Context
from snaporch.run.journal import append_line

Commit = Mapping[str, int]
"""By dataset: the ``createtxg`` of its newest snapshot when a commit began."""
_COMMIT = "commit"


def note_commit(pool: Pool, datasets: Collection[str], journal: Path) -> Commit:
    """Before a commit begins: note in the run's journal which snapshots there are, if it can be.

    Returns: the newest of each dataset, for who has no journal to read it from.

    Raises:
        PoolError: nobody can say.
    """
    newest: dict[str, int] = {}
    for snapshot in pool.snapshots(tuple(datasets)):
        newest[snapshot.dataset] = max(newest.get(snapshot.dataset, 0), snapshot.createtxg)
    with suppress(OSError):  # a full disk must not keep the guest on its overlays
        append_line(journal, event=_COMMIT, after=newest)
    return newest


def commits_in(journal: Path) -> list[Commit]:
    """What was noted before each commit of a run, by itself, its guardian or a recovery."""
    found: list[Commit] = []
    with suppress(OSError):
        for text in journal.read_text("utf-8", "replace").splitlines():
            with suppress(ValueError):  # a line that was cut short
                line = json.loads(text)
                if line.get("event") == _COMMIT:
                    found.append(dict(line["after"]))
    return found


def mark_torn(
    context: Context, datasets: Collection[str], commits: Collection[Commit]
) -> list[PoolSnapshot]:
    """After commits: mark the snapshots that were taken meanwhile, whoever's they are.

    Raises:
        PoolError: they cannot be marked.
    """
    if not commits:
        return []
    torn = [
        snapshot
        for snapshot in context.pool.snapshots(tuple(datasets))
        if snapshot.createtxg > min(commit.get(snapshot.dataset, 0) for commit in commits)
    ]
    if torn:
        names = [snapshot.full_name for snapshot in torn]
        context.pool.set_properties(names, {f"{PREFIX}level": Level.TORN.value})
    return torn


def torn_text(name: str) -> str:
    """What is said of one."""
    return f"{name} was taken while overlays were committed: recorded as torn, of no instant"
