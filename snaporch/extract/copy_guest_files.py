"""Write files out of a guest's file system into a directory of the host.

What a guest's file system has is input. A name is made below an open directory, never by a path,
and never over something that exists. Nothing of the guest's becomes a device or gets the bits of
setuid, and no link is followed. A file that is longer than its file system says is refused.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from snaporch.errors import RefusedError, RunFailedError
from snaporch.extract.guest_files import beneath, shown
from snaporch.extract.guestfish_text import Entry
from snaporch.reserve import RoomWatch

MAX_DEPTH = 200
"""Directories in directories; each keeps a descriptor open."""
MAX_HELD = 400_000
"""Names in a directory and in those that it is in; they are in memory while it is copied."""
_PERMISSIONS = 0o777
_NAME_BYTES = 4096
"""What a name takes on the host, at most: an empty file takes room, too."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Files(Protocol):
    """A guest's files; :class:`~snaporch.extract.guest_files.GuestFiles` has them."""

    def names(self, directory: bytes) -> list[bytes]:
        """The names in a directory."""

    def entries(self, directory: bytes, names: Sequence[bytes]) -> Iterable[Entry]:
        """What these names in a directory are."""

    def link(self, path: bytes) -> bytes:
        """Where a link leads."""

    def read(self, path: bytes, into: Callable[[bytes], object]) -> None:
        """Read a file's data."""


@dataclass(slots=True)
class Copied:
    """What was copied, and what was left out."""

    path: str
    """On the host."""
    files: int = 0
    bytes: int = 0
    left_out: list[str] = field(default_factory=list)
    """Devices, sockets and named pipes, by their path in the guest as it is printed."""

    def as_json(self) -> dict[str, object]:
        """The documented JSON object."""
        return {
            "path": self.path,
            "files": self.files,
            "bytes": self.bytes,
            "left_out": self.left_out,
        }


def destination(path: bytes, to: Path) -> Path:
    """The path on the host for a guest's path: its last name, in the directory ``to``.

    Raises:
        RefusedError: it exists, the directory does not, or the guest's path has no last name.
    """
    name = path.rstrip(b"/").rpartition(b"/")[2]
    if name in (b"", b".", b".."):
        raise RefusedError(shown(path), "has no name to copy it to", "name what is in it")
    if not to.is_dir():
        raise RefusedError(str(to), "is not a directory", "make it first")
    target = to / os.fsdecode(name)
    if os.path.lexists(target):
        raise RefusedError(
            shown(os.fsencode(target)), "exists already", "remove it, or take another directory"
        )
    return target


