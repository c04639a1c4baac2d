"""The bundles on a replica: compared with this host's, read again from time to time, replaced.

The names and sizes of their files are compared at each replication. Their content is compared with
the manifest's SHA-256 when they arrive, and again by the first replication after a week.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from snaporch.bundle.age import AgeError
from snaporch.bundle.encrypted_bundles import SUFFIX, EncryptedBundles, plain_manifest
from snaporch.bundle.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestError,
    parse_manifest,
)
from snaporch.bundle.store import COPY_NAME, BundleError
from snaporch.context import Context
from snaporch.errors import InterruptedRunError, SnaporchError
from snaporch.model import BundleState, SnapshotRecord
from snaporch.replication.interface import Destination, ReplicaError
from snaporch.zfs_names import quoted

READ_AGAIN_SECONDS = 7 * 86_400
"""A bundle on a replica is read again when it was last read so long ago."""
_SPREAD_SECONDS = 86_400
"""At each replication the bundle that was read longest ago is read again, if so long ago."""
_SHOWN = 3
"""Names in a message."""


class BundleFile(NamedTuple):
    """A file of a bundle."""

    bytes: int
    sha256: str


class BundleCopies:
    """A domain's bundles on a replica.

    Args:
        context: the configuration, the store and the progress of this host.
        destination: the replica.
        replica: its name in the configuration.
        records: the domain's snapshots, oldest first.
        manifests: of their bundles, by run.
    """

    def __init__(
        self,
        context: Context,
        destination: Destination,
        replica: str,
        records: Sequence[SnapshotRecord],
        manifests: Mapping[str, Manifest | None],
    ) -> None:
        self._context = context
        self._destination = destination
        self._replica = replica
        self._copies = destination.bundles(records[0].uuid)
        self._recipients = context.config.replica[replica].encrypt_to
        self._replaces_none = context.config.replica[replica].append_only
        self._encrypted = EncryptedBundles(context.store, replica)
        self._manifests = manifests
        self._files = {run: self._expected(manifest) for run, manifest in manifests.items()}
        self._read: set[str] = set()
        """Runs whose bundles were read there by this replication, and are whole."""
        self._stored: set[str] = set()
        """Of these, the ones that this replication has copied."""

    def _expected(self, manifest: Manifest | None) -> dict[str, BundleFile] | None:
        """The files that the replica should have of a bundle; None without a manifest.

        What was encrypted once is expected, for whichever recipients; also for none, as long as the
        replica has it.
        """
        if manifest is None:
            return None
        reference = f"{manifest.uuid}/{manifest.run}"
        sent = self._encrypted.record_of(reference, manifest)
        if not self._recipients:
            encrypted = _files(self._encrypted.path(reference), sent) if sent is not None else None
            copy = self._copies.get(manifest.run)
            if (
                encrypted
                and copy
                and all(copy.sizes.get(e) == encrypted[e].bytes for e in encrypted)
            ):
                return encrypted
            return _files(self._context.store.path(reference), manifest)
        if sent is None and self._replaces_none:
            sent = self._adopted(reference, manifest)
        found = _files(self._encrypted.path(reference), sent) if sent is not None else None
        return found or {MANIFEST_NAME: BundleFile(-1, "")}  # no file is as it should be

    def _adopted(self, reference: str, manifest: Manifest) -> Manifest | None:
        """Take over the record of what an append-only replica has: it accepts no other bytes.

        This host has none after the guest was rebuilt from elsewhere.

        Returns:
            None if the replica has no encrypted files of this bundle, by its own account.
        """
        if manifest.run not in self._copies:
            return None
        text = self._destination.manifest(reference).encode("utf-8", "surrogateescape")
        try:
            sent = parse_manifest(text, reference)
            if not sent.is_encrypted or plain_manifest(sent) != manifest:
                return None
        except ManifestError:
            return None
        self._encrypted.write_record(reference, text)
        note = "this host has no record of what it sent, and takes over the replica's"
        self._context.progress.note(f"{self._replica}: bundle {reference}", note)
        return sent

    def has_any(self, records: Iterable[SnapshotRecord]) -> bool:
        """Whether the replica has a directory of at least one of these bundles."""
        return any(record.run in self._copies for record in records)

    def differing(self, record: SnapshotRecord) -> tuple[str, ...]:
        """The files of a bundle that the replica lacks, or has with another size.

        Without a manifest here, only the bundle's directory is expected.
        """
        copy, files = self._copies.get(record.run), self._files[record.run]
        if copy is None:
            return tuple(files or [MANIFEST_NAME])
        sizes = {name: file.bytes for name, file in (files or {}).items()}
        wrong = [name for name, size in sizes.items() if copy.sizes.get(name) != size]
        return (*wrong, *(name for name in [COPY_NAME] if name not in copy.sizes))

    def due(self, records: Iterable[SnapshotRecord]) -> frozenset[str]:
        """The runs whose bundles must be read again by this replication."""
        ages = {r.run: self._copies[r.run].unread for r in records if r.run in self._copies}
        oldest = max(ages.values(), default=0)
        limit = oldest if _SPREAD_SECONDS < oldest < READ_AGAIN_SECONDS else READ_AGAIN_SECONDS
        return frozenset(run for run, age in ages.items() if age >= limit)

    def is_read(self, record: SnapshotRecord) -> bool:
        """Whether this replication has read the bundle there, or copied it."""
        return record.run in self._read

    def read(self, record: SnapshotRecord, *, in_clear: bool = False) -> tuple[str, ...]:
        """Read a bundle on the replica.

        Args:
            record: of the bundle.
            in_clear: it is there in clear, see :meth:`is_in_clear`.

        Returns:
            The files that are missing, or differ from this host's manifest. If this host has none,
            the files are compared with the manifest there.

        Raises:
            ReplicaError, CommandError: the replica does not answer.
        """
        self._context.progress.step(self._replica, f"reading the bundle of @{record.snapshot}")
        reference = f"{record.uuid}/{record.run}"
        files = self._clear_files(record.run) if in_clear else self._files[record.run]
        if files is None:
            sums = self._sums_there(record)
        else:
            sums = {name: file.sha256 for name, file in files.items()}
        if not sums:
            return (MANIFEST_NAME,)
        damaged = self._destination.damaged(reference, sums)
        if not damaged:
            self._read.add(record.run)
            if not in_clear:
                self._encrypted.arrived(reference)  # its parts may wait: the end was not noted
        return tuple(damaged)

    def _sums_there(self, record: SnapshotRecord) -> dict[str, str]:
        """The SHA-256 of each file in the replica's own manifest; empty without a valid one."""
        reference = f"{record.uuid}/{record.run}"
        text = self._destination.manifest(reference)
        try:
            manifest = parse_manifest(text.encode("utf-8", "surrogateescape"), reference)
        except ManifestError:
            return {}
        if (manifest.uuid, manifest.run) != (record.uuid, record.run):
            return {}
        return {part.name: part.sha256 for part in manifest.parts}

    def copy(self, record: SnapshotRecord) -> bool:
        """Copy a bundle to the replica, in place of the one that is there.

        A bundle that changes meanwhile is not copied; the next replication copies it.

        Returns:
            False if it is not whole on this host, or was pruned meanwhile.

        Raises:
            ReplicaError: the transfer failed, or a file here differs from its manifest's SHA-256.
            SnaporchError: it cannot be encrypted.
        """
        store, reference = self._context.store, f"{record.uuid}/{record.run}"
        state, manifest = store.state(reference)
        if state is not BundleState.COMPLETE or manifest is None or not self._files[record.run]:
            return False
        if manifest != self._manifests[record.run]:
            return True
        try:
            damaged = self._store(record, manifest)
        except InterruptedRunError:
            raise
        except SnaporchError:
            if not store.path(reference).is_dir():
                return False
            if store.state(reference)[1] != manifest:
                return True
            raise
        if not damaged:
            self._read.add(record.run)
            self._stored.add(record.run)
            return True
        if store.state(reference)[1] != manifest:
            return True
        raise self._damaged(record, ", ".join(damaged))

    def _store(self, record: SnapshotRecord, manifest: Manifest) -> list[str]:
        """Copy a bundle, encrypted if that is configured; return the damaged files."""
        reference = f"{record.uuid}/{record.run}"
        directory = self._context.store.path(reference)
        if self._recipients:
            directory = self._encrypt(record, manifest)
        else:
            self._encrypted.discard(reference)  # what was sent encrypted is not there any more
            self._files[record.run] = _files(directory, manifest)
        self._context.progress.step(self._replica, f"copying the bundle of @{record.snapshot}")
        sums = {name: file.sha256 for name, file in (self._files[record.run] or {}).items()}
        damaged = self._destination.store(directory, reference, sums)
        if damaged:
            # A power loss there may have damaged an earlier part, which is discarded by now.
            damaged = self._destination.store(directory, reference, sums)
        if self._recipients and damaged:
            self._encrypted.discard(reference)
        elif self._recipients:
            self._encrypted.arrived(reference)
        return damaged

    def _encrypt(self, record: SnapshotRecord, manifest: Manifest) -> Path:
        """Encrypt a bundle, unless that was done; return the directory of the encrypted files.

        Raises:
            ReplicaError: it is damaged, or changed meanwhile. Or an append-only replica has it in
                clear: it would not replace it.
            SnaporchError: it cannot be encrypted.
        """
        if self._replaces_none and self._is_clear(record.run):
            clear = [quoted(each) for each in sorted(self._copies) if self._is_clear(each)]
            raise ReplicaError(
                f"{self._replica}: {record.domain}",
                f"bundles are there in clear ({_listed(clear)}), and an append-only replica "
                "replaces none",
                f"move these away there, below its bundles/{record.uuid}: "
                "docs/how-to/replication.md, 'Encrypt bundles'",
            )
        context, reference = self._context, f"{record.uuid}/{record.run}"

        def report(done: int, total: int) -> None:
            context.interrupt.check(self._replica)
            context.progress.amount(self._replica, done, total)

        context.progress.step(self._replica, f"encrypting the bundle of @{record.snapshot}")
        try:
            directory = self._encrypted.prepare(reference, manifest, self._recipients, report)
        except AgeError as error:
            thing = f"{self._replica}: {record.full_name}"
            step = f"see encrypt_to of [replica.{self._replica}]"
            reason = f"its bundle was not encrypted: {error.reason}"
            raise ReplicaError(thing, reason, step) from error
        except BundleError as error:
            raise self._damaged(record, error.thing) from error
        self._files[record.run] = self._expected(manifest)
        return directory

    def is_in_clear(self, record: SnapshotRecord) -> bool:
        """Whether the replica has all of a bundle in clear, and bundles are sent encrypted now.

        By the names and sizes of its files.
        """
        copy, files = self._copies.get(record.run), self._clear_files(record.run) or {}
        if not self._recipients or copy is None:
            return False
        sizes = {name: file.bytes for name, file in files.items()}
        return bool(files) and COPY_NAME in copy.sizes and sizes.items() <= copy.sizes.items()

    def _clear_files(self, run: str) -> dict[str, BundleFile] | None:
        manifest = self._manifests[run]
        if manifest is None:
            return None
        return _files(self._context.store.path(f"{manifest.uuid}/{run}"), manifest)

    def note_in_clear(self, records: Sequence[SnapshotRecord]) -> None:
        """Note the bundles that are there in clear, and are copied again, encrypted.

        Args:
            records: snapshots of the domain that the replica has.
        """
        found = [
            f"@{each.snapshot}"
            for each in records
            if self.is_in_clear(each) and not self._stays_in_clear(each.run)
        ]
        if found and not self._replaces_none:
            self._context.progress.note(
                f"{self._replica}: {records[0].domain}",
                "bundles from before encrypt_to are there in clear, and are copied again, "
                f"encrypted: {_listed(found)}",
            )

    def note_left_in_clear(self, domain: str) -> None:
        """Note what is there in clear though bundles are sent encrypted, and cannot be replaced.

        Args:
            domain: the guest's name.
        """
        if not self._recipients:
            return
        if clear := [quoted(run) for run in sorted(self._copies) if self._stays_in_clear(run)]:
            self._context.progress.note(
                f"{self._replica}: {domain}",
                "bundles that this host has no longer, or not whole, are there in clear; remove "
                f"them there: {_listed(clear)}",
            )

    def _stays_in_clear(self, run: str) -> bool:
        """Whether a bundle is there in clear, and none of this host can replace it."""
        manifest = self._manifests.get(run)
        if not self._has_clear_parts(run) or run in self._stored:
            return False
        if manifest is None:
            return True
        reference = f"{manifest.uuid}/{manifest.run}"
        return self._context.store.state(reference)[0] is not BundleState.COMPLETE

    def _has_clear_parts(self, run: str) -> bool:
        names = self._copies[run].sizes.keys() - {MANIFEST_NAME, COPY_NAME}
        return any(not name.endswith(SUFFIX) for name in names)

    def _is_clear(self, run: str) -> bool:
        """Whether the replica has a bundle, and none of its files is encrypted."""
        copy = self._copies.get(run)
        return copy is not None and not any(name.endswith(SUFFIX) for name in copy.sizes)

    def _damaged(self, record: SnapshotRecord, files: str) -> ReplicaError:
        return ReplicaError(
            f"{self._replica}: {record.full_name}",
            f"its bundle is damaged on this host, and was not copied: {files}",
            f"see: {shlex.join(['snaporch', 'verify', record.full_name])}",
        )


def _listed(names: Sequence[str]) -> str:
    """Names for a message; of many only the first."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _files(directory: Path, manifest: Manifest) -> dict[str, BundleFile] | None:
    """The files in a directory, as its manifest describes them; None if that cannot be read."""
    try:
        text = (directory / MANIFEST_NAME).read_bytes()
    except OSError:
        return None
    found = {part.name: BundleFile(part.bytes, part.sha256) for part in manifest.parts}
    return {**found, MANIFEST_NAME: BundleFile(len(text), hashlib.sha256(text).hexdigest())}
