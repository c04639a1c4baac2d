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
from dataclasses import asdict, dataclass
from pathlib import Path

from snaporch.bundle.firmware_files import HostFileError, trusted_directory
from snaporch.errors import RefusedError
from snaporch.private_files import replace_private, sync_directory, write_private

MARK = ".import"
_MARK_BYTES = 1 << 20
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PRIVATE = 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_STICKY = stat.S_ISVTX
_TRAVERSABLE = 0o711
"""The emulator runs as another user; libvirt gives it access to the files it needs."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """The content of the file that marks an unfinished import."""

    uuid: str
    files: dict[str, list[int]] | None = None
    """The inode and the time of the last change of each file, in ns, when all were there."""
    running: bool | None = None
    """Whether the guest runs when it is resumed from RAM."""

    def as_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()


class ImportPlace:
    """The directory of one guest."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.uuid = ""

    def check(self) -> str | None:
        """Refuse a directory that exists, unless an interrupted import left it.

        Returns:
            The UUID that an interrupted import had here, empty if it is not known; ``None`` if
            there was none.

        Raises:
            RefusedError: it has other files, or a guest has written to it since; or another user
                can replace it.
        """
        self._check_above()
        if not os.path.lexists(self.path):
            return None
        step = "choose another name: --name NEW"
        if not self._is_own_directory():
            raise RefusedError(str(self.path), "exists already", step)
        if self.is_empty():
            return None
        mark = self._mark()
        if mark is None or mark.files not in (None, self._states()):
            raise RefusedError(str(self.path), "exists already, and is no unfinished import", step)
        return mark.uuid

    def _is_own_directory(self) -> bool:
        """Whether it is a directory of root's, and no link."""
        status = self.path.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid in (0, os.geteuid())

    def _check_above(self) -> None:
        """Refuse a path on which another user can replace a directory or a link."""
        above = self.path.parent
        try:
            with trusted_directory(above):
                pass
        except HostFileError as error:
            raise RefusedError(error.thing, error.reason, "choose another --directory") from error
        real = above.resolve()
        for directory in (real, *real.parents):
            status = directory.stat()
            shared = status.st_mode & _OTHERS_WRITE and not status.st_mode & _STICKY
            if status.st_uid not in (0, os.geteuid()) or shared:
                reason = "belongs to another user, or other users may write to it"
                raise RefusedError(str(directory), reason, "choose another --directory")

    def begin(self, uuid: str) -> None:
        """Make the directory, private and empty but for the mark.

        Args:
            uuid: the guest's, which the mark names.

        Raises:
            RefusedError: see :meth:`check`.
            OSError: it cannot be made; or another process has made it meanwhile.
        """
        self.check()
        self.uuid = uuid
        if not os.path.lexists(self.path):
            self.path.mkdir(_PRIVATE)
        self.path.chmod(_PRIVATE)
        self._remove_files()
        self._remove_mark()
        write_private(self.path / MARK, _Mark(uuid).as_bytes())
        sync_directory(self.path)
        sync_directory(self.path.parent)

    def complete(self, *, running: bool = False) -> None:
        """Record that all files are there; from now on a guest may write to them.

        Args:
            running: whether the guest runs when it is resumed from RAM.

        Raises:
            OSError: they are not on stable storage.
        """
        mark = _Mark(self.uuid, self._states(), running)
        replace_private(self.path / MARK, mark.as_bytes())
        self.path.chmod(_TRAVERSABLE)
        sync_directory(self.path)

    def finish(self) -> None:
        """Remove the RAM, and last the mark: the guest is defined."""
        for path in self._files():
            if path.name.startswith(".") and path.name != MARK:
                path.unlink()
        self._remove_mark()
        sync_directory(self.path)

    def discard(self) -> None:
        """Remove the directory with all files, and last the mark: the same command continues."""
        with suppress(OSError):
            self._remove_files()
            self._remove_mark()
        shutil.rmtree(self.path, ignore_errors=True)

    def _remove_files(self) -> None:
        """Remove all but the mark, which first stops naming them: a kill leaves some of them."""
        if not self.is_empty():
            replace_private(self.path / MARK, _Mark(self.uuid).as_bytes())
            sync_directory(self.path)
        for path in self._files():
            if path.name != MARK:
                path.unlink()

    def _remove_mark(self) -> None:
        """Remove the mark, when all that is removed before is so on stable storage."""
        sync_directory(self.path)
        (self.path / MARK).unlink(missing_ok=True)

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

    def marked(self) -> str | None:
        """The UUID of an unfinished import; ``None`` if there is none, or it is not known.

        A place that another user can replace has none.
        """
        try:
            self._check_above()
            mark = self._mark() if self._is_own_directory() else None
        except (RefusedError, OSError):
            return None
        return mark.uuid or None if mark is not None else None

    def unwritten(self) -> bool | None:
        """Whether the guest runs when it is resumed, of a complete import that none has started.

        ``None`` if that is not known, or a guest may have written to its files.
        """
        mark = self._mark()
        if mark is None or mark.files is None or mark.files != self._states():
            return None
        return mark.running

    def _mark(self) -> _Mark | None:
        """The mark of an interrupted import; ``None`` if there is none."""
        try:
            descriptor = os.open(self.path / MARK, _READ)
            with os.fdopen(descriptor, "rb") as stream:
                is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
                recorded = stream.read(_MARK_BYTES) if is_file else b"?"
            # a kill before the first write leaves an empty file
            return _Mark(**json.loads(recorded)) if recorded else _Mark("")
        except (OSError, ValueError, TypeError):
            return None
