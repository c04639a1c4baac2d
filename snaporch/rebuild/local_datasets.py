"""The datasets of this host that are received: their state, the command that receives, mounting.

What else on this host prevents a rebuild is decided by :mod:`snaporch.rebuild.local_checks`.

A replica may be under an attacker's control, so it does not choose where file systems are mounted:
not over anything, and never where the system finds programs or settings.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from snaporch.default_paths import HOST
from snaporch.errors import RefusedError, UnavailableError
from snaporch.hypervisor import HostObject
from snaporch.interrupt import Interrupt
from snaporch.model import DatasetKind, PoolSnapshot
from snaporch.rebuild.missing_networks import HostNetworks
from snaporch.rebuild.reached_addresses import read_host_networks
from snaporch.remote_host import CommandError, Host
from snaporch.replication.resume_transfer import NO_TOKEN
from snaporch.zfs import REBUILD_PROPERTY, Pool

IMAGES = Path("/var/lib/libvirt/images")
SYSTEM = tuple(
    map(
        Path,
        (
            *("/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib32", "/lib64", "/libx32"),
            *("/proc", "/root", "/run", "/sbin", "/sys", "/tmp", "/usr", "/var"),  # noqa: S108
        ),
    )
)
"""Where a file system from another machine could run programs as root; see ``hier(7)``."""
_RECEIVED_WITH = {
    DatasetKind.FILESYSTEM: ("canmount=noauto", "setuid=off", "exec=off", "devices=off"),
    DatasetKind.VOLUME: ("volmode=none",),
}
"""Until all is here no boot mounts a file system, and no guest finds a volume. The files come from
another machine: no user of this one may run them, or open a device of them, also later."""
RECEIVED = "transfer"
"""The value of ``snaporch:rebuild`` of a dataset that is being received."""
ARRIVED = "restore"
"""Its value once all is here, and until the guest is restored."""


class LocalState(NamedTuple):
    """What this host has of a dataset."""

    exists: bool
    token: str
    """Continues an interrupted transfer; :data:`~snaporch.replication.resume_transfer.NO_TOKEN`
    without one."""
    snapshots: tuple[PoolSnapshot, ...]
    """Oldest first."""
    stage: str = ""
    """The value of its ``snaporch:rebuild``; empty without."""

    @property
    def guids(self) -> list[int]:
        """Of its snapshots."""
        return [each.guid for each in self.snapshots]


class Local(Protocol):
    """The datasets and networks of this host."""

    def networks(self, defined: Sequence[HostObject]) -> HostNetworks:
        """The networks that this host reaches, besides those that libvirt has defined."""

    def state(self, dataset: str) -> LocalState:
        """The state of a dataset."""

    def receiver(
        self, dataset: str, name: str, kind: DatasetKind, *, resumable: bool = True
    ) -> list[str]:
        """The command that receives a snapshot; nothing finds the dataset before :meth:`mount`.

        It marks the dataset as one of a rebuild that is not complete, also if it is interrupted.
        A file system is one of which no user of this host runs files, or opens devices.

        Args:
            dataset: its name.
            name: of the snapshot.
            kind: of the dataset.
            resumable: keep what arrived of an interrupted stream; otherwise none of it stays.
        """

    def make_parents(self, dataset: str) -> None:
        """Create what the dataset is below, unless it exists; what is created is never mounted."""

    def mountpoint_to_set(self, dataset: str, wanted: str) -> str:
        """The mount point that a file system must get; empty if it is mounted there by itself.

        Args:
            dataset: its name.
            wanted: where its images must be; empty if that is not known.

        Raises:
            RefusedError: a replica must not choose this directory.
        """

    def mount(self, dataset: str, kind: DatasetKind, mountpoint: str) -> None:
        """Mount a file system; make a volume available.

        Args:
            dataset: its name.
            kind: its kind.
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

    def networks(self, defined: Sequence[HostObject]) -> HostNetworks:
        """See :class:`Local`."""
        return read_host_networks(self._host, HOST, defined)

    def state(self, dataset: str) -> LocalState:
        """See :class:`Local`."""
        if dataset not in self._names():
            return LocalState(exists=False, token=NO_TOKEN, snapshots=())
        token = self._value("receive_resume_token", dataset)
        marks = self._pool.local_properties([REBUILD_PROPERTY], [dataset])
        stage = marks.get(dataset, {}).get(REBUILD_PROPERTY, "")
        return LocalState(True, token, tuple(self._pool.snapshots([dataset])), stage)

    def receiver(
        self, dataset: str, name: str, kind: DatasetKind, *, resumable: bool = True
    ) -> list[str]:
        """See :class:`Local`."""
        options = (
            *(["-s"] if resumable else []),
            "-u",
            *(word for each in _RECEIVED_WITH[kind] for word in ("-o", each)),
            "-o",
            f"{REBUILD_PROPERTY}={RECEIVED}",
        )
        return self._host.command("zfs", "receive", *options, f"{dataset}@{name}")

    def make_parents(self, dataset: str) -> None:
        """See :class:`Local`."""
        names, parts = self._names(), dataset.split("/")
        for end in range(2, len(parts)):
            if (above := "/".join(parts[:end])) not in names:
                self._host.run("zfs", "create", "-o", "canmount=off", above)

    def mountpoint_to_set(self, dataset: str, wanted: str) -> str:
        """See :class:`Local`."""
        inherited = self._mountpoint(dataset)
        place = wanted or inherited
        stays = place == inherited and dataset in self._names()
        if place and not (stays and self._value("mounted", dataset) == "yes"):
            _check_place(dataset, Path(place))
        return "" if place == inherited else place

    def _mountpoint(self, dataset: str) -> str:
        """The mount point of a dataset, or the one it will inherit; empty for none."""
        names, above, inside = self._names(), dataset, ""
        while above and above not in names:
            above, _, last = above.rpartition("/")
            inside = f"/{last}{inside}"
        value = self._value("mountpoint", above) if above else "none"
        return f"{value.rstrip('/')}{inside}" if value.startswith("/") else ""

    def mount(self, dataset: str, kind: DatasetKind, mountpoint: str) -> None:
        """See :class:`Local`."""
        if self._value("keystatus", dataset) == "unavailable":
            root = self._value("encryptionroot", dataset)
            step = f"zfs load-key {shlex.quote(root)}, and run this command again"
            raise UnavailableError(dataset, "came back, and its key is not loaded", step)
        if kind is DatasetKind.VOLUME:
            self._host.run("zfs", "inherit", "volmode", dataset)
            return
        self._host.run("zfs", "set", "canmount=on", dataset)
        if mountpoint:
            self._host.run("zfs", "set", f"mountpoint={mountpoint}", dataset)
        if self._value("mounted", dataset) == "yes":
            return
        try:
            self._host.run("zfs", "mount", dataset)
        except CommandError as error:
            reason = f"came back, and is not mounted: {error.reason}"
            step = (
                f"zfs set mountpoint=DIRECTORY {shlex.quote(dataset)}, and run this command again"
            )
            raise RefusedError(dataset, reason, step) from error

    def _names(self) -> Collection[str]:
        return {each.name for each in self._pool.datasets()}

    def _value(self, key: str, dataset: str) -> str:
        return self._host.run("zfs", "get", "-Hp", "-o", "value", key, dataset).strip()


def _check_place(dataset: str, place: Path) -> None:
    """Refuse a mount point where something is, or which belongs to the system.

    Raises:
        RefusedError: with the reason.
    """
    step = "bring it back by hand: see docs/how-to/replication.md, 'By hand'"
    real = Path(os.path.realpath(place))
    is_system = any(real.is_relative_to(each) or each.is_relative_to(real) for each in SYSTEM)
    if is_system and not real.is_relative_to(IMAGES):
        raise RefusedError(dataset, f"would be mounted on {place}, a directory of the system", step)
    if os.path.lexists(place) and (not real.is_dir() or any(real.iterdir())):
        raise RefusedError(dataset, f"would be mounted on {place}, where something is", step)
