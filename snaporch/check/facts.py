"""The facts that the rules judge: plain data, gathered by :mod:`snaporch.check.gather`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from snaporch.check.disk_facts import DiskFacts, RecordFacts
from snaporch.hypervisor import StartHookProblem
from snaporch.known_faults import Component, FaultCondition
from snaporch.sanoid.config.resolve import SanoidConfig
from snaporch.sanoid.hooks.freeze_order import FreezeEstimate
from snaporch.snapshot.capture_selftest import CaptureMode


@dataclass(frozen=True, slots=True)
class HookProgram:
    """The program of a hook setting, as it is on disk."""

    exists: bool
    executable: bool
    version: str = ""
    """The version of a snaporch; empty for another program."""


@dataclass(frozen=True, slots=True)
class SanoidFacts:
    """sanoid on this host."""

    installed: bool
    scheduled: bool | None
    """Whether its timer or cron job is enabled; ``None`` if unknown."""
    directory: Path
    config: SanoidConfig | None
    refusal: str = ""
    """Why sanoid refuses its configuration."""
    unused: bool = False
    """``sanoid.conf`` does not exist: sanoid is installed for syncoid, or not set up."""
    programs: Mapping[str, HookProgram] = field(default_factory=dict)
    """By their name in a hook setting."""


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """A source, and the place here for its copies."""

    unreachable: str = ""
    """Why it does not answer; then nothing else of it is known."""
    has_shell: bool = False
    """The key of this machine may run other commands there than ``snaporch send``."""
    unsent: tuple[str, ...] = ()
    """Names in ``domains`` that it does not send."""
    sends_none: bool = False
    """It sends no guest at all."""
    version: str = ""
    """Of snaporch there; empty if it is not known."""
    ahead_seconds: float = 0
    """How far its clock is before the one of this machine."""
    no_place: str = ""
    """Why its copies cannot be stored here."""
    free_mib: int | None = None
    """What can still be stored here, of snapshots or of bundles; ``None`` if it is not known."""
    locked: tuple[str, ...] = ()
    """Its copies that are encrypted here, if its bundles are in clear."""


class BundlePrivacy(StrEnum):
    """How a replica's bundles are protected from being read there."""

    ENCRYPTED = "encrypted"
    """This host encrypts them."""
    ENCRYPTED_DATASET = "encrypted-dataset"
    """They are in clear, on an encrypted dataset of the replica."""
    ALL = "all"
    """The replica has all encrypted, the disks, too."""
    CLEAR = "clear"
    NOT_ASKED = "not-asked"
    """They count as in clear: an append-only replica is not asked about that."""

    @property
    def is_clear(self) -> bool:
        """Whether they are in clear, or count as such."""
        return self in (BundlePrivacy.CLEAR, BundlePrivacy.NOT_ASKED)


@dataclass(frozen=True, slots=True)
class UnmetPolicy:
    """A policy whose level a guest cannot have now."""

    policy: str
    reason: str
    step: str
    """What to do; may be empty."""
    fails: bool
    """Its snapshots fail; otherwise a lower level is allowed."""


@dataclass(frozen=True, slots=True)
class GuestFacts:
    """A domain, and the plan of a snapshot of it."""

    name: str
    level: str
    """The configured level."""
    datasets: tuple[str, ...]
    off_zfs: tuple[str, ...] = ()
    """Writable disks that no snapshot holds, each with the reason."""
    refusal: tuple[str, str] | None = None
    """Why no snapshot can be taken, and the next step."""
    downgrade: str = ""
    """Why the plan has a lower level than the configured one."""
    busy: str = ""
    """The run or libvirt job on the guest; with one, no plan was made."""
    shared: tuple[str, ...] = ()
    """Its datasets that hold files of others, and which files."""
    other_program: str = ""
    """The program that snapshots its datasets without freezing the guest, for a message."""
    overlays: bool = False
    """Whether a snapshot switches its disks to overlays and commits them afterwards."""
    commits: bool = False
    """Whether any of its snapshots does so: also those of its policies, those that sanoid takes
    while hooks freeze it, and, of a guest that is off, those that are taken when it runs."""
    confined_overlays: int = 0
    """How many disks sanoid's hooks would switch to overlays while AppArmor confines it."""
    estimate: FreezeEstimate | None = None
    """What freezing it for sanoid takes; ``None`` if it is off or cannot be planned."""
    on_unavailable: str = "fail"
    """The configured level if the wanted one is not available, or ``fail``."""
    excluded: tuple[str, ...] = ()
    """Disks in ``exclude_disks`` that lie in a dataset of another of its disks."""
    policies: tuple[str, ...] = ()
    """Its policies that take snapshots on a schedule."""
    opted_out: bool = False
    """Whether the configuration gives it no policy on purpose; a clone needs none."""
    unmet: tuple[UnmetPolicy, ...] = ()
    """Policies whose level it cannot have."""
    replicas: tuple[str, ...] = ()
    """The replicas of its policies."""
    has_ram: bool = True
    """Whether any of its policies may save its RAM, or takes no snapshots itself."""
    firmware: tuple[str, ...] = ()
    """What each of its bundles has beside RAM that is secret: UEFI variables, TPM state."""
    left_out: tuple[str, ...] = ()
    """The datasets of disks that are left out: its RAM has what was read of them."""
    nested: Mapping[str, str] = field(default_factory=dict)
    """Replicas of its policies that refuse its datasets, each with the reason."""


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """The bundle store."""

    path: Path
    exists: bool = True
    writable: bool = True
    mode: int = 0o700
    dataset: str | None = None
    encrypted: bool = False
    has_bundles: bool = True


