"""Move items to the trash and back, and delete them.

Every change begins with one rename within the store, which is on stable storage before anything
else happens. So after any interruption an item is in its place, in the trash, or marked for
deletion.
"""

from __future__ import annotations

import os
import stat
from datetime import UTC, datetime
from pathlib import Path

from snaporch.private_files import private_directory, sync_directory
from snaporch.prune.decision import ItemKind, StoreItem
from snaporch.prune.scan import DELETING, STAMP, TRASH_NAME


class Trash:
    """The trash of the store at ``root``; all methods raise OSError."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._place = root / TRASH_NAME

    def put(self, found: StoreItem, now: datetime) -> Path:
        """Move a bundle into the trash; its new path."""
        target = self._place / f"{now.astimezone(UTC):{STAMP}}.{found.uuid}.{found.name}"
        return self._move(found.path, target)

    def put_back(self, found: StoreItem) -> Path:
        """Move a bundle from the trash back to its place; its new path."""
        private_directory(self._root / found.uuid)
        return self._move(found.path, self._root / found.uuid / found.name)

    def mark_deleting(self, found: StoreItem, now: datetime) -> Path:
        """Mark an item for deletion, so that a partly deleted one is never taken for a bundle."""
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


def remove(marked: Path) -> None:
    """Delete a directory that is marked for deletion, with the plain files in it.

    Raises:
        OSError: there is something other than a plain file in it, or it cannot be deleted.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(marked, flags)
    except FileNotFoundError:  # another prune has deleted it
        return
    try:
        for name in os.listdir(descriptor):
            _unlink(name, descriptor)
    finally:
        os.close(descriptor)
    try:
        marked.rmdir()
    except FileNotFoundError:
        return


def _unlink(name: str, directory: int) -> None:
    try:
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        if stat.S_ISREG(mode):
            os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return
