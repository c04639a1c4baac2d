"""The plan of a run: which disks are snapshotted, how, and under which name. Only reads.

What rules a strategy out is found by :mod:`snaporch.hypervisor.definition_blockers` and
:mod:`snaporch.snapshot.storage_blockers`; of the others, :mod:`snaporch.snapshot.choose_strategy`
chooses one.

Every reason to refuse a snapshot before the guest is touched is raised from here.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

from snaporch.bundle.compress import Compression, CompressionSettings, choose_compression
from snaporch.bundle.compression_tuning import FIRST_LEVEL, next_level
from snaporch.catalog.records import check_store
from snaporch.catalog.unfrozen_snapshots import find_other_program
from snaporch.config import DomainSettings
from snaporch.context import Context
from snaporch.disks.backing_chain import BackingFile, find_beneath, shared_disk_warnings
from snaporch.errors import RefusedError, UnavailableError
from snaporch.hypervisor import BackingImage, OverlayDisk
from snaporch.hypervisor.domain_xml import disk_xml
from snaporch.journal import RunFacts, list_journals
from snaporch.known_faults import risks_overlays
from snaporch.model import Dataset, Domain, GroupRun, Level, Strategy
from snaporch.recovery import unknown_overlays
from snaporch.snapshot.choose_strategy import choose_strategy, may_take_overlays
from snaporch.snapshot.firmware_blockers import check_firmware
from snaporch.snapshot.locate_disks import LeftOut, PlannedDisk, locate_disks
from snaporch.snapshot.request import AS_CONFIGURED, SnapshotRequest
from snaporch.snapshot.snapshot_name import check_full_names, default_name, new_run_id
from snaporch.snapshot.storage_blockers import find_storage_blockers

_SAME_ROOM = 64 << 20
"""Free bytes of two datasets of a pool that differ by less count as the same free bytes."""


_FREEZING = (Strategy.MANUAL, Strategy.PAUSED, Strategy.QUIESCED)
"""Strategies that keep the guest paused or quiesced until the ZFS snapshots exist."""
_ALL_CPU_TIME = 100
_SLOWING_SECONDS = 3600
"""How long a guest may be slowed down where saving its RAM has no limit."""
_MARGIN_SECONDS = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run does with one domain."""

    domain: Domain
    settings: DomainSettings
    compression: CompressionSettings
    disks: tuple[PlannedDisk, ...]
    left_out: tuple[LeftOut, ...]
    backing_files: tuple[BackingFile, ...]
    """Backing files and data files of the disks."""
    downgrade: str
    """Why the level is lower than the requested one; empty if it is not lower."""
    facts: RunFacts
    policy: str | None = None
    """The policy for which the snapshot is taken."""
    note: str = ""
    """The admin's note."""
    group: GroupRun | None = None
    """The group with which it is taken."""
    other_program: str = ""
    """Another program that may snapshot the datasets meanwhile; empty if no overlay is possible."""
    yields_to_other_program: bool = False
    """Whether overlays are avoided only because of that program."""
    shared_disk_warnings: tuple[str, ...] = ()
    """Descriptions of disks to which other guests go on writing."""

    @property
    def run(self) -> str:
        """The identifier of the run."""
        return self.facts.run

    @property
    def snapshot(self) -> str:
        """The name of the snapshot."""
        return self.facts.snapshot

    @property
    def strategy(self) -> Strategy:
        """How the guest is frozen."""
        return self.facts.strategy

    @property
    def level(self) -> Level:
        """The level that the run reaches if nothing disturbs it."""
        return self.strategy.level

    @property
    def datasets(self) -> tuple[Dataset, ...]:
        """The datasets to snapshot, each once, in the order of their names."""
        return tuple(sorted({planned.dataset for planned in self.disks}))

    @property
    def max_frozen(self) -> float:
        """Seconds for which the guest may be frozen: less than its guardian allows."""
        if self.strategy not in _FREEZING:
            return math.inf
        return max(self.settings.freeze_deadline - _MARGIN_SECONDS, 1)

    @property
    def full_names(self) -> list[str]:
        """The full names of the snapshots to take."""
        return [f"{dataset.name}@{self.snapshot}" for dataset in self.datasets]

    def renamed(self, name: str) -> Plan:
        """Return the same plan for a snapshot of another name."""
        return replace(self, facts=replace(self.facts, snapshot=name))


