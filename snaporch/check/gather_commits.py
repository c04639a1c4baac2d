"""Whether snapshots of a guest switch its disks to overlays and commit them. Only reads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from snaporch.catalog.unfrozen_snapshots import find_other_program
from snaporch.check.facts import GuestFacts
from snaporch.context import Context
from snaporch.errors import SnaporchError
from snaporch.known_faults import risks_overlays
from snaporch.model import Domain, DomainState, Strategy
from snaporch.snapshot.choose_strategy import choose_strategy
from snaporch.snapshot.plan import make_plan
from snaporch.snapshot.request import SnapshotRequest


def with_commits(
    context: Context, domain: Domain, guest: GuestFacts, levels: Collection[str]
) -> GuestFacts:
    """The facts, in which the snapshots of policies count too, and those of a guest when it runs.

    Args:
        levels: the levels of its policies.
    """
    if guest.commits or guest.refusal is not None or guest.busy:
        return guest
    planned = _commits_now if domain.active else _commits_when_it_runs
    wanted = {*levels, *(() if domain.active else (guest.level,))}
    return replace(guest, commits=any(planned(context, domain, guest, each) for each in wanted))


def _commits_now(context: Context, domain: Domain, _guest: GuestFacts, level: str) -> bool:
    try:
        return bool(make_plan(context, domain, SnapshotRequest(level=level)).facts.overlays)
    except SnaporchError:  # another rule reports it
        return False


def _commits_when_it_runs(context: Context, domain: Domain, guest: GuestFacts, level: str) -> bool:
    """What is likely: blockers of a running guest, such as a device, are not known yet."""
    settings = context.config.settings(domain.name, domain.uuid)
    running = replace(domain, state=DomainState.RUNNING, live_xml=domain.inactive_xml)
    avoided = risks_overlays("", domain.disks) or bool(find_other_program(context, guest.datasets))
    at_once = not context.frozen_by_hooks(guest.datasets)
    try:
        choice = choose_strategy(
            running, settings, (), level, at_once=at_once, avoid_overlays=avoided
        )
    except SnaporchError:
        return False
    return choice.strategy is Strategy.OVERLAY
