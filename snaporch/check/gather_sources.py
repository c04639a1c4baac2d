"""Gathers the facts about sources: each is asked once, and nothing is changed there or here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from snaporch.check.facts import SourceFacts
from snaporch.config import Source
from snaporch.context import Context
from snaporch.errors import InterruptedRunError, SnaporchError
from snaporch.pull.local_copies import LocalCopies
from snaporch.pull.record import choose_guests
from snaporch.pull.source import PullSource
from snaporch.replication.received_bundles import ReceivedBundles
from snaporch.zfs.pulled import PulledZfs

Open = Callable[[Context, str], tuple[PullSource, LocalCopies]]


def open_source(context: Context, name: str) -> tuple[PullSource, LocalCopies]:
    """Open a source of the configuration; nothing is asked yet."""
    settings = context.config.source[name]
    source = PullSource(name, settings, context.interrupt, context.progress)
    return source, LocalCopies(name, settings.dataset, PulledZfs.open())


def gather_sources(
    context: Context, opened: Open = open_source, now: Callable[[], float] = time.time
) -> Mapping[str, SourceFacts]:
    """The facts about each source of the configuration, by name.

    Args:
        context: has the configuration.
        opened: opens a source.
        now: the clock of this machine, in seconds since the epoch.

    Raises:
        InterruptedRunError: a signal came.
    """
    return {name: _source(context, name, opened, now) for name in context.config.source}


def _source(context: Context, name: str, opened: Open, now: Callable[[], float]) -> SourceFacts:
    settings = context.config.source[name]
    try:
        source, copies = opened(context, name)
    except SnaporchError as error:
        return SourceFacts(unreachable=error.line())
    no_place = _no_place(settings, copies)
    free = None if no_place else _free_mib(context, settings)
    locked = () if no_place else _locked(context, settings, copies)
    try:
        answer, at = source.about(), now()
        has_shell = source.has_shell()
    except InterruptedRunError:
        raise
    except SnaporchError as error:
        line = error.line()
        return SourceFacts(unreachable=line, no_place=no_place, free_mib=free, locked=locked)
    _, unsent = choose_guests(answer.guests, settings.domains)
    return SourceFacts(
        has_shell=has_shell,
        unsent=tuple(unsent),
        sends_none=not answer.guests,
        version=answer.version,
        ahead_seconds=0 if answer.time is None else answer.time - at,
        no_place=no_place,
        free_mib=free,
        locked=locked,
    )


def _no_place(settings: Source, copies: LocalCopies) -> str:
    """Why copies cannot be stored here; empty if no obstacle is found."""
    try:
        copies.check()
        ReceivedBundles(settings.bundles, settings.dataset).check()
    except SnaporchError as error:
        return error.line()
    return ""


def _locked(context: Context, settings: Source, copies: LocalCopies) -> tuple[str, ...]:
    """The copies that came encrypted, and so have a key of their own, if the bundles have none."""
    if copies.is_encrypted(settings.bundles):
        return ()
    start = f"{settings.dataset}/"
    names = sorted(name for name in context.pool.encrypted() if name.startswith(start))
    roots = context.pool.encryption_roots(names) if names else {}
    return tuple(name for name in names if roots.get(name) == name)


def _free_mib(context: Context, settings: Source) -> int | None:
    """The room for snapshots or for bundles, of which there is less."""
    names = {each.name for each in context.pool.datasets()}
    place = settings.dataset
    while place not in names and "/" in place:  # a pull creates the rest
        place = place.rpartition("/")[0]
    try:
        room = os.statvfs(settings.bundles)
        free = min(context.pool.available(place), room.f_bavail * room.f_frsize)
    except (OSError, SnaporchError):
        return None
    return free >> 20
