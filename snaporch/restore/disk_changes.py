"""Whether a guest has written to its disks since they were rolled back.

Of a file system its files tell, all of them: a disk may have its data in a second file, and the RAM
may bring a disk that no definition names. ZFS counts more than what is written: whoever only reads
an image, as ``qemu-img info`` does or a backup, has it write the time of that.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple

from snaporch.context import Context
from snaporch.restore.journal import RestoreFacts, Written
from snaporch.restore.newer_snapshots import SAFETY_PREFIX
from snaporch.restore.other_files import TooManyError, other_files
from snaporch.zfs import resolver

_PROBE = f"{SAFETY_PREFIX}probe-"


def written_now(context: Context, facts: RestoreFacts, *, probing: bool = True) -> Written:
    """What tells, compared with itself at another time, whether the guest has written.

    Of a file system that is mounted: a checksum over name, size, inode and time of writing of every
    file. Of any other dataset: the bytes it has got since its snapshot, if that is still there. Not
    all of these are the guest's: a rollback itself leaves some, as does mounting.

    Args:
        probing: take a snapshot for a moment, which has ZFS write out what it holds in memory.
            Without, the bytes are some seconds old.

    Raises:
        PoolError: ZFS does not say.
    """
    pool = context.pool
    files = {dataset: told for dataset in facts.datasets if (told := _files(dataset))}
    counted = [target for target in facts.targets if target.dataset not in files]
    probes = [f"{target.dataset}@{_PROBE}{facts.run}" for target in counted]
    for probe in probes if probing else ():
        pool.destroy_snapshots([probe])  # of a restore that was killed just here
        pool.snapshot([probe], {})
        pool.destroy_snapshots([probe])
    names = [target.dataset for target in counted]
    there = {each.full_name for each in pool.snapshots(names)} if names else set()
    counts = {
        target.dataset: pool.written_since(target.full_name)
        for target in counted
        if target.full_name in there
    }
    return {**files, **counts}


def _files(dataset: str) -> str:
    """The checksum; empty for a volume, or for what is not mounted or too much."""
    try:
        found = other_files(resolver.mount_point_of(dataset), set())
    except (OSError, resolver.NotOnZfsError, TooManyError):
        return ""
    states = sorted((each.path, *astuple(each.state)) for each in found)
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()
