"""What has changed of a guest's datasets since its last snapshot, when the guest has ended.

libvirt changes the owner and the labels of the images. ZFS counts that as changes of the dataset,
so that no increment could be received into it later: it is rolled back. The guest wrote nothing, if
it was paused until its end. What it wrote all the same is found here, and never discarded: another
program may have resumed it between the last look at its pause and its end.
"""

from __future__ import annotations

from collections.abc import Sequence

from snaporch.context import Context
from snaporch.errors import SnaporchError
from snaporch.model import DatasetKind, Domain, PoolSnapshot, SnapshotRecord
from snaporch.restore.other_files import changed_other_files, changed_own_files
from snaporch.restore.shared_dataset_checks import check_alone


def written_since(
    context: Context, disks: Sequence[str], members: Sequence[PoolSnapshot]
) -> list[PoolSnapshot]:
    """The snapshots of those datasets in which the guest's disks were written to since then.

    An image counts by its size and modification time, which no change of its owner changes.

    Args:
        context: of this host.
        disks: the paths of the guest's disks at its last snapshot; it is off, and no process has
            its volumes open.
        members: the ZFS snapshots of that.

    Raises:
        PoolError: ZFS does not answer.
        UnavailableError: a file system cannot be examined, such as one that is not mounted.
    """
    kinds = {each.name: each.kind for each in context.pool.datasets()}
    context.pool.sync([each.dataset for each in members])
    return [
        each
        for each in members
        if (
            changed_own_files(context, each, disks)
            if kinds.get(each.dataset) is DatasetKind.FILESYSTEM
            else context.pool.is_volume_modified(each.full_name)
        )
    ]


def check_examinable(
    context: Context, disks: Sequence[str], members: Sequence[PoolSnapshot]
) -> None:
    """Look through the file systems as :func:`written_since` will, while the guest still runs.

    Args:
        context: of this host.
        disks: the paths of the guest's disks.
        members: ZFS snapshots of its datasets.

    Raises:
        UnavailableError: a file system cannot be examined, such as one with too many files.
    """
    kinds = {each.name: each.kind for each in context.pool.datasets()}
    for each in members:
        if kinds.get(each.dataset) is DatasetKind.FILESYSTEM:
            changed_own_files(context, each, disks)


def discard_own_changes(
    context: Context, domain: Domain, record: SnapshotRecord, members: Sequence[PoolSnapshot]
) -> None:
    """Roll the file systems back to the last snapshot, if only the guest's own files have changed.

    Nothing fails: a dataset with changes of others stays as it is, with a note. ZFS is not asked
    whether a file system has changed: it would not know what it has yet to write to the pool. The
    caller has checked by :func:`written_since` that the guest has written nothing.

    Args:
        context: of this host.
        domain: the guest.
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
