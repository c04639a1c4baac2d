"""Gathers facts about policies and about names in the configuration. Only reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from snaporch.bundle.manifest import Role
from snaporch.check.facts import GuestFacts, UnmetPolicy
from snaporch.check.gather_commits import with_commits
from snaporch.config import Config, Policy
from snaporch.context import Context
from snaporch.errors import SnaporchError
from snaporch.model import Domain
from snaporch.replication.members import nesting_reason
from snaporch.replication.ram_in_clear import secret_parts
from snaporch.schedule.forecast import replicas_of
from snaporch.schedule.policy_assignment import Assignment, assign
from snaporch.snapshot.plan import make_plan
from snaporch.snapshot.request import SnapshotRequest


def with_policies(
    context: Context, domains: Sequence[Domain], guests: Sequence[GuestFacts]
) -> tuple[GuestFacts, ...]:
    """The guests, with the facts about their policies added."""
    properties = context.pool.policy_view().policies
    found = []
    for domain, each in zip(domains, guests, strict=True):
        given = assign(context, domain, properties)
        config = context.config.policy
        takes = tuple(name for name in given.policies if takes_snapshots(config[name]))
        planned = given.policies if each.refusal is None and not each.busy else ()
        levels = {config[name].level for name in takes} - {"auto"}
        guest = with_commits(context, domain, each, levels)
        unmet = filter(None, (_unmet(context, domain, name) for name in planned))
        opted_out = bool(given.source) and not given.policies and not given.unknown
        nested = _nested(context.config, given, guest.datasets)
        found.append(
            replace(
                guest,
                policies=takes,
                opted_out=opted_out,
                unmet=tuple(unmet),
                replicas=tuple(replicas_of(context.config, given)),
                nested=nested,
                has_ram=any(_may_save_ram(config[name]) for name in given.policies),
                firmware=_firmware(domain),
            )
        )
    return tuple(found)


def takes_snapshots(policy: Policy) -> bool:
    """Whether the policy takes snapshots on a schedule."""
    return bool(policy.every or policy.cron)


def _may_save_ram(policy: Policy) -> bool:
    """Whether a policy replicates RAM: one without a schedule replicates whatever is there."""
    return policy.level in ("auto", "ram") or not takes_snapshots(policy)


def _firmware(domain: Domain) -> tuple[str, ...]:
    state = {Role.TPM: domain.tpm_state, Role.NVRAM: domain.nvram}
    return tuple(secret_parts([role for role, path in state.items() if path is not None]))


def _unmet(context: Context, domain: Domain, policy: str) -> UnmetPolicy | None:
    """Why a guest cannot have the level that its policy names; ``None`` if it can."""
    level = context.config.policy[policy].level
    if level == "auto" or not domain.active:
        return None
    try:
        plan = make_plan(context, domain, SnapshotRequest(level=level, policy=policy))
    except SnaporchError as error:
        return UnmetPolicy(policy, error.reason, error.step, fails=True)
    return UnmetPolicy(policy, plan.downgrade, "", fails=False) if plan.downgrade else None


def _nested(config: Config, given: Assignment, datasets: Sequence[str]) -> dict[str, str]:
    """The replicas that refuse these datasets, each with the reason."""
    reasons = {
        name: nesting_reason(config.replica[name], datasets) for name in replicas_of(config, given)
    }
    return {name: reason for name, reason in reasons.items() if reason}


def unknown_names(config: Config, domains: Sequence[Domain]) -> dict[str, tuple[str, ...]]:
    """By the place in the configuration: names, patterns and disks that match no guest."""
    names = {name for domain in domains for name in (domain.name, domain.uuid)}
    disks = {domain.name: {disk.target for disk in domain.disks} for domain in domains}
    disks |= {domain.uuid: disks[domain.name] for domain in domains}
    all_disks = set[str]().union(*disks.values())
    found = {
        f"[policy.{name}] domains": [d for d in policy.domains if not _matches(d, names)]
        for name, policy in config.policy.items()
    } | {
        f"[group.{name}] domains": [d for d in group.domains if not _matches(d, names)]
        for name, group in config.group.items()
    }
    for name, own in config.domain.items():
        found[f'[domain."{name}"]'] = [] if name in names else [name]
        excluded = own.get("exclude_disks", ()) if name in names else ()
        found[f'[domain."{name}"] exclude_disks'] = [d for d in excluded if d not in disks[name]]
    if domains:
        excluded = config.defaults.exclude_disks
        found["[defaults] exclude_disks"] = [d for d in excluded if d not in all_disks]
    return {where: tuple(unknown) for where, unknown in found.items() if unknown}


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(pattern == name or fnmatchcase(name, pattern) for name in names)
