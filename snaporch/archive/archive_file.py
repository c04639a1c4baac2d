"""The file of an archive, which :mod:`snaporch.restore.new_file` makes, or standard output."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from snaporch.errors import RunFailedError, UsageError
from snaporch.restore.new_file import check_destination, new_file

SUFFIX = ".tar.zst"
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


@contextmanager
def new_archive(path: Path) -> Iterator[BinaryIO]:
    """Write an archive as :func:`~snaporch.restore.new_file.new_file` does.

    Raises:
        BusyError, RefusedError: see there.
        RunFailedError: it cannot be written. Then, and after any other exception, no file is left.
    """
    try:
        with new_file(path) as writing:
            yield writing
    except OSError as error:
        raise RunFailedError(str(path), error.strerror or "cannot be written") from error


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
