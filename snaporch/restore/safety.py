"""What a restore discards, kept as files, so that a restore can be undone.

A rollback destroys every snapshot newer than its target, so a safety snapshot alone would not
survive it. Therefore all that lies between the target and the safety snapshot is written as an
incremental stream (``zfs send -I``, newer snapshots included) into the bundle store, with a script
that puts it back. First while the guest still runs; after it was stopped, only what came since.
NVRAM, TPM state, a managed save image and, if asked for, the RAM of the guest are kept beside it.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from snaporch.bundle.hostfile import read_host_file, tpm_files
from snaporch.bundle.ramimage import RamImageError, read_header
from snaporch.bundle.store import explained_store, private_directory, sync_directory, write_private
from snaporch.errors import RefusedError
from snaporch.model import Domain
from snaporch.pool import PREFIX
from snaporch.restore.journal import Target
from snaporch.restore.plan import SAFETY_PREFIX
from snaporch.restore.undo import TPM_PREFIX, undo_script
from snaporch.run.context import Context

_MARGIN = 1.1
_DIRECTORY = "safety-"


@dataclass
class Safety:
    """The safety copy of one restore."""

    context: Context
    directory: Path
    targets: tuple[Target, ...]
    _last: dict[str, str] = field(default_factory=dict)
    _streams: list[tuple[str, Path]] = field(default_factory=list)
    _saves: int = 0

    @classmethod
    def place(cls, context: Context, uuid: str) -> Path:
        """A directory for a new one, which is not made yet."""
        stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"
        return context.store.root / uuid / f"{_DIRECTORY}{stamp}"

    @classmethod
    def begin(cls, context: Context, directory: Path, targets: tuple[Target, ...]) -> Safety:
        """An empty one; what an earlier attempt left in its directory goes, but for the RAM."""
        safety = cls(context, directory, targets)
        safety._sweep()
        with explained_store(context.store.root):
            private_directory(context.store.root)
            private_directory(directory.parent)
            private_directory(directory)
        safety._last = {target.dataset: target.full_name for target in targets}
        return safety

    @property
    def ram(self) -> Path:
        """Where the RAM of the running guest is kept."""
        return self.directory / "running.save"

    @property
    def has_ram(self) -> bool:
        """Whether it is there, and whole."""
        try:
            return bool(read_header(self.ram))
        except (OSError, RamImageError):
            return False

    @property
    def _stamp(self) -> str:
        return self.directory.name.removeprefix(_DIRECTORY)

    def save(self) -> list[str]:
        """Snapshot every dataset as it is now, and write what came since the last time.

        Returns: the safety snapshots' full names.

        Raises:
            RefusedError: the store has no room for it; the safety snapshots are gone again.
        """
        name = f"{SAFETY_PREFIX}{self._stamp}-{self._saves}"
        self._saves += 1
        pools: dict[str, list[str]] = {}
        for target in self.targets:
            pool = target.dataset.split("/", 1)[0]
            pools.setdefault(pool, []).append(f"{target.dataset}@{name}")
        for names in pools.values():
            self.context.pool.snapshot(names, {})
        taken = [full for names in pools.values() for full in names]
        try:
            self._check_room(taken)
            for full in taken:
                self._send(full)
        except BaseException:
            for names in pools.values():
                self.context.pool.destroy_snapshots(names)
            raise
        return taken

    def _check_room(self, taken: list[str]) -> None:
        pairs = [(self._last[full.split("@")[0]], full) for full in taken]
        self.check_room(int(sum(self.context.pool.increment_size(*pair) for pair in pairs)))

    def check_room(self, size: int) -> None:
        """Refuse what the store has no room for.

        Raises:
            RefusedError: with both figures.
        """
        needed = int(size * _MARGIN)
        free = shutil.disk_usage(self.directory).free
        if needed > free:
            raise RefusedError(
                str(self.directory),
                f"no room for the safety copy: {needed >> 20} MiB needed, {free >> 20} MiB free",
                "make room, or give the safety up with --no-safety",
            )

    def _send(self, full: str) -> None:
        dataset = full.split("@", 1)[0]
        path = self.directory / f"{len(self._streams):03}.zfs"
        self.context.pool.send_increment(self._last[dataset], full, path)
        self._streams.append((dataset, path))
        self._last[dataset] = full

    def _marks(self) -> list[str]:
        """What makes the newer snapshots snaporch's, which does not travel in the streams."""
        lines = []
        for target in self.targets:
            snapshots = self.context.pool.snapshots([target.dataset])
            born = next(each.createtxg for each in snapshots if each.guid == target.guid)
            for snapshot in snapshots:
                if snapshot.createtxg > born and snapshot.properties:
                    pairs = [f"{PREFIX}{key}={value}" for key, value in snapshot.properties.items()]
                    lines.append(shlex.join(["zfs", "set", *pairs, snapshot.full_name]))
        return lines

    def keep_files(self, domain: Domain | None) -> None:
        """Copy what a restore will replace: NVRAM, TPM state, a managed save image."""
        if domain is None:
            return
        if domain.nvram is not None and os.path.lexists(domain.nvram):
            _copy(Path(domain.nvram), self.directory / "nvram.fd")
        for path in tpm_files(domain.tpm_state):
            _copy(path, self.directory / f"{TPM_PREFIX}{path.name}")
        image = self.context.hypervisor.managed_save_path(domain.uuid)
        if image is not None:
            _link_or_copy(image, self.directory / "managed.save")

    def write_script(
        self,
        domain: Domain | None,
        *,
        own: Mapping[str, Sequence[str]],
        journal: Path,
        lock: Path,
        barred: str | None,
    ) -> Path:
        """The script that undoes the restore; its path."""
        xml = domain and (domain.inactive_xml or domain.live_xml)
        if xml:
            write_private(self.directory / "domain.xml", xml.encode())
        if barred:
            write_private(self.directory / "barred.xml", barred.encode())
        text = undo_script(
            self.directory,
            domain,
            self.targets,
            [(dataset, path.name) for dataset, path in self._streams],
            self._marks(),
            own=own,
            uri=self.context.config.libvirt_uri,
            journal=journal,
            lock=lock,
        )
        script = self.directory / "undo.sh"
        write_private(script, text.encode())
        script.chmod(0o700)
        sync_directory(self.directory)
        sync_directory(self.directory.parent)
        return script

    def forget(self) -> None:
        """The restore did not begin: leave no trace of its safety copy."""
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


def _copy(source: Path, target: Path) -> None:
    """Whose it is and what may be done with it included; on stable storage."""
    data, status = read_host_file(source)
    target.unlink(missing_ok=True)
    write_private(target, data)
    os.chown(target, status.st_uid, status.st_gid)
    target.chmod(status.st_mode & 0o7777)


def _link_or_copy(source: Path, target: Path) -> None:
    """A large file that nobody writes to any more."""
    with suppress(OSError):
        os.link(source, target)
        return
    shutil.copyfile(source, target)
    target.chmod(0o600)
    with target.open("rb") as stream:
        os.fsync(stream.fileno())
