"""Writes Prometheus metrics into a file for the textfile collector of the node exporter."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from snaporch.private_files import store_errors

_MODE = 0o644


def write_textfile(path: Path, text: bytes) -> None:
    """Replace ``path`` atomically, so that the textfile collector never reads a part of it.

    Raises:
        UnavailableError: the file cannot be written.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")  # the collector reads only *.prom
    with store_errors(path.parent):
        try:
            descriptor = os.open(
                fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE
            )
            with os.fdopen(descriptor, "wb") as stream:
                os.fchmod(stream.fileno(), _MODE)  # whatever the umask: the collector is not root
                stream.write(text)
            os.replace(fresh, path)
        finally:
            with suppress(FileNotFoundError):
                fresh.unlink()
