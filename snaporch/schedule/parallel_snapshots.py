"""Snapshots of several domains at once, each in a process of its own: ``--all`` and ``--jobs``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from snaporch.config import Schedule
from snaporch.context import Context
from snaporch.errors import ExitCode, NotFoundError
from snaporch.hypervisor.clone_xml import clone_of
from snaporch.model import Domain
from snaporch.schedule.concurrency import ConcurrencyLimiter, SnapshotJob
from snaporch.schedule.policy_assignment import datasets
from snaporch.schedule.run_due import estimate_load, take_all, without_repeated_groups
from snaporch.schedule.subprocesses import (
    SnapshotJobResult,
    Subprocesses,
    bulk_job_command,
    own_command,
)
from snaporch.snapshot.request import SnapshotRequest


def find_all_domains(context: Context) -> list[Domain]:
    """Return the domains that can be snapshotted: no clones, and none without a disk on ZFS.

    Raises:
        NotFoundError: there is none.
    """
    found = []
    for domain in context.hypervisor.domains():
        if (origin := clone_of(domain.inactive_xml or domain.live_xml or "<domain/>")) is not None:
            context.progress.step(domain.name, f"left out: it is a clone of {origin}")
        elif not datasets(context, domain):
            context.progress.step(domain.name, "left out: no disk of it is on ZFS")
        else:
            found.append(domain)
    if not found:
        raise NotFoundError("--all", "no domain has a disk on ZFS", "see `virsh list --all`")
    return found


def snapshot_in_parallel(
    context: Context,
    domains: Sequence[Domain],
    request: SnapshotRequest,
    *,
    jobs: int | None,
    on_result: Callable[[SnapshotJobResult], None],
) -> list[SnapshotJobResult]:
    """Snapshot the domains; with a policy a domain's group is snapshotted with it, once.

    After a signal no other snapshot is begun, and the running ones undo or finish themselves.

    Args:
        context: configuration, hypervisor, pools and progress.
        domains: the domains.
        request: what each process is asked for.
        jobs: the most snapshots at once; ``None`` for the limits of the configuration.
        on_result: is called with each result as it comes.

    Returns:
        The results in the order of the domains' names.
    """
    children = Subprocesses(
        ConcurrencyLimiter(limits_for(context.config.schedule, jobs)),
        lambda job: child_command(context, job, request),
        bulk_job_command(context),
    )
    level = request.level or "auto"
    planned = [estimate_load(context, domain, request.policy or "", level) for domain in domains]
    results = take_all(context, children, without_repeated_groups(planned), on_result)
    return sorted(results, key=lambda result: result.job.domain)


def limits_for(schedule: Schedule, jobs: int | None) -> Schedule:
    """Return the limits of the configuration; ``jobs`` replaces those on the host and in a pool."""
    if jobs is None:
        return schedule
    return schedule.model_copy(update={"jobs": jobs, "jobs_per_pool": jobs})


def worst_status(statuses: Sequence[int]) -> int:
    """Return the most urgent exit code: attention, then a bug, then the highest number."""
    for code in (ExitCode.ATTENTION, ExitCode.BUG):
        if code in statuses:
            return int(code)
    return max(statuses, default=int(ExitCode.OK))


def child_command(context: Context, job: SnapshotJob, request: SnapshotRequest) -> list[str]:
    """Return the command line of the process that snapshots one domain."""
    options = {
        "--name": request.name,
        "--level": request.level,
        "--policy": request.policy,
        "--note": request.note or None,
        "--wait": None if request.wait is None else f"{request.wait}s",
        "--rate": request.rate,
    }
    given = [word for key, value in options.items() if value is not None for word in (key, value)]
    given += ["--if-changed"] if request.if_changed else []
    words = ["snapshot", job.uuid, *map(str, given), "--json", "--quiet"]
    return [*own_command(context), *words]
