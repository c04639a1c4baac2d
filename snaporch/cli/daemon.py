"""``snaporch daemon``."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from snaporch.cli.options import ConfigOption, config_path

if TYPE_CHECKING:
    from snaporch.context import Context
    from snaporch.schedule.daemon import Daemon


def daemon_command(
    context: typer.Context,
    config: ConfigOption = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only warnings and errors.")
    ] = False,
) -> int:
    """Run policies as a service until stopped.

    Does what run-due does, each snapshot at its time. SIGHUP reloads the configuration. SIGTERM
    and SIGINT end the daemon, after running snapshots have finished or were undone.
    """
    from snaporch.cli.watching import observing
    from snaporch.config import load_config
    from snaporch.context import Context
    from snaporch.hypervisor import open_hypervisor
    from snaporch.locks import SCHEDULE, domain_lock
    from snaporch.output.terminal import TerminalProgress
    from snaporch.recovery.settle import recover_leftovers
    from snaporch.schedule.concurrency import ConcurrencyLimiter
    from snaporch.schedule.daemon import Daemon
    from snaporch.schedule.subprocesses import Subprocesses, bulk_job_command, snapshot_command
    from snaporch.snapshot.capture_selftest import capture_mode
    from snaporch.zfs import open_pool

    path = config_path(context, config)
    settings = load_config(path)
    pool, hypervisor = open_pool(), open_hypervisor(settings.libvirt_uri)
    opened = Context(settings, hypervisor, pool, TerminalProgress(quiet=quiet), config_path=path)
    captures = Subprocesses(
        ConcurrencyLimiter(settings.schedule), snapshot_command(path), bulk_job_command(path)
    )
    runtime, interrupt = settings.paths.runtime, opened.interrupt
    with (
        observing(opened) as watching,
        domain_lock(runtime, SCHEDULE, SCHEDULE, "daemon", wait=0, interrupt=interrupt),
    ):
        daemon = Daemon(opened, captures, lambda: load_config(path), watching)
        with _signals(daemon, opened), watching.observer.serving(opened, settings.metrics):
            recover_leftovers(opened)
            mode = capture_mode(opened)
            report = opened.progress.step if mode.streams else opened.progress.note
            report("snaporch", mode.describe())
            daemon.run()
    return 0


@contextmanager
def _signals(daemon: Daemon, context: Context) -> Iterator[None]:
    def end(signum: int, _frame: FrameType | None) -> None:
        context.interrupt.signum = signum
        daemon.stop()

    def reload(_signum: int, _frame: FrameType | None) -> None:
        daemon.reload()

    handlers = {signal.SIGTERM: end, signal.SIGINT: end, signal.SIGHUP: reload}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
