"""Fence a guest by hand, and remove a fence."""

from __future__ import annotations

import shlex
from dataclasses import replace
from uuid import UUID

from snaporch import default_paths
from snaporch.catalog.records import ENDED
from snaporch.context import Context
from snaporch.errors import NoSuchDomainError, NotFoundError, RefusedError
from snaporch.failover.last_snapshot import last_record, members_of
from snaporch.fence import Fence
from snaporch.locks import domain_lock
from snaporch.model import Domain, PoolSnapshot, SnapshotRecord
from snaporch.rebuild.stages import Stage
from snaporch.replication.replicate import host_lock
from snaporch.snapshot.locate_disks import datasets_of
from snaporch.zfs import PREFIX, REBUILD_PROPERTY


def make_fence(context: Context, name: str) -> Fence:
    """Fence a guest that is off.

    Args:
        context: of this host.
        name: the guest's name or UUID.

    Returns:
        Its fence; the former one if it has one.

    Raises:
        RefusedError: it runs, or libvirt would start it in spite of a fence.
        BusyError: a run of it has not ended.
    """
    domain = context.hypervisor.domain(name)
    with domain_lock(
        default_paths.LOCKS, domain.name, domain.uuid, "fence", wait=0, interrupt=context.interrupt
    ):
        if (problem := context.hypervisor.start_hook_problem()) is not None:
            reason = f"libvirt would start it in spite of a fence: {problem.reason}"
            raise RefusedError(domain.name, reason, f"run: {problem.step}")
        _refuse_active(domain)
        if (found := context.fences.find(domain.uuid)) is not None:
            return found
        at, guids = context.clock.now().isoformat(), _newest(context, domain)
        fence = Fence(domain.uuid, domain.name, at, guids=",".join(guids))
        context.fences.put(fence)
        try:  # it may have been started while nothing prevented that
            _refuse_active(context.hypervisor.domain(domain.uuid))
        except RefusedError:
            context.fences.remove(domain.uuid)
            raise
        return fence


def _refuse_active(domain: Domain) -> None:
    if domain.active:
        step = f"if its copy runs elsewhere, end it: virsh destroy {domain.uuid}"
        raise RefusedError(domain.name, "runs, and no fence ends it", step)


def _newest(context: Context, domain: Domain) -> list[str]:
    """The GUIDs of the newest snapshots of a guest's datasets."""
    found = context.pool.snapshots(sorted(datasets_of(context.resolver, domain)))
    return [str(guid) for guid in {each.dataset: each.guid for each in found}.values()]


def find_fence(context: Context, name: str) -> Fence:
    """The fence of a guest, which need not be defined any more.

    Raises:
        NotFoundError: there is none.
    """
    try:
        uuid = context.hypervisor.domain(name).uuid
    except NoSuchDomainError:
        try:
            uuid = str(UUID(name))
        except ValueError:
            step = "name it by its UUID: ls /var/lib/snaporch/fences"
            raise NotFoundError(name, "no such domain", step) from None
    if (found := context.fences.find(uuid)) is None:
        raise NotFoundError(name, "has no fence")
    return found


def remove_fence(context: Context, fence: Fence) -> SnapshotRecord | None:
    """Remove a fence, so that its guest starts again; its last snapshot is not its end any more.

    Returns:
        That snapshot, if a failover made the fence; None if it is not in the guest's datasets.

    Raises:
        BusyError: a run of it has not ended, or a replication of this host.
        RefusedError: a rebuild of it has received some of its datasets.
    """
    quick = replace(context, lower_priority=lambda _work: None)
    with (
        host_lock(quick),  # a failover that still copies holds it
        domain_lock(
            default_paths.LOCKS,
            fence.domain,
            fence.uuid,
            "fence",
            wait=0,
            interrupt=context.interrupt,
        ),
    ):
        _refuse_half_rebuilt(context, fence)
        last = last_record(context, fence) if fence.run else None
        if last is not None:  # a rebuild must not take it for the guest's end any more
            members = [each.full_name for each in members_of(context, last)]
            context.pool.clear_properties(members, [PREFIX + ENDED])
        context.fences.remove(fence.uuid)
        return last


def _refuse_half_rebuilt(context: Context, fence: Fence) -> None:
    found = context.pool.local_properties([REBUILD_PROPERTY])
    begun = [name for name, each in found.items() if each.get(REBUILD_PROPERTY) == Stage.TRANSFER]
    own = [e for e in context.pool.snapshots(begun) if e.properties.get("uuid") == fence.uuid]
    if own:
        then = [each for each in own if fence.has_seen(each)]
        back = "; ".join(_way_back(each) for each in then) or "see docs/how-to/failover.md"
        reason = "a rebuild of it has not ended, and its datasets may be of two instants"
        raise RefusedError(fence.domain, reason, f"run the rebuild again; or go back: {back}")


def _way_back(then: PoolSnapshot) -> str:
    """The commands that discard what a rebuild has received into a dataset."""
    keys = ("canmount", "volmode", REBUILD_PROPERTY)
    inherit = [["zfs", "inherit", key, then.dataset] for key in keys]
    return "; ".join(map(shlex.join, [["zfs", "rollback", "-r", then.full_name], *inherit]))
