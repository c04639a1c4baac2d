"""The plan of a run: what will happen to which disks. All reads; every refusal comes from here."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from snaporch.bundle.compress import Compressing, Compression, choose
from snaporch.bundle.compression_tuning import FIRST_LEVEL, next_level
from snaporch.catalog.other_takers import find_stranger
from snaporch.catalog.records import check_store
from snaporch.config import DomainSettings
from snaporch.context import Context
from snaporch.disks.backing_chain import BackingFile, find_beneath, tell_shared
from snaporch.errors import RefusedError, UnavailableError, UsageError
from snaporch.faults import risks_overlays
from snaporch.hypervisor import BackingImage, Blocker, OverlayDisk
from snaporch.hypervisor.domain_xml import disk_xml
from snaporch.journal import RunFacts
from snaporch.model import Dataset, Disk, Domain, GroupRun, LeftOutCode, Level, Strategy
from snaporch.names import MAX_FULL_NAME, is_snapshot, shown
from snaporch.snapshot.choose_strategy import choose_strategy, may_take_overlays
from snaporch.snapshot.firmware_files import check_firmware
from snaporch.snapshot.guest_changes import check_idle
from snaporch.zfs.resolver import (
    NotOnZfsError,
    forgetful,
    read_mounts,
    resolve,
    resolve_nearest,
)

_RAM_RATIO = 0.6
_ALIKE = 64 << 20
"""Room of two datasets that differs by less is taken for the same."""

_COMMITTED = ("raw", "qcow2")
"""Formats of images that an overlay over them is committed past, without libvirt."""


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
    code: LeftOutCode
    detail: str | None = None
    """What the code does not say: see :meth:`LeftOutCode.describe`."""

    @property
    def reason(self) -> str:
        """Why, for a message."""
        return self.code.describe(self.detail)

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
    beneath: tuple[BackingFile, ...]
    """What lies beneath the disks."""
    downgrade: str
    """Why the level is lower than what was asked for; empty when it is not."""
    facts: RunFacts
    policy: str | None = None
    """The policy it is taken for."""
    group: GroupRun | None = None
    """The group it is taken with."""
    stranger: str = ""
    """Who else may snapshot the datasets meanwhile; not asked where no overlay is possible."""
    gives_way: bool = False
    """Whether only for the stranger's sake it takes no overlays."""
    shared: tuple[str, ...] = ()
    """Disks that others write to as well, and go on writing to, in words."""

    @property
    def strategy(self) -> Strategy:
        """How the guest will be made to stand still."""
        return self.facts.strategy

    @property
    def level(self) -> Level:
        """What the run sets out to reach."""
        return self.strategy.level

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
    """Refuse what ZFS would refuse, see :mod:`snaporch.names`.

    Raises:
        UsageError: it is no snapshot name.
    """
    if not is_snapshot(name):
        raise UsageError(
            f"snapshot name {shown(name)}",
            "may hold letters, digits, '_', '-', '.', ':' and inner spaces, 255 in all",
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
        if (out := _left_out_by_nature(disk, exclude)) is not None:
            left_out.append(out)
            continue
        assert disk.source is not None
        try:
            planned.append(PlannedDisk(disk, disk.source, resolve(disk.source)))
        except NotOnZfsError as error:
            left_out.append(LeftOut(disk, LeftOutCode.NOT_ON_ZFS, error.reason))
        except OSError as error:
            raise _unreadable(domain, disk, error) from error
    return planned, left_out


def datasets_of(domain: Domain) -> set[str]:
    """Datasets that hold a domain's disks; of an image that is gone, the one it would be in."""
    found: set[str] = set()
    mounts = read_mounts()
    for disk in domain.disks:
        if disk.source is None or not disk.source.startswith("/"):
            continue
        with suppress(NotOnZfsError, OSError):
            found.add(resolve_nearest(disk.source, mounts).name)
    return found


def dataset_under(path: Path) -> str | None:
    """The dataset that holds a path, or would if it existed; ``None`` off ZFS."""
    with suppress(NotOnZfsError, OSError):
        return resolve(str(existing_part(path))).name
    return None


def _left_out_by_nature(disk: Disk, exclude: tuple[str, ...]) -> LeftOut | None:
    if disk.target in exclude:
        return LeftOut(disk, LeftOutCode.EXCLUDED)
    if disk.device in ("cdrom", "floppy"):
        return LeftOut(disk, LeftOutCode.REMOVABLE, disk.device)
    if disk.readonly:
        return LeftOut(disk, LeftOutCode.READ_ONLY)
    if disk.source is None:
        return LeftOut(disk, LeftOutCode.NOT_LOCAL, disk.kind)
    return None


def _unreadable(domain: Domain, disk: Disk, error: OSError) -> RefusedError | UnavailableError:
    thing = f"{domain.name}: {disk.target} ({disk.source})"
    if isinstance(error, PermissionError):
        return UnavailableError(thing, "permission denied", "run snaporch as root")
    return RefusedError(thing, error.strerror or "cannot be read", "see `virsh domblklist`")


def make_plan(
    context: Context,
    domain: Domain,
    name: str | None,
    level: str | None = None,
    *,
    awaited: int | None = None,
    policy: str | None = None,
    group: GroupRun | None = None,
    heed_stranger: bool = True,
) -> Plan:
    """Plan a snapshot of ``domain``; ``name`` is the snapshot's, or ``None`` for the default.

    Args:
        level: overrides the configured one.
        awaited: seconds for which the frozen window may wait for somebody else to take the
            snapshots, under whatever names; ``None`` when the run takes them.
        policy: the policy it is taken for, which the default name ends in.
        group: the group it is taken with: its members stand still until all do.
        heed_stranger: whether overlays are avoided where somebody else snapshots the datasets.

    Raises:
        RefusedError: it cannot be done, and why.
    """
    if domain.trouble:
        raise UnavailableError(domain.name, f"libvirt cannot look at it ({domain.trouble})")
    check_store(context.store, context.pool, context.hypervisor)
    settings = context.config.settings(domain.name, domain.uuid)
    check_firmware(domain, context.config.libvirt_uri)
    planned, left_out = locate_disks(domain, settings.exclude_disks)
    if not planned:
        details = "; ".join(out.describe() for out in left_out)
        raise RefusedError(domain.name, f"no disk on ZFS ({details or 'it has no disks'})")
    started = datetime.now(UTC)
    datasets = tuple(sorted({disk.dataset.name for disk in planned}))
    _check_reservations(context, domain, datasets)
    beneath = find_beneath(
        domain,
        [each.disk for each in planned],
        {each.dataset for each in planned},
        context.hypervisor.domains,
    )
    if awaited is not None and name is not None:
        check_snapshot_name(name)
        snapshot = name
    else:
        snapshot = _free_name(context, domain, datasets, name, started, policy or "manual")
    run = f"{started:%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
    blockers = _find_blockers(context, domain, planned, left_out, beneath)
    pools = {disk.dataset.pool for disk in planned}
    stranger = (
        find_stranger(context, datasets) if may_take_overlays(domain, settings, level) else ""
    )
    choose = partial(
        choose_strategy,
        domain,
        settings,
        blockers,
        pools,
        level,
        at_once=awaited is None,
        together=group is not None,
    )
    choice = alone = choose(avoid_overlays=_risks_overlays(context, domain, planned))
    if stranger and heed_stranger:
        choice = choose(avoid_overlays=True)
    paths = context.config.paths
    overlay_dir = paths.overlays / run
    facts = RunFacts(
        run=run,
        domain=domain.name,
        uuid=domain.uuid,
        was=domain.state,
        boot=domain.boot,
        strategy=choice.strategy,
        snapshot=snapshot,
        datasets=datasets,
        overlay_dir=str(overlay_dir),
        overlays=_overlays(context, domain, choice.strategy, planned, overlay_dir),
        emulator=domain.emulator_owner,
        # Under one name for all runs: libvirt adds it to the guest's AppArmor profile each time.
        ram_pipe=str(paths.runtime / f"{domain.uuid}.ram"),
        overlay_max_mib=paths.overlay_max_mib,
        overlay_floor_mib=paths.overlay_floor_mib,
        awaited=awaited is not None,
        window_seconds=awaited or 0,
        group=group.mark if group else "",
        **_downtime(context, domain, choice.strategy, settings),
    )
    return Plan(
        run,
        snapshot,
        domain,
        settings,
        _compressing(context, settings, facts),
        tuple(planned),
        tuple(left_out),
        beneath,
        choice.downgrade,
        facts,
        policy,
        group,
        stranger,
        choice != alone,
        tuple(
            tell_shared(domain, [each.disk for each in planned], context.hypervisor.domains, group)
        ),
    )


def _check_reservations(context: Context, domain: Domain, datasets: tuple[str, ...]) -> None:
    """A snapshot of what has a ``refreservation`` needs room for all that it holds."""
    together: dict[tuple[str, int], dict[str, int]] = {}
    for name, (needed, free) in context.pool.reserved(datasets).items():
        # What is free to several of a pool alike is free once.
        alike = together.setdefault((name.split("/", 1)[0], free // _ALIKE), {})
        alike[name] = needed
        if (total := sum(alike.values())) > free:
            names = ", ".join(sorted(alike))
            raise RefusedError(
                domain.name,
                f"a snapshot of {names} needs {total >> 20} MiB free, {max(free, 0) >> 20} MiB "
                "are: what it holds would be reserved once more",
                f"make room, or: zfs set refreservation=none {names.replace(', ', ' ')}",
            )


def _risks_overlays(context: Context, domain: Domain, planned: list[PlannedDisk]) -> bool:
    discarding = [disk.disk for disk in planned if disk.disk.discards]
    if not discarding:
        return False
    return risks_overlays(context.hypervisor.emulator_release(domain), discarding)


def _downtime(
    context: Context, domain: Domain, strategy: Strategy, settings: DomainSettings
) -> dict[str, int]:
    """The facts about the emulator's downtime limit."""
    if not settings.downtime_ms or strategy.level is not Level.RAM:
        return {}
    own = context.hypervisor.downtime_limit(domain.uuid)
    return {"downtime_ms": settings.downtime_ms, "own_downtime_ms": own} if own else {}


def _compressing(context: Context, settings: DomainSettings, facts: RunFacts) -> Compressing:
    method = choose(settings.compression, reads_zstd=context.hypervisor.reads_zstd())
    level = settings.fixed_level
    if level is None:
        follows = method is Compression.ZSTD and facts.strategy.level is Level.RAM
        level = next_level(context.store.last_pace(facts.uuid)) if follows else FIRST_LEVEL
    return Compressing(method, level, settings.compression_threads)


def _overlays(
    context: Context,
    domain: Domain,
    strategy: Strategy,
    planned: list[PlannedDisk],
    directory: Path,
) -> tuple[OverlayDisk, ...]:
    if strategy is not Strategy.OVERLAY:
        return ()
    chain = context.hypervisor.backing_images
    return tuple(
        _overlay(domain, disk, directory, chain(domain, disk.disk.target)) for disk in planned
    )


def _overlay(
    domain: Domain, planned: PlannedDisk, directory: Path, below: tuple[BackingImage, ...]
) -> OverlayDisk:
    block = stat.S_ISBLK(os.stat(planned.path).st_mode)
    return OverlayDisk(
        target=planned.disk.target,
        base=planned.path,
        base_kind="block" if block else "file",
        base_format=planned.disk.format,
        overlay=str(directory / f"{planned.disk.target}.qcow2"),
        below=below,
        xml=disk_xml(domain.inactive_xml, planned.disk.target) if domain.inactive_xml else "",
    )


def _free_name(
    context: Context,
    domain: Domain,
    datasets: tuple[str, ...],
    name: str | None,
    now: datetime,
    purpose: str,
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
        candidates = (f"{stem}{more}_{purpose}" for more in ["", *(f".{n}" for n in range(2, 100))])
        chosen = next(candidate for candidate in candidates if candidate not in taken)
    for dataset in datasets:
        if len(f"{dataset}@{chosen}".encode()) > MAX_FULL_NAME:
            raise RefusedError(
                f"{dataset}@{chosen}", "is longer than ZFS allows", "use a short --name"
            )
    return chosen


def _find_blockers(
    context: Context,
    domain: Domain,
    planned: list[PlannedDisk],
    left_out: list[LeftOut],
    beneath: Sequence[BackingFile],
) -> list[Blocker]:
    """What the hypervisor knows, and what only the disks' places tell."""
    if not domain.active:
        return []
    check_idle(context.hypervisor, domain)
    for out in left_out:
        _check_foreign_overlay(context, domain, out)
    blockers = context.hypervisor.blockers(domain)
    blockers += filter(None, map(_commits_alone, beneath))
    blockers += _overlay_place(context, planned)
    blockers += _store_place(context, planned)
    blockers += _ram_room(context, domain)
    elsewhere = {out.disk.target for out in left_out}
    return [blocker for blocker in blockers if blocker.target not in elsewhere]


def _commits_alone(file: BackingFile) -> Blocker | None:
    """What qemu-img cannot commit an overlay over, or not without believing a header."""
    what = f"lies over {file.path}"
    if file.data:
        what = f"has a data file ({file.path})"
    elif not file.is_unknown and file.format in _COMMITTED:
        return None
    reason = f"{file.target} {what}, so that only libvirt could commit an overlay into it"
    return Blocker(frozenset({Strategy.OVERLAY}), reason, "use manual")


def _check_foreign_overlay(context: Context, domain: Domain, out: LeftOut) -> None:
    """A disk off ZFS whose backing chain leads onto ZFS is what a failed run of some tool left."""
    for below in context.hypervisor.backing_chain(domain, out.disk.target):
        try:
            dataset = resolve(below)
        except (NotOnZfsError, OSError):
            continue
        raise RefusedError(
            f"{domain.name}: {out.disk.target}",
            f"it runs on the overlay {out.disk.source} over {below} ({dataset.name}), which "
            "snaporch did not make",
            f"commit it: virsh blockcommit {domain.name} {out.disk.target} --active --pivot",
        )


def _overlay_place(context: Context, planned: list[PlannedDisk]) -> Iterator[Blocker]:
    """An overlay inside a snapshotted dataset would be in the snapshot, and go in a rollback."""
    directory = context.config.paths.overlays
    existing = existing_part(directory)
    with suppress(NotOnZfsError):
        dataset = resolve(str(existing))
        if dataset in {disk.dataset for disk in planned}:
            yield Blocker(
                frozenset({Strategy.OVERLAY}),
                f"the overlay directory {directory} lies in {dataset.name}, which would be "
                "snapshotted",
                "set paths.overlays to a place outside the guests' datasets",
            )
    for what, place in (("overlay", directory), ("journal", context.config.paths.journal)):
        if kind := forgetful(existing_part(place)):
            yield Blocker(
                frozenset({Strategy.OVERLAY}),
                f"the {what} directory {place} is on {kind}, and a power loss would take the "
                "guest's last writes with it",
                f"set paths.{what}{'s' if what == 'overlay' else ''} to a place on a disk",
            )
    free, wanted = free_mib(existing), context.config.paths.overlay_reserve_mib
    if free < wanted:
        yield Blocker(
            frozenset({Strategy.OVERLAY}),
            f"the file system of {directory} has {free} MiB free, {wanted} MiB are needed",
            "make room, or see paths.overlay_reserve_mib",
        )


def _store_place(context: Context, planned: list[PlannedDisk]) -> Iterator[Blocker]:
    """A bundle inside the guest's own dataset would be gone after the rollback it is needed for."""
    store = context.config.paths.bundles
    with suppress(NotOnZfsError):
        dataset = resolve(str(existing_part(store)))
        if dataset in {disk.dataset for disk in planned}:
            yield Blocker(
                frozenset({Strategy.OVERLAY, Strategy.MANUAL}),
                f"the bundle store {store} lies in {dataset.name}, which is the guest's",
                "set paths.bundles to a place outside the guests' datasets",
            )


def _ram_room(context: Context, domain: Domain) -> Iterator[Blocker]:
    """RAM in use, at the ratio that a fast compressor reaches on an ordinary guest at worst."""
    store = context.config.paths.bundles
    used = context.hypervisor.ram_in_use(domain.uuid)
    needed = int(used * _RAM_RATIO) >> 20
    free = free_mib(existing_part(store))
    if free < needed:
        yield Blocker(
            frozenset({Strategy.OVERLAY, Strategy.MANUAL}),
            f"the bundle store {store} has {free} MiB free, RAM needs about {needed} MiB",
            "make room in the bundle store",
        )


def existing_part(path: Path) -> Path:
    """The path, or the nearest directory above it that there is."""
    return next(candidate for candidate in [path, *path.parents] if candidate.exists())


def free_mib(path: Path) -> int:
    """Room on the file system of ``path``, in MiB."""
    room = os.statvfs(path)
    return room.f_bavail * room.f_frsize >> 20
