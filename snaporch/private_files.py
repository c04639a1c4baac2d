"""Files and directories that only root reads, written so that they survive a power loss."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from snaporch.errors import UnavailableError

_READ = 1 << 20


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Turn an error of the file system about ``path`` into an error with a next step."""
    try:
        yield
    except OSError as error:
        where = error.filename or str(path)
        raise UnavailableError(
            str(where),
            error.strerror or "cannot be written",
            "run snaporch as root, and check the paths in its configuration",
        ) from error


def private_directory(path: Path, mode: int = 0o700) -> None:
    """Create the directory ``path`` with ``mode``, unless it exists.

    An existing directory is left unchanged: another program may own it, as with ``/var/tmp``.
    Missing parents are created with permission to traverse only.
    """
    if path.is_dir():
        return
    path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    path.mkdir(mode=mode, exist_ok=True)
    path.chmod(mode)  # whatever the umask


def write_private(path: Path, data: bytes) -> None:
    """Create ``path`` (0600) with ``data`` on stable storage."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def replace_private(path: Path, data: bytes) -> None:
    """Replace ``path`` (0600) by ``data`` in one step. A reader gets the old or the new data."""
    fresh = path.with_name(f".{path.name}")
    fresh.unlink(missing_ok=True)
    write_private(fresh, data)
    os.replace(fresh, path)


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``; one call of pwrite(2) may write only a part.

    Raises:
        OSError: not all could be written.
    """
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def subdirectories(path: Path) -> list[Path]:
    """Return the directories in ``path``, sorted by name; links do not count.

    Raises:
        OSError: it cannot be listed.
    """
    with os.scandir(path) as entries:
        return sorted(path / each.name for each in entries if each.is_dir(follow_symlinks=False))


def sync_directory(path: Path) -> None:
    """Sync a directory, so that its names survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path, on_read: Callable[[int], None] = lambda _done: None) -> str:
    """The SHA-256 of a file.

    Args:
        path: the file.
        on_read: is called with the bytes read so far, after each block.
    """
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as stream:
        while block := stream.read(_READ):
            digest.update(block)
            done += len(block)
            on_read(done)
    return digest.hexdigest()