class Copy:
    """One copy of a file or a directory.

    Args:
        thing: the snapshot, for errors.
        files: the guest's files.
        check: is called for each file; raises to stop.
        room: of the directory that is copied into.
        keep_owner: give the files the guest's user and group numbers.
    """

    def __init__(
        self,
        thing: str,
        files: Files,
        check: Callable[[], None],
        room: RoomWatch,
        *,
        keep_owner: bool,
    ) -> None:
        self._thing, self._files, self._check, self._room = thing, files, check, room
        self._keep_owner = keep_owner
        self._held = 0

    def run(self, path: bytes, entry: Entry, target: Path) -> Copied:
        """Copy under a temporary name, which no other copy has; rename the complete copy.

        Args:
            path: of the file or directory in the guest, without links.
            entry: what it is.
            target: see :func:`destination`.

        Raises:
            RefusedError: it is neither a file nor a directory, or there is no room.
            RunFailedError: it cannot be written, or the target exists now, or it would take the
                room that is kept for others; nothing of it is left.
        """
        if entry.kind not in ("file", "directory"):
            raise RefusedError(f"{self._thing} {shown(path)}", "is neither a file nor a directory")
        done = Copied(shown(os.fsencode(target)))
        partial = f".{secrets.token_hex(6)}.partial"
        try:
            parent = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                try:
                    self._one(done, path, entry, os.fsencode(partial), parent, 0)
                    rename_complete(partial, target.name, parent)
                    os.fsync(parent)
                except BaseException:
                    _remove(partial, parent)
                    raise
            finally:
                os.close(parent)
        except OSError as error:
            reason = error.strerror or str(error)
            raise RunFailedError(
                f"{self._thing} {shown(path)}", f"could not be copied to {done.path} ({reason})"
            ) from error
        return done

    def _one(
        self, done: Copied, path: bytes, entry: Entry, name: bytes, parent: int, depth: int
    ) -> None:
        self._check()
        self._room.wrote(_NAME_BYTES)
        if entry.kind == "directory":
            self._directory(done, path, entry, name, parent, depth)
        elif entry.kind == "file":
            self._file(done, path, entry, name, parent)
        elif entry.kind == "link":
            os.symlink(self._files.link(path) or b"?", name, dir_fd=parent)
        else:
            done.left_out.append(shown(path))

    def _directory(
        self, done: Copied, path: bytes, entry: Entry, name: bytes, parent: int, depth: int
    ) -> None:
        if depth >= MAX_DEPTH:
            raise RefusedError(f"{self._thing} {shown(path)}", "is too deep", "copy parts of it")
        os.mkdir(name, 0o700, dir_fd=parent)
        descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
        try:
            names = self._files.names(path)
            self._held += len(names)
            if self._held > MAX_HELD:
                thing = f"{self._thing} {shown(path)}"
                raise RefusedError(thing, f"more than {MAX_HELD} names", "copy parts of it")
            for each in self._files.entries(path, names):
                inside = beneath(path, each.name)
                self._one(done, inside, each, each.name, descriptor, depth + 1)
            self._held -= len(names)
            self._attributes(descriptor, entry)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _file(self, done: Copied, path: bytes, entry: Entry, name: bytes, parent: int) -> None:
        descriptor = os.open(name, _NEW_FILE, 0o600, dir_fd=parent)
        try:
            if entry.size > shutil.disk_usage(descriptor).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            left = entry.size

            def write(block: bytes) -> None:
                nonlocal left
                self._check()
                self._room.wrote(len(block))
                left -= len(block)
                if left < 0:
                    raise OSError(errno.EFBIG, "it is longer than its file system says")
                view = memoryview(block)
                while view:
                    view = view[os.write(descriptor, view) :]

            self._files.read(path, write)
            if left:
                raise OSError(errno.EIO, "it is shorter than its file system says")
            self._attributes(descriptor, entry)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        done.files += 1
        done.bytes += entry.size

    def _attributes(self, descriptor: int, entry: Entry) -> None:
        """Set owner, permissions and time; the bits of setuid, setgid and sticky are dropped."""
        if self._keep_owner:
            os.fchown(descriptor, entry.uid, entry.gid)
        os.fchmod(descriptor, stat.S_IMODE(entry.mode) & _PERMISSIONS)
        os.utime(descriptor, ns=(entry.mtime_ns, entry.mtime_ns))


def rename_complete(partial: str, name: str, parent: int) -> None:
    """Give a complete copy its name, in the open directory ``parent``; nothing is overwritten.

    Raises:
        OSError: the name exists, or the file system has no hard links.
    """
    status = os.stat(partial, dir_fd=parent, follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode):
        os.mkdir(name, 0o700, dir_fd=parent)
        try:  # a rename replaces a directory only if it is empty
            os.rename(partial, name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError:
            with suppress(OSError):
                os.rmdir(name, dir_fd=parent)
            raise
        return
    os.link(partial, name, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
    os.unlink(partial, dir_fd=parent)


def _remove(name: str, parent: int) -> None:
    """Remove a copy that is not complete, if it exists; no link is followed."""
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(status.st_mode):
        shutil.rmtree(name, dir_fd=parent)
    else:
        os.unlink(name, dir_fd=parent)
