"""Fence a guest by hand, and remove a fence."""

from __future__ import annotations

from uuid import UUID

from snaporch import default_paths
from snaporch.context import Context
from snaporch.errors import NoSuchDomainError, NotFoundError, RefusedError
from snaporch.fence import Fence
from snaporch.locks import domain_lock


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
        fence = Fence(domain.uuid, domain.name, context.clock.now().isoformat())
        context.fences.put(fence)
        # Only now: it may have been started while nothing prevented that.
        if context.hypervisor.domain(domain.uuid).active:
            context.fences.remove(domain.uuid)
            step = f"if its copy runs elsewhere, end it: virsh destroy {domain.uuid}"
            raise RefusedError(domain.name, "runs, and was not fenced", step)
        return fence


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
    """Remove a fence, so that its guest starts again.

    Raises:
        BusyError: a run of it has not ended.
    """
    with domain_lock(
        default_paths.LOCKS, fence.domain, fence.uuid, "fence", wait=0, interrupt=context.interrupt
    ):
        context.fences.remove(fence.uuid)
