"""Snapshots and bookmarks that are newer than a restore's target, and that a rollback destroys."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence

from snaporch.catalog.keep import KEEP_HOLD
from snaporch.catalog.safety_copy_holds import UNDO_HOLD
from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.model import PoolSnapshot
from snaporch.restore.journal import HOLD
from snaporch.restore.plan_model import RestorePlan
from snaporch.zfs import DatasetListing

SAFETY_PREFIX = "snaporch-safety_"
_OWN_BOOKMARK = re.compile(r"snaporch-.+-([0-9]+)")
"""The names that ``replication/bookmarks.py`` and ``pull/sender.py`` give: a GUID at the end."""


def is_safety(name: str) -> bool:
    """Whether this is the safety snapshot of a restore, which a restore may always destroy."""
    return f"@{SAFETY_PREFIX}" in name


def bases_of_copies(listing: DatasetListing, newer: Sequence[str]) -> frozenset[str]:
    """Those of these names that are bookmarks which snaporch keeps for a replica or a pull.

    Their names end with the GUID that they have; one whose GUID is another is not snaporch's.
    They have no data. Without them the next copy may have to be a full one.
    """
    marks = listing.bookmarks
    return frozenset(
        name
        for name in newer
        if name in marks
        and (own := _OWN_BOOKMARK.fullmatch(name.partition("#")[2]))
        and int(own[1]) == marks[name].guid
    )


def needs_consent(plan: RestorePlan) -> list[str]:
    """Those newer snapshots and bookmarks that a restore destroys only with ``--discard-newer``."""
    return [name for name in plan.newer if not is_safety(name) and name not in plan.bases]


def newer_than(
    context: Context, members: Sequence[PoolSnapshot]
) -> tuple[tuple[str, ...], DatasetListing]:
    """Return the snapshots and bookmarks that are newer than these, and the listing with them.

    Raises:
        PoolError: one of these does not exist.
    """
    there = context.pool.listing([member.dataset for member in members])
    return tuple(name for member in members for name in there.newer(member.full_name)), there


def check_newer(plan: RestorePlan, *, discard: bool) -> None:
    """Refuse to destroy snapshots and bookmarks that are newer than the target.

    Args:
        discard: the user agreed to it.

    Raises:
        RefusedError: with their names.
    """
    precious = needs_consent(plan)
    if precious and not discard:
        raise RefusedError(
            plan.thing,
            f"newer {_kinds(precious)} would be destroyed: {', '.join(precious)}",
            "use --discard-newer to destroy them",
        )


def _kinds(names: Sequence[str]) -> str:
    """Return what the names are: of snapshots, of bookmarks such as a pull sets, or of both."""
    marks = sum("#" in name for name in names)
    kinds = ("snapshots" if marks < len(names) else "", "bookmarks" if marks else "")
    return " and ".join(filter(None, kinds))


def check_destroyable(
    context: Context, thing: str, uuid: str, newer: Sequence[str], there: DatasetListing
) -> None:
    """Refuse newer snapshots that the admin keeps or that ZFS would not destroy.

    Args:
        thing: the subject of the error.
        uuid: of the guest itself, which is stopped first and may have mounted a snapshot.
        there: the snapshots of their datasets.

    Raises:
        RefusedError: a snapshot has clones, is kept or held, or is mounted by another guest.
    """
    snapshots = [name for name in newer if "@" in name]
    cloned = {name: there.clones[name] for name in snapshots if name in there.clones}
    if cloned:
        names = ", ".join(f"{name} (clone {', '.join(of)})" for name, of in cloned.items())
        raise RefusedError(
            thing, f"newer snapshots have clones: {names}", "destroy the clones first"
        )
    holds = {name: set(tags) for name, tags in context.pool.holds_of(snapshots).items()}
    _check_kept(thing, holds, there)
    held = [name for name, tags in holds.items() if tags - {HOLD, UNDO_HOLD}]
    if held:
        raise RefusedError(
            thing, f"newer snapshots are held: {', '.join(held)}", "release them with zfs release"
        )
    for mount in context.pool.blocking_mounts(snapshots) if snapshots else ():
        if mount.uuid != uuid:  # the guest itself is stopped first
            raise RefusedError(
                thing,
                f"the newer snapshot {mount.name} is mounted by {mount.program}",
                "shut it off or end it, then restore again",
            )


def _check_kept(thing: str, holds: Mapping[str, Collection[str]], there: DatasetListing) -> None:
    """Refuse snapshots that the admin keeps, also if their holds were released.

    Args:
        holds: of each snapshot.

    Raises:
        RefusedError: with their names, and the command that releases them.
    """
    kept = [
        each
        for each in there.snapshots
        if each.full_name in holds
        and ("kept" in each.properties or KEEP_HOLD in holds[each.full_name])
    ]
    if kept:
        own = thing.rpartition("@")[0]
        released = [f"{each.properties.get('domain', own)}@{each.name}" for each in kept]
        raise RefusedError(
            thing,
            f"newer snapshots are kept: {', '.join(each.full_name for each in kept)}",
            "release them first: " + shlex.join(["snaporch", "unkeep", *dict.fromkeys(released)]),
        )