def make_plan(
    context: Context,
    domain: Domain,
    request: SnapshotRequest = AS_CONFIGURED,
    *,
    awaited: int | None = None,
    group: GroupRun | None = None,
    avoid_other_programs: bool = True,
) -> Plan:
    """Plan a snapshot of a domain.

    Args:
        context: configuration, hypervisor and pools.
        domain: the domain as it is now.
        request: name, level, policy and rate.
        awaited: seconds for which the guest may stay frozen until another program has taken the
            snapshots, under names of its own; ``None`` if the run takes them.
        group: the group whose members stay frozen until all are.
        avoid_other_programs: whether to avoid overlays if another program snapshots the datasets.

    Raises:
        RefusedError: the snapshot is not possible.
        UnavailableError: libvirt or a file cannot be read.
    """
    if domain.problem:
        raise UnavailableError(domain.name, f"libvirt cannot read it ({domain.problem})")
    context.fences.refuse(domain.uuid, domain.name)
    check_store(context.store, context.pool, context.hypervisor)
    settings = context.config.settings(domain.name, domain.uuid)
    if request.rate is not None:
        settings = settings.model_copy(update={"ram_rate": request.rate})
    check_firmware(domain, context.config.libvirt_uri)
    _check_overlays(context, domain)
    planned, left_out = locate_disks(context.resolver, domain, settings.exclude_disks)
    if not planned:
        details = "; ".join(out.describe() for out in left_out)
        raise RefusedError(domain.name, f"no disk on ZFS ({details or 'it has no disks'})")
    now = context.clock.now()
    disks = [each.disk for each in planned]
    datasets = tuple(sorted({disk.dataset.name for disk in planned}))
    _check_reservations(context, domain, datasets)
    beneath = find_beneath(
        context.resolver,
        domain,
        disks,
        {each.dataset for each in planned},
        context.hypervisor.domains,
    )
    name = request.name if awaited is not None else None
    snapshot = name or _choose_name(context, domain, datasets, request, now)
    blockers = find_storage_blockers(context, domain, planned, left_out, beneath)
    overlays_possible = may_take_overlays(domain, settings, request.level)
    other_program = find_other_program(context, datasets) if overlays_possible else ""
    choose = partial(
        choose_strategy,
        domain,
        settings,
        blockers,
        request.level,
        at_once=awaited is None,
    )
    choice = alone = choose(avoid_overlays=_risks_overlays(context, domain, planned))
    if other_program and avoid_other_programs:
        choice = choose(avoid_overlays=True)
    paths, run = context.config.paths, new_run_id(now)
    facts = RunFacts(
        run=run,
        domain=domain.name,
        uuid=domain.uuid,
        was=domain.state,
        boot=domain.boot,
        strategy=choice.strategy,
        snapshot=snapshot,
        datasets=datasets,
        overlay_dir=str(paths.overlays / run),
        overlays=_overlays(context, domain, choice.strategy, planned, paths.overlays / run),
        emulator=domain.emulator_owner,
        # One name for all runs, because libvirt adds it to the guest's AppArmor profile each time.
        ram_pipe=str(paths.runtime / f"{domain.uuid}.ram"),
        overlay_max_mib=paths.overlay_max_mib,
        overlay_floor_mib=paths.overlay_floor_mib,
        taken_by_other_program=awaited is not None,
        window_seconds=awaited or 0,
        group=group.mark if group else "",
        **_downtime(context, domain, choice.strategy, settings),
        vcpu_quotas=_vcpu_quotas(context, domain, choice.strategy, settings),
        slowing_seconds=settings.ram_time_budget or _SLOWING_SECONDS,
    )
    return Plan(
        domain,
        settings,
        _compressing(context, settings, facts),
        tuple(planned),
        tuple(left_out),
        beneath,
        choice.downgrade,
        facts,
        policy=request.policy,
        note=request.note,
        group=group,
        other_program=other_program,
        yields_to_other_program=choice != alone,
        shared_disk_warnings=tuple(
            shared_disk_warnings(context.resolver, domain, disks, context.hypervisor.domains, group)
        ),
    )


