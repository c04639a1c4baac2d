"""Strategies that are impossible because of where the disks, overlays and bundles are.

``hypervisor/definition_blockers.py`` finds the reasons that a domain's definition gives.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from snaporch.context import Context
from snaporch.disks.backing_chain import BackingFile
from snaporch.disks.image_layers import COMMITTED_OFFLINE
from snaporch.errors import RefusedError
from snaporch.hypervisor import Blocker
from snaporch.model import Domain, Strategy
from snaporch.snapshot.host_directories import dataset_under, existing_part, free_mib
from snaporch.snapshot.locate_disks import LeftOut, PlannedDisk
from snaporch.snapshot.plan_still_valid import check_idle
from snaporch.zfs.resolver import NotOnZfsError

_RAM_RATIO = 0.6
"""The worst ratio to which a fast compressor compresses the RAM of an ordinary guest."""

_OVERLAY = frozenset({Strategy.OVERLAY})
_RAM = frozenset({Strategy.OVERLAY, Strategy.MANUAL})


def find_storage_blockers(
    context: Context,
    domain: Domain,
    planned: Sequence[PlannedDisk],
    left_out: Sequence[LeftOut],
    beneath: Sequence[BackingFile],
) -> list[Blocker]:
    """Return what rules out strategies for a domain: its definition and the places on the host.

    Raises:
        RefusedError: libvirt has a job on the domain, or a disk is on another program's overlay.
    """
    if not domain.active:
        return []
    check_idle(context.hypervisor, domain)
    for out in left_out:
        _check_unknown_overlay(context, domain, out)
    names = {disk.dataset.name for disk in planned}
    blockers = context.hypervisor.blockers(domain)
    blockers += filter(None, map(_only_libvirt_commits, beneath))
    blockers += _overlay_place(context, names)
    blockers += _store_place(context, names)
    blockers += _ram_room(context, domain)
    ignored = {out.disk.target for out in left_out}
    return [blocker for blocker in blockers if blocker.target not in ignored]


def _only_libvirt_commits(file: BackingFile) -> Blocker | None:
    """Block overlays where qemu-img cannot commit, or would have to trust an image's header."""
    what = f"lies over {file.path}"
    if file.data:
        what = f"has a data file ({file.path})"
    elif not file.is_unknown and file.format in COMMITTED_OFFLINE:
        return None
    reason = f"{file.target} {what}, so that only libvirt could commit an overlay into it"
    return Blocker(_OVERLAY, reason, "use manual")


def _check_unknown_overlay(context: Context, domain: Domain, out: LeftOut) -> None:
    """Refuse a disk off ZFS whose backing chain leads onto ZFS: a failed run of another tool."""
    for below in context.hypervisor.backing_chain(domain, out.disk.target):
        try:
            dataset = context.resolver.resolve(below)
        except (NotOnZfsError, OSError):
            continue
        raise RefusedError(
            f"{domain.name}: {out.disk.target}",
            f"it runs on the overlay {out.disk.source} over {below} ({dataset.name}), which "
            "snaporch did not make",
            f"commit it: virsh blockcommit {shlex.quote(domain.name)} {out.disk.target} --active "
            "--pivot",
        )


def _overlay_place(context: Context, datasets: set[str]) -> Iterator[Blocker]:
    """Block overlays whose directory is snapshotted, is lost with the power, or is full.

    An overlay inside a snapshotted dataset would be in the snapshot, and removed by a rollback.
    """
    paths = context.config.paths
    directory, journal = paths.overlays, paths.journal
    if (dataset := dataset_under(context.resolver, directory)) in datasets:
        yield Blocker(
            _OVERLAY,
            f"the overlay directory {directory} lies in {dataset}, which would be snapshotted",
            "set paths.overlays to a place outside the guests' datasets",
        )
    for what, key, place in (("overlay", "overlays", directory), ("journal", "journal", journal)):
        if kind := context.resolver.volatile_file_system(existing_part(place)):
            yield Blocker(
                _OVERLAY,
                f"the {what} directory {place} is on {kind}, and a power loss would take the "
                "guest's last writes with it",
                f"set paths.{key} to a place on a disk",
            )
    free, needed = free_mib(existing_part(directory)), paths.overlay_reserve_mib
    if free < needed:
        yield Blocker(
            _OVERLAY,
            f"the file system of {directory} has {free} MiB free, {needed} MiB are needed",
            "make room, or see paths.overlay_reserve_mib",
        )


def _store_place(context: Context, datasets: set[str]) -> Iterator[Blocker]:
    """Block RAM if bundles are in the guest's datasets: the rollback would remove the bundle."""
    store = context.config.paths.bundles
    if (dataset := dataset_under(context.resolver, store)) in datasets:
        yield Blocker(
            _RAM,
            f"the bundle store {store} lies in {dataset}, which is the guest's",
            "set paths.bundles to a place outside the guests' datasets",
        )


def _ram_room(context: Context, domain: Domain) -> Iterator[Blocker]:
    store = context.config.paths.bundles
    needed = int(context.hypervisor.ram_in_use(domain.uuid) * _RAM_RATIO) >> 20
    free = free_mib(existing_part(store))
    if free < needed:
        yield Blocker(
            _RAM,
            f"the bundle store {store} has {free} MiB free, RAM needs about {needed} MiB",
            "make room in the bundle store",
        )
