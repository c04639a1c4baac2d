"""Move a guest to the host of its replica.

What prevents it is decided by :mod:`snaporch.failover.refusal`.

The order: a replication while the guest runs, so that little is left to send; a snapshot whose RAM
is saved live, after which the guest stays paused; the bundle is sealed; a look at the room on the
replica; the fence; the end of QEMU; a look at the disks, which must not have been written to since;
the replication of that snapshot; the first snapshot is deleted. Before the fence exists, each
failure releases the guest. From then on the guest never runs here, and the same command goes on.

A guest that is off is moved in the same way, without RAM.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from snaporch.catalog.note import check_note
from snaporch.catalog.records import ENDED, ENDED_HERE, NOT_ENDED
from snaporch.config import Replica
from snaporch.context import Context
from snaporch.errors import AttentionError, NotFoundError, RefusedError, SnaporchError
from snaporch.failover.delete_first import delete_first
from snaporch.failover.last_snapshot import last_record, members_of
from snaporch.failover.own_changes import check_examinable, discard_own_changes, written_since
from snaporch.failover.refusal import (
    FailoverFacts,
    changed_state,
    late_writes,
    other_move,
    refusal,
    way_to_end,
)
from snaporch.failover.room import lack_of_room
from snaporch.fence import Fence
from snaporch.journal import journals_of, other_journals_of
from snaporch.model import Domain, SnapshotRecord, Strategy
from snaporch.recovery.recover_runs import recover_leftovers
from snaporch.replication.interface import Destination, find_replica
from snaporch.replication.replicate import host_lock
from snaporch.restore.foreign_definition import check_foreign_definitions
from snaporch.restore.foreign_images import check_foreign_images
from snaporch.restore.own_places import OwnPlaces, with_paths
from snaporch.restore.start_bar import has_bar
from snaporch.schedule.replicate_domains import ReplicationTarget, replicate_domains
from snaporch.snapshot.group import group_of, members_of_group
from snaporch.snapshot.locate_disks import datasets_of
from snaporch.snapshot.plan import make_plan
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.zfs import PREFIX

_LONGEST_PAUSE = "1h"
"""After it the guardian releases a guest whose bundle is not sealed; then it is not failed over."""
_NOTE = "taken by a failover"
check_note(_NOTE)


@dataclass(frozen=True, slots=True)
class FailedOver:
    """A guest that has ended here, and whose last snapshot a replica has."""

    record: SnapshotRecord
    replica: str
    command: str
    """What resumes the guest, or brings it back off, on the host that has the replica."""

    def as_json(self) -> dict[str, object]:
        """The documented JSON object (``docs/reference/json.md``)."""
        return {
            "domain": self.record.domain,
            "uuid": self.record.uuid,
            "snapshot": self.record.snapshot,
            "replica": self.replica,
            "command": self.command,
        }


def fail_over(
    context: Context,
    name: str,
    replica: str,
    opened: Callable[[Context, str], Destination],
    confirm: Callable[[Domain], None],
    accepted: Sequence[str] = (),
) -> FailedOver:
    """Fail a guest over, or go on after an interruption.

    Args:
        context: of this host.
        name: the guest's name or UUID.
        replica: the name of the replica.
        opened: opens it.
        confirm: asks whether to go on, and raises if not; it is not asked again after an
            interruption.
        accepted: what the guest may have of the other host; the command there has it, too.

    Raises:
        RefusedError: nothing was touched.
        SnaporchError: the guest runs here as before; or, if its fence exists, it has ended here and
            the same call goes on.
    """
    section = find_replica(context.config, replica)
    recover_leftovers(context)
    domain = context.hypervisor.domain(name)
    is_new = context.fences.find(domain.uuid) is None
    if is_new:
        _check(_forced(context, domain), domain, replica, accepted)
        confirm(domain)
    # Nothing of it may run at low priority while the guest is paused.
    with host_lock(replace(context, lower_priority=lambda _work: None)):
        fence = context.fences.find(domain.uuid)
        if fence is None and not is_new:  # the admin was not asked
            raise RefusedError(domain.name, "its fence was removed meanwhile", "try again")
        fence = fence or _end(context, domain, replica, opened, accepted)
        if (found := other_move(fence, replica)) is not None:
            raise RefusedError(domain.name, *found)
        context.fences.put(fence)  # once more: an error may have left it on no stable storage
        now = context.hypervisor.domain(domain.uuid)
        if now.active:
            journals = journals_of(context.config.paths.journal, now.uuid)
            step = way_to_end(now.uuid, now.state, is_recovered=not journals)
            raise AttentionError(domain.name, "is fenced, and its QEMU has not ended", step)
        done = _ship(context, domain, fence, replica, opened, section, accepted)
        delivered = context.clock.now().isoformat()
        context.fences.put(replace(fence, replica=replica, delivered=delivered))
        delete_first(context, done.record)
        return done


def _forced(context: Context, domain: Domain) -> Context:
    """The context with the settings of the last snapshot: all of RAM, and no overlay."""
    config = context.config
    own = config.domain_section(domain.name, domain.uuid)
    forced = {
        **own,
        "ram_strategy": Strategy.MANUAL.value,
        "on_unavailable": "fail",
        "freeze_deadline": _LONGEST_PAUSE,
    }
    sections = {**config.domain, domain.name: forced}
    return replace(context, config=config.model_copy(update={"domain": sections}))


def _check(
    context: Context, domain: Domain, replica: str, accepted: Sequence[str]
) -> FailoverFacts:
    """Refuse a guest that cannot be failed over; what that was decided by.

    Raises:
        RefusedError: it cannot.
    """
    journal, group = context.config.paths.journal, group_of(context.config, domain)
    facts = FailoverFacts(
        domain.state,
        uuid=domain.uuid,
        replica=replica,
        is_persistent=domain.inactive_xml is not None,
        has_saved_ram=domain.managed_save,
        is_half_restored=bool(other_journals_of(journal, domain.uuid)) or has_bar(journal, domain),
        group=group,
        members=tuple(e.name for e in members_of_group(context, group)) if group else (),
        left_out=(),
        shared_with=(),
        engine=context.config.replica[replica].engine,
        hook_problem=context.hypervisor.start_hook_problem(),
    )
    found = refusal(facts)
    if found is None:
        plan = make_plan(context, domain, _LAST)
        facts = facts._replace(
            left_out=tuple(each.describe() for each in plan.left_out if each.matters),
            shared_with=_sharing(context, domain, {each.name for each in plan.datasets}),
        )
        found = refusal(facts)
    if found is not None:
        raise RefusedError(domain.name, *found)
    places = OwnPlaces(context, domain.name, [each.name for each in plan.datasets])
    why = "its definition goes to another host"  # which refuses the same
    check_foreign_definitions(domain.name, _definitions(context, domain), accepted, places.has, why)
    return facts


def _definitions(context: Context, domain: Domain) -> list[str]:
    """Those that the rebuild on the other host may use."""
    return with_paths(context, filter(None, (domain.live_xml, domain.inactive_xml)))


def _check_images(
    context: Context, domain: Domain, first: SnapshotRecord, accepted: Sequence[str]
) -> None:
    """Refuse what a rebuild on another host would refuse when the data is there.

    Raises:
        RefusedError: the header of an image, or a link, leads out of the guest's datasets.
    """
    check_foreign_images(
        context,
        domain.name,
        members_of(context, first),
        OwnPlaces(context, domain.name, first.datasets),
        _definitions(context, domain),
        accepted,
        why="it goes to another host",
        live=True,
    )


def _sharing(context: Context, domain: Domain, datasets: set[str]) -> tuple[str, ...]:
    """The other guests with disks in these datasets."""
    others = [each for each in context.hypervisor.domains() if each.uuid != domain.uuid]
    return tuple(e.name for e in others if datasets & datasets_of(context.resolver, e))


_LAST = SnapshotRequest(level="ram", note=_NOTE)


def _end(
    context: Context,
    domain: Domain,
    replica: str,
    opened: Callable[[Context, str], Destination],
    accepted: Sequence[str],
) -> Fence:
    """Take the last snapshot, fence the guest and end it; the fence.

    Raises:
        SnaporchError: the guest runs, or is off, as before.
    """
    first = take_snapshot(context, domain, SnapshotRequest(level="crash", note=_NOTE))
    _check_images(context, domain, first, accepted)
    before = [each.full_name for each in members_of(context, first)]
    context.pool.set_properties(before, {PREFIX + ENDED: NOT_ENDED})  # see delete_first
    _replicate(context, domain, replica, opened)
    there = opened(context, replica)
    there.mark({name: {ENDED: NOT_ENDED} for name in before})  # it will accept the last one's
    now, forced = context.hypervisor.domain(domain.uuid), _forced(context, domain)
    facts = _check(forced, now, replica, accepted)  # that may have taken hours
    # Not first when it has ended: it would be nowhere until an admin has removed files.
    check_examinable(context, _disks(context, now, first), members_of(context, first))
    free = there.free_bytes()  # not later: the replica may not answer, and the guest would wait

    def end(record: SnapshotRecord, check_paused: Callable[[], None]) -> None:
        shared = _sharing(context, now, set(record.datasets))
        last = facts._replace(left_out=record.apart, shared_with=shared)
        changed = refusal(last) or changed_state(facts.state, record.level)
        if changed is not None:
            raise RefusedError(domain.name, *changed)
        written = sum(context.pool.written_since(each) for each in before)
        lack = lack_of_room(record.stored_bytes or 0, written, free)
        if lack is not None:
            raise RefusedError(replica, *lack)
        at = context.clock.now().isoformat()  # to the microsecond: it is compared
        fence = Fence(record.uuid, record.domain, at, record.run, record.snapshot, replica)
        context.fences.put(fence)
        try:  # it may have been resumed while the fence was written
            check_paused()
        except BaseException:
            context.fences.remove(record.uuid)
            raise
        if now.active:
            context.progress.step(record.domain, "fenced; ending it")
            context.hypervisor.destroy(record.uuid)

    try:
        take_snapshot(forced, now, _LAST, end=end)
    except SnaporchError as error:
        if (found := context.fences.find(domain.uuid)) is None:
            raise
        context.progress.note(domain.name, error.explanation)
        return found
    found = context.fences.find(domain.uuid)
    assert found is not None
    return found


def _ship(
    context: Context,
    domain: Domain,
    fence: Fence,
    replica: str,
    opened: Callable[[Context, str], Destination],
    section: object,
    accepted: Sequence[str],
) -> FailedOver:
    """Copy the last snapshot to the replica, and mark the copy as the last one."""
    record = _record(context, domain, fence)
    snapshots = members_of(context, record)
    members = [each.full_name for each in snapshots]
    if written := written_since(context, _disks(context, domain, record), snapshots):
        sizes = {each.full_name: context.pool.written_since(each.full_name) for each in written}
        raise AttentionError(record.full_name, *late_writes(record.uuid, sizes))
    discard_own_changes(context, domain, record, snapshots)
    _replicate(context, domain, replica, opened)
    record = _record(context, domain, fence)
    if replica not in record.replicated:
        step = "run this command again"
        raise AttentionError(record.full_name, f"replica {replica} does not have all of it", step)
    now = context.fences.find(domain.uuid)
    if now is None or now.run != fence.run or context.hypervisor.domain(domain.uuid).active:
        reason = f"its fence was removed, or it was started: never resume what {replica} has"
        raise AttentionError(record.full_name, reason, f"destroy @{record.snapshot} there")
    # Never here: another replica would get it, too.
    opened(context, replica).mark({name: {ENDED: ENDED_HERE} for name in members})
    words = ["snaporch", "rebuild", "--from", replica, record.full_name]
    words += [word for each in accepted for word in ("--accept", each)]
    closed = isinstance(section, Replica) and section.encrypt_to
    return FailedOver(record, replica, shlex.join(words) + (" --identity FILE" if closed else ""))


def _disks(context: Context, domain: Domain, record: SnapshotRecord) -> list[str]:
    """The paths of a guest's disks: as now, and as of its last snapshot.

    One that was attached only to the running guest is in the bundle's manifest.
    """
    _, manifest = context.store.state(f"{record.uuid}/{record.run}")
    then = {each.source for each in manifest.disks} if manifest is not None else set()
    return sorted(filter(None, then | {each.source for each in domain.disks}))


def _record(context: Context, domain: Domain, fence: Fence) -> SnapshotRecord:
    if (found := last_record(context, fence)) is not None:
        return found
    reason = f"its last snapshot @{fence.snapshot} does not exist any more"
    raise NotFoundError(domain.name, reason, fence.step)


def _replicate(
    context: Context,
    domain: Domain,
    replica: str,
    opened: Callable[[Context, str], Destination],
) -> None:
    target = ReplicationTarget(domain, (replica,), is_named=True)
    for _, _, outcome in replicate_domains(context, [target], opened, recheck=False):
        if isinstance(outcome, SnaporchError):
            raise outcome
