"""The loop over domains and groups behind ``snaporch snapshot``."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from snaporch.bundle.manifest import ManifestError
from snaporch.bundle.store import BundleError
from snaporch.context import Context
from snaporch.errors import (
    InterruptedRunError,
    NotFoundError,
    SnaporchError,
    UsageError,
    one_line,
)
from snaporch.model import Domain, SnapshotRecord, VerificationResult, VerifyDepth
from snaporch.output.format import pause, size
from snaporch.output.terminal import print_error, print_result
from snaporch.recovery.settle import recover_leftovers
from snaporch.snapshot.group import (
    group_of,
    members_of_group,
    plan_group,
    raise_bugs,
    snapshot_group,
)
from snaporch.snapshot.plan import Plan, check_snapshot_name, make_plan
from snaporch.snapshot.run import take_snapshot


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """What was asked for, of whatever domains; ``None`` where nothing was said."""

    name: str | None = None
    level: str | None = None
    policy: str | None = None
    wait: int | None = None
    rate: int | None = None
    if_changed: bool = False


@dataclass(frozen=True, slots=True)
class _Unit:
    """What is snapshotted at once: a domain, or a group."""

    domain: Domain | None
    group: str | None


def snapshot_each(
    context: Context, names: Sequence[str], group: str | None, wish: SnapshotRequest, *, json: bool
) -> int:
    """Snapshot the domains one after the other, or a group; the first failure's exit code.

    All are looked up first, so that a misspelt name is refused before anything is touched. One
    domain prints a JSON object, several print an array of those that succeeded.
    """
    wish = complete(context, wish)
    recover_leftovers(context)
    units = _units(context, names, group, wish)
    single = len(units) == 1 and units[0].domain is not None
    records: list[SnapshotRecord] = []
    failures: list[int] = []
    for unit in units:
        taken, errors = _attempt(context, unit, wish, alone=single)
        records += taken
        for error in errors:
            print_error(error.line())
            failures.append(error.exit_code)
        if not json:
            for record in taken:
                print_result(_line(record))
        context.interrupt.check(unit.domain.name if unit.domain else unit.group or "")
    if json:
        documents = [record.as_json() for record in records]
        document = documents[0] if single else documents
        print_result(json_format.dumps(document, indent=2, ensure_ascii=False))
    return failures[0] if failures else 0


def _attempt(
    context: Context, unit: _Unit, wish: SnapshotRequest, *, alone: bool
) -> tuple[list[SnapshotRecord], list[SnaporchError]]:
    try:
        if unit.domain is None:
            return _take_group(context, unit.group or "", wish)
        return [_take(context, unit.domain, wish)], []
    except InterruptedRunError:
        raise
    except SnaporchError as error:
        if alone:
            raise
        return [], [error]


def _take_group(
    context: Context, group: str, wish: SnapshotRequest
) -> tuple[list[SnapshotRecord], list[SnaporchError]]:
    outcome = snapshot_group(
        context,
        group,
        name=wish.name,
        wait=wish.wait,
        level=wish.level,
        policy=wish.policy,
        rate=wish.rate,
    )
    errors = raise_bugs(outcome)
    for error in errors:
        if isinstance(error, InterruptedRunError) and not outcome.records:
            raise error
    if errors and not outcome.records:
        context.progress.note(group, "none of its domains was snapshotted")
    for record in outcome.records:
        try:
            _read_back(context, record, wish.policy)
        except SnaporchError as error:
            errors.append(error)
    return outcome.records, errors


def _take(context: Context, domain: Domain, wish: SnapshotRequest) -> SnapshotRecord:
    record = take_snapshot(
        context,
        domain,
        name=wish.name,
        wait=wish.wait,
        level=wish.level,
        policy=wish.policy,
        rate=wish.rate,
        if_changed=wish.if_changed,
    )
    _read_back(context, record, wish.policy)
    return record


def _read_back(context: Context, record: SnapshotRecord, policy: str | None) -> None:
    """As the policy wants it; what was read otherwise is written on the snapshot as its verdict.

    Raises:
        BundleError, ManifestError: something is missing or differs.
    """
    if policy is None or not context.config.policy[policy].reads_back or not record.bundle:
        return
    context.progress.step(record.domain, "reading the bundle back")
    try:
        context.store.verify(f"{record.uuid}/{record.run}")
    except (BundleError, ManifestError):
        from snaporch.verify.verify import write_verdict

        failed = VerificationResult(datetime.now(UTC), passed=False, reached=VerifyDepth.NOTHING)
        write_verdict(context, record, failed)
        raise


def complete(context: Context, wish: SnapshotRequest) -> SnapshotRequest:
    """With the level to ask for; bad names are refused before anything is touched.

    Raises:
        UsageError, NotFoundError: what was wished for cannot be.
    """
    if wish.name is not None:
        check_snapshot_name(wish.name)
    if wish.policy is None:
        if wish.if_changed:
            raise UsageError("--if-changed", "goes by the last snapshot of a --policy")
        return wish
    if wish.name is not None:
        raise UsageError("--policy", "names its snapshots itself", "leave out --name")
    known = context.config.policy
    if wish.policy not in known:
        told = f"there are {', '.join(sorted(known))}" if known else "there is none"
        raise NotFoundError(wish.policy, f"no such policy in the configuration; {told}")
    wanted = known[wish.policy].level
    return replace(wish, level=wish.level or (None if wanted == "auto" else wanted))


def _units(
    context: Context, names: Sequence[str], group: str | None, wish: SnapshotRequest
) -> list[_Unit]:
    """A policy takes the whole group of a domain, once."""
    if group is not None:
        members_of_group(context, group)
        return [_Unit(None, group)]
    units = []
    for domain in look_up(context, names):
        own = group_of(context.config, domain) if wish.policy else None
        units.append(_Unit(None, own) if own else _Unit(domain, None))
    return list(dict.fromkeys(units))


def look_up(context: Context, names: Sequence[str]) -> list[Domain]:
    """The domains by name or UUID, each once.

    Raises:
        NotFoundError: one is misspelt.
    """
    domains = [context.hypervisor.domain(wanted) for wanted in dict.fromkeys(names)]
    return list({domain.uuid: domain for domain in domains}.values())


def show_plans(
    context: Context, names: Sequence[str], group: str | None, wish: SnapshotRequest, *, json: bool
) -> int:
    """Print what a snapshot of each domain would do; refusals are errors as they would be."""
    wish = complete(context, wish)
    units = _units(context, names, group, wish)
    failures: list[int] = []
    documents: list[dict[str, object]] = []
    for unit in units:
        try:
            for plan in _plans(context, unit, wish):
                documents.append(_document(plan))
                if not json:
                    _show(plan)
        except SnaporchError as error:
            if len(units) == 1:
                raise
            print_error(error.line())
            failures.append(error.exit_code)
    if json:
        single = len(units) == 1 and units[0].domain is not None
        document = documents[0] if single else documents
        print_result(json_format.dumps(document, indent=2, ensure_ascii=False))
    return failures[0] if failures else 0


def _document(plan: Plan) -> dict[str, object]:
    return {
        "domain": plan.domain.name,
        "uuid": plan.domain.uuid,
        "snapshot": plan.snapshot,
        "level": plan.level.value,
        "strategy": plan.strategy.value,
        "group": plan.group.name if plan.group else None,
        "downgrade": plan.downgrade or None,
        "disks": [
            {
                "target": planned.disk.target,
                "path": planned.path,
                "format": planned.disk.format,
                "dataset": planned.dataset.name,
            }
            for planned in plan.disks
        ],
        "left_out": [
            {"target": out.disk.target, "path": out.disk.source, "reason": out.reason}
            for out in plan.left_out
        ],
        "shared": list(plan.shared),
    }


def _plans(context: Context, unit: _Unit, wish: SnapshotRequest) -> list[Plan]:
    if unit.domain is not None:
        return [make_plan(context, unit.domain, wish.name, wish.level, policy=wish.policy)]
    return plan_group(
        context,
        unit.group or "",
        members_of_group(context, unit.group or ""),
        name=wish.name,
        level=wish.level,
        policy=wish.policy,
    )


def _show(plan: Plan) -> None:
    how = f"{plan.level}, by {plan.strategy}"
    with_group = f", with the group {plan.group.name}" if plan.group else ""
    print_result(f"{plan.domain.name}@{plan.snapshot}  {how}{with_group}")
    if plan.downgrade:
        print_result(f"  instead of what was asked for: {plan.downgrade}")
    for planned in plan.disks:
        disk = planned.disk
        print_result(f"  {disk.target}  {planned.path} ({disk.format}) on {planned.dataset.name}")
    for out in plan.left_out:
        print_result(f"  left out: {out.describe()}")
    for text in plan.shared:
        print_result(f"  {one_line(text)}")


def _line(record: SnapshotRecord) -> str:
    text = f"{record.full_name}  {record.level}  {record.state}"
    if record.ram_bytes is not None:
        text += (
            f"  paused {pause(record.pause_ms)}, "
            f"RAM {size(record.ram_bytes)}, stored {size(record.stored_bytes)}"
        )
    if record.unchanged is not None:
        text += "  unchanged, no other was taken"
    if record.apart:
        text += f"  without {one_line(', '.join(record.apart))}, of another instant after a restore"
    return text
