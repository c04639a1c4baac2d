"""Write a safety copy: the data that a restore discards, in files, so that it can be undone.

When a safety copy is deleted is decided by :mod:`snaporch.prune.decision`; those that exist are
listed by :mod:`snaporch.restore.safety_catalog`.

A rollback destroys every snapshot newer than its target, so a safety snapshot alone would not
survive it. Therefore everything between the target and the safety snapshot is written as an
incremental stream (``zfs send -I``, newer snapshots included; raw for an
encrypted dataset, as :mod:`snaporch.zfs.cli` decides) into the bundle store, with a script
that puts it back. The first stream is written while the guest runs; after the guest was stopped, a
second one has only the changes since. NVRAM, TPM state, a managed save image and, if requested, the
RAM of the guest are kept beside the streams.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from snaporch import __version__
from snaporch.bundle.firmware_files import read_host_file, tpm_files
from snaporch.bundle.manifest import (
    BackingFileEntry,
    DiskEntry,
    Manifest,
    Part,
    Role,
    SnapshotEntry,
    VersionsEntry,
    cut_to_milliseconds,
)
from snaporch.bundle.save_image import SaveImageError, read_header
from snaporch.catalog.run_snapshots import by_pool
from snaporch.context import Context
from snaporch.disks.backing_chain import find_beneath
from snaporch.errors import RefusedError, SnaporchError
from snaporch.model import Disk, Domain, LeftOutCode, Level, PoolSnapshot
from snaporch.private_files import (
    private_directory,
    replace_private,
    store_errors,
    sync_directory,
    write_private,
)
from snaporch.restore.journal import RestoreFacts, Target
from snaporch.restore.newer_snapshot_checks import SAFETY_PREFIX
from snaporch.restore.safety_catalog import (
    DIRECTORY,
    MANAGED_SAVE,
    RAM,
    RECORD,
    SafetyCopy,
    SafetyRecord,
    kept_of,
)
from snaporch.restore.undo_script import TPM_PREFIX, refusing_script, undo_script
from snaporch.snapshot.bundle_parts import backing_file_entry
from snaporch.snapshot.locate_disks import PlannedDisk, locate_disks
from snaporch.zfs import DatasetListing, Pool, PoolError

_MARGIN = 1.1


@dataclass
class SafetyCopyWriter:
    """Writes the safety copy of one restore."""

    context: Context
    directory: Path
    targets: tuple[Target, ...]
    _raw: dict[str, bool] = field(default_factory=dict)
    """Whether a dataset is encrypted, so that its streams are raw."""
    _last: dict[str, str] = field(default_factory=dict)
    _streams: list[tuple[str, Path]] = field(default_factory=list)
    _saves: int = 0
    _made: set[str] = field(default_factory=set)
    _parts: dict[str, Part] = field(default_factory=dict)

    @classmethod
    def place(cls, context: Context, uuid: str) -> Path:
        """Return the path of a new safety copy; the directory is not created."""
        stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"
        return context.store.root / uuid / f"{DIRECTORY}{stamp}"

    @classmethod
    def begin(
        cls, context: Context, directory: Path, targets: tuple[Target, ...]
    ) -> SafetyCopyWriter:
        """Create an empty safety copy. Files of an earlier attempt are deleted, except the RAM."""
        safety = cls(context, directory, targets)
        safety._sweep()
        with store_errors(context.store.root):
            private_directory(context.store.root)
            private_directory(directory.parent)
            private_directory(directory)
        encrypted = context.pool.encrypted()
        safety._raw = {target.dataset: target.dataset in encrypted for target in targets}
        safety._last = {target.dataset: target.full_name for target in targets}
        return safety

    @property
    def ram(self) -> Path:
        """The path of the RAM image of the running guest."""
        return self.directory / RAM

    @property
    def has_ram(self) -> bool:
        """Whether the RAM image exists and is complete."""
        try:
            return bool(read_header(self.ram))
        except (OSError, SaveImageError):
            return False

    @property
    def _stamp(self) -> str:
        return self.directory.name.removeprefix(DIRECTORY)

    def save(self) -> None:
        """Snapshot every dataset, and write the changes since the last call into the store.

        Raises:
            RefusedError: the store has too little room; the safety snapshots were destroyed again.
        """
        name = f"{SAFETY_PREFIX}{self._stamp}-{self._saves}"
        self._saves += 1
        pools = by_pool(f"{target.dataset}@{name}" for target in self.targets)
        for names in pools:
            self.context.pool.snapshot(names, {})
        taken = [full for names in pools for full in names]
        self._made.update(taken)
        try:
            for full, expected in self._check_room(taken).items():
                self._send(full, expected)
        except BaseException:
            for names in pools:
                self.context.pool.destroy_snapshots(names)
            raise

    def _check_room(self, taken: list[str]) -> dict[str, int]:
        """Refuse streams for which there is too little room; the expected bytes of each."""
        sizes = {full: self._increment_size(full) for full in taken}
        self.check_room(sum(sizes.values()))
        return sizes

    def _increment_size(self, full: str) -> int:
        dataset = full.split("@", 1)[0]
        last, raw = self._last[dataset], self._raw[dataset]
        return self.context.pool.increment_size(last, full, raw=raw)

    def check_room_for_rest(self) -> None:
        """Refuse if the store has too little room for what changed since :meth:`save`.

        Raises:
            RefusedError: with the bytes that are needed and the bytes that are free.
        """
        self.check_room(sum(map(self.context.pool.written_since, self._last.values())))

    def check_room(self, size: int) -> None:
        """Refuse data for which the store has too little room.

        Args:
            size: in bytes.

        Raises:
            RefusedError: with the bytes that are needed and the bytes that are free.
        """
        needed = int(size * _MARGIN)
        free = shutil.disk_usage(self.directory).free
        if needed > free:
            raise RefusedError(
                str(self.directory),
                f"no room for the safety copy: {needed >> 20} MiB needed, {free >> 20} MiB free",
                "make room, or use --no-safety",
            )

    def _send(self, full: str, expected: int) -> None:
        dataset = full.split("@", 1)[0]
        path = self.directory / f"{len(self._streams):03}.zfs"
        amount = self.context.progress.amount
        self.context.pool.send_increment(
            self._last[dataset],
            full,
            path,
            lambda written: amount(dataset, written, expected),
            raw=self._raw[dataset],
        )
        self._streams.append((dataset, path))
        self._last[dataset] = full

    def keep_files(self, domain: Domain | None) -> None:
        """Copy the files that a restore will replace: NVRAM, TPM state, a managed save image."""
        if domain is None:
            return
        if domain.nvram is not None and os.path.lexists(domain.nvram):
            self._keep("nvram.fd", Role.NVRAM, Path(domain.nvram))
        for path in tpm_files(domain.tpm_state):
            name = re.sub(r"[^a-z0-9.-]", "-", path.name.lower())
            self._keep(f"{TPM_PREFIX}{name}", Role.TPM, path)
        image = self.context.hypervisor.managed_save_path(domain.uuid)
        if image is not None:
            _link_or_copy(image, self.directory / MANAGED_SAVE)

    def _keep(self, name: str, role: Role, source: Path) -> None:
        data, status = read_host_file(source)
        mode = status.st_mode & 0o7777
        self._write(name, role, data)
        owned = {"uid": status.st_uid, "gid": status.st_gid, "mode": mode, "source": str(source)}
        self._parts[name] = self._parts[name].model_copy(update=owned)
        os.chown(self.directory / name, status.st_uid, status.st_gid)
        (self.directory / name).chmod(mode)

    def _write(self, name: str, role: Role, data: bytes) -> None:
        """Write a small file of the copy to stable storage."""
        (self.directory / name).unlink(missing_ok=True)
        write_private(self.directory / name, data)
        digest = hashlib.sha256(data).hexdigest()
        self._parts[name] = Part(name=name, role=role, bytes=len(data), sha256=digest)

    def write_script(
        self,
        domain: Domain | None,
        *,
        facts: RestoreFacts,
        there: DatasetListing,
        own: Mapping[str, Sequence[str]],
        journal: Path,
        lock: Path,
        barred: str | None,
    ) -> Path:
        """Write the record of the copy and the script that undoes the restore.

        Args:
            there: what exists of the datasets, after the last snapshot of the copy.
            own: for each dataset the paths of the guest's files in it.
            journal: of the restore.
            lock: of the domain.
            barred: the definition that cannot be started; ``None`` for a transient domain.

        Returns: the path of the script.
        """
        xml = domain and (domain.inactive_xml or domain.live_xml)
        if xml:
            self._write("domain.xml", Role.INACTIVE_XML, xml.encode())
        if barred:
            write_private(self.directory / "barred.xml", barred.encode())
        copy = SafetyCopy(self.directory, self._record(domain, facts, there))
        replace_private(
            self.directory / RECORD, copy.record.as_json()
        )  # other processes may read it
        uri = self.context.config.libvirt_uri
        text = (
            refusing_script(copy)
            if copy.record.half_way
            else undo_script(copy, own=own, uri=uri, journal=journal, lock=lock)
        )
        script = self.directory / "undo.sh"
        write_private(script, text.encode("utf-8", "surrogateescape"))
        script.chmod(0o700)
        sync_directory(self.directory)
        sync_directory(self.directory.parent)
        return script

    def _record(
        self, domain: Domain | None, facts: RestoreFacts, there: DatasetListing
    ) -> SafetyRecord:
        pool = self.context.pool
        names = [*(target.full_name for target in self.targets), *self._last.values()]
        now = cut_to_milliseconds(datetime.now(UTC))
        taken = {each.full_name: each for each in there.snapshots}
        entries = {
            name: SnapshotEntry(
                dataset=each.dataset, name=each.name, guid=each.guid, createtxg=each.createtxg
            )
            for name, each in taken.items()
        }
        if missing := [name for name in names if name not in entries]:
            raise PoolError(", ".join(missing), "is missing")
        streams: dict[str, list[str]] = {}
        for dataset, path in self._streams:
            streams.setdefault(dataset, []).append(path.name)
        manifest = Manifest(
            run=facts.run,
            domain=facts.domain,
            uuid=facts.uuid,
            snapshot=facts.snapshot,
            level=Level.RAM if self.has_ram else Level.OFF,
            was_running=facts.ran,
            started=now,
            created=now,
            finished=now,
            snapshots=tuple(entries[target.full_name] for target in self.targets),
            disks=disk_entries(self.context, domain, facts.datasets),
            parts=tuple(self._parts.values()),
            versions=VersionsEntry(
                snaporch=__version__,
                libvirt="",
                emulator="",
                machine=domain.machine if domain is not None else "",
            ),
        )
        return SafetyRecord(
            manifest=manifest,
            last=tuple(entries[name] for name in self._last.values()),
            kept=tuple(
                kept_of(pool, target, streams.get(target.dataset, ()), there, self._made)
                for target in self.targets
            ),
            sizes={path.name: path.stat().st_size for _, path in self._streams},
            half_way=facts.half_way,
            whole=Path(facts.whole).name,
        )

    def forget(self) -> None:
        """Delete the safety copy and its snapshots, because the restore did not begin."""
        self._sweep()
        if self.directory.is_dir():
            self.ram.unlink(missing_ok=True)
            self.directory.rmdir()

    def _sweep(self) -> None:
        datasets = [target.dataset for target in self.targets]
        for snapshot in self.context.pool.snapshots(datasets):
            if snapshot.name.startswith(f"{SAFETY_PREFIX}{self._stamp}-"):
                self.context.pool.destroy_snapshots([snapshot.full_name])
        if not self.directory.is_dir():
            return
        keep = self.has_ram
        for path in self.directory.iterdir():
            if path != self.ram or not keep:
                path.unlink()


def safety_copy_bytes(pool: Pool, targets: Collection[PoolSnapshot]) -> int:
    """Estimate the bytes that a safety copy of what is newer than the targets writes.

    Raises:
        PoolError: ZFS gives no number.
    """
    there = pool.snapshots([target.dataset for target in targets])
    encrypted = pool.encrypted()
    newest_of = {each.dataset: each for each in there}  # which are in the order of their age
    total = 0
    for target in targets:
        newest = newest_of.get(target.dataset, target)
        if newest.createtxg > target.createtxg:  # what was overwritten since is sent, too
            raw = target.dataset in encrypted
            total += pool.increment_size(target.full_name, newest.full_name, raw=raw)
        total += pool.written_since(newest.full_name)
    return int(total * _MARGIN)


def disk_entries(
    context: Context, domain: Domain | None, datasets: Collection[str]
) -> tuple[DiskEntry, ...]:
    """Return the manifest's entries for a guest's disks, as far as the disks can be examined.

    Args:
        datasets: the datasets in the safety copy. An undo does not bring back a disk elsewhere.
    """
    disks = domain.disks if domain is not None else ()
    return tuple(
        _disk_entry(context, replace(domain, disks=(disk,)), disk, datasets)
        for disk in disks
        if domain is not None
    )


def _disk_entry(
    context: Context, alone: Domain, disk: Disk, datasets: Collection[str]
) -> DiskEntry:
    entry = DiskEntry(target=disk.target, source=disk.source, format=disk.format)
    with suppress(SnaporchError, OSError):
        settings = context.config.settings(alone.name, alone.uuid)
        planned, left_out = locate_disks(context.resolver, alone, settings.exclude_disks)
        for out in left_out:
            reason = {"left_out": out.code, "left_out_detail": out.detail}
            return entry.model_copy(update=reason | {"apart": out.matters})
        for each in planned:
            if each.dataset.name not in datasets:
                continue
            place = {
                "dataset": each.dataset.name,
                "inside": context.resolver.inside(each.path, each.dataset),
                "partition": context.resolver.partition_number(each.path),
                "beneath": _beneath(context, alone, each),
            }
            return entry.model_copy(update=place)
    return entry.model_copy(update={"left_out": LeftOutCode.NOT_ROLLED_BACK, "apart": True})


def _beneath(context: Context, alone: Domain, disk: PlannedDisk) -> tuple[BackingFileEntry, ...]:
    """Return the backing files of a disk; if they cannot be examined, an entry of unknown state."""
    try:
        found = find_beneath(
            context.resolver, alone, [disk.disk], {disk.dataset}, context.hypervisor.domains
        )
        return tuple(backing_file_entry(context.resolver, each) for each in found)
    except (SnaporchError, OSError):
        return (BackingFileEntry(path=disk.path),)


def _link_or_copy(source: Path, target: Path) -> None:
    """Link or copy a large file that is not written to any more."""
    with suppress(OSError):
        os.link(source, target)
        return
    shutil.copyfile(source, target)
    target.chmod(0o600)
    with target.open("rb") as stream:
        os.fsync(stream.fileno())
