"""Snapshots that sanoid took of a guest nobody held still: recorded as what they are."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from snaporch.catalog.torn import Commit, commits_of_all, is_torn, mark_torn
from snaporch.config import load_config
from snaporch.model import Level
from snaporch.sanoid.config.coverage import conf_of, takes_children
from snaporch.sanoid.hooks.caller import Caller
from snaporch.sanoid.hooks.dispatch import tell
from snaporch.sanoid.hooks.guests import GuestDatasets
from snaporch.sanoid.hooks.request import Request
from snaporch.zfs import PREFIX, Pool, open_pool


def record_unheld(
    request: Request,
    caller: Caller,
    guests: Sequence[GuestDatasets],
    config: Path | None,
) -> int:
    """Mark what sanoid has just taken as ``crash``; 8 if there was something, since pre ran.

    Args:
        config: snaporch's configuration file, if one was named.
    """
    pool = open_pool(to_look=True)
    commits = commits_of_all(load_config(config).paths.journal)
    marked = [_mark(pool, request, caller, guest, commits) for guest in guests]
    return 8 if any(marked) else 0


def _mark(
    pool: Pool, request: Request, caller: Caller, guest: GuestDatasets, commits: Sequence[Commit]
) -> bool:
    datasets = _datasets(request, caller, guest)
    mark_torn(pool, sorted(datasets), commits)
    fresh = [
        snapshot
        for snapshot in pool.snapshots(sorted(datasets))
        if snapshot.name in request.names and "run" not in snapshot.properties
    ]
    if not fresh:
        return False
    level = Level.CRASH if guest.domain.active else Level.OFF
    if any(is_torn(snapshot) for snapshot in fresh):
        level = Level.TORN
    pool.set_properties([s.full_name for s in fresh], _properties(guest, level))
    names = ", ".join(snapshot.full_name for snapshot in fresh)
    what = "of no instant" if level is Level.TORN else "crash-consistent"
    tell(f"{guest.domain.name}: was not held still for {names}: recorded as {what}")
    return True


def _datasets(request: Request, caller: Caller, guest: GuestDatasets) -> frozenset[str]:
    direct = guest.on(request.targets, below=False)
    if guest.datasets == direct:
        return direct
    conf = conf_of(caller)
    whole = [target for target in request.targets if conf and takes_children(conf, target)]
    return direct | guest.on(whole, below=True)


def _properties(guest: GuestDatasets, level: Level) -> dict[str, str]:
    now = datetime.now(UTC)
    return {
        f"{PREFIX}run": f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}",
        f"{PREFIX}uuid": guest.domain.uuid,
        f"{PREFIX}domain": guest.domain.name,
        f"{PREFIX}level": level.value,
    }
