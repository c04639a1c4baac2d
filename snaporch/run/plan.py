"""The plan of a run: what will happen to which disks. All reads; every refusal comes from here."""

from __future__ import annotations

import os
import re
import secrets
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from snaporch.bundle.compress import Compressing, choose
from snaporch.config import DomainSettings
from snaporch.errors import RefusedError, UnavailableError, UsageError
from snaporch.hypervisor import OverlayDisk
from snaporch.model import Dataset, Disk, Domain, DomainState, Level
from snaporch.pool.resolver import NotOnZfsError, resolve
from snaporch.run.context import Context
from snaporch.run.journal import Facts

_NAME = re.compile(r"^[A-Za-z0-9_.:-][A-Za-z0-9_.: -]*$")
_MAX_FULL_NAME = 255
"""ZFS_MAX_DATASET_NAME_LEN less the terminating NUL."""
_REFUSED_STATES = {
    DomainState.SUSPENDED: "wake it with `virsh dompmwakeup`",
    DomainState.CRASHED: "reset or destroy it first",
    DomainState.STOPPING: "wait until it is off",
}


@dataclass(frozen=True, slots=True)
class PlannedDisk:
    """A disk that will be snapshotted, and where its bytes are."""

    disk: Disk
    path: str
    dataset: Dataset


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A disk that will not be snapshotted, and why."""

    disk: Disk
    reason: str

    def describe(self) -> str:
        """The disk, its place and the reason, for a message."""
        place = f" ({self.disk.source})" if self.disk.source else ""
        return f"{self.disk.target}{place}: {self.reason}"

    @property
    def matters(self) -> bool:
        """Whether the guest can write to it, so that a restore would find it of another time."""
        return self.disk.device in ("disk", "lun") and not self.disk.readonly


@dataclass(frozen=True, slots=True)
class Plan:
    """One run on one domain."""

    run: str
    snapshot: str
    domain: Domain
    settings: DomainSettings
    compressing: Compressing
    disks: tuple[PlannedDisk, ...]
    left_out: tuple[LeftOut, ...]
    facts: Facts

    @property
    def level(self) -> Level:
        """What the run sets out to reach."""
        return Level.RAM if self.domain.active else Level.OFF

    @property
    def datasets(self) -> tuple[Dataset, ...]:
        """Every dataset to snapshot, once, by name."""
        return tuple(sorted({planned.dataset for planned in self.disks}))

    def by_pool(self) -> dict[str, list[str]]:
        """Full names of the snapshots to take, pool by pool."""
        pools: dict[str, list[str]] = {}
        for dataset in self.datasets:
            pools.setdefault(dataset.pool, []).append(f"{dataset.name}@{self.snapshot}")
        return pools


def check_snapshot_name(name: str) -> None:
    """Refuse what ZFS would refuse (zfsprops(7), "ZFS Component Naming Requirements").

    Raises:
        UsageError: it is no snapshot name.
    """
    if not _NAME.match(name):
        raise UsageError(
            f"snapshot name {name!r}",
            "may hold letters, digits, '_', '-', '.', ':' and inner spaces",
        )


def locate_disks(
    domain: Domain, exclude: tuple[str, ...] = ()
) -> tuple[list[PlannedDisk], list[LeftOut]]:
    """Every disk of the domain: on which dataset, or why not.

    Raises:
        RefusedError: a disk that should be there cannot be looked at.
    """
    planned: list[PlannedDisk] = []
    left_out: list[LeftOut] = []
    for disk in domain.disks:
        reason = _left_out_by_nature(disk, exclude)
        if reason is None and disk.source is not None:
            try:
                planned.append(PlannedDisk(disk, disk.source, resolve(disk.source)))
            except NotOnZfsError as error:
                reason = error.reason
            except OSError as error:
                raise _unreadable(domain, disk, error) from error
        if reason is not None:
            left_out.append(LeftOut(disk, reason))
    return planned, left_out


def _left_out_by_nature(disk: Disk, exclude: tuple[str, ...]) -> str | None:
    if disk.target in exclude:
        return "excluded by the configuration"
    if disk.device in ("cdrom", "floppy"):
        return f"removable ({disk.device})"
    if disk.readonly:
        return "read-only"
    if disk.source is None:
        return f"not a local file or device ({disk.kind})"
    return None


def _unreadable(domain: Domain, disk: Disk, error: OSError) -> RefusedError | UnavailableError:
    thing = f"{domain.name}: {disk.target} ({disk.source})"
    if isinstance(error, PermissionError):
        return UnavailableError(thing, "permission denied", "run snaporch as root")
    return RefusedError(thing, error.strerror or "cannot be read", "see `virsh domblklist`")


def make_plan(context: Context, domain: Domain, name: str | None) -> Plan:
    """Plan a snapshot of ``domain``; ``name`` is the snapshot's, or ``None`` for the default.

    Raises:
        RefusedError: it cannot be done, and why.
    """
    settings = context.config.settings(domain.name, domain.uuid)
    planned, left_out = locate_disks(domain, settings.exclude_disks)
    if not planned:
        details = "; ".join(out.describe() for out in left_out)
        raise RefusedError(domain.name, f"no disk on ZFS ({details or 'it has no disks'})")
    started = datetime.now(UTC)
    datasets = tuple(sorted({disk.dataset.name for disk in planned}))
    snapshot = _free_name(context, domain, datasets, name, started)
    run = f"{started:%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
    if domain.active:
        _check_active(context, domain, planned)
    paths = context.config.paths
    overlay_dir = paths.overlays / run
    facts = Facts(
        run=run,
        domain=domain.name,
        uuid=domain.uuid,
        was=domain.state,
        snapshot=snapshot,
        datasets=datasets,
        overlay_dir=str(overlay_dir),
        overlays=_overlays(domain, planned, overlay_dir),
        ram_pipe=str(paths.runtime / f"{run}.ram"),
    )
    return Plan(
        run,
        snapshot,
        domain,
        settings,
        _compressing(context, settings),
        tuple(planned),
        tuple(left_out),
        facts,
    )


def _compressing(context: Context, settings: DomainSettings) -> Compressing:
    method = choose(settings.compression, reads_zstd=context.hypervisor.reads_zstd())
    return Compressing(method, settings.compression_level, settings.compression_threads)


def _overlays(
    domain: Domain, planned: list[PlannedDisk], directory: Path
) -> tuple[OverlayDisk, ...]:
    """A running guest writes to overlays meanwhile; a paused one writes nothing, and needs none.

    It could not have any either: saving RAM leaves a paused guest's images inactive, and QEMU
    refuses to commit into an inactive base until the guest runs again.
    """
    if domain.state is not DomainState.RUNNING:
        return ()
    return tuple(_overlay(disk, directory) for disk in planned)


def _overlay(planned: PlannedDisk, directory: Path) -> OverlayDisk:
    block = stat.S_ISBLK(os.stat(planned.path).st_mode)
    return OverlayDisk(
        target=planned.disk.target,
        base=planned.path,
        base_kind="block" if block else "file",
        base_format=planned.disk.format,
        overlay=str(directory / f"{planned.disk.target}.qcow2"),
    )


def _free_name(
    context: Context, domain: Domain, datasets: tuple[str, ...], name: str | None, now: datetime
) -> str:
    taken = {found.name for found in context.pool.snapshots(datasets)}
    if name is not None:
        check_snapshot_name(name)
        if name in taken:
            raise RefusedError(
                f"{domain.name}@{name}", "a snapshot of that name exists", "choose another --name"
            )
        chosen = name
    else:
        stem = f"snaporch_{now:%Y%m%dT%H%M%SZ}"
        candidates = (f"{stem}{more}_manual" for more in ["", *(f".{n}" for n in range(2, 100))])
        chosen = next(candidate for candidate in candidates if candidate not in taken)
    for dataset in datasets:
        if len(f"{dataset}@{chosen}".encode()) > _MAX_FULL_NAME:
            raise RefusedError(
                f"{dataset}@{chosen}", "is longer than ZFS allows", "use a short --name"
            )
    return chosen


def _check_active(context: Context, domain: Domain, planned: list[PlannedDisk]) -> None:
    if domain.state in _REFUSED_STATES:
        raise RefusedError(domain.name, f"is {domain.state}", _REFUSED_STATES[domain.state])
    job = context.hypervisor.busy_with(domain.uuid)
    if job is not None:
        raise RefusedError(domain.name, f"libvirt is busy with it ({job})", "wait until that ended")
    for disk in planned:
        _check_disk(domain, disk.disk)
    directory = context.config.paths.overlays
    existing = next(path for path in [directory, *directory.parents] if path.exists())
    _check_overlay_directory(domain, planned, directory, existing)
    _check_overlay_space(context, domain, directory, existing)


def _check_disk(domain: Domain, disk: Disk) -> None:
    thing = f"{domain.name}: {disk.target}"
    if disk.device == "lun":
        raise RefusedError(
            thing, "device='lun' cannot have an overlay", "exclude it by exclude_disks"
        )
    if disk.transient:
        raise RefusedError(thing, "a transient disk cannot have an overlay", "exclude it")
    if disk.cache == "unsafe":
        raise RefusedError(thing, "cache='unsafe' ignores flushes", "choose another cache mode")


def _check_overlay_directory(
    domain: Domain, planned: list[PlannedDisk], directory: Path, existing: Path
) -> None:
    """An overlay inside a snapshotted dataset would be in the snapshot, and go in a rollback."""
    try:
        dataset = resolve(str(existing))
    except NotOnZfsError:
        return
    if dataset in {disk.dataset for disk in planned}:
        raise RefusedError(
            f"{domain.name}: {directory}",
            f"the overlay directory lies in {dataset.name}, which would be snapshotted",
            "set paths.overlays to a place outside the guests' datasets",
        )


def _check_overlay_space(context: Context, domain: Domain, directory: Path, existing: Path) -> None:
    """A full overlay would stop the guest's writes: QEMU pauses a guest whose disk is full."""
    wanted = context.config.paths.overlay_reserve_mib
    room = os.statvfs(existing)
    free = room.f_bavail * room.f_frsize >> 20
    if free < wanted:
        raise RefusedError(
            f"{domain.name}: {directory}",
            f"the overlay file system has {free} MiB free, {wanted} MiB are needed",
            "make room, or see paths.overlay_reserve_mib",
        )
