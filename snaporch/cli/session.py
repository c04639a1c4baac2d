"""Opening the :class:`~snaporch.context.Context` of a command from its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from snaporch.cli.command_host import CommandHost
from snaporch.cli.options import config_path
from snaporch.config import Config
from snaporch.config.replica import rebuild_step
from snaporch.context import Context
from snaporch.errors import NoSuchDomainError
from snaporch.hypervisor import no_guests
from snaporch.journal import OtherJournal
from snaporch.output.terminal import TerminalProgress

if TYPE_CHECKING:
    from snaporch.zfs import Pool


def _finish_restore(context: Context, journal: OtherJournal, dry_run: bool) -> list[str]:
    from snaporch.restore.recovery import recover_restore

    return recover_restore(context, journal, dry_run=dry_run)


def _unfrozen_by(datasets: Sequence[str]) -> str:
    from snaporch.sanoid.config.frozen_datasets import unfrozen_by_sanoid

    return unfrozen_by_sanoid(datasets)


def _held_by_hooks(datasets: Sequence[str]) -> frozenset[str]:
    from snaporch.sanoid.config.frozen_datasets import frozen_by_hooks

    return frozen_by_hooks(datasets)


class _NoZfs:
    """In place of ZFS, for a command that does not use it."""


def session(
    context: typer.Context,
    config: Path | None,
    *,
    quiet: bool,
    read_only: bool = False,
    of_copies: bool = False,
    zfs: bool = True,
) -> AbstractContextManager[Context]:
    """Open what a command needs; see :func:`open_session`.

    Args:
        context: the command's.
        config: the command's ``--config``.
    """
    path = config_path(context, config)
    return open_session(
        context.obj, path, quiet=quiet, read_only=read_only, of_copies=of_copies, zfs=zfs
    )


@contextmanager
def open_session(
    host: CommandHost,
    config: Path | None,
    *,
    quiet: bool,
    read_only: bool = False,
    of_copies: bool = False,
    zfs: bool = True,
) -> Iterator[Context]:
    """Open configuration, libvirt and ZFS for a command, and handle signals meanwhile.

    Args:
        quiet: print notes, but no progress.
        read_only: the command only reads from ZFS, so that libzfs_core is not loaded.
        of_copies: the command works on copies alone, so that libvirt is not opened.
        zfs: the command uses ZFS; else it works on a host without.

    Raises:
        ConfigError, UnavailableError: nothing was changed.
    """
    settings = host.load_config(config)
    pool = host.open_pool(read_only=read_only) if zfs else cast("Pool", _NoZfs())
    uri = settings.libvirt_uri
    has_guests = not of_copies and (not settings.only_keeps_copies or host.has_libvirt(uri))
    hypervisor = host.open_hypervisor(uri) if has_guests else no_guests()
    context = host.make_context(
        settings,
        hypervisor,
        pool,
        TerminalProgress(quiet=quiet),
        config_path=config,
        finishers={"restore": _finish_restore},
        unfrozen_by=_unfrozen_by,
        frozen_by_hooks=_held_by_hooks,
    )
    with context.interrupt.watching(), naming_replicas(settings):
        yield context


@contextmanager
def naming_replicas(config: Config) -> Iterator[None]:
    """Add to the error for an unknown domain how it comes back from a replica, if there is one."""
    try:
        yield
    except NoSuchDomainError as error:
        steps = [error.step, rebuild_step(config.replica, error.thing)]
        step = "; ".join(filter(None, steps))
        raise NoSuchDomainError(error.thing, error.reason, step) from error
