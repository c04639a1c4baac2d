"""``snaporch snapshot``: takes snapshots by :mod:`snaporch.snapshot.run`, and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from snaporch.cli.options import ConfigOption, JsonOption, QuietOption, WaitOption, whole_number
from snaporch.errors import InterruptedRunError, SnaporchError, UsageError, one_line

if TYPE_CHECKING:
    from snaporch.context import Context
    from snaporch.model import Domain, SnapshotRecord
    from snaporch.schedule.subprocesses import SnapshotJobResult
    from snaporch.snapshot.guests_and_groups import Target
    from snaporch.snapshot.plan import Plan
    from snaporch.snapshot.ram_outlook import RamOutlook
    from snaporch.snapshot.request import SnapshotRequest

_UNCHANGED = "unchanged, no other was taken"


class SnapshotLevel(StrEnum):
    """Values of ``--level``."""

    AUTO = "auto"
    RAM = "ram"
    QUIESCED = "quiesced"
    PAUSED = "paused"
    CRASH = "crash"


def snapshot_command(
    context: typer.Context,
    domains: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DOMAIN]...", help="Domains by name or UUID.", show_default=False),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            metavar="NAME",
            help="The domains of this consistency group, all in one window or none.",
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All domains with disks on ZFS, except clones.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            parser=whole_number(1, 64),
            metavar="N",
            help="Take this many at once, each in a process of its own [default: 1; with --all: "
            "schedule.jobs].",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            help="Name of the snapshot [default: snaporch_<UTC time>_manual].",
            show_default=False,
        ),
    ] = None,
    note: Annotated[
        str,
        typer.Option(
            "--note",
            metavar="TEXT",
            help="A note of one line, which `list` and `show` print.",
            show_default=False,
        ),
    ] = "",
    level: Annotated[
        SnapshotLevel | None,
        typer.Option(
            "--level", help="How consistent [default: as configured, auto].", show_default=False
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="Take it for this policy, with its level and its retention.",
            show_default=False,
        ),
    ] = None,
    if_changed: Annotated[
        bool,
        typer.Option(
            "--if-changed",
            help="With --policy: skip a guest that is off and unchanged since the policy's last "
            "snapshot.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and change nothing.")
    ] = False,
    rate: Annotated[
        int | None,
        typer.Option(
            "--rate",
            metavar="MIB",
            parser=whole_number(0, 1 << 20),
            help="Limit for saving RAM while the guest runs, in MiB a second; 0 for none "
            "[default: as configured].",
            show_default=False,
        ),
    ] = None,
    wait: WaitOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Take a consistent snapshot of one or more domains.

    The RAM of a running guest is saved while it runs. Then the guest is paused for a moment. With
    the strategy `overlay` the pause ends when its disks write to overlays, which are committed
    after the ZFS snapshots. With `manual` it ends when the ZFS snapshots exist. --dry-run prints
    the strategy. A guest that is off gets a plain snapshot. With --policy the whole consistency
    group of a domain is snapshotted.

    With --all or --jobs a failure does not stop the others, and the exit code is the worst one.
    """
    from snaporch.cli.session import session
    from snaporch.recovery.recover_runs import recover_leftovers
    from snaporch.schedule.parallel_snapshots import find_all_domains
    from snaporch.snapshot.guests_and_groups import find_domains, find_targets
    from snaporch.snapshot.request import SnapshotRequest, apply_policy

    if [bool(domains), every, group is not None].count(True) != 1:
        reason = "expected either DOMAIN..., or --all, or --group NAME"
        raise UsageError("DOMAIN", reason, "see `snaporch snapshot --help`")
    if group is not None and jobs is not None:
        raise UsageError("--jobs", "a group is snapshotted at once", "leave it out")
    given = level.value if level else None
    request = SnapshotRequest(name, given, policy, wait, rate, if_changed, note)
    with session(context, config, quiet=quiet or json) as opened:
        names = [each.uuid for each in find_all_domains(opened)] if every else domains or []
        request = apply_policy(opened.config, request)
        if not dry_run and (every or jobs is not None):
            found = find_domains(opened, names)
            return _snapshot_in_parallel(opened, found, request, jobs=jobs, json=json)
        if not dry_run:
            recover_leftovers(opened)
        targets = find_targets(opened, names, group, request)
        if dry_run:
            return _print_plans(opened, targets, request, json=json)
        return _snapshot_in_turn(opened, targets, request, json=json)


def _snapshot_in_turn(
    context: Context, targets: Sequence[Target], request: SnapshotRequest, *, json: bool
) -> int:
    """Snapshot one target after the other; the exit code is that of the first failure."""
    from snaporch.output.terminal import print_error, print_result

    single = len(targets) == 1 and not targets[0].is_group
    taken: list[SnapshotRecord] = []
    failures: list[int] = []
    for target in targets:
        records, errors = _snapshot(context, target, request, raising=single)
        taken += records
        for error in errors:
            print_error(error.line())
            failures.append(error.exit_code)
        if not json:
            for record in records:
                print_result(_line(record))
        context.interrupt.check(target.name)
    if json:
        _print_json([record.as_json() for record in taken], single=single)
    return failures[0] if failures else 0


