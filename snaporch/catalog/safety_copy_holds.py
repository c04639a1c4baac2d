"""Hold the base snapshots of safety copies: the incremental streams of a copy need them.

Safety copies are written by :mod:`snaporch.restore.safety_copy`; when one is deleted is decided by
:mod:`snaporch.prune.decision`.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

from snaporch.bundle.manifest import ManifestError, SnapshotEntry, without_checksum
from snaporch.zfs import PREFIX, Pool

UNDO_HOLD = "snaporch-undo"
"""The tag of the hold; it stays as long as a safety copy needs the snapshot."""
_COPIES, _RECORD = "safety-*", "undo.json"


class _Manifest(BaseModel):
    snapshots: tuple[SnapshotEntry, ...]


class _Kept(BaseModel):
    properties: dict[str, dict[str, str]]


class _Record(BaseModel):
    """The needed part of a copy's record."""

    manifest: _Manifest
    kept: tuple[_Kept, ...]


def _read(copy: Path) -> _Record | None:
    """Read a copy's record; None for an unfinished copy, which cannot be used."""
    path = copy / _RECORD
    try:
        document = without_checksum(path.read_bytes(), str(path))
        return _Record.model_validate(json.loads(document))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise ManifestError(str(path), why or "does not describe the copy") from error


def bases_of(copy: Path) -> set[tuple[str, int]]:
    """Dataset and GUID of each base snapshot of a copy.

    Raises:
        ManifestError: the copy's record cannot be read.
    """
    record = _read(copy)
    return {(each.dataset, each.guid) for each in record.manifest.snapshots} if record else set()


def runs_of(copy: Path) -> set[str]:
    """The runs whose snapshots are in a copy.

    Raises:
        ManifestError: the copy's record cannot be read, so it may be any runs.
    """
    record = _read(copy)
    held = (each for kept in record.kept for each in kept.properties.values()) if record else ()
    return {each[f"{PREFIX}run"] for each in held if f"{PREFIX}run" in each}


def hold_bases(pool: Pool, directory: Path) -> None:
    """Hold the base snapshots of all safety copies in a domain's directory of the store.

    A copy whose record is unreadable now had its base snapshots held when it was made.

    Raises:
        PoolError: a snapshot cannot be held.
    """
    wanted: set[tuple[str, int]] = set()
    for copy in directory.glob(_COPIES):
        with suppress(ManifestError):
            wanted |= bases_of(copy)
    there = pool.snapshots(sorted({dataset for dataset, _ in wanted})) if wanted else ()
    bases = [each.full_name for each in there if (each.dataset, each.guid) in wanted]
    for name, tags in pool.holds_of(bases).items():
        if UNDO_HOLD not in tags:
            pool.hold([name], UNDO_HOLD)


def release_bases(pool: Pool, copy: Path) -> None:
    """Release the base snapshots that no other copy of the domain needs, before deleting a copy.

    Only the GUID counts, since a dataset may have been renamed.

    Raises:
        ManifestError: the record of a copy cannot be read.
        PoolError: a snapshot cannot be released.
    """
    others = {
        guid for other in copy.parent.glob(_COPIES) if other != copy for _, guid in bases_of(other)
    }
    over = {guid for _, guid in bases_of(copy)} - others
    there = [each.full_name for each in (pool.snapshots() if over else ()) if each.guid in over]
    for name, tags in pool.holds_of(there).items():
        if UNDO_HOLD in tags:
            pool.release([name], UNDO_HOLD)
