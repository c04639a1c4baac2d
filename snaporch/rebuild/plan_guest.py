"""Plans the rebuild of one guest, with all checks that need no transfer.

What comes from the replica is decided by :mod:`snaporch.rebuild.plan`; what on this host is in the
way, by :mod:`snaporch.rebuild.local_checks`.
"""

from __future__ import annotations

from dataclasses import replace

from snaporch.catalog.records import check_store
from snaporch.context import Context
from snaporch.rebuild.fenced_guest import plan_on_fenced
from snaporch.rebuild.local_checks import (
    AlreadyHereError,
    check_guest,
    check_local,
    check_others,
    check_room,
    restore_command,
)
from snaporch.rebuild.local_datasets import Local
from snaporch.rebuild.plan import (
    Copies,
    Guests,
    RebuildPlan,
    bundled_guests,
    choose_snapshot,
    find_uuid,
    make_plan,
)
from snaporch.rebuild.replica_source import Source
from snaporch.rebuild.stages import Stage, stage_of


def plan_guest(
    context: Context,
    source: Source,
    local: Local,
    copies: Copies,
    words: str,
    *,
    history: bool,
    guests: Guests | None = None,
) -> RebuildPlan:
    """Plan how to bring back one guest, and make the checks that need no transfer.

    Args:
        context: the pools and the guests of this host.
        source: the replica.
        local: the datasets of this host.
        copies: all snapshots of its copies.
        words: the guest's name or UUID, or ``DOMAIN@SNAPSHOT``.
        history: the older snapshots and their bundles come back, too.
        guests: those that the replica has bundles of; it is asked for them by default.

    Raises:
        SnaporchError: the replica does not have all of it, or this host is in the way.
    """
    everything = [each for snapshots in copies.values() for each in snapshots]
    names = {e.properties.get(key) for e in everything for key in ("domain", "uuid")}
    domain, _, snapshot = (words, "", "") if words in names else words.rpartition("@")
    guests = bundled_guests(source, copies) if guests is None else guests
    uuid = find_uuid(source, everything, domain or snapshot, guests)
    manifest, name, skipped = choose_snapshot(source, copies, uuid, snapshot if domain else "")
    plan = replace(make_plan(source, copies, manifest, name, history=history), skipped=skipped)
    check_guest(context, plan)
    check_store(context.store, context.pool, context.hypervisor)
    present = context.pool.datasets()
    here = {each.name for each in present}
    has_disks = all(each.dataset in here or each.is_pages for each in plan.incoming)
    stage = stage_of(context, plan) if context.hypervisor.find(uuid) else Stage.TRANSFER
    if (fence := context.fences.find(uuid)) is not None:
        plan, stage = plan_on_fenced(local, plan, copies, fence), Stage.TRANSFER
    if has_disks and stage in (Stage.RESTORE, Stage.FINISH):
        raise _already_here(plan)  # it may have snapshots of its own by now
    has_to_come = check_local(plan, local, {each.pool for each in present}, source.name)
    if not has_to_come and stage is not Stage.TRANSFER:
        raise _already_here(plan)
    check_others(plan, copies, here, guests)
    check_room(context, plan)
    for each in plan.incoming:
        local.mountpoint_to_set(each.dataset, each.mountpoint)
    return plan


def _already_here(plan: RebuildPlan) -> AlreadyHereError:
    reason = "is on this host, with all its datasets"
    here = AlreadyHereError(plan.manifest.domain, reason, restore_command(plan))
    here.plan = plan
    return here
