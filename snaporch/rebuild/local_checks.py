"""What on this host prevents a rebuild: the guest, its name, its datasets, a missing pool, no room.

Where a file system must not be mounted is decided by :mod:`snaporch.rebuild.local_datasets`. What a
replica lacks is found by :mod:`snaporch.rebuild.plan`.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from snaporch.bundle.manifest import Manifest
from snaporch.bundle.store import copy_name
from snaporch.catalog.records import COPY
from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.model import BundleState, DatasetKind, PoolSnapshot
from snaporch.rebuild.local_datasets import ARRIVED, RECEIVED, Local, LocalState
from snaporch.rebuild.plan import Copies, Guests, Incoming, RebuildPlan
from snaporch.replication.resume_transfer import NO_TOKEN
from snaporch.snapshot.host_directories import existing_part, free_mib


class AlreadyHereError(RefusedError):
    """The guest is on this host, so there is nothing to rebuild."""

    plan: RebuildPlan | None = None
    """What would have come back."""


def check_guest(context: Context, plan: RebuildPlan) -> None:
    """Refuse to bring back a guest that this host has.

    Raises:
        AlreadyHereError: it runs.
        RefusedError: another guest has its name; or it has a fence and RAM that libvirt saved.
    """
    manifest = plan.manifest
    for domain in context.hypervisor.domains():
        if domain.uuid == manifest.uuid and domain.active:
            step = f"to restore it here: {restore_command(plan)}"
            here = AlreadyHereError(domain.name, "runs on this host", step)
            here.plan = plan
            raise here
        fenced = context.fences.find(manifest.uuid) is not None
        if domain.uuid == manifest.uuid and domain.managed_save and fenced:
            reason = "has RAM that libvirt saved, which does not fit the disks that come"
            step = f"to discard that RAM: virsh managedsave-remove {domain.uuid}"
            raise RefusedError(domain.name, reason, step)
        if domain.name == manifest.domain and domain.uuid != manifest.uuid:
            step = f"virsh domrename {shlex.quote(domain.name)} NEW, or rebuild on another host"
            raise RefusedError(domain.name, "is another guest of this host (UUID differs)", step)


def restore_command(plan: RebuildPlan) -> str:
    """The command that restores what came back; a shell reads no part of the names."""
    return shlex.join(["snaporch", "restore", plan.thing])


def move_away(dataset: str, kind: DatasetKind) -> str:
    """The commands that rename a dataset, and leave its mount point to the one that comes."""
    rename = shlex.join(["zfs", "rename", dataset, f"{dataset}-before"])
    if kind is DatasetKind.VOLUME:
        return rename
    no_mount = shlex.join(["zfs", "set", "canmount=noauto", dataset])
    return f"{no_mount}; {shlex.join(['zfs', 'unmount', dataset])}; {rename}"


def check_local(plan: RebuildPlan, local: Local, pools: set[str], replica: str) -> bool:
    """Refuse what cannot come back to this host, before anything is received.

    Args:
        plan: the plan.
        local: the datasets of this host.
        pools: the names of its pools.
        replica: the name of the replica.

    Returns:
        Whether anything has yet to come.

    Raises:
        RefusedError: a dataset exists, or its pool does not.
    """
    has_to_come = False
    for each in plan.incoming:
        pool = each.dataset.partition("/")[0]
        if pool not in pools:
            step = f"{shlex.join(['zpool', 'import', pool])}, or create it"
            raise RefusedError(each.dataset, f"this host has no pool {pool}", step)
        has_to_come |= bool(remaining(each, local.state(each.dataset), replica))
    return has_to_come


def remaining(each: Incoming, state: LocalState, replica: str) -> list[tuple[PoolSnapshot, str]]:
    """The snapshots of a dataset that have yet to come, each with the name of its base.

    The replica may have pruned older ones since an interrupted rebuild received them, but not the
    newest one here: the next one begins at it. A dataset with a base gets an increment; see
    :mod:`snaporch.rebuild.fenced_guest`.

    Args:
        each: the dataset.
        state: what this host has of it.
        replica: the name of the replica.

    Raises:
        RefusedError: the dataset exists, and is not what an interrupted rebuild left: this host's
            own snapshots have no mark of the replica.
    """
    if not state.exists:
        return list(_with_bases(each.snapshots))
    guids = [snapshot.guid for snapshot in each.snapshots]
    has = state.guids
    if each.base:
        return [(last, each.base) for last in each.snapshots if last.guid not in has]
    came_back = all(
        "run" not in snapshot.properties or snapshot.properties.get(COPY) == replica
        for snapshot in state.snapshots
    )
    if came_back and has == guids[: len(has)] and (has or state.token != NO_TOKEN):
        return list(_with_bases(each.snapshots))[len(has) :]
    is_rebuild = state.stage in (RECEIVED, ARRIVED)
    common = [guid for guid in has if guid in guids]
    fits = bool(common) and common[-1] == has[-1] and common == guids[: len(common)]
    if came_back and is_rebuild and fits:
        return list(_with_bases(each.snapshots))[len(common) :]
    away = move_away(each.dataset, each.kind)
    step = f"to bring the guest back beside its data: {away}"
    if is_rebuild and came_back and has and has[-1] not in guids:
        last = f"its newest snapshot, @{state.snapshots[-1].name}"
        reason = f"exists on this host, and {last}, is none of those that come from {replica}"
        raise RefusedError(each.dataset, reason, f"to begin again: {away}")
    if not has:
        step = f"if it is still being received, wait for its end; {step}"
    raise RefusedError(each.dataset, "exists on this host, and is not received into", step)


def _with_bases(snapshots: Sequence[PoolSnapshot]) -> Iterator[tuple[PoolSnapshot, str]]:
    base = ""
    for each in snapshots:
        yield each, base
        base = each.name


def check_others(
    plan: RebuildPlan, copies: Copies, present: Collection[str], guests: Guests
) -> None:
    """Refuse a guest that cannot come back without other guests' data.

    Args:
        plan: the plan.
        copies: what the replica has.
        present: the datasets of this host.
        guests: those that the replica has bundles of; a snapshot is marked with one guest only.

    Raises:
        RefusedError: another guest uses one of the datasets, or one above them.
    """
    step = "bring them back by hand: see docs/how-to/replication.md, 'By hand'"
    own, uuid = {each.dataset for each in plan.incoming}, plan.manifest.uuid
    for each in plan.incoming:
        marks = [snapshot.properties for snapshot in copies[each.copy]]
        foreign = [mark for mark in marks if mark.get("uuid", uuid) != uuid]
        others = {mark["domain"] for mark in foreign if "domain" in mark}
        others |= {g.name for u, g in guests.items() if u != uuid and each.dataset in g.datasets}
        if others:
            reason = f"has snapshots of other guests, too ({', '.join(sorted(others))})"
            raise RefusedError(each.dataset, reason, step)
        parts = each.dataset.split("/")
        for above in ("/".join(parts[:end]) for end in range(2, len(parts))):
            if above not in {*own, *present} and copy_name(above) in copies:
                reason = f"is below {above}, which the replica has, and this host has not"
                raise RefusedError(each.dataset, reason, "bring back the guest on that one first")


def check_room(context: Context, plan: RebuildPlan) -> None:
    """Refuse a bundle that the store has no room for.

    Raises:
        RefusedError: with the bytes.
    """
    store = context.config.paths.bundles
    if context.store.state(plan.reference)[0] is not BundleState.COMPLETE:
        manifests = (plan.manifest, *([plan.sent] if plan.sent else []))
        check_free(store, plan.thing, *manifests)


def check_free(store: Path, thing: str, *manifests: Manifest) -> None:
    """Refuse bundles that the file system of the store has no room for.

    Raises:
        RefusedError: with the MiB that are free, and those that are needed.
    """
    needed = sum(part.bytes for each in manifests for part in each.parts) >> 20
    free = free_mib(existing_part(store))
    if needed > free:
        reason = f"has {free} MiB free, and the bundle of {thing} needs {needed} MiB"
        raise RefusedError(str(store), reason, "make room, and try again")
