"""Advice about the settings of disks and their datasets: hints, but for ``ignored-flushes``.

Nothing is advised on a disk that has hardly been written to since its guest started. All else
about disks is judged by :mod:`.guests`; the directories of snaporch by :mod:`.storage`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from snaporch.check.disk_facts import DiskFacts, RecordFacts
from snaporch.check.facts import HostFacts
from snaporch.check.findings import Finding, hint, listed, warning

ENOUGH_WRITES = 100_000
"""A boot and the updates after it write less."""
_SMALL = 4
"""Of the writes at least three quarters are shorter than this many times their mean (Markov)."""
_SECTORS = 4
"""A record needs this many: compression saves whole sectors (docs/benchmarks/storage.md)."""
_USUAL_SECTOR = 4096
_SMALLEST = 16 << 10
"""Smaller records gain nothing, and cost metadata (docs/benchmarks/storage.md)."""
_IMMEDIATE = 32 << 10
"""Larger writes are not copied into the intent log (OpenZFS: ``zfs_immediate_write_sz``)."""
_USUAL_LARGEST = 128 << 10
"""The default ``recordsize``; larger records are for files that are written once."""
_WASTE = 1.25
"""Parity and padding that are worth a finding: more than this, of what the best record takes."""
_MEASURED = "docs/benchmarks/storage.md"


@dataclass(frozen=True, slots=True)
class _Written:
    """A dataset whose disks have been written to enough."""

    name: str
    records: RecordFacts
    guests: list[str]
    cluster: int
    """The smallest of its qcow2 images, in bytes; 0 without any."""
    writes: int
    mean: int
    """Bytes of a write."""

    @property
    def smallest_record(self) -> int:
        """The smallest record in which compression can save something, and parity wastes little."""
        return _saving(self.records, _enough_sectors(self.records))

    @property
    def fitting_record(self) -> int:
        """The mean of the writes as a power of two, at most a cluster; at least what gains."""
        power = 1 << max(self.mean - 1, 0).bit_length()
        wanted = max(min(power, self.cluster or power), self.smallest_record, _SMALLEST)
        return _saving(self.records, wanted)

    def describe(self) -> str:
        """What was observed, for a message."""
        return f"{listed(self.guests)} wrote {_size(self.mean)} at a time, on average"


def _written(facts: HostFacts) -> Iterator[_Written]:
    by_dataset: dict[str, list[DiskFacts]] = {}
    for disk in facts.disks:
        by_dataset.setdefault(disk.dataset, []).append(disk)
    for name, disks in sorted(by_dataset.items()):
        writes = sum(disk.writes.requests for disk in disks)
        if writes >= ENOUGH_WRITES and name in facts.records:
            clusters = [disk.cluster for disk in disks if disk.cluster]
            mean = sum(disk.writes.bytes for disk in disks) // writes
            guests = [disk.guest for disk in disks]
            records = facts.records[name]
            yield _Written(name, records, guests, min(clusters, default=0), writes, mean)


def _disks_written(facts: HostFacts) -> Iterator[tuple[DiskFacts, RecordFacts]]:
    for disk in facts.disks:
        if disk.writes.requests >= ENOUGH_WRITES and disk.dataset in facts.records:
            yield disk, facts.records[disk.dataset]


def _share(records: RecordFacts, size: int) -> float:
    """The bytes that a record takes, of each of its bytes, in the worst vdev of its pool."""
    sector = records.sector or _USUAL_SECTOR
    return max((each.allocated(size, sector) / size for each in records.groups), default=1.0)


def _wastes(records: RecordFacts, size: int) -> bool:
    """Whether a record of this size takes much more than the same data in the best record."""
    return _share(records, size) > _WASTE * _share(records, _USUAL_LARGEST)


def _enough_sectors(records: RecordFacts) -> int:
    return _SECTORS * (records.sector or _USUAL_SECTOR)


def _saving(records: RecordFacts, size: int) -> int:
    """The smallest record of at least this size that parity and padding waste little of."""
    while size < _USUAL_LARGEST and _wastes(records, size):
        size *= 2
    return size


def _size(count: int) -> str:
    """Bytes as ZFS prints them, rounded to whole KiB."""
    return f"{max(1, round(count / 1024))}K"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def record_size(facts: HostFacts) -> Iterator[Finding]:
    """A dataset's records are several times as large as most writes of its guests."""
    for each in _written(facts):
        size, fitting = each.records.size, each.fitting_record
        if size >= _SMALL * each.mean and fitting <= size // 2:
            yield _resized(
                each,
                fitting,
                "a write to a random place reads and writes a whole record; sequential writes gain "
                f"nothing by smaller ones: {_MEASURED}",
            )


def record_sectors(facts: HostFacts) -> Iterator[Finding]:
    """A dataset's records have too few sectors for compression, and the writes are large."""
    for each in _written(facts):
        records = each.records
        smallest = each.smallest_record
        few = records.sector and records.compressed and records.size < smallest
        if few and each.mean >= 2 * smallest:
            yield _resized(
                each,
                smallest,
                f"compression saves whole sectors, here of {_size(records.sector)}, of which a "
                f"record should have {_SECTORS}: {_MEASURED}",
            )


