"""Which domains have disks on the datasets that sanoid is at: asked of libvirt, every time.

Nothing is remembered between two hooks: a guest that was defined a second ago must not be missed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from snaporch.default_paths import BAR
from snaporch.errors import NotFoundError, SnaporchError
from snaporch.hypervisor import Hypervisor, open_hypervisor
from snaporch.model import Domain
from snaporch.sanoid.hooks.settings import HookSettings
from snaporch.zfs.resolver import Mount, NotOnZfsError, read_mounts, resolve, resolve_nearest

_ZVOLS = Path("/dev/zvol")


@dataclass(frozen=True, slots=True)
class GuestDatasets:
    """A domain and where its disks are."""

    domain: Domain
    disks: dict[str, str]
    """Target → dataset, of every disk that a snapshot would take along."""

    @property
    def datasets(self) -> frozenset[str]:
        """Every dataset with a disk of the guest."""
        return frozenset(self.disks.values())

    def on(self, targets: Iterable[str], *, below: bool) -> frozenset[str]:
        """Its datasets among ``targets``; and among their children, if ``below``."""
        wanted = tuple(targets)
        return frozenset(
            dataset
            for dataset in self.datasets
            if any(
                dataset == target or (below and dataset.startswith(f"{target}/"))
                for target in wanted
            )
        )


def guests_at(peeked: HookSettings, targets: Sequence[str]) -> list[GuestDatasets]:
    """The domains with a disk on one of ``targets`` or below.

    Raises:
        UnavailableError, HypervisorError: libvirt does not answer.
    """
    hypervisor = open_hypervisor(peeked.libvirt_uri)
    mounts = read_mounts()
    guests = []
    for domain in map(_as_it_was, hypervisor.domains()):
        places = _places(hypervisor, domain, peeked.overlays)
        guest = GuestDatasets(domain, _datasets(places, mounts, even_if_gone=domain.active))
        if guest.on(targets, below=True):
            guests.append(guest)
    return guests


def _as_it_was(domain: Domain) -> Domain:
    """With all its disks, also while a restore of it goes on or waits to be finished."""
    if any(disk.source is not None and disk.source.endswith(BAR) for disk in domain.disks):
        from snaporch.restore.start_lock import as_it_was

        with suppress(SnaporchError):  # of a journal that nobody understands; its other disks count
            return as_it_was(domain)
    return domain


def _places(hypervisor: Hypervisor, domain: Domain, overlays: Path) -> dict[str, str]:
    """Target → path; of a guest in the middle of a window, what lies below our overlays."""
    found = {}
    for disk in domain.disks:
        if disk.device not in ("disk", "lun") or disk.readonly or not disk.source:
            continue
        found[disk.target] = disk.source
        if Path(disk.source).is_relative_to(overlays):
            below = hypervisor.backing_chain(domain, disk.target)
            found[disk.target] = below[0] if below else disk.source
    return found


def _datasets(places: dict[str, str], mounts: list[Mount], *, even_if_gone: bool) -> dict[str, str]:
    """Target → dataset; of a running guest's image that is gone, the one it would be in."""
    found = {}
    for target, source in places.items():
        look = resolve_nearest if even_if_gone else resolve
        with suppress(NotOnZfsError, OSError):
            found[target] = look(source, mounts).name
    return found


def check_exist(targets: Sequence[str]) -> None:
    """See that the datasets exist; ``zfs`` is asked only about those that are not mounted.

    Raises:
        NotFoundError: one does not.
    """
    mounted = {mount.source for mount in read_mounts() if mount.filesystem == "zfs"}
    for target in targets:
        if target in mounted or (_ZVOLS / target).exists():
            continue
        import subprocess

        from snaporch.command_log import LoggedCommand

        command = ["zfs", "list", "-H", "-o", "name", target]
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        with suppress(FileNotFoundError), LoggedCommand(*command) as log:
            done = subprocess.run(
                command, capture_output=True, check=False, env={**os.environ, "PATH": path}
            )
            log.exited(done.returncode)
            if done.returncode != 0:
                raise NotFoundError(target, "no such dataset", "nothing was touched")
