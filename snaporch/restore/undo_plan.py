"""Plan an undo, and check every reason to refuse it. Nothing is changed.

An undo is a restore of a safety copy. Each dataset is rolled back to the snapshot that the restore
went back to, and then receives the copy's streams. If the copy's own last snapshot still exists, as
after an interrupted restore, rolling back to that one is enough.
"""

from __future__ import annotations

import shlex
from contextlib import AbstractContextManager
from dataclasses import replace

from snaporch.bundle.manifest import SnapshotEntry
from snaporch.bundle.save_image import SaveImageError, read_header
from snaporch.catalog.renamed_datasets import check_names
from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.model import BundleState, Domain, Level, PoolSnapshot, SnapshotRecord
from snaporch.restore.definition_checks import check_definition
from snaporch.restore.journal import KeptDataset
from snaporch.restore.newer_snapshot_checks import bases_of_copies, newer_than
from snaporch.restore.plan import RAISED, check_plan
from snaporch.restore.plan_model import RestorePlan
from snaporch.restore.processes_in_datasets import check_unused
from snaporch.restore.safety_catalog import NAMES_OPTIONS, SafetyCopy, safety_copies
from snaporch.restore.start_bar import is_barred, without_bar


def make_undo_plan(
    context: Context,
    copy: SafetyCopy,
    *,
    disks_only: bool = False,
    discard_newer: bool = False,
    also_roll_back: bool = False,
    refusals: AbstractContextManager[object] = RAISED,
) -> RestorePlan:
    """Plan an undo and make all checks.

    Args:
        disks_only: leave the guest off, even if its RAM was kept. Then backing files outside the
            copy may have changed.
        discard_newer: snapshots taken since the restore may be destroyed.
        also_roll_back: files that are not the guest's may be rolled back with it.
        refusals: surrounds each check of the finished plan; it may collect the errors.

    Raises:
        RefusedError: the undo would not be safe; the error has the reason.
    """
    copy.check()
    manifest = copy.manifest
    members, kept = _targets(context, copy)
    domain = without_bar(context, context.hypervisor.find(manifest.uuid))
    record = _record(copy)
    check_definition(context, record, manifest, domain)
    ram = None if disks_only else copy.ram
    if ram is not None:
        _check_image(copy)
    newer, there = newer_than(context, members)
    plan = RestorePlan(
        record=record,
        manifest=manifest,
        domain=_with_disks(context, domain, copy),
        snapshots=members,
        newer=newer,
        bases=bases_of_copies(there, newer),
        ram=ram,
        boot=False,
        running=manifest.was_running,
        also_roll_back=also_roll_back,
        despite_other_disks=disks_only,
        undoes=copy.name,
        kept=kept,
    )
    plan = check_plan(
        context, plan, disks_only=disks_only, discard_newer=discard_newer, refusals=refusals
    )
    with refusals:
        _check_room(context, plan, copy)
    with refusals:
        check_unused(context.resolver, plan.thing, record.datasets, manifest.uuid)
    return plan


def _targets(
    context: Context, copy: SafetyCopy
) -> tuple[tuple[PoolSnapshot, ...], tuple[KeptDataset, ...]]:
    """Return for each dataset the snapshot to roll back to, and the data to receive after that.

    Raises:
        RefusedError: a snapshot does not exist any more, or its dataset was renamed.
    """
    entries, everything = copy.manifest.snapshots, context.pool.snapshots()
    present = {(each.dataset, each.guid): each for each in everything}
    last = {(entry.dataset, entry.guid) for entry in copy.record.last}
    members, kept = [], []
    for entry in entries:
        whole = [each for key, each in present.items() if key in last and key[0] == entry.dataset]
        base = present.get((entry.dataset, entry.guid))
        if whole:
            members += whole
        elif base is not None:
            members.append(base)
            kept.append(copy.kept(entry.dataset))
        else:
            thing = f"{copy.manifest.domain}@{copy.name}"
            check_names(context.pool, thing, copy.manifest, everything)
            raise _gone(context, copy, entry)
    return tuple(members), tuple(kept)


def _gone(context: Context, copy: SafetyCopy, entry: SnapshotEntry) -> RefusedError:
    """Return the error for a missing base snapshot.

    A later restore may have destroyed the snapshot; the undo of that restore brings it back.
    """
    later = [
        each for each in safety_copies(context.store, copy.manifest.uuid) if each.name > copy.name
    ]
    step = "restore a snapshot: see `snaporch list`"
    if later and not later[0].record.half_way:
        words = ["snaporch", "undo", copy.manifest.domain, "--copy", later[0].name]
        step = f"undo {later[0].thing} first: {shlex.join(words)} {NAMES_OPTIONS}"
    full = f"{entry.dataset}@{entry.name}"
    reason = f"{full} (GUID {entry.guid}), the base of its streams, is missing"
    return RefusedError(f"{copy.manifest.domain}@{copy.name}", reason, step)


def _record(copy: SafetyCopy) -> SnapshotRecord:
    """Return a record of the safety copy, in the form of a snapshot's record."""
    manifest = copy.manifest
    return SnapshotRecord(
        domain=manifest.domain,
        uuid=manifest.uuid,
        snapshot=copy.name,
        run=manifest.run,
        level=Level.OFF if copy.ram is None else Level.RAM,
        datasets=tuple(sorted(entry.dataset for entry in manifest.snapshots)),
        created=manifest.created,
        ram_bytes=None,
        stored_bytes=0,
        pause_ms=None,
        bundle=str(copy.directory),
        state=BundleState.COMPLETE,
    )


def _with_disks(context: Context, domain: Domain | None, copy: SafetyCopy) -> Domain | None:
    """Return the domain with the disks it had before an interrupted ``undo.sh`` barred it.

    ``undo.sh`` keeps no journal. The definition stays barred until the disks are back.
    """
    if domain is None or domain.inactive_xml is None or not is_barred(context, domain):
        return domain
    sources = {entry.target: entry.source for entry in copy.manifest.disks}
    disks = tuple(
        replace(disk, source=sources.get(disk.target, disk.source)) for disk in domain.disks
    )
    return replace(domain, disks=disks)


def _check_image(copy: SafetyCopy) -> None:
    assert copy.ram is not None
    try:
        read_header(copy.ram)
    except (OSError, SaveImageError) as error:
        raise RefusedError(
            str(copy.ram), f"the RAM cannot be resumed ({error})", "use --disks-only"
        ) from error


def _check_room(context: Context, plan: RestorePlan, copy: SafetyCopy) -> None:
    for kept in plan.kept:
        target = next(each for each in plan.snapshots if each.dataset == kept.dataset)
        pool, needed = context.pool, copy.size(kept.dataset)
        room = pool.available(kept.dataset) + pool.written_since(target.full_name)
        if needed > room:
            raise RefusedError(
                plan.thing,
                f"no room on {kept.dataset}: {needed >> 20} MiB needed, {room >> 20} MiB free",
                "make room, or raise its quota",
            )
