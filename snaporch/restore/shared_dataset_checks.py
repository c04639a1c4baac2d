"""Refuses to roll back datasets that are not the guest's alone.

A rollback would also change another guest's disks, the host's own directories, or the files that
:mod:`snaporch.restore.other_files` finds.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.model import Domain, SnapshotRecord
from snaporch.restore.other_files import named
from snaporch.restore.plan_model import RestorePlan
from snaporch.snapshot.locate_disks import datasets_of
from snaporch.zfs.resolver import NotOnZfsError

_HOST_PLACES = (Path("/"), Path("/var/lib/libvirt"))


_BY_HAND = "restore both by hand: docs/how-to/groups.md, 'A disk of several guests'"


def check_alone(context: Context, record: SnapshotRecord) -> None:
    """Refuse datasets on which another domain has disks: the rollback would change them too.

    Args:
        context: of this host.
        record: the snapshot.

    Raises:
        RefusedError: names the other domain. If its disks there are in ``exclude_disks``, they are
            those of this guest, and the step is another.
    """
    for other in context.hypervisor.domains():
        if other.uuid == record.uuid:
            continue
        shared = datasets_of(context.resolver, other) & set(record.datasets)
        if shared:
            is_excluded = shared.isdisjoint(_without_excluded(context, other))
            raise RefusedError(
                record.domain,
                f"the domain {other.name} has disks on {', '.join(sorted(shared))} too, which the "
                "rollback would change",
                _BY_HAND if is_excluded else "give each guest a dataset of its own",
            )


def _without_excluded(context: Context, domain: Domain) -> set[str]:
    """Return the datasets of the disks that are not in ``exclude_disks``."""
    excluded = context.config.settings(domain.name, domain.uuid).exclude_disks
    disks = tuple(disk for disk in domain.disks if disk.target not in excluded)
    return datasets_of(context.resolver, replace(domain, disks=disks))


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
