"""Find out whether a guest that is off is unchanged since its policy's last snapshot.

Then the policy needs no new snapshot. Anything that cannot be determined counts as a change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from snaporch.bundle.firmware_files import PERMANENT_SUFFIX, read_host_file, tpm_files
from snaporch.bundle.manifest import Manifest, Role
from snaporch.catalog.records import marked_records, record_of
from snaporch.context import Context
from snaporch.errors import SnaporchError
from snaporch.model import BundleState, Domain, Level, PoolSnapshot, SnapshotRecord, iso
from snaporch.snapshot.bundle_parts import disk_entries
from snaporch.snapshot.plan import Plan
from snaporch.snapshot.plan_still_valid import check_unchanged
from snaporch.zfs import PREFIX
from snaporch.zfs.resolver import Resolver

_SIDE = (Role.INACTIVE_XML, Role.NVRAM, Role.TPM)


def find_unchanged(context: Context, plan: Plan) -> SnapshotRecord | None:
    """Return the policy's last snapshot if the guest was off then and has not changed since.

    The time of this check is written on the ZFS snapshots, so that the policy counts as carried
    out.

    Returns:
        The last snapshot; ``None`` if something was written to the datasets, the definition, UEFI
        variables or TPM state differ, the bundle is damaged, a file beneath a disk cannot be
        recognized again, or any of this cannot be determined.
    """
    domain = plan.domain
    if plan.level is not Level.OFF or plan.policy is None or plan.group or domain.managed_save:
        return None
    if any(file.is_unknown for file in plan.backing_files):
        return None
    now = context.clock.now()
    try:
        there = context.pool.snapshots(plan.facts.datasets)
        record = _last(context, plan, there)
        if record is None or not record.bundle or not _is_whole(record):
            return None
        manifest = context.store.manifest(f"{record.uuid}/{record.run}")
        if manifest is None or not _is_held(context.resolver, manifest, plan):
            return None
        names = [f"{dataset}@{record.snapshot}" for dataset in record.datasets]
        if _is_written(context, plan, names):
            return None
        if context.store.damage(f"{record.uuid}/{record.run}"):
            return None
        check_unchanged(context.hypervisor, domain, (), state=True)
        context.pool.set_properties(names, {f"{PREFIX}unchanged": iso(now)})
        marked = context.pool.snapshots(plan.facts.datasets)
        return record_of(context.store, marked, record.run, record.snapshot)
    except (SnaporchError, OSError) as error:
        context.progress.note(domain.name, f"cannot determine whether it has changed: {error}")
        return None


def _last(context: Context, plan: Plan, there: list[PoolSnapshot]) -> SnapshotRecord | None:
    """Return the policy's last snapshot by ZFS's transaction groups, which no clock can change."""
    own = [each for each in there if each.properties.get("uuid") == plan.domain.uuid]
    made = {each.full_name: each.createtxg for each in own}
    records = marked_records(context.store, own, {each.guid for each in there})
    taken = [each for each in records if each.policy == plan.policy]
    return max(
        taken,
        key=lambda each: max(made.get(f"{d}@{each.snapshot}", 0) for d in each.datasets),
        default=None,
    )


def _is_whole(record: SnapshotRecord) -> bool:
    whole = record.state is BundleState.COMPLETE and not record.has_failed
    return record.level is Level.OFF and whole


def _is_held(resolver: Resolver, manifest: Manifest, plan: Plan) -> bool:
    """Whether the bundle has the guest's current disks, definition, UEFI and TPM state."""
    held = [(part.role, part.sha256) for part in manifest.parts if part.role in _SIDE]
    same = sorted(held) == sorted(_side(plan.domain))
    return same and manifest.disks == disk_entries(resolver, plan)


def _side(domain: Domain) -> Iterator[tuple[Role, str]]:
    if domain.inactive_xml is not None:
        text = domain.inactive_xml.encode("utf-8", "surrogateescape")
        yield Role.INACTIVE_XML, hashlib.sha256(text).hexdigest()
    if domain.nvram is not None and Path(domain.nvram).exists():
        yield Role.NVRAM, _digest(Path(domain.nvram))
    for path in tpm_files(domain.tpm_state, PERMANENT_SUFFIX):
        yield Role.TPM, _digest(path)


def _digest(path: Path) -> str:
    return hashlib.sha256(read_host_file(path)[0]).hexdigest()


def _is_written(context: Context, plan: Plan, names: list[str]) -> bool:
    """Whether the datasets were written to since, including data still in the host's memory."""
    for planned in plan.disks:
        context.flush_volume(planned.path)
    context.pool.sync(plan.facts.datasets)
    return any(context.pool.written_since(name) for name in names)
