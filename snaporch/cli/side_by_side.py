"""Several domains at once, each in a process of its own: ``snapshot --all`` and ``--jobs``."""

from __future__ import annotations

import json as json_format
from collections.abc import Mapping, Sequence
from typing import Any

from snaporch.cli.snapshots import SnapshotRequest, complete
from snaporch.context import Context
from snaporch.errors import ExitCode, NotFoundError
from snaporch.hypervisor.clone_xml import clone_of
from snaporch.model import Domain
from snaporch.output.tables import print_outcomes
from snaporch.output.terminal import print_error, print_result
from snaporch.schedule.concurrency import ConcurrencyLimiter, PolicyCapture
from snaporch.schedule.policy_assignment import datasets
from snaporch.schedule.run_due import burden, groups_once, take_all
from snaporch.schedule.subprocesses import CaptureOutcome, Subprocesses, own_words


def snapshot_side_by_side(
    context: Context,
    domains: Sequence[Domain],
    wish: SnapshotRequest,
    *,
    jobs: int | None,
    json: bool,
) -> int:
    """Snapshot the domains, several at once; the exit code of the worst.

    With a policy a domain takes its consistency group along, which is then snapshotted once. A
    signal lets nothing begin any more, and the runs under way undo or finish themselves.

    Raises:
        UsageError, NotFoundError: nothing was touched.
        InterruptedRunError: a signal came; what was done by then is told before.
    """
    level = complete(context, wish).level or "auto"
    limits = context.config.schedule
    if jobs is not None:
        limits = limits.model_copy(update={"jobs": jobs, "jobs_per_pool": jobs})
    captures = Subprocesses(
        ConcurrencyLimiter(limits), lambda capture: _command(context, capture, wish)
    )
    work = [burden(context, domain, wish.policy or "", level) for domain in domains]
    once = groups_once(work)
    outcomes = take_all(context, captures, once, lambda each: _progress(context, each))
    ordered = sorted(outcomes, key=lambda outcome: outcome.capture.domain)
    if json:
        taken = [document for outcome in ordered for document in outcome.documents]
        print_result(json_format.dumps(taken, indent=2, ensure_ascii=False))
    else:
        print_outcomes([row for outcome in ordered for row in _rows(outcome)])
    for outcome in ordered:
        if not outcome.ok:
            print_error(f"{outcome.capture.label}: {outcome.text}")
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


def _command(context: Context, capture: PolicyCapture, wish: SnapshotRequest) -> list[str]:
    options = {
        "--name": wish.name,
        "--level": wish.level,
        "--policy": wish.policy,
        "--wait": wish.wait,
        "--rate": wish.rate,
    }
    asked = [w for option, v in options.items() if v is not None for w in (option, str(v))]
    asked += ["--if-changed"] if wish.if_changed else []
    words = ["snapshot", capture.uuid, *asked, "--json", "--quiet"]
    return [*own_words(context.config_path), *words]


def _rows(outcome: CaptureOutcome) -> list[tuple[str, int, Mapping[str, Any] | None]]:
    done = [(each["domain"], outcome.status, each) for each in outcome.documents]
    return [*done] or [(outcome.capture.label, outcome.status, None)]


def _progress(context: Context, outcome: CaptureOutcome) -> None:
    documents = outcome.documents
    text = f"done: @{documents[0]['snapshot']}" if documents else "failed"
    if documents and documents[0].get("unchanged"):
        text += "  unchanged, no other was taken"
    context.progress.step(outcome.capture.label, text)
