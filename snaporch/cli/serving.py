"""Signals and the daemon, behind ``snaporch daemon``."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from snaporch.cli.watching import watchers
from snaporch.config import load_config
from snaporch.context import Context
from snaporch.hypervisor import open_hypervisor
from snaporch.locks import SCHEDULE, domain_lock
from snaporch.output.terminal import TerminalProgress
from snaporch.recovery.settle import recover_leftovers
from snaporch.schedule.concurrency import ConcurrencyLimiter
from snaporch.schedule.daemon import Daemon
from snaporch.schedule.subprocesses import Subprocesses, errand_command, snapshot_command
from snaporch.snapshot.capture_selftest import capture_mode
from snaporch.zfs import open_pool

_ENDING = (signal.SIGTERM, signal.SIGINT)


def serve(path: Path | None, *, quiet: bool) -> int:
    """Run the daemon to its end.

    Raises:
        BusyError: a ``run-due`` or another daemon is at it.
        ConfigError, UnavailableError: it cannot begin.
    """
    config = load_config(path)
    pool, hypervisor = open_pool(), open_hypervisor(config.libvirt_uri)
    context = Context(config, hypervisor, pool, TerminalProgress(quiet=quiet), config_path=path)
    captures = Subprocesses(
        ConcurrencyLimiter(config.schedule), snapshot_command(path), errand_command(path)
    )
    runtime, interrupt = config.paths.runtime, context.interrupt
    with (
        watchers(context) as watching,
        domain_lock(runtime, SCHEDULE, SCHEDULE, "daemon", wait=0, interrupt=interrupt),
    ):
        daemon = Daemon(context, captures, lambda: load_config(path), watching)
        with _signals(daemon, context), watching.observer.serving(context, config.metrics):
            recover_leftovers(context)
            mode = capture_mode(context)
            tell = context.progress.step if mode.streams else context.progress.note
            tell("snaporch", mode.describe())
            daemon.run()
    return 0


@contextmanager
def _signals(daemon: Daemon, context: Context) -> Iterator[None]:
    def end(signum: int, _frame: FrameType | None) -> None:
        context.interrupt.signum = signum
        daemon.stop()

    def reload(_signum: int, _frame: FrameType | None) -> None:
        daemon.reload()

    handlers = {**dict.fromkeys(_ENDING, end), signal.SIGHUP: reload}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
