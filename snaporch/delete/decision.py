"""Decide whether a snapshot may be deleted: a pure function of the facts about it.

This is for ``snaporch delete``. What retention deletes is decided by
:mod:`snaporch.schedule.retention`; which bundles go, by :mod:`snaporch.prune.decision`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from snaporch.catalog.keep import KEEP_HOLD
from snaporch.catalog.safety_copy_holds import UNDO_HOLD
from snaporch.errors import RefusedError
from snaporch.restore.journal import HOLD as RESTORE_HOLD


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """The facts about a snapshot that decide whether it may be deleted."""

    domain: str
    snapshot: str
    holds: Mapping[str, Sequence[str]]
    """The tags of the holds, by the full name of the ZFS snapshot; none is empty."""
    clones: Mapping[str, Sequence[str]]
    """The datasets that are clones of its ZFS snapshots, each with the words of the command that
    deletes it."""
    mounts: Sequence[str]
    """The programs that have its ZFS snapshots mounted, as text."""
    kept: bool
    """Whether the admin keeps it."""
    shared_with: Sequence[str]
    """Snapshots of other guests that need one of its ZFS snapshots, and are not deleted with it."""
    copies: Sequence[str]
    """ZFS snapshots of which one is a copy of another; without a manifest nothing shows which."""
    unfinished: bool
    """Whether a run or restore of the domain was interrupted, and is not recovered."""
    last: Sequence[str]
    """What it is the last of, such as the last good RAM snapshot; empty if there are newer ones."""

    @property
    def name(self) -> str:
        """``DOMAIN@SNAPSHOT``."""
        return f"{self.domain}@{self.snapshot}"


def refusal(facts: SnapshotFacts, *, also_newest: bool) -> RefusedError | None:
    """The reason for which a snapshot must not be deleted; ``None`` if it may be.

    Args:
        facts: about the snapshot.
        also_newest: the admin agreed to delete the last good snapshots, too.
    """
    found = _needed(facts) or _blocked_by_zfs(facts)
    if found is None and facts.last and not also_newest:
        reason = f"is {' and '.join(facts.last)} of {facts.domain}"
        found = (reason, "take another one first, or use --also-newest")
    return RefusedError(facts.name, *found) if found else None


def _needed(facts: SnapshotFacts) -> tuple[str, str] | None:
    """Why snaporch needs the snapshot, and the next step."""
    domain, name = shlex.quote(facts.domain), shlex.quote(facts.name)
    tags = {tag for each in facts.holds.values() for tag in each}
    if facts.unfinished or RESTORE_HOLD in tags:
        return "a run of its domain was interrupted", f"snaporch recover {shlex.quote(domain)}"
    if facts.kept or KEEP_HOLD in tags:
        return "is kept", f"snaporch unkeep {shlex.quote(name)}"
    if UNDO_HOLD in tags:
        # an undo would not help: it makes a safety copy that needs the snapshot, too
        bases = [full_name for full_name, own in facts.holds.items() if UNDO_HOLD in own]
        words = shlex.join(["zfs", "release", UNDO_HOLD, *bases])
        wait = "wait until prune deletes the safety copies, after prune.safety_keep"
        step = f"{wait} (docs/how-to/pruning.md), or give that undo up: {words}"
        return "is needed to undo a restore", step
    if facts.shared_with:
        others = " ".join(map(shlex.quote, facts.shared_with))
        return f"is also {', '.join(facts.shared_with)}", f"delete both: add {others}"
    if facts.copies:
        reason = (
            f"it has no readable manifest, and some of these are copies: {', '.join(facts.copies)}"
        )
        return reason, "destroy those that are not needed with zfs destroy"
    return None


def _blocked_by_zfs(facts: SnapshotFacts) -> tuple[str, str] | None:
    """Why ZFS would not destroy the snapshot, and the next step."""
    for full_name, tags in facts.holds.items():
        words = shlex.join(["zfs", "release", tags[0], full_name])
        return f"{full_name} is held ({', '.join(tags)})", f"release it: {words}"
    if facts.clones:
        commands = dict.fromkeys(shlex.join(words) for words in facts.clones.values())
        return f"has clones: {', '.join(facts.clones)}", f"delete them first: {'; '.join(commands)}"
    if facts.mounts:
        return (
            f"is mounted: {', '.join(facts.mounts)}",
            "unmount it first (docs/reference/hosts.md)",
        )
    return None
