"""The configuration, libvirt, ZFS and the other dependencies of one command.

How long a command waits for what is set in :mod:`snaporch.waiting_times`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from snaporch.bundle.store import BundleStore
from snaporch.config import Config
from snaporch.disks.overlay_files import OverlayImages
from snaporch.fence import HOST as HOST_FENCES
from snaporch.fence import Fences
from snaporch.hypervisor import Hypervisor
from snaporch.interrupt import Interrupt
from snaporch.progress import Progress
from snaporch.systemd.low_priority import lower_priority
from snaporch.systemd.start_detached import start_detached
from snaporch.systemd.unit_state import unit_states
from snaporch.waiting_times import LibvirtTimes, LivenessTimes, RamTimes
from snaporch.zfs import Pool
from snaporch.zfs.resolver import HOST, Resolver, flush_volume


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock that a command reads."""

    now: Callable[[], datetime] = _now
    monotonic: Callable[[], float] = time.monotonic


@dataclass
class Context:
    """The configuration, libvirt and ZFS (or their fakes), and the progress display."""

    config: Config
    hypervisor: Hypervisor
    pool: Pool
    progress: Progress
    interrupt: Interrupt = field(default_factory=Interrupt)
    config_path: Path | None = None
    """The configuration's file, for child processes."""
    finishers: Mapping[str, Callable[[Context, Any, bool], list[str]]] = field(default_factory=dict)
    """Functions that finish runs of other kinds, by the kind in their journal. They are called with
    the context, the journal and ``dry_run``. See :mod:`snaporch.recovery.finishers`."""
    unfrozen_by: Callable[[Sequence[str]], str] = lambda _datasets: ""
    """Names the programs that are configured to snapshot datasets without freezing their guests;
    empty if there is none. See :mod:`snaporch.catalog.unfrozen_snapshots`."""
    frozen_by_hooks: Callable[[Sequence[str]], frozenset[str]] = lambda _datasets: frozenset()
    """The datasets that sanoid, by its configuration, snapshots only while a snaporch hook holds
    their guests frozen."""
    resolver: Resolver = HOST
    """Finds the datasets of paths, and the paths of datasets."""
    open_store: Callable[[Path], BundleStore] = BundleStore
    """Opens the bundle store at a path."""
    foreign: bool = False
    """The guests are those of other hosts: no path in their definitions is one of this host."""
    fences: Fences = HOST_FENCES
    """Guests that must not start on this host."""
    clock: Clock = Clock()
    libvirt_times: LibvirtTimes = field(default_factory=LibvirtTimes)
    ram_times: RamTimes = field(default_factory=RamTimes)
    liveness_times: LivenessTimes = field(default_factory=LivenessTimes)
    flush_volume: Callable[[str], None] = flush_volume
    """Writes the host's cache of a disk to its volume; see
    :func:`~snaporch.zfs.resolver.flush_volume`."""
    overlay_images: OverlayImages = field(default_factory=OverlayImages)
    program: Sequence[str] = (sys.executable, "-P", "-m", "snaporch")
    """The first words of a command line that starts this snaporch."""
    start_detached: Callable[[str, list[str]], object] = start_detached
    """Starts a process that outlives this one, from its unit's name and its command."""
    lower_priority: Callable[[str], object] = lower_priority
    """Lowers the priority of this process for a kind of work."""
    unit_states: Callable[[], Mapping[str, str]] = unit_states
    """The states of snaporch's units; see :func:`~snaporch.systemd.unit_state.unit_states`."""

    @property
    def store(self) -> BundleStore:
        """The bundle store of the configuration."""
        return self.open_store(self.config.paths.bundles)
