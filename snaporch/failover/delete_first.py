"""Delete the snapshots that failovers took before a guest's last one.

Such a snapshot only makes the last increment small. It is marked with ``ended=no``, also for a
later failover: one that was killed leaves its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from snaporch.catalog.records import COPY, ENDED, NOT_ENDED
from snaporch.context import Context
from snaporch.delete.delete import delete
from snaporch.delete.plan import DeleteRequest
from snaporch.errors import SnaporchError
from snaporch.model import PoolSnapshot, SnapshotRecord


def delete_first(context: Context, last: SnapshotRecord) -> None:
    """Delete them as ``snaporch delete`` does; what it refuses stays, with a note.

    Args:
        context: of this host.
        last: the guest's last snapshot, of which the replica has all.
    """
    try:
        runs = first_runs(context.pool.snapshots(), last.uuid)
        request = DeleteRequest(tuple(f"{last.uuid}@{run}" for run in runs))
        failures = delete(context, request, confirm=None, wait=0).failures
    except SnaporchError as error:
        failures = (error,)
    for each in failures:
        context.progress.note(each.thing, f"was not deleted: {each.explanation}")


def first_runs(snapshots: Iterable[PoolSnapshot], uuid: str) -> list[str]:
    """The runs in which failovers of a guest took a snapshot before its last one: a pure function.

    Args:
        snapshots: all of this host; copies do not count.
        uuid: the guest's.
    """
    marks = [e.properties for e in snapshots if COPY not in e.properties]
    own = [e for e in marks if e.get("uuid") == uuid and e.get(ENDED) == NOT_ENDED]
    return list(dict.fromkeys(each["run"] for each in own if "run" in each))
