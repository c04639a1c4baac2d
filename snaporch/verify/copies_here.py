"""Copies in a pool of this machine as snapshots that a test restore can clone and run.

Their guests are those of other hosts, or this host has lost them. A copy has a dataset of another
name, and its bundle is in another directory. What a bundle says of its host's paths is not true of
this machine, and may be forged: no such path is ever opened.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath

from snaporch import default_paths
from snaporch.bundle.manifest import (
    MANIFEST_NAME,
    BackingFileEntry,
    DiskEntry,
    Manifest,
    Part,
)
from snaporch.bundle.store import COPY_NAME, BundleStore, copy_name
from snaporch.catalog.records import all_records, snapshots_of_record
from snaporch.config import Config, Replica
from snaporch.context import Context
from snaporch.errors import InterruptedRunError, NotFoundError, RefusedError, SnaporchError
from snaporch.locks import readers_lock
from snaporch.model import BundleState, PoolSnapshot, SnapshotRecord
from snaporch.verify.restore_results import restore_results
from snaporch.verify.verify import Verification, VerifyOptions, verify

_PRUNE_SECONDS = 60
"""How long prune may destroy a copy of a guest, for which a test restore of it waits."""
_GONE = "was destroyed meanwhile"


def find_place(config: Config, name: str) -> Replica:
    """The copies in a pool of this machine with this name in the configuration.

    Raises:
        NotFoundError: there are none of this name here.
    """
    here = config.copies_here
    if name not in here:
        known = ", ".join(here) or "none"
        reason = f"no copies of this name are in a pool of this machine ({known})"
        step = "see docs/how-to/verify.md"
        if name in config.replica:
            step = f"without --test-restore: snaporch verify --on {shlex.quote(name)}"
        raise NotFoundError(name, reason, step)
    return here[name]


def named_as_copy(manifest: Manifest, root: str) -> Manifest:
    """The manifest with the names that its datasets have as copies.

    Args:
        manifest: of a bundle that was copied.
        root: the dataset that the copies are directly below.
    """

    def copy_of(dataset: str | None) -> str | None:
        return dataset and f"{root}/{copy_name(dataset)}"

    def beneath(file: BackingFileEntry) -> BackingFileEntry:
        # What is outside of the snapshot is not here: it is unknown whether it is the same.
        unknown = {"bytes": None, "inode": None, "mtime_ns": None}
        return file.model_copy(update={"dataset": copy_of(file.dataset), **unknown})

    def disk(each: DiskEntry) -> DiskEntry:
        changes: dict[str, object] = {"dataset": copy_of(each.dataset)}
        changes["beneath"] = tuple(map(beneath, each.beneath or ()))
        if each.dataset is not None and each.inside is None:
            changes["source"] = f"/dev/zvol/{copy_of(each.dataset)}"
        return each.model_copy(update=changes)

    def part(each: Part) -> Part:
        pages = each.pages
        if pages is None:
            return each
        moved = pages.model_copy(update={"dataset": copy_of(pages.dataset)})
        return each.model_copy(update={"pages": moved})

    # The txg is that of the original: none could be taken for the copy, renamed.
    snapshots = tuple(
        each.model_copy(update={"dataset": copy_of(each.dataset), "createtxg": 0})
        for each in manifest.snapshots
    )
    changes = {
        "snapshots": snapshots,
        "disks": tuple(map(disk, manifest.disks)),
        "parts": tuple(map(part, manifest.parts)),
    }
    return manifest.model_copy(update=changes)


def mount_points(manifest: Manifest) -> dict[str, Path]:
    """Where the file systems of a guest were mounted on its host, by dataset.

    Links in images name these paths. Known only where a disk's path ends with its place in the
    dataset, as it does unless a link leads there.
    """
    found: dict[str, Path] = {}
    for disk in manifest.disks:
        if disk.dataset and disk.inside and disk.source:
            source, inside = PurePosixPath(disk.source), PurePosixPath(disk.inside)
            depth = len(inside.parts)
            if source.is_absolute() and source.parts[-depth:] == inside.parts:
                found.setdefault(disk.dataset, Path(*source.parts[:-depth]))
    return found


class CopiedBundles(BundleStore):
    """The bundles of copies, whose manifests name the copies.

    Args:
        root: the directory.
        dataset: the dataset that the copies are directly below.
    """

    def __init__(self, root: Path, dataset: str) -> None:
        super().__init__(root)
        self._dataset = dataset

    def state(self, reference: str) -> tuple[BundleState, Manifest | None]:
        """See :class:`BundleStore`; files must be plain ones, since the sender chose them."""
        state, manifest = super().state(reference)
        if manifest is None:
            return state, None
        if _not_plain(self.path(reference), manifest) is not None:
            state = BundleState.INCOMPLETE
        return state, named_as_copy(manifest, self._dataset)


def _not_plain(directory: Path, manifest: Manifest | None) -> Path | None:
    """The first file of a bundle, or directory above it, that is a link or not a file at all."""
    for above in (directory.parent, directory):
        if above.is_symlink():
            return above
    parts = manifest.parts if manifest is not None else ()
    for name in (MANIFEST_NAME, *(each.name for each in parts)):
        with suppress(FileNotFoundError):
            if not stat.S_ISREG((directory / name).lstat().st_mode):
                return directory / name
    return None


class NotRestorableError(RefusedError):
    """A copy cannot be restored here, or not yet; nothing may be wrong with it."""


class CopiesHere:
    """The copies at one place of this machine.

    Args:
        context: of this machine.
        name: of the section of the configuration.
        place: where the copies are.
    """

    def __init__(self, context: Context, name: str, place: Replica) -> None:
        self._name = name
        self._root = place.dataset
        paths = context.config.paths.model_copy(update={"bundles": Path(place.bundles)})
        self._context = replace(
            context,
            config=context.config.model_copy(update={"paths": paths}),
            open_store=lambda root: CopiedBundles(root, place.dataset),
            foreign=True,
        )

    def find(self, names: Sequence[str]) -> list[SnapshotRecord]:
        """The records of the copies that ``DOMAIN`` and ``DOMAIN@SNAPSHOT`` name; all without.

        Raises:
            NotFoundError: there is none of a name.
        """
        there = self._context.pool.snapshots()
        own = [each for each in there if each.dataset.rpartition("/")[0] == self._root]
        records = all_records(self._context.store, own)
        found: dict[tuple[str, str, str], SnapshotRecord] = {}
        for name in names:
            named = [e for e in records if name in (e.domain, e.uuid, e.full_name)]
            if not named:
                known = ", ".join(sorted({each.domain for each in records})) or "no guest"
                reason = f"{self._name} has no copy of it, but of: {known}"
                raise NotFoundError(name, reason, f"see: zfs list -r -t snapshot {self._root}")
            found |= {(each.uuid, each.run, each.snapshot): each for each in named}
        results = restore_results(self._context.config, own)
        tested = {(each.uuid, each.snapshot): each.result for each in results}
        return [
            replace(each, verified=tested.get((each.uuid, each.snapshot)))
            for each in (found.values() if names else records)
        ]

    def verify(self, record: SnapshotRecord, options: VerifyOptions) -> Verification:
        """Restore a copy in a clone, and write the result on its ZFS snapshots.

        Args:
            record: of :meth:`find`.
            options: see :class:`VerifyOptions`.

        Raises:
            NotRestorableError: its bundle is encrypted, or has not arrived, or the copy was
                destroyed meanwhile.
            SnaporchError: there is no result, for a reason outside the copy; nothing is written.
        """
        reference = f"{record.uuid}/{record.run}"
        _, manifest = self._context.store.state(reference)
        path = _not_plain(self._context.store.path(reference), manifest)
        if path is not None:
            reason = f"{path} is no plain file, and so was not made by a transfer"
            raise RefusedError(record.full_name, reason, f"see: ls -l {shlex.quote(str(path))}")
        words = ["snaporch", "verify", "--on", self._name, record.full_name]
        checked = f"to compare its checksums: {shlex.join(words)}"
        if manifest is not None and manifest.is_encrypted:
            reason = "its bundle is encrypted, so that only its key can restore it"
            raise NotRestorableError(record.full_name, reason, checked)
        if record.verified is None and not self._has_arrived(reference, manifest):
            raise NotRestorableError(record.full_name, "its bundle has not arrived", checked)
        mounted = mount_points(manifest) if manifest is not None else {}
        resolver = replace(self._context.resolver, mounted=mounted)
        context = replace(self._context, resolver=resolver)
        with self._not_pruned(record):
            return self._verify(context, record, replace(options, on=self._name))

    def _not_pruned(self, record: SnapshotRecord) -> AbstractContextManager[None]:
        """Keep the retention of copies from destroying what is read; it waits for one destroy."""
        return readers_lock(
            default_paths.LOCKS,
            record.domain,
            record.uuid,
            alone=False,
            wait=_PRUNE_SECONDS,
            interrupt=self._context.interrupt,
        )

    def _verify(
        self, context: Context, record: SnapshotRecord, options: VerifyOptions
    ) -> Verification:
        before = self._members(record)
        if not before:
            raise NotRestorableError(record.full_name, _GONE)
        try:
            outcome = verify(context, record, options)
        except InterruptedRunError:
            raise
        except SnaporchError as error:
            if self._members(record) == before:
                raise
            raise NotRestorableError(record.full_name, _GONE) from error
        if outcome.failure is not None and self._members(record) != before:
            raise NotRestorableError(record.full_name, _GONE)
        return outcome

    def _members(self, record: SnapshotRecord) -> list[PoolSnapshot]:
        """The ZFS snapshots of a copy that exist now, without what is written on them."""
        found = snapshots_of_record(self._context.store, self._context.pool.snapshots(), record)
        return [replace(each, properties={}) for each in found]

    def _has_arrived(self, reference: str, manifest: Manifest | None) -> bool:
        """Whether the bundle came as a whole: its last file is the description of the copy."""
        path = self._context.store.path(reference) / COPY_NAME
        return manifest is not None and os.path.lexists(path)

    def verify_all(
        self, records: Sequence[SnapshotRecord], options: VerifyOptions, count: int
    ) -> Iterator[Verification | SnaporchError]:
        """Restore copies one after the other, until ``count`` have a result.

        A copy that has none does not count: without a result it comes first again.

        Yields:
            The result, or the error that kept a copy from being restored.

        Raises:
            InterruptedRunError: a signal came.
        """
        for record in records:
            if count <= 0:
                return
            try:
                outcome: Verification | SnaporchError = self.verify(record, options)
                count -= 1
            except InterruptedRunError:
                raise
            except SnaporchError as error:
                outcome = error
            yield outcome
