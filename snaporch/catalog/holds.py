"""What the streams of safety copies follow upon: held, for without it a copy undoes nothing."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

from snaporch.bundle.manifest import ManifestError, SnapshotEntry
from snaporch.zfs import PREFIX, Pool

UNDO_HOLD = "snaporch-undo"
"""The tag that keeps such a snapshot as long as there is a copy that needs it."""
_COPIES, _RECORD = "safety-*", "undo.json"


class _Manifest(BaseModel):
    snapshots: tuple[SnapshotEntry, ...]


class _Kept(BaseModel):
    properties: dict[str, dict[str, str]]


class _Record(BaseModel):
    """What has to be known of a copy's record; that of a later snaporch may say more."""

    manifest: _Manifest
    kept: tuple[_Kept, ...]


def _read(copy: Path) -> _Record | None:
    """``None`` for a copy that is not whole, and undoes nothing."""
    path = copy / _RECORD
    try:
        return _Record.model_validate(json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise ManifestError(str(path), why or "does not say what the copy holds") from error


def bases_of(copy: Path) -> set[tuple[str, int]]:
    """Dataset and GUID of what a copy's streams follow upon.

    Raises:
        ManifestError: its record cannot be read.
    """
    record = _read(copy)
    return {(each.dataset, each.guid) for each in record.manifest.snapshots} if record else set()


def runs_of(copy: Path) -> set[str]:
    """The runs whose snapshots a copy holds.

    Raises:
        ManifestError: its record cannot be read, so that it may hold any.
    """
    record = _read(copy)
    held = (each for kept in record.kept for each in kept.properties.values()) if record else ()
    return {each[f"{PREFIX}run"] for each in held if f"{PREFIX}run" in each}


def hold_bases(pool: Pool, directory: Path) -> None:
    """Hold what the safety copies in a domain's directory of the store follow upon.

    A copy whose record cannot be read any more had its own held when it was made.

    Raises:
        PoolError: one cannot be held.
    """
    wanted: set[tuple[str, int]] = set()
    for copy in directory.glob(_COPIES):
        with suppress(ManifestError):
            wanted |= bases_of(copy)
    for each in pool.snapshots(sorted({dataset for dataset, _ in wanted})) if wanted else ():
        if (each.dataset, each.guid) in wanted and UNDO_HOLD not in pool.holds(each.full_name):
            pool.hold([each.full_name], UNDO_HOLD)


def let_bases_go(pool: Pool, copy: Path) -> None:
    """Before a copy is deleted: let go of what no other of its domain follows upon.

    A dataset may have another name by now, so the GUID alone counts.

    Raises:
        ManifestError: what another follows upon cannot be read.
        PoolError: one cannot be let go.
    """
    others = {
        guid for other in copy.parent.glob(_COPIES) if other != copy for _, guid in bases_of(other)
    }
    over = {guid for _, guid in bases_of(copy)} - others
    for each in pool.snapshots() if over else ():
        if each.guid in over and UNDO_HOLD in pool.holds(each.full_name):
            pool.release([each.full_name], UNDO_HOLD)
