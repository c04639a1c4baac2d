"""Decrypts what a rebuild reads of an encrypted bundle, and refuses without an identity for it.

The form of encrypted bundles is in :mod:`snaporch.bundle.encrypted_bundles`, the command ``age`` in
:mod:`snaporch.bundle.age`.
"""

from __future__ import annotations

import shlex

from snaporch.bundle.age import AgeError, Digest, Identity
from snaporch.bundle.encrypted_bundles import EncryptedBundles
from snaporch.bundle.manifest import Manifest, Part
from snaporch.config.recipients import is_recipient
from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.replication.interface import ReplicaError
from snaporch.zfs_names import quoted

_SHOWN = 4
"""Public keys that a message names."""


def missing_identity(thing: str, manifest: Manifest, replica: str) -> RefusedError:
    """The error for an encrypted bundle that cannot be decrypted without its identity.

    Args:
        thing: the subject.
        manifest: of the bundle.
        replica: the name of the replica that has it.
    """
    keys = [e if is_recipient(e) else quoted(e) for e in (manifest.recipients or ())[:_SHOWN]]
    chosen = f"{manifest.domain}@{manifest.snapshot}"
    disks = shlex.join(["snaporch", "rebuild", "--from", replica, chosen, "--no-restore"])
    return RefusedError(
        thing,
        f"its bundle is encrypted for {' or '.join(keys)}",
        f"name the file of the private key: --identity FILE; for the disks alone: {disks}",
    )


def decrypt_bundle(
    context: Context, bundles: EncryptedBundles, reference: str, identity: Identity
) -> None:
    """Decrypt a bundle, whose encrypted files are all here, into the store.

    Args:
        context: has the progress and the interrupt.
        bundles: has the files, which are discarded if they cannot be decrypted.
        reference: of the bundle.
        identity: decrypts it.

    Raises:
        ReplicaError: it cannot be decrypted.
    """

    def report(done: int, total: int) -> None:
        context.interrupt.check(reference)
        context.progress.amount(reference, done, total)

    context.progress.step(reference, "decrypting the bundle")
    try:
        bundles.decrypt(reference, identity, report)
    except AgeError as error:
        bundles.discard(reference)
        raise ReplicaError(reference, f"{error.thing} {error.reason}", error.step) from error


def decrypt_definition(thing: str, part: Part, data: bytes, identity: Identity) -> bytes:
    """Decrypt a definition as a replica has it; one that is not encrypted is returned as it is.

    Args:
        thing: the subject of the error.
        part: the definition, in the manifest on the replica.
        data: the content of its file.
        identity: decrypts it.

    Raises:
        ReplicaError: it cannot be decrypted.
    """
    if part.plain is None:
        return data
    try:
        return identity.decrypt_small(data, part.name, Digest(part.plain.bytes, part.plain.sha256))
    except AgeError as error:
        reason = f"its {part.role} {error.reason}"
        raise ReplicaError(thing, reason, error.step) from error
