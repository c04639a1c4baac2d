"""Bundles as replicas have them when they are encrypted, and what this host keeps of each.

A rebuild reads them, or refuses without an identity, in :mod:`snaporch.rebuild.decrypt_bundles`.

``STORE/.encrypted/<replica>/<domain UUID>/<run>/`` has the encrypted parts until they have arrived,
because encrypting again gives other bytes. Its manifest stays: it is this host's record of what the
replica should have, and is dropped with the bundle. When a guest is rebuilt, the encrypted parts
come to the same place, and are decrypted from there.

Such a manifest differs from the bundle's in its parts alone: their names end in ``.age``, sizes and
sums are those of the encrypted files, and ``plain`` has those of the bundle's.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from snaporch.bundle.age import Digest, Identity, encrypt
from snaporch.bundle.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestError,
    PlainEntry,
    manifest_bytes,
    read_manifest,
)
from snaporch.bundle.store import (
    RUN_NAME,
    UUID_NAME,
    BundleError,
    BundleStore,
    has_all_files,
)
from snaporch.errors import RefusedError
from snaporch.private_files import (
    private_directory,
    store_errors,
    subdirectories,
    sync_directory,
    write_private,
)

ENCRYPTED_NAME = ".encrypted"
"""In the store: the directory of all encrypted bundles."""
SUFFIX = ".age"
_MIB = 1 << 20
_OVERHEAD = 1.01
"""``age`` adds 16 bytes to each 64 KiB, and a header."""

OnBytes = Callable[[int, int], None]
"""Is called with the bytes so far, and those in all; an exception ends the work."""


def encrypted_manifest(
    manifest: Manifest, files: Mapping[str, Digest], recipients: Sequence[str]
) -> Manifest:
    """The manifest that a replica gets.

    Args:
        manifest: of the bundle.
        files: of each part: what it is when it is encrypted.
        recipients: the public keys.
    """
    parts = tuple(
        part.model_copy(
            update={
                "name": part.name + SUFFIX,
                "bytes": files[part.name].bytes,
                "sha256": files[part.name].sha256,
                "plain": PlainEntry(bytes=part.bytes, sha256=part.sha256),
            }
        )
        for part in manifest.parts
    )
    return manifest.model_copy(update={"parts": parts, "recipients": tuple(recipients)})


def plain_manifest(manifest: Manifest) -> Manifest:
    """The manifest of the bundle, from that of its encrypted files; others are returned as is.

    Raises:
        ManifestError: only some of its parts are encrypted.
    """
    if not manifest.is_encrypted:
        return manifest
    parts = []
    for part in manifest.parts:
        if part.plain is None or not part.name.endswith(SUFFIX) or manifest.recipients is None:
            raise ManifestError(f"{manifest.uuid}/{manifest.run}", "is encrypted only in part")
        plain = {"bytes": part.plain.bytes, "sha256": part.plain.sha256, "plain": None}
        parts.append(part.model_copy(update={"name": part.name.removesuffix(SUFFIX), **plain}))
    return manifest.model_copy(update={"parts": tuple(parts), "recipients": None})


class EncryptedBundles:
    """The encrypted bundles of one replica.

    Args:
        store: the bundle store of this host.
        replica: the replica's name in the configuration.
    """

    def __init__(self, store: BundleStore, replica: str) -> None:
        self._store = store
        self.root = store.root / ENCRYPTED_NAME / replica

    def path(self, reference: str) -> Path:
        """The directory of a bundle.

        Raises:
            BundleError: it is not a valid reference.
        """
        return self.root / self._store.path(reference).relative_to(self._store.root)

    def prepare_root(self) -> None:
        """Create the directory of the encrypted bundles, for root alone."""
        with store_errors(self.root):
            private_directory(self.root.parent)
            private_directory(self.root)

    def record(self, reference: str) -> Manifest | None:
        """The manifest of what was encrypted; None without a valid one."""
        with suppress(ManifestError):
            found = read_manifest(self.path(reference))
            return found if found.is_encrypted else None
        return None

    def record_of(self, reference: str, manifest: Manifest | None) -> Manifest | None:
        """The manifest of what was encrypted of a bundle; None if that was another one.

        Args:
            reference: ``uuid/run``.
            manifest: of the bundle as it is now, or None if that is not known.
        """
        found = self.record(reference)
        if found is None or manifest is None:
            return found
        with suppress(ManifestError):
            return found if plain_manifest(found) == manifest else None
        return None

    def prepare(
        self, reference: str, manifest: Manifest, recipients: Sequence[str], on_bytes: OnBytes
    ) -> Path:
        """Encrypt a bundle, unless that was done and it has not arrived yet.

        Only one waits for a replica: the encrypted parts of all others are removed first.

        Args:
            reference: ``uuid/run``.
            manifest: of the bundle, which is whole.
            recipients: the public keys.
            on_bytes: see :data:`OnBytes`.

        Returns:
            The directory of the encrypted files and their manifest.

        Raises:
            BundleError: a part differs from the manifest.
            RefusedError: the store has no room for it.
            AgeError, UnavailableError: it cannot be encrypted, or not be written.
        """
        directory = self.path(reference)
        found = self.record_of(reference, manifest)
        same = found is not None and found.recipients == tuple(recipients)
        if found is not None and same and has_all_files(directory, found):
            return directory
        self.prepare_root()
        with store_errors(self.root):
            private_directory(directory.parent)
            partial = directory.with_name(f".{directory.name}.partial")
            self._drop_waiting()
            self._check_room(reference, manifest)
            partial.mkdir(mode=0o700)
            try:
                files = self._encrypt(reference, manifest, partial, recipients, on_bytes)
                made = encrypted_manifest(manifest, files, recipients)
                write_private(partial / MANIFEST_NAME, manifest_bytes(made))
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            sync_directory(partial)
            shutil.rmtree(directory, ignore_errors=True)
            partial.rename(directory)
            sync_directory(directory.parent)
        return directory

    def _drop_waiting(self) -> None:
        """Remove all encrypted parts for the replica; the records stay."""
        for domain in subdirectories(self.root):
            for each in subdirectories(domain):
                if each.name.startswith("."):
                    shutil.rmtree(each)
                else:
                    _keep_record(each)

    def _check_room(self, reference: str, manifest: Manifest) -> None:
        """Check for room, with as much left as the guest's next snapshot with RAM needs."""
        needed = 2 * (int(sum(part.bytes for part in manifest.parts) * _OVERHEAD) + _MIB)
        free = shutil.disk_usage(self._store.root).free
        if needed > free:
            figures = (
                f"{needed // _MIB} MiB are needed to encrypt it, of which half is for the next "
                f"snapshot, and {free // _MIB} are free"
            )
            raise RefusedError(reference, figures, f"make room in {self._store.root}")

    def _encrypt(
        self,
        reference: str,
        manifest: Manifest,
        target: Path,
        recipients: Sequence[str],
        on_bytes: OnBytes,
    ) -> dict[str, Digest]:
        source, found, before = self._store.path(reference), {}, 0
        total = sum(part.bytes for part in manifest.parts)
        for part in manifest.parts:

            def report(done: int, before: int = before) -> None:
                on_bytes(before + done, total)

            path = source / part.name
            plain, made = encrypt(path, target / f"{part.name}{SUFFIX}", recipients, report)
            if plain != (part.bytes, part.sha256):
                raise BundleError(str(path), "its SHA-256 differs from the manifest's")
            found[part.name] = made
            before += part.bytes
        return found

    def arrived(self, reference: str) -> None:
        """Remove the encrypted parts of a bundle, if any, and keep their manifest as the record."""
        directory = self.path(reference)
        with store_errors(directory), suppress(FileNotFoundError):
            _keep_record(directory)

    def write_record(self, reference: str, text: bytes) -> None:
        """Record what a replica has, by the content of its manifest; nothing else is kept here.

        Raises:
            UnavailableError: the store cannot be written.
        """
        self.prepare_root()
        self.discard(reference)
        directory = self.path(reference)
        with store_errors(directory):
            private_directory(directory.parent)
            private_directory(directory)
            write_private(directory / MANIFEST_NAME, text)

    def discard(self, reference: str) -> None:
        """Remove what is here of an encrypted bundle."""
        shutil.rmtree(self.path(reference), ignore_errors=True)

    def decrypt(self, reference: str, identity: Identity, on_bytes: OnBytes) -> None:
        """Decrypt a bundle that was fetched into :meth:`path`; it is in the store then, sealed.

        The caller holds the domain's lock. The encrypted parts are removed, see :meth:`arrived`.

        Args:
            reference: ``uuid/run``.
            identity: the private keys.
            on_bytes: see :data:`OnBytes`.

        Raises:
            AgeError: no identity decrypts it, it was changed, or it is not what the manifest says.
            ManifestError: its manifest is invalid.
            UnavailableError: the store cannot be written.
        """
        source = self.path(reference)
        sent = read_manifest(source)
        manifest = plain_manifest(sent)
        total, before = sum(part.bytes for part in manifest.parts), 0
        self._store.discard_partial(sent.uuid, sent.run)
        partial = self._store.create(sent.uuid, sent.run)
        try:
            with store_errors(partial.directory):
                for part, encrypted in zip(manifest.parts, sent.parts, strict=True):

                    def report(done: int, before: int = before) -> None:
                        on_bytes(before + done, total)

                    plain = Digest(part.bytes, part.sha256)
                    path = source / encrypted.name
                    identity.decrypt(path, partial.directory / part.name, plain, report)
                    before += part.bytes
                partial.seal(manifest)
        except BaseException:
            self._store.discard_partial(sent.uuid, sent.run)
            raise
        self.arrived(reference)


