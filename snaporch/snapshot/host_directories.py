"""Directories of this host: which part exists, how much room there is, which dataset holds them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from snaporch.zfs.resolver import NotOnZfsError, Resolver


def existing_part(path: Path) -> Path:
    """Return the path, or its nearest parent directory that exists."""
    return next(candidate for candidate in [path, *path.parents] if candidate.exists())


def free_mib(path: Path) -> int:
    """Return the room on the file system of ``path`` for unprivileged processes, in MiB."""
    room = os.statvfs(path)
    return room.f_bavail * room.f_frsize >> 20


def dataset_under(resolver: Resolver, path: Path) -> str | None:
    """Return the dataset that holds a path, or would hold it; ``None`` if that is not ZFS."""
    with suppress(NotOnZfsError, OSError):
        return resolver.resolve(str(existing_part(path))).name
    return None
