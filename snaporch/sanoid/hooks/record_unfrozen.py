"""Records snapshots that sanoid took of a guest that was not frozen, at the level they have.

Other programs that snapshot a guest's datasets are found by
:mod:`snaporch.catalog.unfrozen_snapshots`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime

from snaporch.catalog.torn import Commit, commits_of_all, is_torn, mark_torn
from snaporch.model import Level
from snaporch.sanoid.config.datasets_of_round import conf_of, takes_children
from snaporch.sanoid.hooks.dispatch import print_line
from snaporch.sanoid.hooks.guests import GuestDatasets
from snaporch.sanoid.hooks.host import HookHost
from snaporch.sanoid.hooks.request import Request
from snaporch.zfs import PREFIX


def record_unfrozen(request: Request, host: HookHost, guests: Sequence[GuestDatasets]) -> int:
    """Record the snapshots of a request as ``crash``, ``off`` or ``torn``.

    Returns: the exit code: 8 if there were any, 0 otherwise.

    Raises:
        PoolError: the snapshots cannot be listed, or their properties not be set.
    """
    commits = commits_of_all(host.config.paths.journal)
    recorded = [_record(request, host, guest, commits) for guest in guests]
    return 8 if any(recorded) else 0


def _record(
    request: Request, host: HookHost, guest: GuestDatasets, commits: Sequence[Commit]
) -> bool:
    datasets = sorted(_datasets(request, host, guest))
    mark_torn(host.pool, datasets, commits)
    fresh = [
        snapshot
        for snapshot in host.pool.snapshots(datasets)
        if snapshot.name in request.names and "run" not in snapshot.properties
    ]
    if not fresh:
        return False
    level = Level.CRASH if guest.domain.active else Level.OFF
    if any(is_torn(snapshot) for snapshot in fresh):
        level = Level.TORN
    host.pool.set_properties([s.full_name for s in fresh], _properties(guest, level))
    names = ", ".join(snapshot.full_name for snapshot in fresh)
    what = "torn (taken during a commit)" if level is Level.TORN else "crash-consistent"
    print_line(f"{guest.domain.name}: was not frozen for {names}: recorded as {what}")
    return True


def _datasets(request: Request, host: HookHost, guest: GuestDatasets) -> frozenset[str]:
    direct = guest.on(request.targets, below=False)
    if guest.datasets == direct:
        return direct
    conf = conf_of(host.caller)
    recursive = [target for target in request.targets if conf and takes_children(conf, target)]
    return direct | guest.on(recursive, below=True)


def _properties(guest: GuestDatasets, level: Level) -> dict[str, str]:
    now = datetime.now(UTC)
    return {
        f"{PREFIX}run": f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}",
        f"{PREFIX}uuid": guest.domain.uuid,
        f"{PREFIX}domain": guest.domain.name,
        f"{PREFIX}level": level.value,
    }
