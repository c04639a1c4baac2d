"""The properties by which a host records what its replicas have.

Which of them an append-only replica sets is decided by :mod:`snaporch.replication.mark_rules`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from snaporch.catalog.records import COPY, ENDED, marked_by
from snaporch.model import PoolSnapshot
from snaporch.zfs import PREFIX, Pool

REPLICATED = "replicated"
"""The replicas that have all of the run: every snapshot, and the bundle."""
DROPPED = "dropped"
"""The replicas that lack a snapshot, and cannot get it any more because they have a newer one."""

COPIED = (
    "run",
    "level",
    "torn",
    "bundle",
    "uuid",
    "domain",
    "verified",
    "retention",
    "group",
    "note",
    ENDED,
)
"""Properties of a snapshot that are set on its copy."""
OF_PAGES = ("ram", "ram-pools")
"""Those of a snapshot of a page dataset."""
MARKS = (*COPIED, *OF_PAGES, COPY)
"""All properties that a copy can have."""


def record_presence(
    pool: Pool,
    members: Iterable[PoolSnapshot],
    run: str,
    replica: str,
    *,
    replicated: bool,
    dropped: bool = False,
) -> tuple[PoolSnapshot, ...]:
    """Record on the snapshots of a run whether a replica has them.

    Snapshots with another run's mark are shared with other guests, and stay as they are.

    Args:
        pool: the pools of this host.
        members: the snapshots of the run.
        run: the run.
        replica: the replica's name in the configuration.
        replicated: see :data:`REPLICATED`.
        dropped: see :data:`DROPPED`.

    Returns:
        The snapshots with their new properties.

    Raises:
        PoolError: a property was not set.
    """
    changes: dict[tuple[str, str], list[str]] = defaultdict(list)
    found = []
    for each in members:
        now = each
        for key, wanted in ((REPLICATED, replicated), (DROPPED, dropped)):
            names = replicas(each, key)
            if marked_by(each, run) and (replica in names) != wanted:
                text = ",".join(sorted(names ^ {replica}))
                changes[key, text].append(each.full_name)
                now = replace(now, properties={**now.properties, key: text})
        found.append(now)
    for (key, text), changed in changes.items():
        pool.set_properties(changed, {PREFIX + key: text})
    return tuple(found)


def replicas(snapshot: PoolSnapshot, key: str) -> set[str]:
    """The replicas that a property of a snapshot names.

    Args:
        snapshot: a snapshot of this host.
        key: :data:`REPLICATED` or :data:`DROPPED`.
    """
    return set(snapshot.properties.get(key, "").split(",")) - {""}
