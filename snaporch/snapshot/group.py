"""Snapshots of consistency groups: whose domains they are, and all their runs at once."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase

from snaporch.config import Config
from snaporch.context import Context
from snaporch.errors import NotFoundError, RefusedError, SnaporchError
from snaporch.hypervisor.clone_xml import clone_of
from snaporch.model import Domain, GroupRun, SnapshotRecord
from snaporch.snapshot.group_barrier import (
    CalledOffError,
    GroupBarrier,
    GroupMemberSnapshotter,
    MemberInterrupt,
    SharedProgress,
)
from snaporch.snapshot.plan import Plan, check_snapshot_name, make_plan
from snaporch.snapshot.run import take_snapshot

_PATTERN = frozenset("*?[")


@dataclass
class GroupResult:
    """What came of a group."""

    records: list[SnapshotRecord] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    """Of the members that failed by themselves, the first one first."""


def group_of(config: Config, domain: Domain) -> str | None:
    """The first group of the configuration that a domain belongs to."""
    return next((name for name in config.group if _is_in(config, name, domain)), None)


def _is_in(config: Config, group: str, domain: Domain) -> bool:
    """A clone is only where its own name or UUID stands: patterns mean its original."""
    patterns = config.group[group].domains
    if domain.name in patterns or domain.uuid in patterns:
        return True
    if not any(fnmatchcase(domain.name, pattern) for pattern in patterns):
        return False
    return clone_of(domain.inactive_xml or domain.live_xml or "<domain/>") is None


def members_of_group(context: Context, group: str) -> list[Domain]:
    """The domains of a group, by name.

    Raises:
        NotFoundError: there is no such group, or no domain of a name in it.
    """
    known = context.config.group
    if group not in known:
        told = f"there are {', '.join(sorted(known))}" if known else "there is none"
        raise NotFoundError(group, f"no such group in the configuration; {told}")
    domains = context.hypervisor.domains()
    names = {name for domain in domains for name in (domain.name, domain.uuid)}
    for wanted in known[group].domains:
        if wanted not in names and not _PATTERN & set(wanted):
            step = "see `virsh list --all`, and group.*.domains in the configuration"
            raise NotFoundError(wanted, f"no such domain, and the group {group} names it", step)
    found = [domain for domain in domains if _is_in(context.config, group, domain)]
    if not found:
        raise NotFoundError(group, "no domain matches the patterns of this group")
    return found


def plan_group(
    context: Context,
    group: str,
    domains: Sequence[Domain],
    *,
    name: str | None,
    level: str | None,
    policy: str | None,
) -> list[Plan]:
    """The plan of each member, all with one name and one mark; reads only.

    Raises:
        RefusedError: one of them cannot be snapshotted, or two have disks on one dataset.
    """
    if name is not None:
        check_snapshot_name(name)
    now = datetime.now(UTC)
    run = f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
    together = GroupRun(group, run, tuple((domain.uuid, domain.name) for domain in domains))
    plans = [
        make_plan(context, domain, name, level, policy=policy, group=together) for domain in domains
    ]
    _check_apart(group, plans)
    chosen = name or _free_name(context, plans, now, policy or "manual")
    return [replace(plan, snapshot=chosen) for plan in plans]


def _check_apart(group: str, plans: Sequence[Plan]) -> None:
    """A ZFS snapshot can be marked as one run's only, and its rollback would take both back."""
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


def _free_name(context: Context, plans: Sequence[Plan], now: datetime, purpose: str) -> str:
    datasets = [dataset.name for plan in plans for dataset in plan.datasets]
    taken = {found.name for found in context.pool.snapshots(datasets)}
    stem = f"snaporch_{now:%Y%m%dT%H%M%SZ}"
    candidates = (f"{stem}{more}_{purpose}" for more in ["", *(f".{n}" for n in range(2, 100))])
    return next(candidate for candidate in candidates if candidate not in taken)


def snapshot_group(
    context: Context,
    group: str,
    *,
    name: str | None,
    wait: int | None,
    level: str | None,
    policy: str | None,
    rate: int | None = None,
) -> GroupResult:
    """Snapshot all domains of a group in one window; all of them or none.

    Raises:
        NotFoundError, RefusedError: nothing was touched.
    """
    domains = members_of_group(context, group)
    plans = plan_group(context, group, domains, name=name, level=level, policy=policy)
    together = plans[0].group
    assert together is not None
    window = GroupBarrier(context, together)
    progress = SharedProgress(context.progress, window, group)
    names = ", ".join(domain.name for domain in domains)
    progress.step(group, f"@{plans[0].snapshot} of {names} in one window")

    def take(domain: Domain) -> SnapshotRecord:
        interrupt = MemberInterrupt(context.interrupt, window, domain.uuid)
        own = replace(context, progress=progress, interrupt=interrupt)
        try:
            return take_snapshot(
                own,
                domain,
                name=plans[0].snapshot,
                wait=wait,
                level=level,
                taker=GroupMemberSnapshotter(own, window, domain.uuid),
                policy=policy,
                rate=rate,
            )
        except BaseException as error:
            window.fail(domain.uuid, error)
            raise

    outcome = GroupResult()
    with ThreadPoolExecutor(len(domains), thread_name_prefix="member") as threads:
        futures = [threads.submit(take, domain) for domain in domains]
    for future in futures:
        error = future.exception()
        if error is None:
            outcome.records.append(future.result())
        elif not isinstance(error, CalledOffError):
            outcome.failures.append(error)
    first = window.failed[1] if window.failed else None
    outcome.failures.sort(key=lambda error: error is not first)
    return outcome


def raise_bugs(outcome: GroupResult) -> list[SnaporchError]:
    """What a user can act upon; anything else is raised.

    Raises:
        BaseException: a bug.
    """
    for error in outcome.failures:
        if not isinstance(error, SnaporchError):
            raise error
    return [error for error in outcome.failures if isinstance(error, SnaporchError)]
