"""Finds the snapshot at which a failover ended the guest, by the run in its fence."""

from __future__ import annotations

from snaporch.catalog.records import all_records, snapshots_of_record
from snaporch.context import Context
from snaporch.fence import Fence
from snaporch.model import PoolSnapshot, SnapshotRecord


def last_record(context: Context, fence: Fence) -> SnapshotRecord | None:
    """The record of the last snapshot; None if it does not exist any more."""
    for each in all_records(context.store, context.pool.snapshots()):
        if (each.uuid, each.run) == (fence.uuid, fence.run):
            return each
    return None


def members_of(context: Context, record: SnapshotRecord) -> list[PoolSnapshot]:
    """The ZFS snapshots of a record, as the pools have them now."""
    return snapshots_of_record(context.store, context.pool.snapshots(), record)
