"""The file of an archive: it has its name only when it is complete and on stable storage."""

from __future__ import annotations

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


def destination(thing: str, to: Path | None) -> Path:
    """The path of an archive.

    Args:
        thing: ``DOMAIN@SNAPSHOT``, which gives the file its name.
        to: a file, or a directory; ``None`` for the current directory.

    Raises:
        RefusedError: the file exists, or its directory does not.
    """
    place = to if to is not None else Path()
    path = place / f"{thing}{SUFFIX}".replace("/", "_") if place.is_dir() else place
    check_destination(path)
    return path


def partial_name(path: Path) -> Path:
    """The name of an unfinished archive."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def new_archive(path: Path) -> Iterator[BinaryIO]:
    """Write an archive under a temporary name beside ``path``, and rename it at the end.

    What a killed process left under that name is overwritten.

    Raises:
        BusyError: another process writes it.
        RefusedError: ``path`` exists meanwhile.
        RunFailedError: it cannot be written. Then, and after any other exception, no file is left.
    """
    try:
        with _locked(partial_name(path), path) as writing:
            yield writing
            writing.flush()
            os.fsync(writing.fileno())
            check_destination(path)
            partial_name(path).rename(path)
        sync_directory(path.parent)
    except OSError as error:
        raise RunFailedError(str(path), error.strerror or "cannot be written") from error


@contextmanager
def _locked(partial: Path, path: Path) -> Iterator[BinaryIO]:
    """Open the unfinished file, empty and for this process alone; remove it after an exception."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(partial, flags, 0o600), "wb") as writing:
        try:
            fcntl.flock(writing.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyError(str(path), "another export writes it", "wait for its end") from error
        try:
            os.ftruncate(writing.fileno(), 0)
            yield writing
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


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
