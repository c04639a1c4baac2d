"""Several domains at once, each in a process of its own: ``snapshot --all`` and ``--jobs``."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from snaporch.cli.snapshots import chosen_level
from snaporch.errors import ExitCode, NotFoundError
from snaporch.hypervisor.rewrite import clone_of
from snaporch.model import Domain
from snaporch.report.tables import print_outcomes
from snaporch.report.terminal import print_error, print_result
from snaporch.run.context import Context
from snaporch.schedule.assign import datasets
from snaporch.schedule.captures import Captures, Outcome
from snaporch.schedule.due import burden, take_all
from snaporch.schedule.gate import Capture, Gate


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for of every domain."""

    name: str | None
    level: str | None
    policy: str | None
    wait: int | None

    def words(self) -> list[str]:
        """The same as options of ``snaporch snapshot``."""
        options = {
            "--name": self.name,
            "--level": self.level,
            "--policy": self.policy,
            "--wait": self.wait,
        }
        return [w for option, v in options.items() if v is not None for w in (option, str(v))]


def snapshot_side_by_side(
    context: Context, domains: Sequence[Domain], wanted: Wanted, *, jobs: int | None, json: bool
) -> int:
    """Snapshot the domains, several at once; the exit code of the worst.

    A signal lets nothing begin any more, and the runs under way undo or finish themselves.

    Raises:
        UsageError, NotFoundError: nothing was touched.
        InterruptedRunError: a signal came; what was done by then is told before.
    """
    level = chosen_level(context, wanted.name, wanted.level, wanted.policy) or "auto"
    limits = context.config.schedule
    if jobs is not None:
        limits = limits.model_copy(update={"jobs": jobs, "jobs_per_pool": jobs})
    captures = Captures(Gate(limits), lambda capture: _command(context, capture, wanted))
    work = [burden(context, domain, wanted.policy or "", level) for domain in domains]
    outcomes = take_all(context, captures, work, lambda outcome: _progress(context, outcome))
    ordered = sorted(outcomes, key=lambda outcome: outcome.capture.domain)
    documents = [_document(outcome) for outcome in ordered]
    if json:
        taken = [document for document in documents if document is not None]
        print_result(json_format.dumps(taken, indent=2, ensure_ascii=False))
    else:
        print_outcomes(
            [(o.capture.domain, o.status, d) for o, d in zip(ordered, documents, strict=True)]
        )
    for outcome in ordered:
        if not outcome.ok:
            print_error(f"{outcome.capture.domain}: {outcome.text}")
    context.interrupt.check("snapshot")
    return worst([outcome.status for outcome in ordered])


def every_domain(context: Context) -> list[Domain]:
    """All that can have a snapshot: neither clones, nor those without a disk on ZFS.

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


def worst(codes: Sequence[int]) -> int:
    """The exit code to look at first: attention before everything else, then a bug."""
    for code in (ExitCode.ATTENTION, ExitCode.BUG):
        if code in codes:
            return int(code)
    return max(codes, default=int(ExitCode.OK))


def _command(context: Context, capture: Capture, wanted: Wanted) -> list[str]:
    words = [sys.executable, "-P", "-m", "snaporch"]
    if context.config_path is not None:
        words += ["--config", str(context.config_path.absolute())]
    return [*words, "snapshot", capture.uuid, *wanted.words(), "--json", "--quiet"]


def _document(outcome: Outcome) -> dict[str, Any] | None:
    """What the run printed; ``None`` without a snapshot."""
    document: dict[str, Any] | None = json_format.loads(outcome.text) if outcome.ok else None
    return document


def _progress(context: Context, outcome: Outcome) -> None:
    document = _document(outcome)
    text = f"done: @{document['snapshot']}" if document else "failed"
    context.progress.step(outcome.capture.domain, text)
