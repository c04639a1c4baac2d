"""Plan a restore, and check every reason to refuse it. Nothing is changed.

The checks are in modules by subject, such as :mod:`snaporch.restore.disk_checks`.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from snaporch.bundle.manifest import Role
from snaporch.catalog.records import check_store
from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.model import Level
from snaporch.restore.definition_checks import (
    check_bootable,
    check_definition,
    check_definition_may_stay,
)
from snaporch.restore.disk_checks import (
    check_all_disks,
    check_datasets,
    check_files_beneath,
    check_partitions,
    check_places,
    check_volumes_unused,
)
from snaporch.restore.firmware_checks import unfit_files
from snaporch.restore.foreign_definition import came_from_elsewhere, check_foreign_definitions
from snaporch.restore.foreign_images import check_foreign_images
from snaporch.restore.host_requirements import (
    MemoryNeed,
    check_machine,
    check_needs,
    check_networks_and_pools,
    memory_need,
)
from snaporch.restore.newer_snapshot_checks import (
    bases_of_copies,
    check_destroyable,
    check_newer,
    newer_than,
)
from snaporch.restore.own_places import OwnPlaces, with_paths
from snaporch.restore.plan_model import RestorePlan, readable_xml
from snaporch.restore.ram_checks import check_one_instant, check_ram_whole
from snaporch.restore.select import find_inside, find_outside
from snaporch.restore.shared_dataset_checks import (
    check_alone,
    check_others_writes,
    check_own_places,
)
from snaporch.restore.source import IncompleteError, check_pages_exist
from snaporch.restore.start_bar import without_bar

RAISED: AbstractContextManager[object] = nullcontext()
"""Raises the first refusal."""


def make_restore_plan(
    context: Context,
    domain_name: str,
    snapshot: str,
    *,
    cold: bool = False,
    paused: bool = False,
    disks_only: bool = False,
    discard_newer: bool = False,
    bundle: Path | None = None,
    despite_other_disks: bool = False,
    also_roll_back: bool = False,
    keep_definition: bool = False,
    accepted: Collection[str] = (),
    refusals: AbstractContextManager[object] = RAISED,
) -> RestorePlan:
    """Plan a restore and make all checks.

    Args:
        domain_name: the name or UUID of the domain.
        snapshot: the name of the snapshot, or of the run that took it.
        cold: boot from the disks, do not resume from RAM.
        paused: resume from RAM, and leave the guest paused.
        disks_only: roll back, and leave the guest off.
        discard_newer: snapshots newer than this one may be destroyed.
        bundle: the bundle's directory, if it is not in the store.
        also_roll_back: files that are not the guest's may be rolled back with it.
        despite_other_disks: RAM may be resumed over disks that are not in the snapshot, and disks
            may be put back over backing files that have changed.
        keep_definition: the domain stays defined as it is; only without RAM.
        accepted: what a snapshot that came from another host may name of this one.
        refusals: surrounds each check of the finished plan; it may collect the errors.

    Raises:
        NotFoundError: the domain has no such snapshot.
        RefusedError: the restore would not be safe; the error has the reason.
    """
    if bundle is None:
        check_store(context.store, context.pool)
        record, manifest, members = find_inside(context, domain_name, snapshot)
    else:
        record, manifest, members = find_outside(context, domain_name, snapshot, bundle)
    if record.level is Level.TORN:
        raise RefusedError(
            record.full_name,
            "was taken while overlays were committed: its disks are not of one instant",
            f"choose another: snaporch list {shlex.quote(record.domain)}",
        )
    domain = without_bar(context, context.hypervisor.find(record.uuid))
    resumes = not cold and not disks_only
    check_all_disks(record, manifest, members, domain, context.resolver)
    if resumes and (domain is not None or manifest is not None):
        check_ram_whole(record, members)
    check_definition(context, record, manifest, domain)
    check_bootable(record, manifest, domain, cold=cold)
    ram = manifest.part(Role.RAM) if manifest and resumes and record.level is Level.RAM else None
    if paused and ram is None:
        start = shlex.join(["virsh", "start", record.domain])
        step = f"use --disks-only in place of --paused, and then: {start}"
        raise RefusedError(record.full_name, "has no RAM to resume from", step)
    newer, there = newer_than(context, members)
    plan = RestorePlan(
        record=record,
        manifest=manifest,
        domain=domain,
        snapshots=members,
        newer=newer,
        bases=bases_of_copies(there, newer),
        ram=Path(record.bundle) / ram.name if ram and record.bundle else None,
        boot=cold or (resumes and record.level not in (Level.RAM, Level.OFF)),
        running=manifest is not None and manifest.was_running and not paused,
        also_roll_back=also_roll_back,
        despite_other_disks=despite_other_disks,
        keep_definition=keep_definition,
        accepted=tuple(accepted),
    )
    if keep_definition:
        with refusals:
            check_definition_may_stay(plan)
    if came_from_elsewhere(members):
        _check_foreign(context, plan, refusals)
    return check_plan(
        context,
        plan,
        bundle=bundle,
        disks_only=disks_only,
        discard_newer=discard_newer,
        refusals=refusals,
    )


def _check_foreign(
    context: Context, plan: RestorePlan, refusals: AbstractContextManager[object]
) -> None:
    """Check what the definitions and images of another host name here."""
    places = None
    with refusals:
        places = OwnPlaces(context, plan.thing, [each.dataset for each in plan.snapshots])
    if places is None:
        return
    with refusals:
        sent = [] if plan.keep_definition else _definitions(replace(plan, domain=None))
        xmls = with_paths(context, sent)
        check_foreign_definitions(plan.thing, xmls, plan.accepted, places.has)
    with refusals:
        _check_pages(context, plan)
    with refusals:
        xmls = with_paths(context, _definitions(plan))
        check_foreign_images(context, plan.thing, plan.snapshots, places, xmls, plan.accepted)


def _check_pages(context: Context, plan: RestorePlan) -> None:
    if plan.pages is None or plan.manifest is None:
        return
    try:
        check_pages_exist(context, plan.thing, plan.manifest, plan.snapshots)
    except IncompleteError as error:
        step = "boot from the disks with --cold"
        raise RefusedError(error.thing, error.reason, step) from error


def check_plan(
    context: Context,
    plan: RestorePlan,
    *,
    bundle: Path | None = None,
    disks_only: bool,
    discard_newer: bool,
    refusals: AbstractContextManager[object] = RAISED,
) -> RestorePlan:
    """Check that the plan can be carried out with this host's datasets, disks and files.

    Args:
        refusals: surrounds each check; it may collect the errors.

    Returns: the plan, with the firmware files that cannot be put back on this host.

    Raises:
        RefusedError: the restore would not be safe; the error has the reason.
    """
    with refusals:
        context.fences.refuse(plan.record.uuid, plan.record.domain)
    with refusals:
        check_alone(context, plan.record)
    with refusals:
        check_own_places(context, plan.record, bundle)
    with refusals:
        _check_disks(context, plan)
    with refusals:
        check_volumes_unused(context, plan.thing, [member.dataset for member in plan.snapshots])
    with refusals:
        check_newer(plan, discard=discard_newer)
    with refusals:
        there = context.pool.listing([member.dataset for member in plan.snapshots])
        check_destroyable(context, plan.thing, plan.record.uuid, plan.newer, there)
    with refusals:
        if plan.ram is not None and plan.manifest is not None and not plan.despite_other_disks:
            check_one_instant(plan, plan.manifest)
    unfit: Mapping[str, RefusedError] = {}
    with refusals:
        uuid, place = plan.record.uuid, Path(plan.record.bundle or "")
        unfit = unfit_files(context, plan.thing, uuid, place, plan.parts, _definitions(plan))
    for error in () if disks_only else unfit.values():
        with refusals:
            raise error
    plan = replace(plan, unfit=unfit)
    with refusals:
        _check_host(context, plan)
    with refusals:
        check_others_writes(context, plan)
    return plan


def _check_disks(context: Context, plan: RestorePlan) -> None:
    if plan.manifest is None:
        return
    check_places(context, plan.thing, plan.manifest)
    if not plan.also_roll_back:
        check_partitions(context, plan.thing, plan.manifest)
    check_files_beneath(plan, plan.manifest)


def _definitions(plan: RestorePlan) -> list[str]:
    """Return the definitions of the bundle and of the domain that can be parsed."""
    texts = [plan.text(role) for role in (Role.INACTIVE_XML, Role.LIVE_XML)]
    return [xml for xml in (*map(readable_xml, texts), _current_xml(plan)) if xml is not None]


def _current_xml(plan: RestorePlan) -> str | None:
    return plan.domain.inactive_xml or plan.domain.live_xml if plan.domain else None


def _started_from(plan: RestorePlan) -> str | None:
    """Return the definition that the restore starts the guest from; ``None`` if it stays off."""
    if not (plan.ram or plan.boot):
        return None
    inactive, live = (readable_xml(plan.text(role)) for role in (Role.INACTIVE_XML, Role.LIVE_XML))
    return live or inactive if plan.ram else inactive or _current_xml(plan)


def memory_of(context: Context, plan: RestorePlan) -> MemoryNeed:
    """Return the memory that a restore takes and gives back.

    Args:
        context: of this host.
        plan: of the restore.

    Raises:
        RefusedError: the definition has no possible numbers.
    """
    manifest = plan.manifest if plan.ram else None
    return memory_need(context, plan.thing, _started_from(plan), manifest, plan.domain)


def _check_host(context: Context, plan: RestorePlan) -> None:
    """Check that the host can run the guest, if the restore starts it."""
    xml = _started_from(plan)
    if xml is None:
        return
    cpu = plan.manifest.versions.cpu if plan.manifest and plan.ram else ""
    check_machine(context, plan.thing, xml, plan.domain, resumes=plan.ram is not None, cpu=cpu)
    if plan.manifest is not None:
        check_datasets(context, plan.thing, plan.manifest)
    check_needs(plan.thing, [memory_of(context, plan)], context.resolver.host)
    check_networks_and_pools(context, plan.thing, xml, resumes=plan.ram is not None)
