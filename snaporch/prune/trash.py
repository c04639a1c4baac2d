"""Moving things to the trash, back, and away.

Every change begins with one rename within the store, which is on stable storage before anything
else happens. So whatever cuts it short, a thing is where it was, in the trash, or marked as going.
"""

from __future__ import annotations

import os
import stat
from datetime import UTC, datetime
from pathlib import Path

from snaporch.bundle.store import private_directory, sync_directory
from snaporch.prune.decision import ItemKind, StoreItem
from snaporch.prune.scan import DELETING, STAMP, TRASH_NAME


class Trash:
    """The trash of the store at ``root``; everything here raises OSError."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._place = root / TRASH_NAME

    def put(self, found: StoreItem, now: datetime) -> Path:
        """Move a bundle into the trash; where it is now."""
        target = self._place / f"{now.astimezone(UTC):{STAMP}}.{found.uuid}.{found.name}"
        return self._move(found.path, target)

    def put_back(self, found: StoreItem) -> Path:
        """Move a bundle of the trash to where it came from."""
        private_directory(self._root / found.uuid)
        return self._move(found.path, self._root / found.uuid / found.name)

    def condemn(self, found: StoreItem, now: datetime) -> Path:
        """Mark a thing as going, so that what is left of it is never taken for a bundle."""
        if found.kind is ItemKind.REMAINS:
            return found.path
        stem = found.path.name
        if found.kind is not ItemKind.TRASHED:
            stem = f"{now.astimezone(UTC):{STAMP}}.{found.uuid}.{stem.lstrip('.')}"
        return self._move(found.path, self._place / f"{stem}{DELETING}")

    def _move(self, source: Path, target: Path) -> Path:
        private_directory(self._place)
        source.rename(target)
        sync_directory(target.parent)
        sync_directory(source.parent)
        return target


def remove(condemned: Path) -> None:
    """Delete a marked directory with the files in it, and nothing that is not a plain file.

    Raises:
        OSError: something else is in it, or it cannot be deleted.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(condemned, flags)
    except FileNotFoundError:  # somebody else has deleted it
        return
    try:
        for name in os.listdir(descriptor):
            _unlink(name, descriptor)
    finally:
        os.close(descriptor)
    try:
        condemned.rmdir()
    except FileNotFoundError:
        return


def _unlink(name: str, directory: int) -> None:
    try:
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        if stat.S_ISREG(mode):
            os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return
