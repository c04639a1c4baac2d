"""The datasets of this host that are received: their state, the command that receives, mounting."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, Protocol

from snaporch.errors import RefusedError, UnavailableError
from snaporch.interrupt import Interrupt
from snaporch.model import DatasetKind
from snaporch.remote_host import CommandError, Host
from snaporch.replication.needed_streams import NO_TOKEN
from snaporch.zfs import Pool

_LIBVIRT = Path("/var/lib/libvirt")
_SYSTEM = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/root", "/run", "/sbin", "/sys"),
    *("/usr", "/var/spool"),
)
"""Where a file system from another machine could run programs as root; see ``hier(7)``."""


class LocalState(NamedTuple):
    """What this host has of a dataset."""

    exists: bool
    token: str
    """Continues an interrupted transfer; :data:`~snaporch.replication.needed_streams.NO_TOKEN`
    without one."""
    guids: tuple[int, ...]
    """Of its snapshots, oldest first."""


class Local(Protocol):
    """The datasets of this host."""

    def state(self, dataset: str) -> LocalState:
        """The state of a dataset."""

    def receiver(self, dataset: str, name: str) -> list[str]:
        """The command that receives a snapshot and mounts nothing."""

    def make_parent(self, dataset: str) -> None:
        """Create what the dataset is below, unless it exists."""

    def mountpoint_to_set(self, dataset: str, wanted: str) -> str:
        """The mount point that a file system must get; empty if it is mounted there by itself.

        Args:
            dataset: its name.
            wanted: where its images must be; empty if that is not known.

        Raises:
            RefusedError: a replica must not choose this directory.
        """

    def mount(self, dataset: str, mountpoint: str) -> None:
        """Mount a file system; does nothing with a volume.

        Args:
            dataset: its name.
            mountpoint: see :meth:`mountpoint_to_set`.

        Raises:
            RefusedError: it cannot be mounted.
            UnavailableError: its key is not loaded.
        """


class LocalDatasets:
    """:class:`Local` by the ``zfs`` command.

    Args:
        pool: the pools of this host.
        interrupt: a signal ends a command.
    """

    def __init__(self, pool: Pool, interrupt: Interrupt) -> None:
        self._pool = pool
        self._host = Host("", lambda: interrupt.check("zfs"))

    def state(self, dataset: str) -> LocalState:
        """See :class:`Local`."""
        if dataset not in self._names():
            return LocalState(exists=False, token=NO_TOKEN, guids=())
        guids = tuple(each.guid for each in self._pool.snapshots([dataset]))
        return LocalState(True, self._value("receive_resume_token", dataset), guids)

    def receiver(self, dataset: str, name: str) -> list[str]:
        """See :class:`Local`."""
        return self._host.command("zfs", "receive", "-s", "-u", f"{dataset}@{name}")

    def make_parent(self, dataset: str) -> None:
        """See :class:`Local`."""
        above = dataset.rpartition("/")[0]
        if above and above not in self._names():
            self._host.run("zfs", "create", "-p", above)

    def mountpoint_to_set(self, dataset: str, wanted: str) -> str:
        """See :class:`Local`."""
        if not wanted or self._mountpoint(dataset) == wanted:
            return ""
        path = Path(wanted)
        is_system = any(path.is_relative_to(each) for each in _SYSTEM)
        is_libvirts = path.is_relative_to(_LIBVIRT) and path.is_dir() and not any(path.iterdir())
        if not is_system and (is_libvirts or not os.path.lexists(path)):
            return wanted
        reason = f"was mounted on {wanted}, which exists on this host or belongs to the system"
        step = f"create its parent with a mount point by which it is mounted there: {path.parent}"
        raise RefusedError(dataset, reason, step)

    def _mountpoint(self, dataset: str) -> str:
        """The mount point of a dataset, or the one it will inherit; empty for none."""
        names, above, inside = self._names(), dataset, ""
        while above and above not in names:
            above, _, last = above.rpartition("/")
            inside = f"/{last}{inside}"
        value = self._value("mountpoint", above) if above else "none"
        return f"{value.rstrip('/')}{inside}" if value.startswith("/") else ""

    def mount(self, dataset: str, mountpoint: str) -> None:
        """See :class:`Local`."""
        kinds = {each.name: each.kind for each in self._pool.datasets()}
        if kinds.get(dataset) is not DatasetKind.FILESYSTEM:
            return
        if self._value("keystatus", dataset) == "unavailable":
            root = self._value("encryptionroot", dataset)
            step = f"zfs load-key {root}, and run this command again"
            raise UnavailableError(dataset, "came back, and its key is not loaded", step)
        if mountpoint:
            self._host.run("zfs", "set", f"mountpoint={mountpoint}", dataset)
        if self._value("mounted", dataset) == "yes":
            return
        try:
            self._host.run("zfs", "mount", dataset)
        except CommandError as error:
            reason = f"came back, and is not mounted: {error.reason}"
            step = f"zfs set mountpoint=DIRECTORY {dataset}, and run this command again"
            raise RefusedError(dataset, reason, step) from error

    def _names(self) -> Collection[str]:
        return {each.name for each in self._pool.datasets()}

    def _value(self, key: str, dataset: str) -> str:
        return self._host.run("zfs", "get", "-Hp", "-o", "value", key, dataset).strip()
