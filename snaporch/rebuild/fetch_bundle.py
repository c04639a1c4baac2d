"""Fetches a bundle from a replica into the store, after checking where its files would be written.

An encrypted one is decrypted by :mod:`snaporch.rebuild.decrypt_bundles`.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from pathlib import Path

from snaporch.bundle.age import Identity
from snaporch.bundle.encrypted_bundles import EncryptedBundles, plain_manifest
from snaporch.bundle.manifest import MANIFEST_NAME, Manifest, Role
from snaporch.bundle.store import has_all_files
from snaporch.context import Context
from snaporch.errors import InterruptedRunError, RefusedError, SnaporchError
from snaporch.model import BundleState
from snaporch.rebuild.decrypt_bundles import decrypt_bundle, missing_identity
from snaporch.rebuild.local_checks import check_free
from snaporch.rebuild.plan import Copies, RebuildPlan, in_order, manifest_of_copy
from snaporch.rebuild.replica_source import Source
from snaporch.replication.interface import ReplicaError
from snaporch.replication.received_bundles import ReceivedBundles
from snaporch.replication.unsent_files import unsent_files
from snaporch.zfs_names import quoted

_NO_ID = (1 << 32) - 1
"""No user's or group's (chown(2)); greater numbers are impossible."""
_MODE = 0o666
"""What a file of the emulator's may allow."""
_STATE = (Path("/var/lib/libvirt/qemu/nvram"), Path("/var/lib/libvirt/swtpm"))
"""Where libvirt keeps UEFI variables and TPM state."""
_BY_HAND = "bring it back by hand: see docs/how-to/replication.md, 'By hand'"


def fetch_bundle(
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
            check_free(context.config.paths.bundles, reference, *both)
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
        raise missing_identity(reference, manifest, source.name)
    bundles = EncryptedBundles(context.store, source.name)
    directory = bundles.path(reference)
    if bundles.record(reference) != manifest or not has_all_files(directory, manifest):
        bundles.discard(reference)  # the record of what was sent, without the files
        bundles.prepare_root()
        _fetch_whole(source, manifest, text, ReceivedBundles(bundles.root, ""))
    decrypt_bundle(context, bundles, reference, identity)


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
            raise RefusedError(thing, reason, _BY_HAND)
        owners = (each for each in (part.uid, part.gid) if each is not None)
        if not (all(0 <= each < _NO_ID for each in owners) and not (part.mode or 0) & ~_MODE):
            reason = f"its {part.role} has an owner or a mode that is refused"
            raise RefusedError(thing, reason, _BY_HAND)
