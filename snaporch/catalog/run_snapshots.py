"""Mark, find, complete and destroy the ZFS snapshots of one run."""

from __future__ import annotations

from collections.abc import Iterable

from snaporch.context import Context
from snaporch.journal import RunFacts
from snaporch.model import BundleState, Level, PoolSnapshot
from snaporch.zfs import PREFIX


def marks(run: str, uuid: str, domain: str, bundle: str) -> dict[str, str]:
    """The properties that mark a ZFS snapshot as the run's."""
    return {
        f"{PREFIX}run": run,
        f"{PREFIX}uuid": uuid,
        f"{PREFIX}domain": domain,
        f"{PREFIX}bundle": bundle,
    }


def finish_snapshots(context: Context, facts: RunFacts) -> Level | None:
    """Complete the snapshots of an interrupted run whose bundle was sealed before.

    Sets the run's marks, and the level that the manifest names.

    Returns:
        That level; None if there is no complete bundle.
    """
    reference = f"{facts.uuid}/{facts.run}"
    own = own_snapshots(context, facts)
    names = [snapshot.full_name for snapshot in own]
    if any("run" not in snapshot.properties for snapshot in own):
        context.pool.set_properties(names, marks(facts.run, facts.uuid, facts.domain, reference))
    state, manifest = context.store.state(reference)
    if state is not BundleState.COMPLETE or manifest is None:
        return None
    context.pool.set_properties(names, {f"{PREFIX}level": manifest.level.value})
    return manifest.level


def destroy_snapshots(context: Context, facts: RunFacts) -> list[str]:
    """Destroy the snapshots of this run, pool by pool, as they were taken.

    Returns:
        Their names.
    """
    marked = [snapshot.full_name for snapshot in own_snapshots(context, facts)]
    for names in by_pool(marked):
        context.pool.destroy_snapshots(names)
    return marked


def page_snapshots(context: Context, uuid: str, run: str) -> list[str]:
    """Full names of the snapshots that a run took of its domain's pages of RAM.

    Only the configured page dataset is asked for, as other pools may be slow.
    """
    if not (parent := context.config.ram_pages.dataset):
        return []
    taken = context.pool.snapshots([f"{parent}/{uuid}"])
    return [each.full_name for each in taken if each.properties.get("ram") == f"{uuid}/{run}"]


def by_pool(names: Iterable[str]) -> list[list[str]]:
    """Full names of snapshots, grouped by their pools: ZFS changes one pool at a time."""
    pools: dict[str, list[str]] = {}
    for name in names:
        pools.setdefault(name.split("/", 1)[0].split("@", 1)[0], []).append(name)
    return list(pools.values())


def own_snapshots(context: Context, facts: RunFacts) -> list[PoolSnapshot]:
    """The snapshots that this run took, marked as its own, or was about to mark."""
    return [
        found
        for found in context.pool.snapshots(facts.datasets)
        if (facts.taken_by_other_program or found.name == facts.snapshot)
        and found.properties.get("run", _unmarked(found, facts)) == facts.run
    ]


def _unmarked(found: PoolSnapshot, facts: RunFacts) -> str:
    """The run of a snapshot that was taken for a group and does not have a run's marks yet."""
    of_group = facts.group and found.properties.get("group") == facts.group
    return facts.run if of_group else ""
