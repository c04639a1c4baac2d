"""Gathers the facts about guests' disks and their datasets. Only reads.

They are judged by :mod:`snaporch.check.rules.disks`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from snaporch.check.disk_facts import DiskFacts, RecordFacts
from snaporch.context import Context
from snaporch.errors import SnaporchError
from snaporch.hypervisor import DiskWrites
from snaporch.hypervisor.qcow2 import HeaderError, read_qcow2
from snaporch.model import Domain
from snaporch.snapshot.locate_disks import PlannedDisk, locate_disks

_KEYS = (
    "recordsize",
    "volblocksize",
    "compression",
    "primarycache",
    "logbias",
    "sync",
    "volsize",
    "refreservation",
    "referenced",
    "available",
)
_NOT_COMPRESSED = ("off", "zle")
"""``zle`` only removes zeros."""
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | os.O_NOFOLLOW
_DEFAULT_CACHE = "writeback"
"""Of QEMU (its qemu-options.hx, ``-drive cache``)."""


def gather_disks(
    context: Context, domains: Sequence[Domain], busy: Collection[str]
) -> tuple[DiskFacts, ...]:
    """The facts about each disk that is on ZFS.

    Args:
        busy: names of guests that are left out: during a run their disks are overlays.
    """
    found: list[DiskFacts] = []
    for domain in domains:
        if domain.name not in busy:
            writes = _writes(context, domain)
            found += [_disk(domain, each, writes) for each in _located(context, domain)]
    return tuple(found)


def _located(context: Context, domain: Domain) -> list[PlannedDisk]:
    try:
        return locate_disks(context.resolver, domain)[0]
    except SnaporchError:  # another rule reports it
        return []


def _writes(context: Context, domain: Domain) -> Mapping[str, DiskWrites]:
    if not domain.active:
        return {}
    try:
        return context.hypervisor.disk_writes(domain.uuid)
    except SnaporchError:  # it has ended since
        return {}


def _disk(domain: Domain, planned: PlannedDisk, writes: Mapping[str, DiskWrites]) -> DiskFacts:
    disk = planned.disk
    return DiskFacts(
        domain.name,
        disk.target,
        planned.dataset.name,
        writes.get(disk.target, DiskWrites()),
        disk.format,
        _DEFAULT_CACHE if disk.cache in (None, "default") else str(disk.cache),
        disk.discards,
        _cluster(Path(planned.path)) if disk.format == "qcow2" else 0,
    )


def _cluster(image: Path) -> int:
    """The bytes of a cluster; 0 if the header cannot be read. The emulator may own the file."""
    try:
        descriptor = os.open(image, _OPEN)
    except OSError:
        return 0
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return 0
        return read_qcow2(descriptor).cluster
    except (OSError, HeaderError):
        return 0
    finally:
        os.close(descriptor)


def gather_records(context: Context, disks: Collection[DiskFacts]) -> dict[str, RecordFacts]:
    """How the datasets of these disks store data.

    Raises:
        PoolError: ZFS does not report it.
    """
    datasets = sorted({disk.dataset for disk in disks})
    pools = {dataset.split("/", 1)[0] for dataset in datasets}
    sectors = {pool: context.pool.sector_bytes(pool) for pool in sorted(pools)}
    groups = {pool: context.pool.parity_groups(pool) for pool in sorted(pools)}
    values = context.pool.native_properties(_KEYS, datasets)
    found = {}
    for name, each in values.items():
        pool = name.split("/", 1)[0]
        found[name] = replace(_records(each, sectors[pool]), groups=groups[pool])
    return {name: records for name, records in found.items() if records.size}


def _records(values: Mapping[str, str], sector: int) -> RecordFacts:
    def number(key: str) -> int:
        text = values.get(key, "")
        return int(text) if text.isdecimal() else 0

    used = max(number("refreservation"), number("referenced"))
    return RecordFacts(
        size=number("volblocksize") or number("recordsize"),
        is_volume="volblocksize" in values,
        sector=sector,
        compressed=values.get("compression", "off") not in _NOT_COMPRESSED,
        primary_cache=values.get("primarycache", "all"),
        log_bias=values.get("logbias", "latency"),
        sync=values.get("sync", "standard"),
        unreserved=max(0, number("volsize") - used),
        available=number("available"),
    )
