"""Open a file below a directory, and never one outside of it.

The path is walked one component at a time, from descriptor to descriptor, and links are followed
here instead of by the kernel. In a snapshot or a clone an absolute link still names the mount point
of the original, and the kernel would open the original. (``openat2`` with ``RESOLVE_BENEATH`` and
``RESOLVE_NO_SYMLINKS`` would refuse such a link, and every other link in the path.)
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from snaporch.hypervisor.clone_xml import SharedError

_MAX_LINKS = 40
"""The kernel's limit (path_resolution(7))."""
_NO_FILE = "is not a regular file"
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_CLOEXEC


class LeadsOutError(SharedError):
    """A path, a link or the header of an image names something that is not in the snapshot."""


@dataclass(frozen=True, slots=True)
class SafeFile:
    """A regular file below a directory, open for reading."""

    descriptor: int
    path: PurePosixPath
    """Relative to the directory, with all links resolved."""


@contextmanager
def open_beneath(
    root: Path,
    path: PurePosixPath,
    home: PurePosixPath,
    *,
    called: str = "",
    covered: Collection[PurePosixPath] = (),
) -> Iterator[SafeFile]:
    """Open a regular file below ``root``.

    Args:
        root: the mounted clone or snapshot.
        path: relative to ``root``. Links are followed if they stay below ``root``.
        home: the mount point of the original of ``root``, which absolute links name.
        called: the name of ``root`` in errors; by default its path.
        covered: relative paths at which the original has another file system.

    Raises:
        LeadsOutError: a component is not below ``root``, or the file is not a regular one.
        OSError: the file does not exist or cannot be read.
    """
    thing = f"{called}: {path}" if called else str(root / path)
    walk = _Walk(root, path, home, thing, covered)
    try:
        found = walk.go()
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise LeadsOutError(thing, _NO_FILE)
        descriptor = os.open(f"/proc/self/fd/{found}", _READ)
        try:
            yield SafeFile(descriptor, PurePosixPath(*walk.done))
        finally:
            os.close(descriptor)
    finally:
        walk.close()


def check_beneath(
    root: Path,
    path: PurePosixPath,
    home: PurePosixPath,
    *,
    called: str,
    covered: Collection[PurePosixPath],
    may_be_directory: bool,
) -> PurePosixPath:
    """Refuse a path that is neither a regular file below ``root`` nor a socket.

    libvirt makes a socket again at the next start. The other arguments are those of
    :func:`open_beneath`.

    Args:
        may_be_directory: whether it may be a directory, too, which no link leads to.

    Returns: the path relative to ``root``, with all links resolved.

    Raises:
        LeadsOutError: a component is not below ``root``, or it is something else.
        OSError: it does not exist.
    """
    thing = f"{called}: {path}"
    walk = _Walk(root, path, home, thing, covered)
    try:
        mode = os.fstat(walk.go()).st_mode
        is_shared = stat.S_ISDIR(mode) and may_be_directory and not walk.links
        if not (stat.S_ISREG(mode) or stat.S_ISSOCK(mode) or is_shared):
            raise LeadsOutError(thing, _NO_FILE)
        return PurePosixPath(*walk.done)
    finally:
        walk.close()


class _Walk:
    """A walk along a path: the open descriptors from the root to the present component."""

    def __init__(
        self,
        root: Path,
        path: PurePosixPath,
        home: PurePosixPath,
        thing: str,
        covered: Collection[PurePosixPath],
    ) -> None:
        self._path, self._home, self._thing, self._covered = path, home, thing, covered
        self._open = [os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
        self._device = os.fstat(self._open[0]).st_dev
        self.done: list[str] = []
        self.links = 0

    def close(self) -> None:
        """Close every descriptor."""
        while self._open:
            os.close(self._open.pop())

    def go(self) -> int:
        """Walk to the end of the path, and return a descriptor of the file."""
        todo = list(reversed(self._path.parts))
        while todo:
            name = todo.pop()
            if name == "/" or (name == ".." and not self.done):
                raise self._out(f"{name} leads out of it")
            if name == "..":
                self._back(len(self.done) - 1)
                continue
            if (step := PurePosixPath(*self.done, name)) in self._covered:
                raise self._out(f"{step} is on another file system")
            descriptor = os.open(name, _LOOK, dir_fd=self._open[-1])
            self._open.append(descriptor)
            self.done.append(name)
            status = os.fstat(descriptor)
            if status.st_dev != self._device:
                raise self._out(f"{step} is on another file system")
            if stat.S_ISLNK(status.st_mode):
                self.links += 1
                if self.links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(self._path))
                todo += reversed(self._follow(name).parts)
        return self._open[-1]

    def _follow(self, name: str) -> PurePosixPath:
        """Return the target of a link, relative to the directory at which the walk is then."""
        self._back(len(self.done) - 1)
        target = PurePosixPath(os.readlink(name, dir_fd=self._open[-1]))
        if not target.is_absolute():
            return target
        if not target.is_relative_to(self._home):
            raise self._out(f"the link {name} leads out of it, to {target}")
        self._back(0)
        return target.relative_to(self._home)

    def _back(self, depth: int) -> None:
        while len(self.done) > depth:
            self.done.pop()
            os.close(self._open.pop())

    def _out(self, reason: str) -> LeadsOutError:
        return LeadsOutError(self._thing, reason)
