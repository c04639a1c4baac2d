"""What a restore discards, kept as files, so that a restore can be undone.

A rollback destroys every snapshot newer than its target, so a safety snapshot alone would not
survive it. Therefore all that lies between the target and the safety snapshot is written as an
incremental stream (``zfs send -I``, newer snapshots included) into the bundle store, with a script
that puts it back. First while the guest still runs; after it was stopped, only what came since.
"""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from snaporch.bundle.store import explained_store, private_directory, sync_directory, write_private
from snaporch.errors import RefusedError
from snaporch.model import Domain, PoolSnapshot
from snaporch.pool import PREFIX
from snaporch.restore.plan import SAFETY_PREFIX
from snaporch.run.context import Context

_MARGIN = 1.1


@dataclass
class Safety:
    """The safety copy of one restore."""

    context: Context
    directory: Path
    targets: tuple[PoolSnapshot, ...]
    _stamp: str
    _last: dict[str, str] = field(default_factory=dict)
    _streams: list[tuple[str, Path]] = field(default_factory=list)

    @classmethod
    def begin(cls, context: Context, uuid: str, targets: tuple[PoolSnapshot, ...]) -> Safety:
        """An empty one, in a directory of its own."""
        stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"
        directory = context.store.root / uuid / f"safety-{stamp}"
        with explained_store(context.store.root):
            private_directory(context.store.root)
            private_directory(directory.parent)
            private_directory(directory)
        last = {target.dataset: target.full_name for target in targets}
        return cls(context, directory, targets, stamp, last)

    def save(self) -> list[str]:
        """Snapshot every dataset as it is now, and write what came since the last time.

        Returns: the safety snapshots' full names.

        Raises:
            RefusedError: the store has no room for it; the safety snapshots are gone again.
        """
        name = f"{SAFETY_PREFIX}{self._stamp}-{len(self._streams)}"
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
        needed = int(sum(self.context.pool.increment_size(*pair) for pair in pairs) * _MARGIN)
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
            for snapshot in self.context.pool.snapshots([target.dataset]):
                if snapshot.createtxg > target.createtxg and snapshot.properties:
                    pairs = [f"{PREFIX}{key}={value}" for key, value in snapshot.properties.items()]
                    lines.append(shlex.join(["zfs", "set", *pairs, snapshot.full_name]))
        return lines

    def write_script(self, domain: Domain | None) -> Path:
        """The script that undoes the restore; its path."""
        lines = [
            "#!/bin/sh",
            "# Undoes a restore by snaporch: brings the disks back to what they were before it.",
            "# The guest must be off. What was written since the restore is lost.",
            "set -eu",
            'cd "$(dirname "$0")"',
        ]
        if domain is not None:
            lines += [
                f"state=$(LC_ALL=C virsh domstate {domain.uuid} 2>/dev/null || true)",
                'case "$state" in "" | "shut off" | crashed) ;; *)',
                '    echo "the guest is $state; shut it off first" >&2; exit 1 ;;',
                "esac",
            ]
        lines += [f"zfs rollback -r {shlex.quote(target.full_name)}" for target in self.targets]
        for dataset, path in self._streams:
            lines.append(f"zfs receive -F {shlex.quote(dataset)} < {path.name}")
        lines += self._marks()
        xml = domain and (domain.inactive_xml or domain.live_xml)
        if xml:
            write_private(self.directory / "domain.xml", xml.encode())
            lines.append("virsh define domain.xml")
        if domain is not None and domain.nvram is not None and Path(domain.nvram).is_file():
            write_private(self.directory / "nvram.fd", Path(domain.nvram).read_bytes())
            lines.append(f"cat nvram.fd > {shlex.quote(domain.nvram)}")
        script = self.directory / "undo.sh"
        write_private(script, ("\n".join(lines) + "\n").encode())
        script.chmod(0o700)
        sync_directory(self.directory)
        return script
