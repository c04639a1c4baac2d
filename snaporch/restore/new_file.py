"""A file that is new on this host: it has its name only when it is complete and on stable storage.

Copies of disks and of RAM, and archives, are made here. So two processes never write one file.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from snaporch.errors import BusyError, RefusedError, RunFailedError
from snaporch.private_files import sync_directory

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_ATTEMPTS = 5
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


def check_destination(path: Path) -> None:
    """Require that the file does not exist and that its directory does.

    Raises:
        RefusedError: otherwise.
    """
    if os.path.lexists(path):
        raise RefusedError(str(path), "exists already", "remove it, or take another name")
    if not path.parent.is_dir():
        raise RefusedError(str(path.parent), "is not a directory", "make it first")


def partial_name(path: Path) -> Path:
    """The name of an unfinished file."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file under a temporary name beside ``path``, and name it ``path`` at the end.

    What a killed process left under that name is replaced. The file is always a new one that only
    this user reads, also in a directory of another user.

    Raises:
        BusyError: another process writes it.
        RefusedError: ``path`` exists meanwhile.
        RunFailedError: another process has replaced it.
        OSError: it cannot be written. Then, and after any other exception, no file is left.
    """
    partial = partial_name(path)
    with _locked(partial, path) as writing:
        yield writing
        writing.flush()
        os.fsync(writing.fileno())
        if not _is_named(writing.fileno(), partial):
            raise RunFailedError(str(path), f"another process has replaced {partial}")
        _publish(partial, path)
    sync_directory(path.parent)


def _publish(partial: Path, path: Path) -> None:
    """Give a finished file its name, unless there is a file of that name.

    Raises:
        RefusedError: there is one.
    """
    check_destination(path)
    try:
        os.link(partial, path, follow_symlinks=False)
    except FileExistsError:
        check_destination(path)
        raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        partial.rename(path)  # the file system has no links, as FAT
    else:
        partial.unlink()


@contextmanager
def _locked(partial: Path, path: Path) -> Iterator[BinaryIO]:
    """Make the unfinished file, for this process alone; remove it after an exception."""
    with os.fdopen(_new_file(partial, path), "wb") as writing:
        try:
            yield writing
        except BaseException:
            if _is_named(writing.fileno(), partial):
                partial.unlink()
            raise


def _new_file(partial: Path, path: Path) -> int:
    """Create the unfinished file and lock it.

    Another process may open it before it is locked, and take it for a remainder. So it counts only
    if it has its name when it is locked.

    Raises:
        BusyError: another process writes it.
        OSError: it cannot be made.
    """
    for _ in range(_ATTEMPTS):
        _remove_remainder(partial, path)
        try:
            descriptor = os.open(partial, _CREATE, 0o600)
        except FileExistsError:
            continue
        if _lock(descriptor) and _is_named(descriptor, partial):
            os.fchmod(descriptor, 0o600)
            return descriptor
        os.close(descriptor)
    raise _busy(path)


def _remove_remainder(partial: Path, path: Path) -> None:
    """Remove what has the name of the unfinished file, unless another process writes it."""
    try:
        descriptor = os.open(partial, _OPEN)
    except FileNotFoundError:
        return
    except OSError:  # a link, a pipe: not one of these
        partial.unlink(missing_ok=True)
        return
    try:
        if os.fstat(descriptor).st_uid == os.geteuid() and not _lock(descriptor):
            raise _busy(path)
        if _is_named(descriptor, partial):
            partial.unlink()
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_named(descriptor: int, path: Path) -> bool:
    """Whether the name is that of the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _busy(path: Path) -> BusyError:
    return BusyError(str(path), "another process writes it", "wait for its end")
