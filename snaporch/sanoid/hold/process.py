"""``python3 -m snaporch.sanoid.hold.process UUID DOOR [CONFIG]``: holds a guest still for sanoid.

A hook has to return, and what it began has to go on: so the run is a process of its own, which
outlives the hook, and sanoid, and sanoid's control group. It is the ordinary run of
:mod:`snaporch.snapshot.run`, with a
:class:`~snaporch.sanoid.hold.snapshotter.SanoidSnapshotter` to wait for the snapshots.
"""

from __future__ import annotations

import sys
import syslog
from pathlib import Path

from snaporch.config import load_config
from snaporch.context import Context, Interrupt
from snaporch.errors import ExitCode, SnaporchError, one_line
from snaporch.hypervisor import open_hypervisor
from snaporch.sanoid.config.unhooked import held_by_hooks, unheld_by_hooks
from snaporch.sanoid.hold.server import HoldServer
from snaporch.sanoid.hold.snapshotter import SanoidSnapshotter
from snaporch.sanoid.hooks.time_limits import patience
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.zfs import open_pool

_JOIN_SECONDS = 60
_FIXED = 2


class Log:
    """A :class:`~snaporch.progress.Progress` into the system's log; notes also for the hooks."""

    def __init__(self, door: HoldServer) -> None:
        self.notes: list[str] = []
        self._door = door

    def step(self, subject: str, text: str) -> None:
        """A step."""
        syslog.syslog(syslog.LOG_INFO, one_line(f"{subject}: {text}"))

    def note(self, subject: str, text: str) -> None:
        """A warning."""
        syslog.syslog(syslog.LOG_WARNING, one_line(f"{subject}: {text}"))
        self.notes.append(f"{subject}: {text}")

    def amount(self, subject: str, done: int, total: int) -> None:
        """Bytes of RAM, by which hooks tell when to begin with the next guest."""
        self._door.saving(max(total - done, 0))


def main(arguments: list[str]) -> int:
    """Hold the guest ``arguments[0]`` until sanoid is through; the exit code."""
    uuid, path = arguments[0], Path(arguments[1])
    config_path = Path(arguments[2]) if len(arguments) > _FIXED else None
    syslog.openlog("snaporch", syslog.LOG_PID)
    interrupt = Interrupt()
    with interrupt.watching():
        return hold(uuid, path, config_path, interrupt)


def hold(uuid: str, path: Path, config_path: Path | None, interrupt: Interrupt) -> int:
    """Hold a guest for those who come to the door at ``path``; the exit code."""
    door = HoldServer(path, interrupt)
    log = Log(door)
    try:
        _hold(uuid, config_path, door, log, interrupt)
    except SnaporchError as error:
        log.note(error.thing, error.reason)
        door.answer({"ok": False, "line": error.line(), "code": int(error.exit_code)})
        return int(error.exit_code)
    except Exception as error:  # noqa: BLE001 - the hooks must hear of it
        text = f"a bug in snaporch: {type(error).__name__}: {error}"
        log.note(uuid, text)
        door.answer({"ok": False, "line": text, "code": int(ExitCode.BUG)})
        return int(ExitCode.BUG)
    finally:
        door.end()
    return 0


def _hold(
    uuid: str, config_path: Path | None, door: HoldServer, log: Log, interrupt: Interrupt
) -> None:
    first = door.first(_JOIN_SECONDS)
    if first is None:
        return
    config = load_config(config_path)
    hypervisor, pool = open_hypervisor(config.libvirt_uri), open_pool()
    context = Context(
        config,
        hypervisor,
        pool,
        log,
        interrupt,
        config_path,
        strangers=unheld_by_hooks,
        held=held_by_hooks,
    )
    domain = context.hypervisor.domain(uuid)
    settings = config.settings(domain.name, domain.uuid)
    seconds = settings.hook_deadline
    taker = SanoidSnapshotter(context, door, log.notes, seconds)
    wait = patience(settings)
    take_snapshot(context, domain, SnapshotRequest(first.names[0], wait=wait), taker=taker)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