def _check_overlays(context: Context, domain: Domain) -> None:
    """Check that no disk is on an overlay of a run: a snapshot of its base would be too old.

    Raises:
        RefusedError: one is.
    """
    for disk in domain.disks:
        if disk.source and unknown_overlays.is_overlay(context.config.paths.overlays, disk.source):
            reason = f"its disk {disk.target} is on {disk.source}, an overlay of"
            journals = list_journals(context.config.paths.journal, sweep=False)
            if domain.uuid in {journal.uuid for journal in journals}:
                step = f"run: snaporch recover {domain.uuid}"
                raise RefusedError(domain.name, f"{reason} a run that has not ended", step)
            raise RefusedError(domain.name, f"{reason} no known run", unknown_overlays.STEP)


def _choose_name(
    context: Context,
    domain: Domain,
    datasets: Sequence[str],
    request: SnapshotRequest,
    now: datetime,
) -> str:
    taken = {found.name for found in context.pool.snapshots(datasets)}
    if request.name in taken:
        thing = f"{domain.name}@{request.name}"
        raise RefusedError(thing, "a snapshot of that name exists", "choose another --name")
    chosen = request.name or default_name(taken, now, request.policy)
    check_full_names(datasets, chosen)
    return chosen


def _check_reservations(context: Context, domain: Domain, datasets: tuple[str, ...]) -> None:
    """Check for room: a snapshot of a dataset with ``refreservation`` reserves its data again."""
    sharing: dict[tuple[str, int], dict[str, int]] = {}
    for name, (needed, free) in context.pool.reserved(datasets).items():
        # The same free bytes of several datasets in a pool can be used only once.
        same = sharing.setdefault((name.split("/", 1)[0], free // _SAME_ROOM), {})
        same[name] = needed
        if (total := sum(same.values())) > free:
            names = ", ".join(sorted(same))
            raise RefusedError(
                domain.name,
                f"a snapshot of {names} needs {total >> 20} MiB free, {max(free, 0) >> 20} MiB "
                "are: what it holds would be reserved once more",
                f"make room, or: zfs set refreservation=none {names.replace(', ', ' ')}",
            )


def _risks_overlays(context: Context, domain: Domain, planned: Sequence[PlannedDisk]) -> bool:
    discarding = [disk.disk for disk in planned if disk.disk.discards]
    if not discarding:
        return False
    return risks_overlays(context.hypervisor.emulator_release(domain), discarding)


def _downtime(
    context: Context, domain: Domain, strategy: Strategy, settings: DomainSettings
) -> dict[str, int]:
    """Return the fields of the facts about the emulator's downtime limit."""
    if not settings.downtime_limit or strategy.level is not Level.RAM:
        return {}
    own = context.hypervisor.downtime_limit(domain.uuid)
    limit = settings.downtime_limit // timedelta(milliseconds=1)
    return {"downtime_ms": limit, "own_downtime_ms": own} if own else {}


def _vcpu_quotas(
    context: Context, domain: Domain, strategy: Strategy, settings: DomainSettings
) -> dict[str, str]:
    """The quotas of vCPUs that the run may reduce."""
    if settings.vcpu_floor == _ALL_CPU_TIME or strategy.level is not Level.RAM:
        return {}
    return context.hypervisor.vcpu_quotas(domain.uuid)


def _compressing(
    context: Context, settings: DomainSettings, facts: RunFacts
) -> CompressionSettings:
    method = choose_compression(settings.compression, reads_zstd=context.hypervisor.reads_zstd())
    level = settings.fixed_level
    if level is None:
        adjusted = method is Compression.ZSTD and facts.strategy.level is Level.RAM
        level = next_level(context.store.last_save_times(facts.uuid)) if adjusted else FIRST_LEVEL
    return CompressionSettings(method, level, settings.compression_threads)


def _overlays(
    context: Context,
    domain: Domain,
    strategy: Strategy,
    planned: Sequence[PlannedDisk],
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
    is_block = stat.S_ISBLK(os.stat(planned.path).st_mode)
    return OverlayDisk(
        target=planned.disk.target,
        base=planned.path,
        base_kind="block" if is_block else "file",
        base_format=planned.disk.format,
        overlay=str(directory / f"{planned.disk.target}.qcow2"),
        below=below,
        xml=disk_xml(domain.inactive_xml, planned.disk.target) if domain.inactive_xml else "",
    )
