"""What libvirt changes of a guest's images when the guest ends: their owner and its labels.

These changes come after the last snapshot. ZFS counts them as changes of the dataset, so that no
increment could be received into it later. The guest itself was paused, and wrote nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from snaporch.context import Context
from snaporch.errors import SnaporchError
from snaporch.model import DatasetKind, Domain, PoolSnapshot, SnapshotRecord
from snaporch.restore.other_files import changed_other_files
from snaporch.restore.shared_dataset_checks import check_alone


def discard_own_changes(
    context: Context, domain: Domain, record: SnapshotRecord, members: Sequence[PoolSnapshot]
) -> None:
    """Roll the file systems back to the last snapshot, if only the guest's own files have changed.

    Nothing fails: a dataset with changes of others stays as it is, with a note. ZFS is not asked
    whether a file system has changed: it would not know what it has yet to write to the pool.

    Args:
        context: of this host.
        domain: as it was before it ended.
        record: its last snapshot.
        members: the ZFS snapshots of that.
    """
    xmls = [xml for xml in (domain.live_xml, domain.inactive_xml) if xml is not None]
    kinds = {each.name: each.kind for each in context.pool.datasets()}
    for each in members:
        if kinds.get(each.dataset) is not DatasetKind.FILESYSTEM:
            continue
        try:
            check_alone(context, record)
            if changed_other_files(context, [each], xmls):
                reason = "other files in it have changed since the last snapshot"
                context.progress.note(each.dataset, f"{reason}: see docs/how-to/failover.md")
                continue
            context.pool.rollback(each.full_name)
        except SnaporchError as error:
            context.progress.note(error.thing, error.explanation)