@dataclass(frozen=True, slots=True)
class PageStoreFacts:
    """The dataset for RAM in pages."""

    dataset: str
    guests: tuple[str, ...]
    """The guests whose RAM is stored in pages."""
    encrypted: bool = False


@dataclass(frozen=True, slots=True)
class OverlayFacts:
    """The overlay directory."""

    path: Path
    free_mib: int
    reserve_mib: int
    dataset: str | None = None
    unknown: tuple[str, ...] = ()
    """Directories that belong to no run."""
    quarantined: tuple[str, ...] = ()
    """Overlays in quarantine."""


@dataclass(frozen=True, slots=True)
class OpenRunFacts:
    """A run that has a journal."""

    run: str
    domain: str
    alive: bool
    kind: str = "snapshot"
    """``snapshot``, ``restore`` or another kind of run."""


@dataclass(frozen=True, slots=True)
class UnreadableJournalFacts:
    """A journal that cannot be read."""

    path: Path
    reason: str
    step: str


@dataclass(frozen=True, slots=True)
class StrayFence:
    """A fence whose guest is not defined on this host."""

    uuid: str
    domain: str
    """The name that the guest had."""
    namesake: str = ""
    """The UUID of another guest that has this name; empty if there is none."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """All facts about a host."""

    version: str
    command: str
    """The snaporch command for a hook setting."""
    sanoid: SanoidFacts
    guests: tuple[GuestFacts, ...]
    store: StoreFacts
    overlays: OverlayFacts
    datasets: frozenset[str] = frozenset()
    encrypted: frozenset[str] = frozenset()
    mountpoints: Mapping[str, str] = field(default_factory=dict)
    """By dataset: the directories of the file systems that ZFS mounts when the host boots."""
    runs: tuple[OpenRunFacts, ...] = ()
    unreadable_journals: tuple[UnreadableJournalFacts, ...] = ()
    releases: Mapping[Component, str] = field(default_factory=dict)
    """The installed versions; empty text for an unknown one."""
    needs: Mapping[FaultCondition, tuple[str, ...]] = field(default_factory=dict)
    """The conditions of known faults that hold here, each with the guests concerned, if any."""
    domain_sections: frozenset[str] = frozenset()
    """The names of the sections ``[domain.NAME]`` in the configuration."""
    pages: PageStoreFacts | None = None
    """``None`` if no guest stores its RAM in pages."""
    replicas: Mapping[str, str] = field(default_factory=dict)
    """Replicas that policies name, each with the reason why it cannot be reached, or empty."""
    repositories: frozenset[str] = frozenset()
    """Those of them that are repositories of restic."""
    bundle_privacy: Mapping[str, BundlePrivacy] = field(default_factory=dict)
    """Of the replicas that can be reached: how their bundles are protected from being read."""
    weak_replicas: Mapping[str, str] = field(default_factory=dict)
    """Append-only replicas that only ``snaporch receive`` protects, each with the reason."""
    unlimited: Sequence[str] = ()
    """Replicas that policies name and that have a rate, which nothing limits here."""
    sources: Mapping[str, SourceFacts] = field(default_factory=dict)
    """The sources that this machine pulls, by name."""
    volatile: Mapping[Path, str] = field(default_factory=dict)
    """Directories that a power loss empties, and the type of their file system."""
    start_hook_problem: StartHookProblem | None = None
    """Why libvirt might start a guest on its overlays."""
    stray_fences: tuple[StrayFence, ...] = ()
    """Fences that hold no guest of this host."""
    late_fences: str = ""
    """The dataset with the fences, if libvirt's hook is not in its pool and guests are moved."""
    jobs: int = 4
    """How many guests the pre hook freezes at the same time."""
    capture: CaptureMode | None = None
    """Whether RAM can be streamed; ``None`` if that was not tried."""
    policies: bool = False
    """Whether any policy takes snapshots on a schedule."""
    policies_wait: bool = False
    """Whether no program has carried out policies yet, and no unit that does is active."""
    other_configurations: Mapping[Path, tuple[str, ...]] = field(default_factory=dict)
    """Other configuration files than the checked one, each with the units that use it."""
    unknown_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By the place in the configuration: names, patterns and disks that match no guest."""
    disks: tuple[DiskFacts, ...] = ()
    """The disks of the guests that are on ZFS."""
    records: Mapping[str, RecordFacts] = field(default_factory=dict)
    """How the datasets of these disks store data."""
