"""The contents of a run's bundle beside RAM: firmware files, definitions and the manifest.

RAM is received by :mod:`snaporch.snapshot.ram_capture`. The largest firmware file is set in
:mod:`snaporch.bundle.firmware_files`.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from snaporch.bundle.firmware_files import PERMANENT_SUFFIX, tpm_files
from snaporch.bundle.manifest import (
    BackingFileEntry,
    DiskEntry,
    GroupEntry,
    Manifest,
    MemberEntry,
    Part,
    PauseEntry,
    Role,
    SnapshotEntry,
    SurroundingsEntry,
    VersionsEntry,
    cut_to_milliseconds,
)
from snaporch.bundle.store import PartialBundle
from snaporch.disks.backing_chain import BackingFile
from snaporch.hypervisor import Pause
from snaporch.model import (
    Domain,
    DomainState,
    GroupRun,
    Level,
    PauseParts,
    PoolSnapshot,
    Versions,
)
from snaporch.snapshot.plan import Plan
from snaporch.zfs.resolver import Resolver


def side_parts(bundle: PartialBundle, domain: Domain, pause: Pause) -> list[Part]:
    """Store definitions, UEFI variables and TPM state; return their entries of the manifest."""
    parts = []
    if domain.live_xml is not None:
        parts.append(bundle.add_text("domain.live.xml", Role.LIVE_XML, domain.live_xml))
    if domain.inactive_xml is not None:
        parts.append(bundle.add_text("domain.xml", Role.INACTIVE_XML, domain.inactive_xml))
    frozen = pause.began.timestamp() if pause.began else None
    if domain.state in (DomainState.OFF, DomainState.PAUSED):
        frozen = datetime.now(UTC).timestamp()  # no process runs that could change them
    if domain.nvram is not None and Path(domain.nvram).exists():
        parts.append(bundle.add_copy("nvram.fd", Role.NVRAM, Path(domain.nvram), before=frozen))
    for index, path in enumerate(tpm_files(domain.tpm_state, PERMANENT_SUFFIX)):
        parts.append(bundle.add_copy(f"tpm.{index}.permall", Role.TPM, path, before=frozen))
    return parts


def _pause_entry(parts: PauseParts) -> PauseEntry:
    return PauseEntry(
        downtime_ms=parts.downtime,
        switch_ms=parts.switch,
        snapshot_ms=parts.snapshot,
        resume_ms=parts.resume,
    )


def disk_entries(resolver: Resolver, plan: Plan) -> tuple[DiskEntry, ...]:
    """Return the manifest's entries of the disks, those that are left out included."""
    held = [
        DiskEntry(
            target=planned.disk.target,
            source=planned.path,
            format=planned.disk.format,
            dataset=planned.dataset.name,
            inside=resolver.inside(planned.path, planned.dataset),
            partition=resolver.partition_number(planned.path),
            beneath=tuple(
                backing_file_entry(resolver, each)
                for each in plan.backing_files
                if each.target == planned.disk.target
            ),
        )
        for planned in plan.disks
    ]
    out = [
        DiskEntry(
            target=out.disk.target,
            source=out.disk.source,
            format=out.disk.format,
            dataset=None,
            left_out=out.code,
            left_out_detail=out.detail,
            apart=out.matters,
        )
        for out in plan.left_out
    ]
    return (*held, *out)


def build_manifest(
    resolver: Resolver,
    plan: Plan,
    level: Level,
    parts: list[Part],
    snapshots: list[PoolSnapshot],
    versions: Versions,
    pause: Pause,
    started: datetime,
    created: datetime,
    surroundings: SurroundingsEntry | None = None,
) -> Manifest:
    """Return the manifest of a finished run."""
    return Manifest(
        run=plan.run,
        domain=plan.domain.name,
        uuid=plan.domain.uuid,
        snapshot=plan.snapshot,
        level=level,
        was_running=plan.domain.state is DomainState.RUNNING,
        started=cut_to_milliseconds(started),
        created=cut_to_milliseconds(created),
        finished=cut_to_milliseconds(datetime.now(UTC)),
        pause_ms=pause.milliseconds,
        pause_parts=None if pause.parts == PauseParts() else _pause_entry(pause.parts),
        snapshots=tuple(
            SnapshotEntry(dataset=s.dataset, name=s.name, guid=s.guid, createtxg=s.createtxg)
            for s in snapshots
        ),
        disks=disk_entries(resolver, plan),
        parts=tuple(parts),
        versions=VersionsEntry(
            snaporch=versions.snaporch,
            libvirt=versions.libvirt,
            emulator=versions.emulator,
            machine=versions.machine,
            cpu=versions.cpu,
        ),
        group=_group(plan.group),
        surroundings=surroundings,
    )


def backing_file_entry(resolver: Resolver, file: BackingFile) -> BackingFileEntry:
    """Return the manifest's entry of a backing file or data file."""
    if file.dataset is not None:
        inside = resolver.inside(file.path, file.dataset)
        return BackingFileEntry(path=file.path, dataset=file.dataset.name, inside=inside)
    return BackingFileEntry(path=file.path, **(asdict(file.state) if file.state else {}))


def _group(group: GroupRun | None) -> GroupEntry | None:
    if group is None:
        return None
    members = tuple(MemberEntry(domain=name, uuid=uuid) for uuid, name in group.members)
    return GroupEntry(name=group.name, run=group.run, members=members)
