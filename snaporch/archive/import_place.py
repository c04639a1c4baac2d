"""Where an imported guest lies: a directory of its own, possibly in a dataset of its own.

The directory is private until the guest is complete. A file in it marks an unfinished import. It
is removed when the guest is defined. A repeated import removes what an interrupted one left, but
nothing that a guest has written to.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from snaporch.errors import RefusedError
from snaporch.private_files import replace_private, sync_directory, write_private

MARK = ".import"
_PRIVATE = 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_STICKY = stat.S_ISVTX
_TRAVERSABLE = 0o711
"""The emulator runs as another user; libvirt gives it access to the files it needs."""


class ImportPlace:
    """The directory of one guest."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self) -> bool:
        """Refuse a directory that exists, unless an interrupted import left it.

        Returns:
            Whether there is something of an interrupted import.

        Raises:
            RefusedError: it has other files, or a guest has written to it since; or another user
                can replace it.
        """
        above = self.path.parent.stat()
        own = (0, os.geteuid())
        if above.st_uid not in own or (
            above.st_mode & _OTHERS_WRITE and not above.st_mode & _STICKY
        ):
            reason = "belongs to another user, or other users may write to it"
            raise RefusedError(str(self.path.parent), reason, "choose another --directory")
        try:
            status = self.path.lstat()
        except FileNotFoundError:
            return False
        step = "choose another name: --name NEW"
        if not stat.S_ISDIR(status.st_mode) or status.st_uid not in own:
            raise RefusedError(str(self.path), "exists already", step)
        if not self.is_empty() and not self._is_leftover():
            raise RefusedError(str(self.path), "exists already, and is no unfinished import", step)
        return (self.path / MARK).exists()

    def begin(self) -> None:
        """Make the directory, private and empty but for the mark.

        Raises:
            RefusedError: see :meth:`check`.
            OSError: it cannot be made.
        """
        self.check()
        with suppress(FileExistsError):
            self.path.mkdir(_PRIVATE)
        self.path.chmod(_PRIVATE)
        for path in sorted(self._files(), key=lambda path: path.name == MARK):
            path.unlink()
        write_private(self.path / MARK, b"")
        sync_directory(self.path)
        sync_directory(self.path.parent)

    def complete(self) -> None:
        """Record that all files are there; from now on a guest may write to them.

        Raises:
            OSError: they are not on stable storage.
        """
        replace_private(self.path / MARK, json.dumps(self._states()).encode())
        self.path.chmod(_TRAVERSABLE)
        sync_directory(self.path)

    def finish(self) -> None:
        """Remove the mark and the RAM: the guest is defined."""
        for path in self._files():
            if path.name.startswith("."):
                path.unlink()
        sync_directory(self.path)

    def discard(self) -> None:
        """Remove the directory with all files."""
        shutil.rmtree(self.path, ignore_errors=True)

    def is_empty(self) -> bool:
        """Whether it has no files."""
        return not self._files()

    def _files(self) -> list[Path]:
        return [path for path in self.path.iterdir() if path.name != ".zfs"]

    def _states(self) -> dict[str, list[int]]:
        found = {}
        for path in self._files():
            if not path.name.startswith("."):
                status = path.lstat()
                found[path.name] = [status.st_ino, status.st_mtime_ns]
        return found

    def _is_leftover(self) -> bool:
        """Whether an import was interrupted here, and no guest has written since."""
        try:
            recorded = (self.path / MARK).read_bytes()
            return not recorded or json.loads(recorded) == self._states()
        except (OSError, ValueError):
            return False