def _snapshot(
    context: Context, target: Target, request: SnapshotRequest, *, raising: bool
) -> tuple[list[SnapshotRecord], list[SnaporchError]]:
    """Snapshot a target and read its bundles back if the policy wants that."""
    from snaporch.snapshot.guests_and_groups import snapshot_target
    from snaporch.verify.read_back import read_back

    try:
        records, errors = snapshot_target(context, target, request)
        for record in records:
            try:
                read_back(context, record, request.policy)
            except SnaporchError as error:
                if not target.is_group:
                    raise
                errors.append(error)
    except InterruptedRunError:
        raise
    except SnaporchError as error:
        if raising:
            raise
        return [], [error]
    return records, errors


def _snapshot_in_parallel(
    context: Context,
    domains: Sequence[Domain],
    request: SnapshotRequest,
    *,
    jobs: int | None,
    json: bool,
) -> int:
    from snaporch.output.tables import print_results
    from snaporch.output.terminal import print_error
    from snaporch.schedule.parallel_snapshots import snapshot_in_parallel, worst_status

    results = snapshot_in_parallel(
        context, domains, request, jobs=jobs, on_result=lambda each: _print_progress(context, each)
    )
    if json:
        _print_json([document for result in results for document in result.documents])
    else:
        print_results([row for result in results for row in _rows(result)])
    for result in results:
        if not result.ok:
            print_error(f"{result.job.label}: {result.text}")
    context.interrupt.check("snapshot")
    return worst_status([result.status for result in results])


def _rows(result: SnapshotJobResult) -> list[tuple[str, int, Mapping[str, Any] | None]]:
    rows = [(each["domain"], result.status, each) for each in result.documents]
    return [*rows] or [(result.job.label, result.status, None)]


def _print_progress(context: Context, result: SnapshotJobResult) -> None:
    documents = result.documents
    text = f"done: @{documents[0]['snapshot']}" if documents else "failed"
    if documents and documents[0].get("unchanged"):
        text += f"  {_UNCHANGED}"
    context.progress.step(result.job.label, text)


def _line(record: SnapshotRecord) -> str:
    from snaporch.output.format import pause, size

    text = f"{record.full_name}  {record.level}  {record.state}"
    if record.ram_bytes is not None:
        text += (
            f"  paused {pause(record.pause_ms)}, "
            f"RAM {size(record.ram_bytes)}, stored {size(record.stored_bytes)}"
        )
    if record.unchanged is not None:
        text += f"  {_UNCHANGED}"
    if record.apart:
        text += f"  without {one_line(', '.join(record.apart))}, of another instant after a restore"
    return text


def _print_plans(
    context: Context, targets: Sequence[Target], request: SnapshotRequest, *, json: bool
) -> int:
    """Print what the snapshots would do; the exit code is that of the first refusal."""
    from snaporch.output.terminal import print_error
    from snaporch.snapshot.guests_and_groups import plan_target
    from snaporch.snapshot.ram_outlook import ram_outlooks

    failures: list[int] = []
    plans: list[Plan] = []
    for target in targets:
        try:
            plans += plan_target(context, target, request)
        except SnaporchError as error:
            if len(targets) == 1:
                raise
            print_error(error.line())
            failures.append(error.exit_code)
    outlooks = ram_outlooks(context, plans)
    if json:
        documents = [_plan_document(plan, outlooks.get(plan.domain.uuid)) for plan in plans]
        _print_json(documents, single=len(targets) == 1 and not targets[0].is_group)
    else:
        for plan in plans:
            _print_plan(plan, outlooks.get(plan.domain.uuid))
    return failures[0] if failures else 0


def _plan_document(plan: Plan, outlook: RamOutlook | None) -> dict[str, object]:
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
        "shared": list(plan.shared_disk_warnings),
        "ram": outlook.as_json() if outlook else None,
    }


def _print_plan(plan: Plan, outlook: RamOutlook | None) -> None:
    from snaporch.output.ram_outlook import outlook_lines
    from snaporch.output.terminal import print_result

    how = f"{plan.level}, by {plan.strategy}"
    with_group = f", with the group {plan.group.name}" if plan.group else ""
    print_result(f"{plan.domain.name}@{plan.snapshot}  {how}{with_group}")
    if plan.downgrade:
        print_result(f"  instead of the requested level: {plan.downgrade}")
    for planned in plan.disks:
        disk = planned.disk
        print_result(f"  {disk.target}  {planned.path} ({disk.format}) on {planned.dataset.name}")
    for out in plan.left_out:
        print_result(f"  left out: {out.describe()}")
    for text in plan.shared_disk_warnings:
        print_result(f"  {one_line(text)}")
    for text in outlook_lines(outlook) if outlook else ():
        print_result(f"  {text}")


def _print_json(documents: Sequence[Mapping[str, Any]], *, single: bool = False) -> None:
    """Print an array; of a single domain its object alone."""
    from snaporch.output.terminal import print_json

    printed = documents[0] if single else documents
    print_json(printed)
