"""Bring a guest's datasets and bundles back from a replica; each step can be repeated.

Order: all datasets, then the properties of their snapshots, then the bundles, then mounting. Until
a snapshot has its properties, neither retention nor ``prune`` knows it, and then ``copy`` protects
it. Nothing here destroys, rolls back or overwrites anything on this host.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

from snaporch import default_paths
from snaporch.bundle.age import AgeError, Digest, Identity
from snaporch.bundle.encrypted_bundles import EncryptedBundles, plain_manifest
from snaporch.bundle.manifest import MANIFEST_NAME, Manifest, Part, Role
from snaporch.bundle.store import MARKER, has_all_files
from snaporch.catalog.records import COPY, check_store
from snaporch.config.replica import is_recipient
from snaporch.context import Context
from snaporch.errors import InterruptedRunError, RefusedError, SnaporchError
from snaporch.hypervisor import domain_xml
from snaporch.locks import REPLICATION, domain_lock
from snaporch.model import BundleState, PoolSnapshot
from snaporch.private_files import private_directory, store_errors
from snaporch.rebuild.dataset_settings import Settings
from snaporch.rebuild.local_datasets import ARRIVED, RECEIVED, Local
from snaporch.rebuild.plan import (
    Copies,
    Incoming,
    RebuildPlan,
    check_local,
    check_others,
    choose_snapshot,
    find_uuid,
    in_order,
    make_plan,
    manifest_of_copy,
    remaining,
)
from snaporch.rebuild.replica_source import Source
from snaporch.rebuild.surroundings import apply_settings
from snaporch.replication.interface import ReplicaError
from snaporch.replication.marks import COPIED, OF_PAGES
from snaporch.replication.receive_request import is_mark
from snaporch.replication.received_bundles import ReceivedBundles
from snaporch.replication.resume_transfer import NO_TOKEN
from snaporch.replication.unsent_files import unsent_files
from snaporch.restore.definition_checks import check_identity
from snaporch.snapshot.host_directories import existing_part, free_mib
from snaporch.zfs import POLICY_PROPERTY, PREFIX, RAM_PROPERTY, REBUILD_PROPERTY
from snaporch.zfs_names import quoted

_MAX_XML = 1 << 20
_SHOWN = 4
"""Public keys that a message names."""
BY_HAND = "bring it back by hand: see docs/how-to/replication.md, 'By hand'"
_NO_ID = (1 << 32) - 1
"""No user's or group's (chown(2)); greater numbers are impossible."""
_MODE = 0o666
"""What a file of the emulator's may allow."""
_STATE = (Path("/var/lib/libvirt/qemu/nvram"), Path("/var/lib/libvirt/swtpm"))
"""Where libvirt keeps UEFI variables and TPM state."""


def check_room(context: Context, plan: RebuildPlan) -> None:
    """Refuse a bundle that the store has no room for.

    Raises:
        RefusedError: with the bytes.
    """
    store = context.config.paths.bundles
    if context.store.state(plan.reference)[0] is not BundleState.COMPLETE:
        manifests = (plan.manifest, *([plan.sent] if plan.sent else []))
        _check_free(store, plan.thing, *manifests)


def _check_free(store: Path, thing: str, *manifests: Manifest) -> None:
    needed = sum(part.bytes for each in manifests for part in each.parts) >> 20
    free = free_mib(existing_part(store))
    if needed > free:
        reason = f"has {free} MiB free, and the bundle of {thing} needs {needed} MiB"
        raise RefusedError(str(store), reason, "make room, and try again")


class AlreadyHereError(RefusedError):
    """The guest is on this host, so there is nothing to rebuild."""

    plan: RebuildPlan | None = None
    """What would have come back."""


def check_guest(context: Context, plan: RebuildPlan) -> None:
    """Refuse to bring back a guest that this host has.

    Raises:
        AlreadyHereError: it runs.
        RefusedError: another guest has its name.
    """
    manifest = plan.manifest
    for domain in context.hypervisor.domains():
        if domain.uuid == manifest.uuid and domain.active:
            step = f"to restore it here: snaporch restore {plan.thing}"
            here = AlreadyHereError(domain.name, "runs on this host", step)
            here.plan = plan
            raise here
        if domain.name == manifest.domain and domain.uuid != manifest.uuid:
            step = f"virsh domrename {domain.name} NEW, or rebuild on another host"
            raise RefusedError(domain.name, "is another guest of this host (UUID differs)", step)


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
            _receive(context, source, local, each)
        for each in plan.incoming:
            _mark(context, source, each)
        for run in runs:
            _fetch(context, source, plan, run, identity)
        # Not before: `prune` would destroy pages without a bundle.
        for pages in (each.dataset for each in plan.incoming if each.is_pages):
            context.pool.set_properties([pages], {RAM_PROPERTY: manifest.uuid})
        left_out = apply_settings(context, settings)
        set_stage(context, plan, Stage.RESTORE)
        for each in sorted(plan.incoming, key=lambda each: each.mountpoint):
            _mount(context, local, each, places[each.dataset])
    return left_out


