"""``python3 -m snaporch.sanoid.hold.process UUID SOCKET [CONFIG]``: holds a guest for sanoid.

The pre hook has to return, and the guest has to stay frozen. So the run is a process of its own,
which outlives the hook, sanoid and sanoid's control group. It is the ordinary run of
:mod:`snaporch.snapshot.run`, in which a
:class:`~snaporch.sanoid.hold.snapshotter.SanoidSnapshotter` waits for sanoid's snapshots.
That sanoid has ended, or was killed, is noticed by :mod:`snaporch.sanoid.hold.server`.
"""

from __future__ import annotations

import sys
import syslog
import time
from collections.abc import Callable
from pathlib import Path

from snaporch.config import Config, load_config
from snaporch.context import Context
from snaporch.errors import ExitCode, SnaporchError, one_line
from snaporch.hypervisor import open_hypervisor
from snaporch.interrupt import Interrupt
from snaporch.progress import Progress
from snaporch.sanoid.config.frozen_datasets import frozen_by_hooks, unfrozen_by_sanoid
from snaporch.sanoid.hold.server import HoldServer
from snaporch.sanoid.hold.snapshotter import SanoidSnapshotter
from snaporch.sanoid.hooks.handshake_times import order_seconds, patience
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.zfs.open_pool import open_pool

_JOIN_SECONDS = 60
_MIN_ARGUMENTS = 2


class HoldProgress:
    """A :class:`~snaporch.progress.Progress` into the system's log and, in part, to the hooks."""

    def __init__(self, server: HoldServer) -> None:
        self.notes: list[str] = []
        """Warnings, which the hooks print."""
        self._server = server

    def step(self, subject: str, text: str) -> None:
        """Log a step."""
        syslog.syslog(syslog.LOG_INFO, one_line(f"{subject}: {text}"))

    def note(self, subject: str, text: str) -> None:
        """Log a warning, and keep it for the hooks."""
        syslog.syslog(syslog.LOG_WARNING, one_line(f"{subject}: {text}"))
        self.notes.append(f"{subject}: {text}")

    def amount(self, subject: str, done: int, total: int) -> None:
        """Report the bytes of RAM that are left: hooks start the next guest by it."""
        self._server.report_left(max(total - done, 0))


def open_context(config_path: Path | None, progress: Progress, interrupt: Interrupt) -> Context:
    """The configuration, libvirt and ZFS.

    Raises:
        ConfigError, UnavailableError: nothing was touched.
    """
    config = load_config(config_path)
    return Context(
        config,
        open_hypervisor(config.libvirt_uri),
        open_pool(),
        progress,
        interrupt,
        config_path,
        unfrozen_by=unfrozen_by_sanoid,
        frozen_by_hooks=frozen_by_hooks,
    )


def main(arguments: list[str]) -> int:
    """Hold the guest ``arguments[0]`` until sanoid has taken its snapshots; the exit code."""
    uuid, path = arguments[0], Path(arguments[1])
    config_path = Path(arguments[2]) if len(arguments) > _MIN_ARGUMENTS else None
    syslog.openlog("snaporch", syslog.LOG_PID)
    interrupt = Interrupt()
    with interrupt.watching():
        return hold(uuid, path, config_path, interrupt)


def hold(
    uuid: str,
    path: Path,
    config_path: Path | None,
    interrupt: Interrupt,
    *,
    join_seconds: float = _JOIN_SECONDS,
    open_context: Callable[[Path | None, Progress, Interrupt], Context] = open_context,
    monotonic: Callable[[], float] = time.monotonic,
    order_seconds: Callable[[Config], float] = order_seconds,
) -> int:
    """Hold a guest for the hooks that join at the socket ``path``.

    Args:
        join_seconds: to wait for the first hook; without one, nothing is touched.
        open_context: opens the configuration, libvirt and ZFS.
        monotonic: the clock of the window.
        order_seconds: how long to wait for the order to freeze the guest.

    Returns: the exit code.
    """
    server = HoldServer(path, interrupt, monotonic)
    progress = HoldProgress(server)
    try:
        request = server.first_request(join_seconds)
        if request is None:
            return 0
        context = open_context(config_path, progress, interrupt)
        domain = context.hypervisor.domain(uuid)
        settings = context.config.settings(domain.name, domain.uuid)
        snapshotter = SanoidSnapshotter(
            context,
            server,
            progress.notes,
            settings.hook_deadline,
            order_seconds(context.config),
        )
        wait = patience(settings)
        take_snapshot(
            context, domain, SnapshotRequest(request.names[0], wait=wait), taker=snapshotter
        )
    except SnaporchError as error:
        progress.note(error.thing, error.reason)
        server.report_outcome({"ok": False, "line": error.line(), "code": int(error.exit_code)})
        return int(error.exit_code)
    except Exception as error:  # noqa: BLE001 - the hooks need a reply
        text = f"a bug in snaporch: {type(error).__name__}: {error}"
        progress.note(uuid, text)
        server.report_outcome({"ok": False, "line": text, "code": int(ExitCode.BUG)})
        return int(ExitCode.BUG)
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
