"""Which domains have disks on a dataset. Asked of libvirt every time.

Nothing is cached between two hooks: a guest that was defined a second ago must not be missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from snaporch.default_paths import BARRED_DISK
from snaporch.errors import SnaporchError
from snaporch.hypervisor import Hypervisor
from snaporch.model import Domain
from snaporch.sanoid.hooks.host import HookHost
from snaporch.zfs.resolver import Mount, NotOnZfsError, Resolver


@dataclass(frozen=True, slots=True)
class GuestDatasets:
    """A domain and the datasets of its disks."""

    domain: Domain
    disks: dict[str, str]
    """Target → dataset, of every disk that a snapshot would include."""

    @property
    def datasets(self) -> frozenset[str]:
        """Every dataset with a disk of the guest."""
        return frozenset(self.disks.values())

    def on(self, targets: Iterable[str], *, below: bool) -> frozenset[str]:
        """Its datasets that are in ``targets`` or, with ``below``, below one of them."""
        exact = set(targets)
        prefixes = tuple(f"{target}/" for target in exact) if below else ()
        return frozenset(
            each for each in self.datasets if each in exact or each.startswith(prefixes)
        )


def guests_on(host: HookHost, targets: Sequence[str]) -> list[GuestDatasets]:
    """The domains with a disk on one of ``targets`` or below.

    Raises:
        UnavailableError, HypervisorError: libvirt does not answer.
    """
    mounts = host.resolver.mounts()
    guests = []
    for domain in map(_before_restore, host.hypervisor.domains()):
        paths = _disk_paths(host.hypervisor, domain, host.settings.overlays)
        datasets = _datasets(host.resolver, paths, mounts, even_if_missing=domain.active)
        guest = GuestDatasets(domain, datasets)
        if guest.on(targets, below=True):
            guests.append(guest)
    return guests


def _before_restore(domain: Domain) -> Domain:
    """The domain with all its disks, also if a restore has changed its definition meanwhile."""
    if any(disk.source is not None and disk.source.endswith(BARRED_DISK) for disk in domain.disks):
        from snaporch.restore.start_bar import without_bar_by_path

        with suppress(SnaporchError):  # an unreadable journal; the domain's other disks count
            return without_bar_by_path(domain)
    return domain


def _disk_paths(hypervisor: Hypervisor, domain: Domain, overlays: Path) -> dict[str, str]:
    """Target → path; for a disk on an overlay, the path of its base."""
    found = {}
    for disk in domain.disks:
        if disk.device not in ("disk", "lun") or disk.readonly or not disk.source:
            continue
        found[disk.target] = disk.source
        if Path(disk.source).is_relative_to(overlays):
            below = hypervisor.backing_chain(domain, disk.target)
            found[disk.target] = below[0] if below else disk.source
    return found


def _datasets(
    resolver: Resolver, paths: dict[str, str], mounts: list[Mount], *, even_if_missing: bool
) -> dict[str, str]:
    """Target → dataset; for a missing image of a running guest, the dataset it would be in."""
    resolve = resolver.resolve_nearest if even_if_missing else resolver.resolve
    found = {}
    for target, path in paths.items():
        with suppress(NotOnZfsError, OSError):
            found[target] = resolve(path, mounts).name
    return found
