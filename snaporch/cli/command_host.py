"""The host of a command. Modules are imported when they are first used: start-up time counts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snaporch.check.host_files import HostFiles
    from snaporch.config import Config, ResticReplica
    from snaporch.context import Context
    from snaporch.fence import Fences
    from snaporch.hypervisor import Hypervisor
    from snaporch.interrupt import Interrupt
    from snaporch.progress import Progress
    from snaporch.pull.local_copies import LocalCopies
    from snaporch.pull.pull_guest import GuestPull
    from snaporch.pull.source import PullSource
    from snaporch.rebuild.local_datasets import Local
    from snaporch.rebuild.replica_source import Source
    from snaporch.replication.interface import Destination
    from snaporch.replication.restic import ResticRepository
    from snaporch.verify.copy_source import CopySource
    from snaporch.zfs import Pool


class CommandHost:
    """How commands open the configuration, libvirt and ZFS; tests hand in another one."""

    config: Path | None = None
    """The ``--config`` before the command."""

    def load_config(self, path: Path | None) -> Config:
        """The configuration; see :func:`~snaporch.config.load.load_config`."""
        from snaporch.config import load_config

        return load_config(path)

    def open_pool(self, *, read_only: bool = False) -> Pool:
        """ZFS; see :func:`~snaporch.zfs.open_pool.open_pool`."""
        from snaporch.zfs.open_pool import open_pool

        return open_pool(read_only=read_only)

    def open_hypervisor(self, uri: str) -> Hypervisor:
        """libvirt; see :func:`~snaporch.hypervisor.open_hypervisor`."""
        from snaporch.hypervisor import open_hypervisor

        return open_hypervisor(uri)

    def has_libvirt(self, uri: str) -> bool:
        """See :func:`~snaporch.hypervisor.absent.is_expected`."""
        from snaporch.hypervisor import is_expected

        return is_expected(uri)

    def open_replica(self, context: Context, name: str) -> Destination:
        """A replica to copy to; see :func:`~snaporch.replication.destination.open_replica`."""
        from snaporch.replication.destination import open_replica

        return open_replica(context, name)

    def open_source(self, context: Context, name: str, host: str) -> tuple[Source, Local]:
        """A replica to read from; see :func:`~snaporch.rebuild.open_source.open_source`."""
        from snaporch.rebuild.open_source import open_source

        return open_source(context, name, host)

    def open_pull(self, context: Context, name: str) -> tuple[PullSource, LocalCopies, GuestPull]:
        """A source to pull; see :func:`~snaporch.pull.pull.open_pull`."""
        from snaporch.pull.pull import open_pull

        return open_pull(context, name)

    def fences(self) -> Fences:
        """The fences of this host, for a command without a context."""
        from snaporch.fence import HOST

        return HOST

    def host_files(self) -> HostFiles:
        """The host's files that ``check`` reads, and ``render sanoid``."""
        from snaporch.check.host_files import HostFiles

        return HostFiles()

    def open_copies(
        self, config: Config, name: str, pool: Pool, interrupt: Interrupt, progress: Progress
    ) -> CopySource:
        """The copies on a replica; see :func:`~snaporch.verify.copy_source.open_copies`."""
        from snaporch.verify.copy_source import open_copies

        return open_copies(config, name, pool, interrupt, progress)

    def open_repository(
        self, name: str, replica: ResticReplica, interrupt: Interrupt, progress: Progress
    ) -> ResticRepository:
        """A repository; see :class:`~snaporch.replication.restic.ResticRepository`."""
        from snaporch.replication.restic import ResticRepository

        return ResticRepository(name, replica, interrupt, progress)

    def lower_priority(self, work: str) -> None:
        """See :func:`~snaporch.systemd.low_priority.lower_priority`."""
        from snaporch.systemd.low_priority import lower_priority

        lower_priority(work)

    def make_context(self, *arguments: Any, **settings: Any) -> Context:
        """Make the context of a command."""
        from snaporch.context import Context

        return Context(*arguments, **settings)
