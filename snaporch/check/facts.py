"""What a lint looks at: plain data, gathered by :mod:`snaporch.check.gather`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from snaporch.faults import Component, Need
from snaporch.hypervisor import Unguarded
from snaporch.sanoid.config.resolve import SanoidConfig
from snaporch.sanoid.hooks.freeze_order import FreezeEstimate
from snaporch.snapshot.capture_selftest import CaptureMode


@dataclass(frozen=True, slots=True)
class HookProgram:
    """A hook's program as it is on disk."""

    exists: bool
    executable: bool
    version: str = ""
    """Of the snaporch it is; empty when it did not say."""


@dataclass(frozen=True, slots=True)
class SanoidFacts:
    """sanoid on this host."""

    installed: bool
    scheduled: bool | None
    """Whether its timer or cron job is on; ``None`` when that cannot be told."""
    directory: Path
    config: SanoidConfig | None
    refusal: str = ""
    """Why there is no configuration."""
    unused: bool = False
    """There is no file ``sanoid.conf``: it is installed for syncoid, or not set up."""
    programs: Mapping[str, HookProgram] = field(default_factory=dict)
    """By their name in a hook setting."""


@dataclass(frozen=True, slots=True)
class GuestFacts:
    """A domain, and what the plan of a snapshot says of it."""

    name: str
    level: str
    """As it is configured."""
    datasets: tuple[str, ...]
    off_zfs: tuple[str, ...] = ()
    """Disks that it can write to and no snapshot holds, each with the reason."""
    refusal: tuple[str, str] | None = None
    """Why no snapshot can be taken, and the next step."""
    downgrade: str = ""
    busy: str = ""
    """What goes on with it just now; then the plan was not asked."""
    shared: tuple[str, ...] = ()
    """Its datasets that hold files of others, and which."""
    stranger: str = ""
    """Who snapshots its datasets without holding it still."""
    overlays: bool = False
    """Whether its writes go to overlays meanwhile, which are then committed."""
    prospect: FreezeEstimate | None = None
    """What freezing it for sanoid takes; ``None`` if it is off, or cannot be planned."""
    on_unavailable: str = "fail"
    """As it is configured."""
    excluded: tuple[str, ...] = ()
    """Disks that are left out knowingly and lie in one of its datasets all the same."""
    policies: tuple[str, ...] = ()
    """Those of its policies that take snapshots by themselves."""
    opted_out: bool = False
    """Whether it is said somewhere that it has no policy; a clone needs none."""
    unmet: tuple[tuple[str, str, str], ...] = ()
    """Policies whose level it cannot have, each with the reason and the next step."""


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """The bundle store."""

    path: Path
    exists: bool = True
    writable: bool = True
    mode: int = 0o700
    dataset: str | None = None
    encrypted: bool = False


@dataclass(frozen=True, slots=True)
class PageStoreFacts:
    """Where RAM goes page by page."""

    dataset: str
    guests: tuple[str, ...]
    """Those whose RAM goes there."""
    encrypted: bool = False


@dataclass(frozen=True, slots=True)
class OverlayFacts:
    """The overlay directory."""

    path: Path
    free_mib: int
    reserve_mib: int
    dataset: str | None = None
    left: tuple[str, ...] = ()
    """Directories that no run knows."""
    set_aside: tuple[str, ...] = ()
    """Overlays in quarantine."""


@dataclass(frozen=True, slots=True)
class OpenRunFacts:
    """A run with a journal."""

    run: str
    domain: str
    alive: bool


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Everything."""

    version: str
    command: str
    """What a hook setting calls snaporch by."""
    sanoid: SanoidFacts
    guests: tuple[GuestFacts, ...]
    store: StoreFacts
    overlays: OverlayFacts
    datasets: frozenset[str] = frozenset()
    encrypted: frozenset[str] = frozenset()
    runs: tuple[OpenRunFacts, ...] = ()
    releases: Mapping[Component, str] = field(default_factory=dict)
    """The versions that this host has; empty when one cannot be told."""
    needs: Mapping[Need, tuple[str, ...]] = field(default_factory=dict)
    """What lets a known fault matter here, and who: guests, or nobody in particular."""
    pages: PageStoreFacts | None = None
    """``None`` if no guest's RAM is kept so."""
    replicas: Mapping[str, str] = field(default_factory=dict)
    """Of each replica that a policy names: why nothing can be copied there, or nothing."""
    forgetful: Mapping[Path, str] = field(default_factory=dict)
    """Directories that a power loss would empty, and the kind of their file system."""
    unguarded: Unguarded | None = None
    """Why libvirt might start a guest on its overlays."""
    jobs: int = 4
    """How many guests sanoid's pre hook freezes at the same time."""
    capture: CaptureMode | None = None
    """Which way RAM can go; ``None`` if that was not tried."""
    policies: bool = False
    """Whether any policy takes snapshots by itself."""
    nobodys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By the place in the configuration: names, patterns and disks that no guest has."""
