"""Fence a guest by hand, and remove a fence."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID

from snaporch import default_paths
from snaporch.catalog.records import ENDED
from snaporch.context import Context
from snaporch.errors import NoSuchDomainError, NotFoundError, RefusedError, UnavailableError
from snaporch.failover.last_snapshot import last_record, members_of
from snaporch.fence import Fence
from snaporch.locks import domain_lock
from snaporch.model import DatasetKind, Domain, PoolSnapshot, SnapshotRecord
from snaporch.rebuild.stages import Stage
from snaporch.replication.replicate import host_lock
from snaporch.snapshot.locate_disks import datasets_of
from snaporch.zfs import PREFIX, REBUILD_PROPERTY
from snaporch.zfs.resolver import NotOnZfsError

_SECOND = timedelta(seconds=1)
"""ZFS gives the time of a snapshot in whole seconds, and a bundle has it exactly."""


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
        newest, known = _newest(context, domain), _times(context, domain.uuid)
        # The clock may be behind: what is known here now has not ended elsewhere since.
        at = max([context.clock.now(), *(each.created + _SECOND for each in newest), *known])
        guids = ",".join(str(each.guid) for each in newest)
        fence = Fence(domain.uuid, domain.name, at.isoformat(), guids=guids)
        context.fences.put(fence)
        try:  # it may have been started while nothing prevented that
            _refuse_active(context.hypervisor.domain(domain.uuid))
        except RefusedError:
            context.fences.remove(domain.uuid)
            raise
        if missing := missing_disks(context, domain):
            words = (["snaporch", "fence", *more, domain.uuid] for more in (["--remove"], []))
            again = " && ".join(map(shlex.join, words))
            text = f"{', '.join(missing)} is not here, so its snapshots do not count for the fence"
            context.progress.note(domain.name, f"{text}; once it is here run: {again}")
        return fence


def _refuse_active(domain: Domain) -> None:
    if domain.active:
        step = f"if its copy runs elsewhere, end it: virsh destroy {domain.uuid}"
        raise RefusedError(domain.name, "runs, and no fence ends it", step)


def _newest(context: Context, domain: Domain) -> list[PoolSnapshot]:
    """The newest snapshot of each of a guest's datasets."""
    found = context.pool.snapshots(sorted(datasets_of(context.resolver, domain)))
    return list({each.dataset: each for each in found}.values())


def _times(context: Context, uuid: str) -> list[datetime]:
    """When the snapshots of a guest were taken that this host has or has bundles of."""
    own = (e for e in context.pool.snapshots() if e.properties.get("uuid") == uuid)
    found = [each.created + _SECOND for each in own]
    with suppress(UnavailableError):  # a fence is made also where the store is not mounted
        manifests = (context.store.state(each)[1] for each in context.store.references())
        found += [each.created for each in manifests if each is not None and each.uuid == uuid]
    return found


def missing_disks(context: Context, domain: Domain) -> list[str]:
    """The disks of a guest that are not there, such as those on a pool that is not imported.

    A fence that is made meanwhile knows nothing of the snapshots of their datasets.
    """
    found = []
    for path in (e.source for e in domain.disks if e.device in ("disk", "lun") and e.source):
        try:
            context.resolver.resolve(path)
        except NotOnZfsError:
            continue
        except OSError:
            found.append(path)
    return found


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
        RefusedError: a rebuild of it has received some of its datasets; or the fence is another
            one than that which was shown.
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
        if context.fences.find(fence.uuid) != fence:  # its failover may have ended meanwhile
            raise RefusedError(
                fence.domain, "its fence has changed since it was shown", "try again"
            )
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
        kinds = {each.name: each.kind for each in context.pool.datasets()}
        ways = [_way_back(each, kinds.get(each.dataset)) for each in then]
        back = "; ".join(ways) or "see docs/how-to/failover.md"
        reason = "a rebuild of it has not ended, and its datasets may be of two instants"
        raise RefusedError(fence.domain, reason, f"run the rebuild again; or go back: {back}")


def _way_back(then: PoolSnapshot, kind: DatasetKind | None) -> str:
    """The commands that discard what a rebuild has received into a dataset.

    As :meth:`~snaporch.rebuild.local_datasets.Local.mount`: ``canmount`` cannot be inherited.
    """
    appears = ["zfs", "set", "canmount=on", then.dataset]
    if kind is DatasetKind.VOLUME:
        appears = ["zfs", "inherit", "volmode", then.dataset]
    mark = ["zfs", "inherit", REBUILD_PROPERTY, then.dataset]
    commands = (["zfs", "rollback", "-r", then.full_name], appears, mark)
    return " && ".join(map(shlex.join, commands))
