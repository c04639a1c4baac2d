"""Fence a guest by hand, and remove a fence."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

from snaporch import default_paths
from snaporch.catalog.records import ENDED
from snaporch.context import Context
from snaporch.errors import NoSuchDomainError, NotFoundError, RefusedError
from snaporch.failover.last_snapshot import last_record, members_of
from snaporch.fence import Fence
from snaporch.locks import domain_lock
from snaporch.model import Domain
from snaporch.replication.replicate import host_lock
from snaporch.zfs import PREFIX


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
        if (found := context.fences.find(domain.uuid)) is not None:
            return found
        _refuse_active(domain)
        fence = Fence(domain.uuid, domain.name, context.clock.now().isoformat())
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
        raise RefusedError(domain.name, "runs, and was not fenced", step)


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


def remove_fence(context: Context, fence: Fence) -> None:
    """Remove a fence, so that its guest starts again; its last snapshot is not its end any more.

    Raises:
        BusyError: a run of it has not ended, or a replication of this host.
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
        if fence.run:
            _withdraw_end(context, fence)
        context.fences.remove(fence.uuid)


def _withdraw_end(context: Context, fence: Fence) -> None:
    """Remove the mark of the last snapshot, with which a rebuild takes it for the guest's end."""
    if (record := last_record(context, fence)) is not None:
        members = [each.full_name for each in members_of(context, record)]
        context.pool.clear_properties(members, [PREFIX + ENDED])
