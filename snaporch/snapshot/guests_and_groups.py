"""What one command snapshots: single domains, and groups whose domains are snapshotted together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from snaporch.context import Context
from snaporch.errors import InterruptedRunError, SnaporchError, raise_bugs
from snaporch.model import Domain, SnapshotRecord
from snaporch.snapshot.group import (
    group_of,
    members_of_group,
    plan_group,
    snapshot_group,
)
from snaporch.snapshot.plan import Plan, make_plan
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot


@dataclass(frozen=True, slots=True)
class Target:
    """A domain, or a group by its name."""

    item: Domain | str

    @property
    def name(self) -> str:
        """The name of the domain or group."""
        return self.item if isinstance(self.item, str) else self.item.name

    @property
    def is_group(self) -> bool:
        """Whether it is a group."""
        return isinstance(self.item, str)


def find_targets(
    context: Context, names: Sequence[str], group: str | None, request: SnapshotRequest
) -> list[Target]:
    """Find what to snapshot, each once: the group, or the domains, which a policy takes as groups.

    Raises:
        NotFoundError: a domain or the group does not exist.
    """
    if group is not None:
        members_of_group(context, group)
        return [Target(group)]
    domains = find_domains(context, names)
    if request.policy is None:
        return [Target(domain) for domain in domains]
    return list(dict.fromkeys(Target(group_of(context.config, each) or each) for each in domains))


def find_domains(context: Context, names: Sequence[str]) -> list[Domain]:
    """Find domains by name or UUID, each once.

    Raises:
        NotFoundError: one does not exist.
    """
    domains = [context.hypervisor.domain(name) for name in dict.fromkeys(names)]
    return list({domain.uuid: domain for domain in domains}.values())


def plan_target(context: Context, target: Target, request: SnapshotRequest) -> list[Plan]:
    """Plan the snapshot of each domain of a target; only reads.

    Raises:
        RefusedError: a snapshot is not possible.
    """
    if isinstance(target.item, str):
        members = members_of_group(context, target.item)
        return plan_group(context, target.item, members, request)
    return [make_plan(context, target.item, request)]


def snapshot_target(
    context: Context, target: Target, request: SnapshotRequest
) -> tuple[list[SnapshotRecord], list[SnaporchError]]:
    """Snapshot a domain or a group.

    Returns:
        The snapshots, and the errors of a group's members; a domain's error is raised.

    Raises:
        SnaporchError: as of :func:`take_snapshot` and :func:`snapshot_group`.
        InterruptedRunError: a signal came before any snapshot of the group existed.
    """
    if not isinstance(target.item, str):
        return [take_snapshot(context, target.item, request)], []
    result = snapshot_group(context, target.item, request)
    errors = raise_bugs(result.failures)
    if errors and not result.records:
        for error in errors:
            if isinstance(error, InterruptedRunError):
                raise error
        context.progress.note(target.item, "none of its domains was snapshotted")
    return result.records, errors
