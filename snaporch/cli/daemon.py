"""``snaporch daemon``: carries out the policies by :mod:`snaporch.schedule.daemon`."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from snaporch.cli.command_host import CommandHost
from snaporch.cli.options import ConfigOption, config_path

if TYPE_CHECKING:
    from snaporch.context import Context
    from snaporch.schedule.daemon import Daemon


def daemon_command(
    context: typer.Context,
    config: ConfigOption = None,
    check_config: Annotated[
        bool,
        typer.Option(
            "--check-config",
            help="Only read the configuration, as `systemctl reload` does first; exit with 3 if it "
            "has an error.",
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only warnings and errors.")
    ] = False,
) -> int:
    """Run policies as a service until stopped.

    Does what run-due does, each snapshot at its time. SIGHUP reloads the configuration. SIGTERM
    and SIGINT end the daemon, after running snapshots have finished or were undone. If run-due or
    another daemon is running, waits until it has ended.
    """
    from snaporch.cli.policy_observers import observing
    from snaporch.locks import DAEMON, SCHEDULE, domain_lock
    from snaporch.output.terminal import TerminalProgress
    from snaporch.recovery.recover_runs import recover_leftovers
    from snaporch.schedule.concurrency import ConcurrencyLimiter
    from snaporch.schedule.daemon import Daemon
    from snaporch.schedule.subprocesses import Subprocesses, bulk_job_command, snapshot_command
    from snaporch.snapshot.capture_selftest import capture_mode

    host: CommandHost = context.obj
    path = config_path(context, config)
    settings = host.load_config(path)
    if check_config:
        return 0
    pool, hypervisor = host.open_pool(), host.open_hypervisor(settings.libvirt_uri)
    progress = TerminalProgress(quiet=quiet)
    opened = host.make_context(settings, hypervisor, pool, progress, config_path=path)
    subprocesses = Subprocesses(
        ConcurrencyLimiter(settings.schedule), snapshot_command(opened), bulk_job_command(opened)
    )
    runtime, interrupt = settings.paths.runtime, opened.interrupt
    _report_other(opened)
    with (
        observing(opened) as watching,
        domain_lock(runtime, SCHEDULE, SCHEDULE, DAEMON, wait=math.inf, interrupt=interrupt),
    ):
        daemon = Daemon(opened, subprocesses, lambda: host.load_config(path), watching)
        with _signals(daemon, opened), watching.observer.serving(opened, settings.metrics):
            recover_leftovers(opened)
            mode = capture_mode(opened)
            report = opened.progress.step if mode.streams else opened.progress.note
            report("snaporch", mode.describe())
            daemon.run()
    return 0


def _report_other(context: Context) -> None:
    """Report that another process runs the policies; the daemon waits until it has ended."""
    from snaporch.locks import SCHEDULE, held_by
    from snaporch.systemd.sd_notify import notify

    other = held_by(context.config.paths.runtime, SCHEDULE)
    if other is not None:
        text = f"waiting until {other.doing} (pid {other.pid}) has ended"
        context.progress.note("snaporch", text)
        notify(f"STATUS={text}")


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
