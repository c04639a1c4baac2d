"""The facts about guests' disks that :mod:`snaporch.check.rules.disks` judges."""

from __future__ import annotations

from dataclasses import dataclass, field

from snaporch.hypervisor import DiskWrites
from snaporch.zfs.parity import ParityGroup


@dataclass(frozen=True, slots=True)
class RecordFacts:
    """How a dataset stores what is written to it. Sizes are in bytes."""

    size: int
    """``recordsize`` or ``volblocksize``."""
    is_volume: bool
    sector: int = 0
    """The smallest write of the pool's devices, as ``ashift`` has it; 0 if it is unknown."""
    compressed: bool = True
    primary_cache: str = "all"
    log_bias: str = "latency"
    unreserved: int = 0
    """Of a volume: what can yet be written to it without a reservation."""
    groups: tuple[ParityGroup, ...] = ()
    """The pool's vdevs of type raidz or draid."""
    sync: str = "standard"
    available: int = 0
    """What can be written to the dataset, whatever its size."""


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """A disk of a guest, on ZFS."""

    guest: str
    target: str
    dataset: str
    writes: DiskWrites = field(default_factory=DiskWrites)
    """Since the start of its emulator; none of a guest that is off."""
    format: str = "raw"
    cache: str = "writeback"
    discards: bool = True
    cluster: int = 0
    """Bytes of a cluster of a qcow2 image; 0 of another format, or if it cannot be read."""
