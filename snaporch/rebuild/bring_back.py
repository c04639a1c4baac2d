"""Bring a guest's datasets and bundles back from a replica; each step can be repeated.

Order: all datasets, then the properties of their snapshots, then the bundles, then mounting. Until
a snapshot has its properties, neither retention nor ``prune`` knows it, and then ``copy`` protects
it. Nothing here destroys or overwrites data on this host. Only a file system whose data is that of
its newest snapshot is rolled back to it, before an increment. That all datasets can get
their increments is checked before the first one comes: else they were of two instants.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType

from snaporch import default_paths
from snaporch.bundle.age import Identity
from snaporch.bundle.store import MARKER
from snaporch.catalog.records import COPY, ENDED, check_store
from snaporch.context import Context
from snaporch.errors import InterruptedRunError, RefusedError
from snaporch.locks import REPLICATION, domain_lock
from snaporch.model import DatasetKind, PoolSnapshot
from snaporch.private_files import private_directory, store_errors
from snaporch.rebuild.dataset_settings import Settings
from snaporch.rebuild.fenced_guest import way_back
from snaporch.rebuild.fetch_bundle import fetch_bundle
from snaporch.rebuild.local_checks import check_guest, remaining
from snaporch.rebuild.local_datasets import Local
from snaporch.rebuild.plan import Incoming, RebuildPlan
from snaporch.rebuild.replica_source import Source
from snaporch.rebuild.same_data import discard_all_but_data
from snaporch.rebuild.stages import Stage, set_stage
from snaporch.rebuild.surroundings import apply_settings
from snaporch.replication.interface import ReplicaError
from snaporch.replication.marks import COPIED, OF_PAGES
from snaporch.replication.receive_request import is_mark
from snaporch.replication.resume_transfer import NO_TOKEN
from snaporch.zfs import POLICY_PROPERTY, PREFIX, RAM_PROPERTY

_MODIFIED = "has been modified"
"""Of the error of ``zfs receive`` for a dataset that was written to."""


def guest_lock(context: Context, plan: RebuildPlan) -> AbstractContextManager[None]:
    """Hold a guest's lock for all of its rebuild: a snapshot in between would prevent the restore.

    Raises:
        BusyError: another run holds it.
    """
    return _lock(context, default_paths.LOCKS, plan.manifest.domain, plan.manifest.uuid)


def _lock(context: Context, place: Path, name: str, uuid: str) -> AbstractContextManager[None]:
    return domain_lock(place, name, uuid, "rebuild", wait=0, interrupt=context.interrupt)


def bring_back(
    context: Context,
    source: Source,
    local: Local,
    plan: RebuildPlan,
    runs: Sequence[str],
    settings: Mapping[str, Settings] = MappingProxyType({}),
    identity: Identity | None = None,
) -> list[str]:
    """Bring the datasets and bundles of a plan to this host; the caller holds :func:`guest_lock`.

    Args:
        context: the configuration, the pools and the store of this host.
        source: the replica.
        local: the datasets of this host.
        plan: what comes.
        runs: those whose bundles come.
        settings: properties of the datasets.
        identity: decrypts bundles.

    Returns:
        The properties that this host does not accept.

    Raises:
        SnaporchError: a step failed; the same call continues.
    """
    manifest, paths = plan.manifest, context.config.paths
    check_guest(context, plan)
    check_store(context.store, context.pool, context.hypervisor)
    # no replication of what is half here
    with _lock(context, paths.runtime, REPLICATION, REPLICATION):
        with store_errors(paths.bundles):
            private_directory(paths.bundles)
            (paths.bundles / MARKER).touch(mode=0o600)
        places = {
            each.dataset: local.mountpoint_to_set(each.dataset, each.mountpoint)
            for each in plan.incoming
        }
        for each in plan.incoming:
            _check_unwritten(context, source, local, each)
        for each in plan.incoming:
            _receive(context, source, local, each)
        for each in plan.incoming:
            _mark(context, source, each)
        for run in runs:
            fetch_bundle(context, source, plan, run, identity)
        # Not before: `prune` would destroy pages without a bundle.
        for pages in (each.dataset for each in plan.incoming if each.is_pages):
            context.pool.set_properties([pages], {RAM_PROPERTY: manifest.uuid})
        left_out = apply_settings(context, settings)
        set_stage(context, plan, Stage.RESTORE)
        for each in sorted(plan.incoming, key=lambda each: each.mountpoint):
            _mount(context, local, each, places[each.dataset])
    return left_out


def _mount(context: Context, local: Local, each: Incoming, place: str) -> None:
    """Mount a dataset; for pages that is not needed now, so a failure is a note."""
    try:
        local.mount(each.dataset, each.kind, place)
    except RefusedError as error:
        if not each.is_pages:
            raise
        context.progress.note(each.dataset, error.explanation)


def _check_unwritten(context: Context, source: Source, local: Local, each: Incoming) -> None:
    """Refuse a dataset that was written to since the snapshot on which its increment begins.

    Of a file system that cannot be compared, only the receive knows.

    Raises:
        RefusedError: with the commands that discard the writes, or keep them.
    """
    state = local.state(each.dataset)
    if not each.base or state.token != NO_TOKEN or not remaining(each, state, source.name):
        return
    newest = state.snapshots[-1]
    if each.kind is DatasetKind.FILESYSTEM:
        modified = bool(discard_all_but_data(context, newest))
    else:
        modified = context.pool.is_volume_modified(newest.full_name)
    if modified:
        reason = f"has been modified since @{newest.name}"
        raise RefusedError(each.dataset, reason, way_back(each, newest.full_name))


def _receive(context: Context, source: Source, local: Local, each: Incoming) -> None:
    """Receive the snapshots of a dataset that have yet to come."""
    for snapshot, base in remaining(each, local.state(each.dataset), source.name):
        thing = f"{each.dataset}@{snapshot.name}"
        context.progress.step(
            each.dataset, f"receiving @{snapshot.name} from replica {source.name}"
        )
        local.make_parents(each.dataset)
        state = local.state(each.dataset)
        token = state.token
        receiver = local.receiver(each.dataset, snapshot.name, each.kind, resumable=source.resumes)
        try:
            source.receive(snapshot, base, token, receiver, raw=each.raw)
        except InterruptedRunError:
            raise
        except (RefusedError, ReplicaError) as error:
            if token == NO_TOKEN and each.base and _MODIFIED in error.reason:
                newest = state.snapshots[-1].full_name
                if context.pool.written_since(newest):  # a replica may write any error
                    step = way_back(each, newest)
                    raise RefusedError(each.dataset, error.reason, step) from error
            if token == NO_TOKEN:
                raise
            discard = f"zfs receive -A {shlex.quote(each.dataset)}"
            step = f"try again; if this error comes again: {discard}, and run this command again"
            raise ReplicaError(thing, error.reason, step) from error
        if snapshot.guid not in local.state(each.dataset).guids:
            reason = f"did not arrive from replica {source.name}: it sent another snapshot, or none"
            raise ReplicaError(thing, reason, f"zfs list -t snapshot {shlex.quote(each.dataset)}")


def _mark(context: Context, source: Source, each: Incoming) -> None:
    """Set the properties of the snapshots of a dataset, as the copies have them."""
    there = {e.guid: e.properties for e in context.pool.snapshots([each.dataset])}
    for snapshot in each.snapshots:
        wanted = _wanted(snapshot, source.name)
        has = there.get(snapshot.guid, {})
        new = {PREFIX + k: v for k, v in wanted.items() if k not in has}
        if new:
            context.pool.set_properties([f"{each.dataset}@{snapshot.name}"], new)


def _wanted(snapshot: PoolSnapshot, replica: str) -> Mapping[str, str]:
    """The properties that a snapshot gets: those of its copy that are possible.

    ``copy`` does not depend on what the replica has: because of it, a snapshot's images and
    definition are checked before a restore.
    """
    keys = {*COPIED, *OF_PAGES} - {ENDED}  # here it is not its last one
    found = {k: v for k, v in snapshot.properties.items() if k in keys and is_mark(k, v)}
    return {**found, COPY: replica}


def policies_of(source: Source, plan: RebuildPlan) -> dict[str, str]:
    """The policies that the replica has for the datasets of a plan, for :func:`set_policies`."""
    found = source.policies([each.copy for each in plan.incoming])
    named = ((each.dataset, found.get(each.copy, "")) for each in plan.incoming)
    return {dataset: policy for dataset, policy in named if policy and policy.isprintable()}


def set_policies(context: Context, policies: Mapping[str, str]) -> None:
    """Set ``snaporch:policy`` of datasets that have none, so that policies apply from now on."""
    for dataset, policy in policies.items():
        if not context.pool.policies([dataset]):
            context.pool.set_properties([dataset], {POLICY_PROPERTY: policy})
