"""The loop over domains behind ``snaporch snapshot``."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from dataclasses import dataclass, replace

from snaporch.errors import InterruptedRunError, NotFoundError, SnaporchError, UsageError
from snaporch.model import Domain, SnapshotRecord
from snaporch.report.terminal import print_error, print_result
from snaporch.report.units import pause, size
from snaporch.run.context import Context
from snaporch.run.plan import check_snapshot_name, make_plan
from snaporch.run.settle import recover_leftovers
from snaporch.run.snapshot import take_snapshot


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the command line asks for; ``None`` where it says nothing."""

    name: str | None = None
    level: str | None = None
    policy: str | None = None
    wait: int | None = None
    rate: int | None = None


def snapshot_each(context: Context, names: Sequence[str], wishes: Wishes, *, json: bool) -> int:
    """Snapshot the domains one after the other; the first failure's exit code.

    All are looked up first, so that a misspelt name is refused before anything is touched. One
    domain prints a JSON object, several print an array of those that succeeded.
    """
    level = _level(context, wishes.name, wishes.level, wishes.policy)
    wishes = replace(wishes, level=level)
    recover_leftovers(context)
    unique = _look_up(context, names)
    records: list[SnapshotRecord] = []
    failures: list[int] = []
    for domain in unique:
        try:
            records.append(_take(context, domain, wishes))
        except InterruptedRunError:
            raise
        except SnaporchError as error:
            if len(unique) == 1:
                raise
            print_error(error.line())
            failures.append(error.exit_code)
        else:
            if not json:
                print_result(_line(records[-1]))
        context.interrupt.check(domain.name)
    if json:
        documents = [record.as_json() for record in records]
        document = documents[0] if len(unique) == 1 else documents
        print_result(json_format.dumps(document, indent=2, ensure_ascii=False))
    return failures[0] if failures else 0


def _take(context: Context, domain: Domain, wishes: Wishes) -> SnapshotRecord:
    policy = wishes.policy
    record = take_snapshot(
        context,
        domain,
        name=wishes.name,
        wait=wishes.wait,
        level=wishes.level,
        policy=policy,
        rate=wishes.rate,
    )
    if policy is not None and context.config.policy[policy].verify and record.bundle:
        context.progress.step(domain.name, "reading the bundle back")
        context.store.verify(f"{record.uuid}/{record.run}")
    return record


def _level(context: Context, name: str | None, level: str | None, policy: str | None) -> str | None:
    """The level to ask for; bad names are refused before anything is touched."""
    if name is not None:
        check_snapshot_name(name)
    if policy is None:
        return level
    if name is not None:
        raise UsageError("--policy", "names its snapshots itself", "leave out --name")
    known = context.config.policy
    if policy not in known:
        told = f"there are {', '.join(sorted(known))}" if known else "there is none"
        raise NotFoundError(policy, f"no such policy in the configuration; {told}")
    wanted = known[policy].level
    return level or (None if wanted == "auto" else wanted)


def _look_up(context: Context, names: Sequence[str]) -> list[Domain]:
    domains = [context.hypervisor.domain(wanted) for wanted in dict.fromkeys(names)]
    return list({domain.uuid: domain for domain in domains}.values())


def show_plans(
    context: Context,
    names: Sequence[str],
    *,
    name: str | None,
    level: str | None,
    policy: str | None,
) -> int:
    """Print what a snapshot of each domain would do; refusals are errors as they would be."""
    level = _level(context, name, level, policy)
    for domain in _look_up(context, names):
        plan = make_plan(context, domain, name, level, policy=policy)
        print_result(f"{domain.name}@{plan.snapshot}  {plan.level}, by {plan.strategy}")
        if plan.downgrade:
            print_result(f"  instead of what was asked for: {plan.downgrade}")
        for planned in plan.disks:
            disk = planned.disk
            print_result(
                f"  {disk.target}  {planned.path} ({disk.format}) on {planned.dataset.name}"
            )
        for out in plan.left_out:
            print_result(f"  left out: {out.describe()}")
    return 0


def _line(record: SnapshotRecord) -> str:
    text = f"{record.domain}@{record.snapshot}  {record.level}  {record.state}"
    if record.ram_bytes is not None:
        text += (
            f"  paused {pause(record.pause_ms)}, "
            f"RAM {size(record.ram_bytes)}, stored {size(record.stored_bytes)}"
        )
    return text