class Stage(StrEnum):
    """What has yet to be done for a guest whose data came back: a property of its datasets."""

    TRANSFER = RECEIVED
    RESTORE = ARRIVED
    FINISH = "finish"
    """It was restored; policies and autostart are to be set."""


def set_stage(context: Context, plan: RebuildPlan, stage: Stage | None) -> None:
    """Record what has yet to be done, so that the same command finishes it; None for nothing."""
    names = [each.dataset for each in plan.incoming]
    if stage is None:
        context.pool.clear_properties(names, [REBUILD_PROPERTY])
    else:
        context.pool.set_properties(names, {REBUILD_PROPERTY: stage})


def stage_of(context: Context, plan: RebuildPlan) -> Stage | None:
    """What has yet to be done for a guest that is here; None for nothing."""
    found = context.pool.local_properties([REBUILD_PROPERTY])
    values = {found.get(each.dataset, {}).get(REBUILD_PROPERTY) for each in plan.incoming}
    return next((stage for stage in Stage if stage in values), None)


def _mount(context: Context, local: Local, each: Incoming, place: str) -> None:
    """Mount a dataset; for pages that is not needed now, so a failure is a note."""
    try:
        local.mount(each.dataset, each.kind, place)
    except RefusedError as error:
        if not each.is_pages:
            raise
        context.progress.note(each.dataset, error.explanation)


def _receive(context: Context, source: Source, local: Local, each: Incoming) -> None:
    """Receive the snapshots of a dataset that have yet to come."""
    for snapshot, base in remaining(each, local.state(each.dataset), source.name):
        thing = f"{each.dataset}@{snapshot.name}"
        context.progress.step(
            each.dataset, f"receiving @{snapshot.name} from replica {source.name}"
        )
        local.make_parents(each.dataset)
        token = local.state(each.dataset).token
        receiver = local.receiver(each.dataset, snapshot.name, each.kind, resumable=source.resumes)
        try:
            source.receive(snapshot, base, token, receiver, raw=each.raw)
        except InterruptedRunError:
            raise
        except (RefusedError, ReplicaError) as error:
            if token == NO_TOKEN:
                raise
            discard = f"zfs receive -A {each.dataset}"
            step = f"try again; if this error comes again: {discard}, and run this command again"
            raise ReplicaError(thing, error.reason, step) from error
        if snapshot.guid not in local.state(each.dataset).guids:
            reason = f"did not arrive from replica {source.name}: it sent another snapshot, or none"
            raise ReplicaError(thing, reason, f"zfs list -t snapshot {each.dataset}")


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
    """The properties that a snapshot gets: those of its copy that are possible."""
    keys = (*COPIED, *OF_PAGES)
    found = {k: v for k, v in snapshot.properties.items() if k in keys and is_mark(k, v)}
    return {**found, COPY: replica} if found else {}


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


def _fetch(
    context: Context, source: Source, plan: RebuildPlan, run: str, identity: Identity | None
) -> None:
    """Fetch a bundle, unless it is here; one of an older snapshot may fail, with a note.

    Args:
        context: has the store.
        source: the replica.
        plan: has the manifest of the chosen snapshot, as it was checked and shown.
        run: of the bundle.
        identity: decrypts it.

    Raises:
        SnaporchError: it is damaged on the replica, not what was shown, or the transfer failed.
    """
    shown = plan.manifest
    reference, needed = f"{shown.uuid}/{run}", run == shown.run
    state, here = context.store.state(reference)
    if state is BundleState.COMPLETE:
        if needed and here != shown:
            step = f"move {context.store.path(reference)} away, and run this command again"
            raise RefusedError(reference, "is on this host, and differs from the replica's", step)
        return
    context.progress.step(reference, f"fetching the bundle from {source.name}")
    try:
        text = source.manifest(reference).encode("utf-8", "surrogateescape")
        manifest = manifest_of_copy(text, shown.uuid, run)
        if manifest is None:
            raise ReplicaError(reference, "its manifest is damaged, or of another bundle")
        if needed and manifest != (plan.sent or shown):
            reason = f"is not the bundle that was checked: replica {source.name} changed it"
            raise ReplicaError(reference, reason, "run this command again, and read what it shows")
        plain = plain_manifest(manifest)
        check_files(reference, plain)
        if not needed:  # of the one that was shown, it was checked before
            both = (plain, *([manifest] if manifest.is_encrypted else []))
            _check_free(context.config.paths.bundles, reference, *both)
        if manifest.is_encrypted:
            _fetch_encrypted(context, source, manifest, text, identity)
        else:
            received = ReceivedBundles(context.store.root, "")
            _fetch_whole(source, manifest, text, received)
    except InterruptedRunError:
        raise
    except SnaporchError as error:
        if needed:
            raise
        context.progress.note(reference, f"its bundle did not come back: {error.line()}")


