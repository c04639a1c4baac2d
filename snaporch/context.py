"""The configuration, libvirt, ZFS and the other dependencies of one command."""

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
from snaporch.zfs import Pool
from snaporch.zfs.resolver import HOST, Resolver, flush_volume


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock that a command reads."""

    now: Callable[[], datetime] = _now
    monotonic: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class SealingTimes:
    """How often sealing a RAM image is checked, and how long to wait for its end, in seconds."""

    tick: float = 0.5
    abort: float = 10
    """For the end of a sealing that was aborted."""


@dataclass(frozen=True, slots=True)
class LibvirtTimes:
    """How long to wait for libvirt, and how often to ask it, in seconds."""

    poll: float = 0.2
    reconnect: float = 60
    """For a libvirtd that restarts."""
    job: float = 120
    """For the end of a snapshot job that was aborted."""
    start: float = 5
    """For libvirt to start a guest, before the recovery is retried later."""
    resume: float = 30
    """For a guest that cannot run yet."""
    first_pause: float = 0.1
    """The pause after the first try to resume a guest; doubled after each."""
    longest_pause: float = 2.0


@dataclass(frozen=True, slots=True)
class LivenessTimes:
    """How long to wait for signs of life of a clone, and how often to look, in seconds."""

    cpu: float = 60
    agent: float = 300
    poll: float = 0.1


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
    fences: Fences = HOST_FENCES
    """Guests that must not start on this host."""
    clock: Clock = Clock()
    libvirt_times: LibvirtTimes = LibvirtTimes()
    sealing_times: SealingTimes = SealingTimes()
    liveness_times: LivenessTimes = LivenessTimes()
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
        return BundleStore(self.config.paths.bundles)