def record_parity(facts: HostFacts) -> Iterator[Finding]:
    """A dataset's records take much more on raidz or draid than larger ones would."""
    for name, records in sorted(facts.records.items()):
        if _wastes(records, records.size):
            smallest = max(records.size, _enough_sectors(records), _SMALLEST)
            wanted = _saving(records, smallest)
            now, then = _share(records, records.size), _share(records, wanted)
            yield _other_size(
                name,
                records,
                wanted,
                f"its records of {_size(records.size)} take {now:.1f} times their size with "
                f"parity, and records of {_size(wanted)} take {then:.1f} times theirs",
                "raidz and draid give each record parity of its own, and pad it to whole stripes; "
                "small writes to larger records are slower",
            )


def _resized(each: _Written, size: int, why: str) -> Finding:
    what = f"its records have {_size(each.records.size)}, and {each.describe()}"
    return _other_size(each.name, each.records, size, what, why)


def _other_size(name: str, records: RecordFacts, size: int, what: str, why: str) -> Finding:
    wanted, page = _size(size), "docs/how-to/check.md, record-size"
    if records.is_volume:
        fix = f"a volume keeps its size of records: copy it into a new one of {wanted}; {page}"
        return hint(name, what, why, fix)
    fix = f"run this, and rewrite the images, which keep their records: {page}"
    return hint(name, what, why, fix, (f"zfs set recordsize={wanted} {shlex.quote(name)}",))


def ignored_flushes(facts: HostFacts) -> Iterator[Finding]:
    """A dataset with a guest's disk ignores what the guest flushes."""
    for name, records in sorted(facts.records.items()):
        if records.sync == "disabled":
            guests = listed([disk.guest for disk in facts.disks if disk.dataset == name])
            yield warning(
                name,
                f"sync is disabled, and it has disks of {guests}",
                "what the guest has flushed is in memory only: a power failure of this host takes "
                "the last seconds of it, such as committed transactions",
                "run",
                (f"zfs set sync=standard {shlex.quote(name)}",),
            )


def primary_cache(facts: HostFacts) -> Iterator[Finding]:
    """ZFS caches no data of a dataset whose guests write less than a record at a time."""
    for each in _written(facts):
        if each.records.primary_cache != "all" and each.mean < each.records.size:
            yield hint(
                each.name,
                f"primarycache is {each.records.primary_cache}, and {each.describe()}",
                f"a write of less than a record ({_size(each.records.size)}) reads the record from "
                f"the disks each time: {_MEASURED}",
                "run",
                (f"zfs set primarycache=all {shlex.quote(each.name)}",),
            )


def log_bias(facts: HostFacts) -> Iterator[Finding]:
    """Small writes that a guest flushes are written as whole records at once."""
    for each in _written(facts):
        if each.records.log_bias == "throughput" and each.mean < _IMMEDIATE:
            yield hint(
                each.name,
                f"logbias is throughput, and {each.describe()}",
                "a small write that the guest flushes waits for its whole record, and leaves a log "
                f"device unused: {_MEASURED}",
                "run",
                (f"zfs set logbias=latency {shlex.quote(each.name)}",),
            )


def disk_cache(facts: HostFacts) -> Iterator[Finding]:
    """The cache mode of a volume costs memory."""
    for disk, records in _disks_written(facts):
        if disk.cache == "writeback" and records.is_volume:
            yield hint(
                disk.guest,
                f"the cache mode of {disk.target} is {disk.cache}",
                "the host's page cache has the data of the volume beside ZFS's own cache: "
                f"{_MEASURED}",
                _in_definition(disk, "cache='none'"),
            )


def _in_definition(disk: DiskFacts, setting: str) -> str:
    edit = f"virsh edit {shlex.quote(disk.guest)}"
    return f"`{edit}`: give its <driver> {setting}, which counts from the next start on"


def disk_discard(facts: HostFacts) -> Iterator[Finding]:
    """A disk does not pass on what the guest discards."""
    for disk, records in _disks_written(facts):
        is_thin = not records.is_volume or records.unreserved
        if disk.format == "raw" and not disk.discards and is_thin:
            yield hint(
                disk.guest,
                f"{disk.target} has no discard='unmap'",
                "what the guest deletes keeps its space in the pool and in new snapshots",
                _in_definition(disk, "discard='unmap'") + "; then run fstrim in the guest",
            )


def thin_volumes(facts: HostFacts) -> Iterator[Finding]:
    """The volumes of a pool can grow by more than the pool has."""
    pools: dict[str, dict[str, RecordFacts]] = {}
    for name, each in sorted(facts.records.items()):
        if each.unreserved:
            pools.setdefault(name.split("/", 1)[0], {})[name] = each
    for pool, volumes in pools.items():
        growth = sum(each.unreserved for each in volumes.values())
        available = max(each.available for each in volumes.values())
        if growth > available:
            yield hint(
                pool,
                f"{listed(list(volumes))} can grow by {_gib(growth)} without a reservation, and "
                f"{_gib(available)} are available",
                "when the pool is full, writes of guests fail, or pause the guests",
                "free space or add disks: docs/how-to/check.md, thin-volumes",
            )