def _fetch_encrypted(
    context: Context,
    source: Source,
    manifest: Manifest,
    text: bytes,
    identity: Identity | None,
) -> None:
    """Fetch the files of an encrypted bundle, and decrypt them into the store."""
    reference = f"{manifest.uuid}/{manifest.run}"
    if identity is None:
        raise missing_identity(reference, manifest)
    bundles = EncryptedBundles(context.store, source.name)
    directory = bundles.path(reference)
    if bundles.record(reference) != manifest or not has_all_files(directory, manifest):
        bundles.discard(reference)  # the record of what was sent, without the files
        bundles.prepare_root()
        _fetch_whole(source, manifest, text, ReceivedBundles(bundles.root, ""))

    def report(done: int, total: int) -> None:
        context.interrupt.check(reference)
        context.progress.amount(reference, done, total)

    context.progress.step(reference, "decrypting the bundle")
    try:
        bundles.decrypt(reference, identity, report)
    except AgeError as error:
        bundles.discard(reference)
        raise ReplicaError(reference, f"{error.thing} {error.reason}", error.step) from error


def missing_identity(thing: str, manifest: Manifest) -> RefusedError:
    """The error for an encrypted bundle that cannot be decrypted without its identity."""
    keys = [e if is_recipient(e) else quoted(e) for e in (manifest.recipients or ())[:_SHOWN]]
    return RefusedError(
        thing,
        f"its bundle is encrypted for {' or '.join(keys)}",
        "name the file of the private key: --identity FILE; for the disks alone: --no-restore",
    )


def _fetch_whole(
    source: Source, manifest: Manifest, text: bytes, received: ReceivedBundles
) -> None:
    """Fetch all files of a bundle.

    Args:
        source: the replica.
        manifest: of the bundle, as the replica has it.
        text: the content of the manifest's file.
        received: where it comes.

    Raises:
        ReplicaError: it is damaged, or the transfer failed.
    """
    reference = f"{manifest.uuid}/{manifest.run}"
    sums = {part.name: part.sha256 for part in manifest.parts}
    sizes = {part.name: part.bytes for part in manifest.parts}
    sums[MANIFEST_NAME], sizes[MANIFEST_NAME] = hashlib.sha256(text).hexdigest(), len(text)
    unsent = unsent_files(sizes, sums, received.begun(manifest.uuid, manifest.run))
    damaged = source.fetch(reference, unsent, received)
    if damaged:  # maybe only what an interrupted transfer left, which is discarded by now
        damaged = source.fetch(reference, unsent_files(sizes, sums, {}), received)
    if damaged:
        reason = f"is damaged on the replica: {', '.join(damaged)}"
        raise ReplicaError(reference, reason, "name an older snapshot: DOMAIN@SNAPSHOT")


def plan_guest(
    context: Context, source: Source, local: Local, copies: Copies, words: str, *, history: bool
) -> RebuildPlan:
    """Plan how to bring back one guest, and make the checks that need no transfer.

    Args:
        context: the pools and the guests of this host.
        source: the replica.
        local: the datasets of this host.
        copies: all snapshots of its copies.
        words: the guest's name or UUID, or ``DOMAIN@SNAPSHOT``.
        history: the older snapshots and their bundles come back, too.

    Raises:
        SnaporchError: the replica does not have all of it, or this host is in the way.
    """
    everything = [each for snapshots in copies.values() for each in snapshots]
    names = {e.properties.get(key) for e in everything for key in ("domain", "uuid")}
    domain, _, snapshot = (words, "", "") if words in names else words.rpartition("@")
    uuid = find_uuid(source, everything, domain or snapshot)
    manifest, name = choose_snapshot(source, copies, uuid, snapshot if domain else "")
    plan = make_plan(source, copies, manifest, name, history=history)
    check_guest(context, plan)
    check_store(context.store, context.pool, context.hypervisor)
    present = context.pool.datasets()
    here = {each.name for each in present}
    has_disks = all(each.dataset in here or each.is_pages for each in plan.incoming)
    stage = stage_of(context, plan) if context.hypervisor.find(uuid) else Stage.TRANSFER
    if has_disks and stage in (Stage.RESTORE, Stage.FINISH):
        raise _already_here(plan)  # it may have snapshots of its own by now
    has_to_come = check_local(plan, local, {each.pool for each in present}, source.name)
    if not has_to_come and stage is not Stage.TRANSFER:
        raise _already_here(plan)
    check_others(plan, copies, here)
    check_room(context, plan)
    for each in plan.incoming:
        local.mountpoint_to_set(each.dataset, each.mountpoint)
    return plan


