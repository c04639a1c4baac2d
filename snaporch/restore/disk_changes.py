"""Whether a guest has written to its disks since they were rolled back.

Of a disk in a file the file tells: who only reads it, as ``qemu-img info`` does or a backup, has
ZFS write the time of that, which is among the bytes that it counts of the dataset.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import astuple

from snaporch.context import Context
from snaporch.disks.backing_chain import FileState
from snaporch.hypervisor import domain_xml
from snaporch.model import DatasetKind
from snaporch.restore.journal import RestoreFacts
from snaporch.restore.plan import SAFETY_PREFIX
from snaporch.zfs import resolver

_PROBE = f"{SAFETY_PREFIX}probe-"

Written = dict[str, list[list[int]]]
"""Of each dataset the states of the guest's disks in it, or the bytes it has got."""


def written_now(context: Context, facts: RestoreFacts, *, probing: bool = True) -> Written:
    """What tells, compared with itself at another time, whether the guest has written.

    Of a file system with disks of the guest: the size, inode and time of writing of each. Of any
    other dataset: the bytes it has got since its snapshot, if that is still there. Not all of these
    are the guest's: a rollback itself leaves some, as does mounting.

    Args:
        probing: take a snapshot for a moment, which has ZFS write out what it holds in memory.
            Without, the bytes are some seconds old.

    Raises:
        PoolError: ZFS does not say.
    """
    pool = context.pool
    files = _disks_in_files(facts)
    counted = [target for target in facts.targets if target.dataset not in files]
    probes = [f"{target.dataset}@{_PROBE}{facts.run}" for target in counted]
    for probe in probes if probing else ():
        pool.destroy_snapshots([probe])  # of a restore that was killed just here
        pool.snapshot([probe], {})
        pool.destroy_snapshots([probe])
    names = [target.dataset for target in counted]
    there = {each.full_name for each in pool.snapshots(names)} if names else set()
    return files | {
        target.dataset: [[pool.written_since(target.full_name)]]
        for target in counted
        if target.full_name in there
    }


def _disks_in_files(facts: RestoreFacts) -> Written:
    """Of each file system that is rolled back the states of the guest's disks, where it has any."""
    mounts = resolver.read_mounts()
    found: Written = {}
    for xml in {facts.before, facts.after} - {None}:
        for path in (domain_xml.sources(xml) or {}).values():
            with suppress(OSError, resolver.NotOnZfsError):
                dataset = resolver.resolve(path, mounts)
                if dataset.kind is DatasetKind.FILESYSTEM and dataset.name in facts.datasets:
                    state = list(astuple(FileState.of(path)))
                    found.setdefault(dataset.name, []).append(state)
    return {dataset: sorted(states) for dataset, states in found.items()}
