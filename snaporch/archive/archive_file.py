"""The file of an archive: it has its name only when it is complete and on stable storage."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from snaporch.errors import BusyError, RunFailedError, UsageError
from snaporch.private_files import sync_directory
from snaporch.restore.extracted_file import check_destination

SUFFIX = ".tar.zst"
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_ATTEMPTS = 5
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_SEPARATORS = str.maketrans("/:", "__")
"""A name with ``:`` is a host for tar."""


def destination(thing: str, to: Path | None) -> Path:
    """The path of an archive.

    Args:
        thing: ``DOMAIN@SNAPSHOT``, which gives the file its name; ``/`` and ``:`` become ``_``.
        to: a file, or a directory; ``None`` for the current directory.

    Raises:
        RefusedError: the file exists, or its directory does not.
    """
    place = to if to is not None else Path()
    path = place / f"{thing}{SUFFIX}".translate(_SEPARATORS) if place.is_dir() else place
    check_destination(path)
    return path


def partial_name(path: Path) -> Path:
    """The name of an unfinished archive."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def new_archive(path: Path) -> Iterator[BinaryIO]:
    """Write an archive under a temporary name beside ``path``, and rename it at the end.

    What a killed process left under that name is replaced. The file is always a new one that only
    this user reads, also in a directory of another user.

    Raises:
        BusyError: another process writes it.
        RefusedError: ``path`` exists meanwhile.
        RunFailedError: it cannot be written. Then, and after any other exception, no file is left.
    """
    partial = partial_name(path)
    try:
        with _locked(partial, path) as writing:
            yield writing
            writing.flush()
            os.fsync(writing.fileno())
            if not _is_named(writing.fileno(), partial):
                raise RunFailedError(str(path), f"another process has replaced {partial}")
            _publish(partial, path)
        sync_directory(path.parent)
    except OSError as error:
        raise RunFailedError(str(path), error.strerror or "cannot be written") from error


def _publish(partial: Path, path: Path) -> None:
    """Give a finished archive its name, unless there is a file of that name.

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
    """Remove what has the name of the unfinished file, unless another export writes it."""
    try:
        descriptor = os.open(partial, _OPEN)
    except FileNotFoundError:
        return
    except OSError:  # a link, a pipe: not of an export
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
    return BusyError(str(path), "another export writes it", "wait for its end")


@contextmanager
def standard_output() -> Iterator[IO[bytes]]:
    """Write an archive to standard output.

    Raises:
        UsageError: it is a terminal.
        RunFailedError: it cannot be written.
    """
    if os.isatty(1):
        raise UsageError("standard output", "is a terminal, and an archive is no text", "pipe it")
    try:
        with os.fdopen(os.dup(1), "wb") as writing:
            yield writing
    except OSError as error:  # closing writes what is left
        raise RunFailedError("standard output", error.strerror or "cannot be written") from error