def _already_here(plan: RebuildPlan) -> AlreadyHereError:
    step, reason = f"snaporch restore {plan.thing}", "is on this host, with all its datasets"
    here = AlreadyHereError(plan.manifest.domain, reason, step)
    here.plan = plan
    return here


def runs_to_fetch(source: Source, copies: Copies, plan: RebuildPlan, *, history: bool) -> list[str]:
    """The runs whose bundles come: the chosen one's, with ``history`` the older ones', too."""
    run = plan.manifest.run
    runs = in_order(copies, source.bundles(plan.manifest.uuid)) if history else [run]
    return runs[: runs.index(run) + 1]


def check_files(thing: str, manifest: Manifest) -> None:
    """Refuse a bundle whose files would be written elsewhere than libvirt keeps such files.

    The definition is the replica's, too, so it proves nothing. A path is its own normal form, so
    that no other one names the same file. No file may be run, or belong to an impossible user.

    Raises:
        RefusedError: with the file.
    """
    for part in manifest.parts:
        if part.role not in (Role.NVRAM, Role.TPM):
            continue
        source = part.source or "/"
        is_normal = posixpath.normpath(source) == source and source.isprintable()
        place = Path(os.path.realpath(source)) if is_normal else None
        if place is None or not any(place.is_relative_to(each) for each in _STATE):
            reason = (
                f"its {part.role} would be written to {source if is_normal else quoted(source)}"
            )
            raise RefusedError(thing, reason, BY_HAND)
        owners = (each for each in (part.uid, part.gid) if each is not None)
        if not (all(0 <= each < _NO_ID for each in owners) and not (part.mode or 0) & ~_MODE):
            reason = f"its {part.role} has an owner or a mode that is refused"
            raise RefusedError(thing, reason, BY_HAND)


def definitions(source: Source, plan: RebuildPlan, identity: Identity | None = None) -> list[str]:
    """The definitions in the bundle, the running guest's first.

    Args:
        source: the replica.
        plan: what comes back.
        identity: decrypts them.

    Raises:
        RefusedError: one is too long to be one, or of another guest, or there is no identity for
            encrypted ones.
        ReplicaError: one is not what the manifest says, or cannot be decrypted.
    """
    manifest = plan.sent or plan.manifest
    if plan.sent and identity is None:
        raise missing_identity(plan.thing, plan.sent)
    found = [manifest.part(role) for role in (Role.LIVE_XML, Role.INACTIVE_XML)]
    return [_definition(source, plan, part, identity) for part in found if part]


def _definition(source: Source, plan: RebuildPlan, part: Part, identity: Identity | None) -> str:
    if part.bytes > _MAX_XML:
        raise RefusedError(plan.thing, f"its {part.role} has {part.bytes >> 10} KiB", BY_HAND)
    data = source.text(plan.reference, part).encode("utf-8", "surrogateescape")
    if hashlib.sha256(data).hexdigest() != part.sha256:
        reason = f"its {part.role} is damaged on replica {source.name}"
        raise ReplicaError(plan.thing, reason, "name an older snapshot: DOMAIN@SNAPSHOT")
    if part.plain is not None and identity is not None:
        try:
            plain = Digest(part.plain.bytes, part.plain.sha256)
            data = identity.decrypt_small(data, part.name, plain)
        except AgeError as error:
            reason = f"its {part.role} {error.reason}"
            raise ReplicaError(plan.thing, reason, error.step) from error
    text = data.decode("utf-8", "surrogateescape")
    check_identity(plan.thing, f"its {part.role}", text, plan.manifest)
    return text


def host_paths(*xmls: str) -> list[str]:
    """The paths of this host in definitions, for the question to the admin."""
    return sorted({path for xml in xmls for path in domain_xml.host_paths(domain_xml.parse(xml))})
