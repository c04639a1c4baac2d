"""Reasons to refuse a restore: the snapshot, the definition, and what else lies in its datasets."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path

from snaporch.bundle.manifest import Manifest, Role
from snaporch.catalog.records import missing_datasets
from snaporch.config.replica import rebuild_step
from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.hypervisor import domain_xml
from snaporch.model import BundleState, Domain, Level, PoolSnapshot, SnapshotRecord
from snaporch.restore.disk_checks import check_beneath
from snaporch.restore.other_files import named
from snaporch.restore.plan_model import RestorePlan
from snaporch.snapshot.locate_disks import datasets_of, locate_disks
from snaporch.zfs.resolver import NotOnZfsError, Resolver

_HOST_PLACES = (Path("/"), Path("/var/lib/libvirt"))
_DESPITE = "use --despite-other-disks if its content is the same"
_DISKS_ONLY = "use --disks-only"


def check_others_writes(context: Context, plan: RestorePlan) -> None:
    """Refuse to roll back files that are not the guest's and were written since the snapshot.

    With ``also_roll_back`` nothing is refused.

    Raises:
        RefusedError: with some of the files; or the datasets could not be examined.
    """
    if plan.also_roll_back:
        return
    for dataset, others in plan.others(context).items():
        raise RefusedError(
            plan.thing,
            f"{dataset} would be rolled back with {named(others)}",
            "move them to a dataset of their own, or use --also-roll-back",
        )


def check_files_beneath(plan: RestorePlan, manifest: Manifest) -> None:
    """Refuse disks over a backing file that has changed, unless the plan allows it.

    In an undo, a backing file whose former state was not recorded is refused only for its RAM.

    Raises:
        RefusedError: a backing file has changed.
    """
    if not plan.despite_other_disks:
        step = _DISKS_ONLY if plan.undoes else _DESPITE
        needs_all = plan.ram is not None or not plan.undoes
        check_beneath(plan.thing, manifest, step, unknown_too=needs_all)


def check_one_instant(plan: RestorePlan, manifest: Manifest) -> None:
    """Refuse to resume RAM over a disk that is not in the snapshot.

    A resumed guest assumes that its disks have not changed. If one has, the guest corrupts the file
    systems on that disk.
    """
    if others := [disk for disk in manifest.disks if disk.is_apart]:
        names = ", ".join(f"{disk.target} ({disk.left_out_reason})" for disk in others)
        step = "boot it with --cold, or use --despite-other-disks if nothing was"
        raise RefusedError(
            plan.thing,
            f"its RAM would be resumed over {names}, which is not in the snapshot and may have "
            "been written to since",
            _DISKS_ONLY if plan.undoes else step,
        )


def check_whole(
    record: SnapshotRecord,
    manifest: Manifest | None,
    members: tuple[PoolSnapshot, ...],
    domain: Domain | None,
    resolver: Resolver,
    *,
    cold: bool,
) -> None:
    """Refuse a snapshot of which a part is missing.

    Args:
        members: the ZFS snapshots that exist.
        resolver: finds the datasets of the domain's disks.
        cold: the bundle's RAM is not needed.

    Raises:
        RefusedError: a ZFS snapshot is missing, or the RAM cannot be restored.
    """
    thing = record.full_name
    if manifest is not None:
        if missing := missing_datasets(manifest, members):
            names = ", ".join(f"{dataset}@{record.snapshot}" for dataset in missing)
            raise RefusedError(thing, f"some of its snapshots are missing: {names}")
    elif domain is not None:
        planned, _ = locate_disks(resolver, domain)
        bare = {disk.dataset.name for disk in planned} - {member.dataset for member in members}
        if bare:
            raise RefusedError(thing, f"has no snapshot of {', '.join(sorted(bare))}")
        left = {member.dataset for member in members} - {disk.dataset.name for disk in planned}
        if left:
            reason = f"has snapshots of {', '.join(sorted(left))}, where the guest has no disk now"
            raise RefusedError(thing, reason, "define it as it was")
    if cold or (domain is None and manifest is None):  # check_definition refuses the latter
        return
    marked = any(member.properties.get("level") == Level.RAM for member in members)
    needs_ram = marked or record.level is Level.RAM
    if needs_ram and record.state is not BundleState.COMPLETE:
        raise RefusedError(
            thing,
            f"its RAM cannot be restored: the bundle is {record.state}",
            "boot it with --cold"
            if record.state is not BundleState.DAMAGED
            else f"check it again with `snaporch verify --checksums {shlex.quote(thing)}`, or boot "
            "it with --cold",
        )


def check_definition(
    context: Context, record: SnapshotRecord, manifest: Manifest | None, domain: Domain | None
) -> None:
    """Refuse a domain without any definition, one that was renamed, or one whose name is taken.

    Raises:
        RefusedError: with what to do about it.
    """
    if domain is None and manifest is None:
        steps = ["define it by hand", rebuild_step(context.config.replica, record.domain)]
        step = "; ".join(filter(None, steps))
        raise RefusedError(record.domain, "is undefined, and its bundle is missing", step)
    if domain is not None and domain.name != record.domain:
        raise RefusedError(
            record.domain,
            f"has the name {domain.name} now",
            f"shut it off, and run: virsh domrename {shlex.join([domain.name, record.domain])}",
        )
    for other in context.hypervisor.domains():
        if other.name == record.domain and other.uuid != record.uuid:
            raise RefusedError(
                record.domain,
                f"another domain has this name (UUID {other.uuid})",
                "rename it first",
            )


def check_definition_may_stay(plan: RestorePlan) -> None:
    """Refuse ``--keep-definition`` where the present definition does not fit the snapshot.

    Raises:
        RefusedError: RAM is resumed, there is no definition, or it names other firmware files.
    """
    if plan.ram is not None:
        reason = "its RAM can be resumed only with the definition that it was saved with"
        raise RefusedError(plan.thing, reason, "use --cold or --disks-only as well")
    if plan.domain is None or plan.domain.inactive_xml is None:
        raise RefusedError(
            plan.thing, "there is no definition to keep", "leave out --keep-definition"
        )

    root = domain_xml.parse(plan.domain.inactive_xml)
    state = domain_xml.tpm_state(root)
    for part in plan.parts:
        if part.source is None or part.source == domain_xml.nvram(root):
            continue
        if state is None or not Path(part.source).is_relative_to(state.path):
            raise RefusedError(
                plan.thing,
                f"the definition that is kept does not have {part.name} in {part.source}",
                "leave out --keep-definition",
            )


def check_alone(context: Context, record: SnapshotRecord) -> None:
    """Refuse datasets on which another domain has disks: the rollback would change them too."""
    for other in context.hypervisor.domains():
        if other.uuid == record.uuid:
            continue
        shared = datasets_of(context.resolver, other) & set(record.datasets)
        if shared:
            raise RefusedError(
                record.domain,
                f"the domain {other.name} has disks on {', '.join(sorted(shared))} too, which the "
                "rollback would change",
                "give each guest a dataset of its own",
            )


def check_own_places(context: Context, record: SnapshotRecord, bundle: Path | None) -> None:
    """Refuse datasets that hold the bundle, snaporch's own directories or the host's system."""
    paths = context.config.paths
    own = (bundle or paths.bundles, paths.bundles, paths.journal, paths.overlays)
    for place in (*own, *_HOST_PLACES):
        with suppress(NotOnZfsError, OSError):
            dataset = context.resolver.resolve(str(place)).name
            if dataset in record.datasets:
                raise RefusedError(
                    record.domain,
                    f"{place} lies in {dataset}, and would be rolled back with the guest",
                    "keep guests in datasets of their own, apart from the host and its bundles",
                )


def check_bootable(
    record: SnapshotRecord, manifest: Manifest | None, domain: Domain | None, *, cold: bool
) -> None:
    """Refuse to boot a transient domain, which has no definition. A RAM image has its own."""
    resumes = record.level is Level.RAM and not cold
    has_definition = (manifest is not None and manifest.part(Role.INACTIVE_XML) is not None) or (
        domain is not None and domain.inactive_xml is not None
    )
    if not resumes and not has_definition:
        raise RefusedError(
            record.domain, "is transient: there is no definition to boot from", "define it first"
        )
