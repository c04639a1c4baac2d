"""Detect whether a guest has written to its disks since they were rolled back.

In a file system all files count: a disk may have its data in a second file, and the RAM image may
bring a disk that no definition names. ZFS's own count of written bytes is too high: a program that
only reads an image, such as ``qemu-img info`` or a backup, makes ZFS write the access time.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple

from snaporch.context import Context
from snaporch.restore.journal import RestoreFacts, Written
from snaporch.restore.newer_snapshot_checks import SAFETY_PREFIX
from snaporch.restore.other_files import TooManyError, other_files
from snaporch.zfs.resolver import NotOnZfsError

_PROBE = f"{SAFETY_PREFIX}probe-"


def written_now(context: Context, facts: RestoreFacts, *, probing: bool = True) -> Written:
    """Return a value for each dataset that changes when the guest writes to it.

    For a mounted file system: a checksum over name, size, inode and modification time of every
    file. For any other dataset: the bytes written since its snapshot, if that still exists. Some of
    these bytes are not the guest's: the rollback itself writes some, and so does mounting.

    Args:
        probing: take and destroy a snapshot, which makes ZFS write out the data that it holds in
            memory. Without it the number of bytes may be some seconds old.

    Raises:
        PoolError: ZFS does not return the numbers.
    """
    pool = context.pool
    files = {
        dataset: checksum for dataset in facts.datasets if (checksum := _files(context, dataset))
    }
    counted = [target for target in facts.targets if target.dataset not in files]
    probes = [f"{target.dataset}@{_PROBE}{facts.run}" for target in counted]
    for probe in probes if probing else ():
        pool.destroy_snapshots([probe])  # left by a restore that was killed here
        pool.snapshot([probe], {})
        pool.destroy_snapshots([probe])
    names = [target.dataset for target in counted]
    existing = {each.full_name for each in pool.snapshots(names)} if names else set()
    counts = {
        target.dataset: pool.written_since(target.full_name)
        for target in counted
        if target.full_name in existing
    }
    return {**files, **counts}


def _files(context: Context, dataset: str) -> str:
    """Return the checksum; empty for a volume, an unmounted file system or too many files."""
    try:
        found = other_files(context.resolver, context.resolver.mount_point_of(dataset), set())
    except (OSError, NotOnZfsError, TooManyError):
        return ""
    states = sorted((each.path, *astuple(each.state)) for each in found)
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()
