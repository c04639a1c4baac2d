"""Consistency groups: which domains belong to them, and the snapshot of all members at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial

from snaporch.command_log import fields
from snaporch.config import Config
from snaporch.context import Context
from snaporch.errors import CalledOffError, NotFoundError, RefusedError, SnaporchError
from snaporch.hypervisor.clone_xml import clone_of
from snaporch.interrupt import MemberInterrupt
from snaporch.model import Domain, GroupRun, SnapshotRecord
from snaporch.snapshot.group_barrier import (
    GroupBarrier,
    GroupMemberSnapshotter,
    SharedProgress,
)
from snaporch.snapshot.plan import Plan, make_plan
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import run_plan, snapshot_lock
from snaporch.snapshot.snapshot_name import check_full_names, default_name, new_run_id

_PATTERN = frozenset("*?[")


@dataclass
class GroupResult:
    """The snapshots of a group's members, and their failures."""

    records: list[SnapshotRecord] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    """Errors of the members that failed by themselves, the first failure first."""


def group_of(config: Config, domain: Domain) -> str | None:
    """Return the first group in the configuration that contains the domain; ``None`` if none."""
    return next((name for name in config.group if is_in_group(config, name, domain)), None)


def is_in_group(config: Config, group: str, domain: Domain) -> bool:
    """Whether the domain is a member: a clone only by its own name or UUID, not by a pattern."""
    patterns = config.group[group].domains
    if domain.name in patterns or domain.uuid in patterns:
        return True
    if not any(fnmatchcase(domain.name, pattern) for pattern in patterns):
        return False
    return clone_of(domain.inactive_xml or domain.live_xml or "<domain/>") is None


def members_of_group(context: Context, group: str) -> list[Domain]:
    """Return the domains of a group, sorted by name.

    Raises:
        NotFoundError: the group does not exist, or it names a domain that does not exist.
    """
    known = context.config.group
    if group not in known:
        existing = f"there are {', '.join(sorted(known))}" if known else "there is none"
        raise NotFoundError(group, f"no such group in the configuration; {existing}")
    domains = context.hypervisor.domains()
    names = {name for domain in domains for name in (domain.name, domain.uuid)}
    for wanted in known[group].domains:
        if wanted not in names and not _PATTERN & set(wanted):
            step = "see `virsh list --all`, and group.*.domains in the configuration"
            raise NotFoundError(wanted, f"no such domain, and the group {group} names it", step)
    found = [domain for domain in domains if is_in_group(context.config, group, domain)]
    if not found:
        raise NotFoundError(group, "no domain matches the patterns of this group")
    return found


def plan_group(
    context: Context, group: str, domains: Sequence[Domain], request: SnapshotRequest
) -> list[Plan]:
    """Plan the snapshots of all members, with the same name and the same group run; only reads.

    Raises:
        RefusedError: a member cannot be snapshotted, or two have disks on one dataset.
    """
    now = context.clock.now()
    run = GroupRun(group, new_run_id(now), tuple((each.uuid, each.name) for each in domains))
    plans = [make_plan(context, domain, request, group=run) for domain in domains]
    _check_apart(group, plans)
    if request.name is None:
        datasets = [dataset.name for plan in plans for dataset in plan.datasets]
        taken = {found.name for found in context.pool.snapshots(datasets)}
        name = default_name(taken, now, request.policy)
        check_full_names(datasets, name)
        plans = [plan.renamed(name) for plan in plans]
    return plans


def _check_apart(group: str, plans: Sequence[Plan]) -> None:
    """A ZFS snapshot can carry the mark of one run only, and a rollback would reset both guests."""
    owners: dict[str, str] = {}
    for plan in plans:
        for dataset in plan.datasets:
            other = owners.setdefault(dataset.name, plan.domain.name)
            if other != plan.domain.name:
                raise RefusedError(
                    dataset.name,
                    f"has disks of {other} and of {plan.domain.name}, both of the group {group}",
                    "give each of them a dataset of its own; a disk that both have: exclude_disks "
                    "of all but one",
                )


def snapshot_group(context: Context, group: str, request: SnapshotRequest) -> GroupResult:
    """Snapshot all domains of a group in one window; all of them or none.

    The locks of all members are taken in the order of their UUIDs, so that two groups with the same
    members cannot wait for each other.

    Raises:
        NotFoundError, RefusedError: nothing was touched.
    """
    domains = members_of_group(context, group)
    with fields(), ExitStack() as all_locks:
        locks = {domain.uuid: all_locks.enter_context(ExitStack()) for domain in domains}
        try:
            for domain in sorted(domains, key=lambda each: each.uuid):
                locks[domain.uuid].enter_context(snapshot_lock(context, domain, request))
        except SnaporchError as error:
            return GroupResult(failures=[error])
        current = [context.hypervisor.domain(domain.uuid) for domain in domains]
        return _run_together(context, plan_group(context, group, current, request), request, locks)


def _run_together(
    context: Context,
    plans: Sequence[Plan],
    request: SnapshotRequest,
    locks: Mapping[str, AbstractContextManager[object]],
) -> GroupResult:
    """Run the plans of all members at once; each lock is released when its member's run ends."""
    group = plans[0].group
    assert group is not None
    request = replace(request, name=plans[0].snapshot)
    barrier = GroupBarrier(context, group)
    progress = SharedProgress(context.progress, barrier, group.name)
    names = ", ".join(plan.domain.name for plan in plans)
    progress.step(group.name, f"@{request.name} of {names} in one window")

    def take(plan: Plan) -> SnapshotRecord:
        uuid = plan.domain.uuid
        interrupt = MemberInterrupt(
            outer=context.interrupt, check_others=partial(barrier.check, uuid)
        )
        own = replace(context, progress=progress, interrupt=interrupt)
        try:
            with locks[uuid], fields(DOMAIN=plan.domain.name):
                return run_plan(own, plan, request, GroupMemberSnapshotter(own, barrier, uuid))
        except BaseException as error:
            barrier.fail(uuid, error)
            raise

    result = GroupResult()
    with ThreadPoolExecutor(len(plans), thread_name_prefix="member") as threads:
        futures = [threads.submit(take, plan) for plan in plans]
    for future in futures:
        error = future.exception()
        if error is None:
            result.records.append(future.result())
        elif not isinstance(error, CalledOffError):
            result.failures.append(error)
    first = barrier.failed[1] if barrier.failed else None
    result.failures.sort(key=lambda error: error is not first)
    return result