def _keep_record(directory: Path) -> None:
    for path in directory.iterdir():
        if path.name != MANIFEST_NAME:
            path.unlink()


def sweep(store: BundleStore, replicas: Collection[str], trashed: Collection[str]) -> None:
    """Remove what is encrypted of bundles that the store does not have any more.

    Of a replica that gets no encrypted bundles any more, only the records stay.

    Args:
        store: the bundle store.
        replicas: the names of those that get encrypted bundles.
        trashed: references of bundles in the trash, which may come back.

    Raises:
        UnavailableError: the store cannot be read or written.
    """
    above = store.root / ENCRYPTED_NAME
    if not above.is_dir() or above.is_symlink():
        return
    known = {*store.references(), *trashed}
    with store_errors(above):
        for replica in subdirectories(above):
            bundles = EncryptedBundles(store, replica.name)
            for domain in subdirectories(replica):
                if not re.fullmatch(UUID_NAME, domain.name):
                    continue
                for each in subdirectories(domain):
                    reference = f"{domain.name}/{each.name}"
                    if re.fullmatch(RUN_NAME, each.name) is None or reference not in known:
                        shutil.rmtree(each)
                    elif replica.name not in replicas:
                        bundles.arrived(reference)
                with suppress(OSError):
                    domain.rmdir()  # if it is empty
