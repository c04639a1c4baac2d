"""What the streams of safety copies follow upon: held, for without it a copy undoes nothing."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from snaporch.bundle.manifest import SnapshotEntry
from snaporch.pool import PREFIX, Pool

UNDO_HOLD = "snaporch-undo"
"""The tag that keeps such a snapshot as long as there is a copy that needs it."""
_COPIES, _RECORD = "safety-*", "undo.json"
_ENTRIES = TypeAdapter(tuple[SnapshotEntry, ...])


def bases_of(copy: Path) -> set[tuple[str, int]]:
    """Dataset and GUID of what a copy's streams follow upon; none if its record cannot be read."""
    try:
        entries = json.loads((copy / _RECORD).read_bytes())["manifest"]["snapshots"]
        return {(each.dataset, each.guid) for each in _ENTRIES.validate_python(entries)}
    except (OSError, ValueError, KeyError, TypeError, ValidationError):
        return set()


def runs_in(directory: Path) -> set[str]:
    """The runs whose snapshots the safety copies in a domain's directory of the store hold."""
    found = set()
    for path in directory.glob(f"{_COPIES}/{_RECORD}"):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            for kept in json.loads(path.read_bytes())["kept"]:
                found |= {each.get(f"{PREFIX}run") for each in kept["properties"].values()}
    return found - {None}


def hold_bases(pool: Pool, directory: Path) -> None:
    """Hold what the safety copies in a domain's directory of the store follow upon.

    Raises:
        PoolError: one cannot be held.
    """
    wanted = {base for copy in directory.glob(_COPIES) for base in bases_of(copy)}
    for each in pool.snapshots(sorted({dataset for dataset, _ in wanted})) if wanted else ():
        if (each.dataset, each.guid) in wanted and UNDO_HOLD not in pool.holds(each.full_name):
            pool.hold([each.full_name], UNDO_HOLD)


def let_bases_go(pool: Pool, copy: Path) -> None:
    """Before a copy is deleted: let go of what no other of its domain follows upon.

    A dataset may have another name by now, so the GUID alone counts.

    Raises:
        PoolError: one cannot be let go.
    """
    others = {
        guid for other in copy.parent.glob(_COPIES) if other != copy for _, guid in bases_of(other)
    }
    over = {guid for _, guid in bases_of(copy)} - others
    for each in pool.snapshots() if over else ():
        if each.guid in over and UNDO_HOLD in pool.holds(each.full_name):
            pool.release([each.full_name], UNDO_HOLD)
