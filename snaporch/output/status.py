"""The state of guests, policies and the store, as text and for a monitoring plugin.

What is a problem is decided by :mod:`snaporch.status.problems`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from datetime import datetime, tzinfo

from rich.console import Console
from rich.table import Table
from rich.text import Text

from snaporch.config import StatusOptions as Limits
from snaporch.errors import one_line
from snaporch.model import Level, SnapshotRecord, parse_iso
from snaporch.output.findings import nagios_line
from snaporch.output.format import age, size
from snaporch.output.terminal import print_result
from snaporch.schedule.replication_due import PendingReplication
from snaporch.status.model import (
    DomainStatus,
    PolicyStatus,
    Problem,
    ProblemGrade,
    SchedulerState,
    SourceStatus,
    Status,
)
from snaporch.status.problems import worst_grade
from snaporch.verify.restore_results import RestoreOutcome

_WIDEST = 100
_PIPED_WIDTH = 100_000
_INDENT = "  "
_SHOWN = 3
"""Copies that were not restored, and that a line names."""
_STYLES = {ProblemGrade.CRITICAL: "bold red", ProblemGrade.WARNING: "yellow"}
_NAGIOS = {
    None: ("OK", 0),
    ProblemGrade.WARNING: ("WARNING", 1),
    ProblemGrade.CRITICAL: ("CRITICAL", 2),
}


def print_status(status: Status, problems: Sequence[Problem], zone: tzinfo) -> None:
    """Print ``snaporch status`` on standard output.

    Args:
        problems: the problems, the worst first.
        zone: the time zone of printed times.
    """
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        console = Console(highlight=False, emoji=False, soft_wrap=True, width=_PIPED_WIDTH)
    with console.capture() as captured:
        for line in _head(status, zone):
            console.print(Text(one_line(line)))
        if status.domains:
            console.print()
            console.print(_table(status, zone), soft_wrap=False)
        if problems:
            console.print()
        for problem in problems:
            console.print(_paragraph(problem, console))
    print_result("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")))


def _head(status: Status, zone: tzinfo) -> list[str]:
    store = status.store
    bundles = f"{store.bundles} bundle{'' if store.bundles == 1 else 's'}"
    room = f"{size(store.trash_bytes)} in the trash; {size(store.free_bytes)} free"
    lines = [
        f"policies  {_scheduler(status.scheduler, status.at, zone)}",
        f"store     {size(store.bundle_bytes)} in {bundles}, {room}",
    ]
    lines += _copies(status)
    lines += _waiting(status)
    for source in status.sources:
        lines += _source(source, status.at)
    for run in status.runs:
        if not run.kind:
            written = f"last written {age(run.since, status.at)} ago"
            lines.append(f"run       {run.domain}: its journal {run.phase}, {written}")
            continue
        state = "under way" if run.locked else "interrupted"
        window = ", window open" if run.in_window else ""
        since = age(run.since, status.at)
        lines.append(f"run       {run.domain}: {run.kind} {state}, {run.phase}{window} for {since}")
    return lines


def _copies(status: Status) -> list[str]:
    """One line for each replica whose copies were verified, and one for its test restores."""
    lines = []
    for name in dict.fromkeys(each.replica for each in status.copies):
        own = [each for each in status.copies if each.replica == name]
        passed = f"{sum(each.passed for each in own)} of {len(own)} verified copies passed"
        newest, oldest = (age(choose(e.at for e in own), status.at) for choose in (max, min))
        lines.append(f"replica   {name}: {passed}; verified {newest} to {oldest} ago")
    for name in dict.fromkeys(each.replica for each in status.test_restores):
        results = [each for each in status.test_restores if each.replica == name]
        count = sum(each.outcome is RestoreOutcome.PASSED for each in results)
        passed = f"{count} of {len(results)} test restores passed"
        times = [each.result.at for each in results]
        newest, oldest = (age(choose(times), status.at) for choose in (max, min))
        lines.append(f"replica   {name}: {passed}; done {newest} to {oldest} ago")
        unproven = [e.full_name for e in results if e.outcome is RestoreOutcome.NOT_RESTORED]
        if unproven:
            more = f" and {len(unproven) - _SHOWN} more" if len(unproven) > _SHOWN else ""
            lines.append(f"replica   {name}: not restored: {', '.join(unproven[-_SHOWN:])}{more}")
    return lines


def _waiting(status: Status) -> list[str]:
    """One line for each replica whose window is closed while a replication to it would be due."""
    found: dict[str, list[PendingReplication]] = {}
    for each in (replica.next for domain in status.domains for replica in domain.replicas):
        if each is not None and each.waits_for_window(status.at):
            found.setdefault(each.replica, []).append(each)
    return [
        f"replica   {name}: {len(own)} guest{'' if len(own) == 1 else 's'} waiting for its window "
        f"({own[0].window}) since {age(min(each.since for each in own), status.at)}"
        for name, own in found.items()
    ]


def _source(source: SourceStatus, now: datetime) -> list[str]:
    whole = source.whole
    last = f"pulled {age(whole.pulled, now)} ago" if whole and whole.pulled else "never pulled"
    if since := source.waits_since(now):
        last += f", waiting for its window ({source.window}) since {age(since, now)}"
    lines = [f"source    {source.source}: {last}"]
    for each in source.guests.values():
        newest = f"newest snapshot {age(each.newest, now)} old" if each.newest else "no snapshot"
        more = f", {each.skipped} skipped" if each.skipped else ""
        more += f", {each.waiting} waiting" if each.waiting else ""
        lines.append(f"          {each.domain}: {newest}{more}")
    return lines


def _scheduler(scheduler: SchedulerState, now: datetime, zone: tzinfo) -> str:
    active = sorted(unit for unit, state in scheduler.units.items() if state == "active")
    if scheduler.holder is None:
        return f"{', '.join(active)} active" if active else "neither the daemon nor a timer"
    since = parse_iso(scheduler.holder.since)
    text = (
        f"{scheduler.holder.doing} (pid {scheduler.holder.pid}) since "
        f"{since.astimezone(zone):%Y-%m-%d %H:%M %Z}, {age(since, now)}"
    )
    checked = scheduler.holder.checked
    return f"{text}; last check {age(parse_iso(checked), now)} ago" if checked else text


def _table(status: Status, zone: tzinfo) -> Table:
    levels = [level for level in Level if any(level in each.newest for each in status.domains)]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("DOMAIN", overflow="fold")
    table.add_column("POLICY", overflow="fold")
    for name in ("LAST", "NEXT", *(level.value.upper() for level in levels)):
        table.add_column(name, no_wrap=True)
    for domain in status.domains:
        newest = [_ago(domain.newest.get(level), status.at) for level in levels]
        rows = [_policy_cells(each, status.at, zone) for each in domain.policies]
        for place, cells in enumerate(rows or [[Text("-"), Text("-"), Text("-")]]):
            first = place == 0
            table.add_row(
                Text(one_line(domain.name) if first else ""),
                *cells,
                *(newest if first else [""] * len(newest)),
            )
    return table


def _policy_cells(policy: PolicyStatus, now: datetime, zone: tzinfo) -> list[Text]:
    style = "red" if policy.missed or (policy.next and policy.next.failed) else ""
    return [
        Text(policy.policy),
        Text(_last(policy, now)),
        Text(_next(policy, now, zone), style=style),
    ]


def _last(policy: PolicyStatus, now: datetime) -> str:
    """Format the last snapshot; of an unchanged guest also the time of the last check.

    The guest may have run since that check.
    """
    taken = _ago(policy.last, now)
    if policy.unchanged is None:
        return taken
    return f"{taken}, unchanged {age(policy.unchanged, now)} ago"


def _next(policy: PolicyStatus, now: datetime, zone: tzinfo) -> str:
    if policy.next is None:
        return "-"
    if policy.missed:
        return "missed"
    if policy.next.failed is not None:
        return "failed"
    if policy.next.due(now):
        return "due"
    local = policy.next.at.astimezone(zone)
    same_day = local.date() == now.astimezone(zone).date()
    return f"{local:%H:%M}" if same_day else f"{local:%m-%d %H:%M}"


def _ago(moment: datetime | None, now: datetime) -> str:
    return "-" if moment is None else age(moment, now)


def _paragraph(problem: Problem, console: Console) -> Text:
    word = problem.grade.value
    line = f"{word}  {one_line(problem.subject)}: {one_line(problem.text)}  [{problem.code}]"
    wrapped = textwrap.wrap(
        line,
        min(console.width, _WIDEST) if console.is_terminal else _PIPED_WIDTH,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    text = Text("\n".join(wrapped))
    text.stylize(_STYLES[problem.grade], 0, len(word))
    return text


# -- Nagios --------------------------------------------------------------------------------------


def nagios(status: Status, problems: Sequence[Problem], limits: Limits) -> tuple[str, int]:
    """Return the line and the exit status of a monitoring plugin (Nagios Plugin API)."""
    word, code = _NAGIOS[worst_grade(problems)]
    count = len(status.domains)
    text = f"{count} guest{'' if count == 1 else 's'}"
    if problems:
        text = f"{problems[0].subject}: {problems[0].text}"
        if len(problems) > 1:
            text += f" (and {len(problems) - 1} more)"
    return f"{nagios_line(word, text)} | {_perfdata(status, limits)}", code


def _perfdata(status: Status, limits: Limits) -> str:
    policies = [policy for domain in status.domains for policy in domain.policies]
    store = status.store
    figures = {
        "guests": f"{len(status.domains)}",
        "missed": f"{sum(policy.missed > 0 for policy in policies)}",
        "failed": f"{sum(bool(policy.next and policy.next.failed) for policy in policies)}",
        "interrupted": f"{sum(not run.locked for run in status.runs)}",
        "oldest": f"{_oldest(status.domains, status.at)}s",
        "store_bytes": f"{store.bundle_bytes + store.trash_bytes + store.other_bytes}B",
        "store_used": f"{store.used_percent:.0f}%;{limits.store_warning};{limits.store_critical}",
    }
    return " ".join(f"{name}={value}" for name, value in figures.items())


def _oldest(domains: Sequence[DomainStatus], now: datetime) -> int:
    """Return the highest age, in seconds, of the domains' newest snapshots.

    A snapshot of a guest that is off and unchanged is as old as the last check that found it so.
    """
    lasts = [domain.last for domain in domains if domain.last is not None]
    return max((_seconds(last, now) for last in lasts), default=0)


def _seconds(last: SnapshotRecord, now: datetime) -> int:
    """Return the age of a snapshot: never negative, also after the clock was set back."""
    checked = last.unchanged
    moment = last.created if checked is None or checked > now else checked
    return max(int((now - moment).total_seconds()), 0)
