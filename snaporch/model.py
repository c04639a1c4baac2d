"""The nouns of the field as plain frozen data. Imports nothing of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path


class Level(StrEnum):
    """How consistent a snapshot is, best first."""

    RAM = "ram"
    QUIESCED = "quiesced"
    PAUSED = "paused"
    CRASH = "crash"
    OFF = "off"
    TORN = "torn"
    """Of no instant: taken while overlays were committed. Nothing can be had from it."""


class Strategy(StrEnum):
    """How a guest is made to stand still while its disks are snapshotted."""

    OVERLAY = "overlay"
    MANUAL = "manual"
    QUIESCED = "quiesced"
    PAUSED = "paused"
    CRASH = "crash"
    OFF = "off"

    @property
    def level(self) -> Level:
        """The level it reaches if nothing comes in between."""
        return Level.RAM if self in (Strategy.OVERLAY, Strategy.MANUAL) else Level(self.value)


class BundleState(StrEnum):
    """Whether what belongs to a snapshot is there."""

    COMPLETE = "complete"
    DAMAGED = "damaged"
    """All is there, but its last verification read something else than what was stored."""
    INCOMPLETE = "incomplete"
    MISSING = "missing"

    @property
    def is_there(self) -> bool:
        """Whether no part of it is gone, whatever is in them."""
        return self in (BundleState.COMPLETE, BundleState.DAMAGED)


class DomainState(StrEnum):
    """A domain's state, as far as a run must tell them apart."""

    RUNNING = "running"
    PAUSED = "paused"
    OFF = "off"
    CRASHED = "crashed"
    SUSPENDED = "suspended"
    STOPPING = "stopping"


class LeftOutCode(StrEnum):
    """Why a disk is not in a snapshot, as manifests store it."""

    EXCLUDED = "excluded"
    REMOVABLE = "removable"
    READ_ONLY = "read-only"
    NOT_LOCAL = "not-local"
    NOT_ON_ZFS = "not-on-zfs"
    NOT_ROLLED_BACK = "not-rolled-back"
    """In the safety copy of a restore: the restore did not change this disk."""

    def describe(self, detail: str | None) -> str:
        """The reason as text for a message.

        Args:
            detail: the device of a removable disk, the kind of one that is not local, or what was
                found instead of ZFS; ignored for the other codes.
        """
        return _LEFT_OUT_TEXTS[self].format(detail or "unknown")


_LEFT_OUT_TEXTS = {
    LeftOutCode.EXCLUDED: "excluded by the configuration",
    LeftOutCode.REMOVABLE: "removable ({})",
    LeftOutCode.READ_ONLY: "read-only",
    LeftOutCode.NOT_LOCAL: "not a local file or device ({})",
    LeftOutCode.NOT_ON_ZFS: "{}",
    LeftOutCode.NOT_ROLLED_BACK: "was not rolled back",
}


class DatasetKind(StrEnum):
    """What ``zfs list -o type`` calls a dataset that can hold a disk."""

    FILESYSTEM = "filesystem"
    VOLUME = "volume"


@dataclass(frozen=True, slots=True, order=True)
class Dataset:
    """A ZFS file system or volume."""

    name: str
    kind: DatasetKind

    @property
    def pool(self) -> str:
        """The pool the dataset lives in."""
        return self.name.split("/", 1)[0]


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """One ZFS snapshot of one dataset.

    ``guid`` and ``createtxg`` identify it: a name comes back after a destroy, they do not.
    """

    dataset: str
    name: str
    guid: int
    createtxg: int
    created: datetime
    properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def full_name(self) -> str:
        """``dataset@name``."""
        return f"{self.dataset}@{self.name}"


@dataclass(frozen=True, slots=True)
class Census:
    """What one listing of the imported pools found."""

    pools: frozenset[str]
    """Those that answered."""
    snapshots: Mapping[int, tuple[str, ...]]
    """Full names by GUID; a replica has its original's."""

    def agreed(self, other: Census) -> Census:
        """What must be reckoned with by either: pools in both, snapshots in any of them."""
        guids = dict.fromkeys([*self.snapshots, *other.snapshots])
        merged = {
            guid: tuple(
                dict.fromkeys([*self.snapshots.get(guid, ()), *other.snapshots.get(guid, ())])
            )
            for guid in guids
        }
        return Census(self.pools & other.pools, merged)


@dataclass(frozen=True, slots=True)
class Survey:
    """All that policies need to know of ZFS, of one moment."""

    snapshots: tuple[PoolSnapshot, ...]
    """Oldest first."""
    pinned: Mapping[str, str]
    """Why a snapshot (by its full name) cannot be destroyed: a hold or a clone."""
    policies: Mapping[str, str]
    """``snaporch:policy`` of each dataset that has or inherits one."""


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk of a domain as its XML describes it."""

    target: str
    """The guest's name for it: ``vda``."""
    source: str | None
    """Path of the image or block device; ``None`` for an empty drive or a network disk."""
    kind: str
    """libvirt's ``<disk type=…>``: file, block, volume, network, …"""
    device: str
    """libvirt's ``<disk device=…>``: disk, cdrom, floppy, lun."""
    format: str
    readonly: bool
    cache: str | None = None
    transient: bool = False
    discards: bool = False
    """Whether QEMU may discard what the guest gave up (``discard``) or wrote zeros to
    (``detect_zeroes``)."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The user and group an emulator process runs as."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class TpmState:
    """Where an emulated TPM keeps what outlasts its guest's power cycles."""

    path: str
    is_file: bool = False
    """One file; else a directory, in which each kind of state has a file."""

    @property
    def directory(self) -> Path:
        """The directory of its files."""
        return Path(self.path).parent if self.is_file else Path(self.path)

    def holds(self, file: Path) -> bool:
        """Whether ``file`` would be a part of it."""
        return file == Path(self.path) if self.is_file else file.parent == Path(self.path)


@dataclass(frozen=True, slots=True)
class Domain:
    """A libvirt domain at one moment."""

    name: str
    uuid: str
    state: DomainState
    disks: tuple[Disk, ...]
    live_xml: str | None
    inactive_xml: str | None
    nvram: str | None
    tpm_state: TpmState | None
    machine: str
    managed_save: bool
    emulator_owner: Owner | None
    boot: str
    """Tells one emulator process from the next; empty without one."""
    trouble: str = ""
    """Why libvirt could not say how it is now; then ``live_xml`` is only its definition."""

    @property
    def active(self) -> bool:
        """Whether an emulator process exists."""
        return self.live_xml is not None

    def disk(self, target: str) -> Disk | None:
        """The disk the guest calls ``target``."""
        return next((disk for disk in self.disks if disk.target == target), None)


@dataclass(frozen=True, slots=True)
class GroupRun:
    """One snapshot of a consistency group."""

    name: str
    run: str
    """The same for all its members, whose runs have names of their own."""
    members: tuple[tuple[str, str], ...]
    """UUID and name of each domain."""

    @property
    def mark(self) -> str:
        """As the property ``snaporch:group`` has it."""
        return f"{self.name}/{self.run}"


@dataclass(frozen=True, slots=True)
class Versions:
    """What made a bundle, as text; empty when unknown."""

    snaporch: str
    libvirt: str
    emulator: str
    machine: str
    cpu: str = ""
    """The host's CPU as a running guest sees it, in libvirt's XML; empty if it sees a model."""


@dataclass(frozen=True, slots=True)
class PauseParts:
    """What a pause was made of, in milliseconds; ``None`` is no part of it, or was not told."""

    downtime: float | None = None
    """QEMU's own: the last of RAM, and the devices' state."""
    switch: float | None = None
    """Until the disks stood still: libvirt's end of the image, and the switch to overlays."""
    snapshot: float | None = None
    """The ZFS snapshots, where the guest waits for them."""
    resume: float | None = None
    """Letting it run again."""

    def as_json(self) -> dict[str, object]:
        """The documented JSON object."""
        return {
            "downtime_ms": self.downtime,
            "switch_ms": self.switch,
            "snapshot_ms": self.snapshot,
            "resume_ms": self.resume,
        }


class VerifyDepth(StrEnum):
    """How far a verification came."""

    NOTHING = "nothing"
    CHECKED = "checked"
    """Everything is there, with its checksums and GUIDs."""
    BOOTED = "booted"
    """A clone was booted from the disks."""
    RESUMED = "resumed"
    """A clone was resumed from RAM."""


@dataclass(frozen=True, slots=True)
class VerificationResult:
    """What the last verification of a snapshot said."""

    at: datetime
    passed: bool
    reached: VerifyDepth
    disks: bool = False
    """Whether all of its disks was read."""

    def as_text(self) -> str:
        """As the property ``snaporch:verified`` has it: ``2026-11-21T14:00:00Z passed resumed``.

        A fourth word, ``disks``, says that these were read.
        """
        words = [iso(self.at), "passed" if self.passed else "failed", self.reached.value]
        return " ".join([*words, "disks"] if self.disks else words)

    @classmethod
    def parse(cls, text: str | None) -> VerificationResult | None:
        """What :meth:`as_text` wrote; ``None`` for anything else."""
        match (text or "").split(" "):
            case [at, ("passed" | "failed") as word, reached, *rest] if rest in ([], ["disks"]):
                try:
                    return cls(parse_iso(at), word == "passed", VerifyDepth(reached), bool(rest))
                except ValueError:
                    return None
        return None

    @property
    def is_damage(self) -> bool:
        """Whether what is stored is not what was stored."""
        return not self.passed and self.reached is VerifyDepth.NOTHING

    def as_json(self) -> dict[str, object]:
        """Fields of the documented JSON objects."""
        return {
            "at": iso(self.at),
            "passed": self.passed,
            "reached": self.reached.value,
            "disks_read": self.disks,
        }


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A snapshot of a whole domain: what ``list`` shows and ``--json`` prints."""

    domain: str
    uuid: str
    snapshot: str
    run: str
    level: Level
    datasets: tuple[str, ...]
    created: datetime
    ram_bytes: int | None
    stored_bytes: int
    pause_ms: float | None
    bundle: str | None
    state: BundleState
    verified: VerificationResult | None = None
    policy: str | None = None
    """The policy it was taken for, and by whose rules it may be deleted."""
    group: str | None = None
    """The consistency group it was taken with."""
    group_run: str | None = None
    """The same for all that were taken in that window."""
    pause_parts: PauseParts | None = None
    replicated: tuple[str, ...] = ()
    """The replicas that have all of it."""
    apart: tuple[str, ...] = ()
    """Disks that the guest can write to and that are not in it: of another instant."""
    unchanged: datetime | None = None
    """When its guest was last found off, and still what the snapshot holds."""
    renamed: tuple[str, ...] = ()
    """What datasets of it were called that have another name now, if that was looked at."""

    @property
    def full_name(self) -> str:
        """``domain@snapshot``, as commands take it."""
        return f"{self.domain}@{self.snapshot}"

    @property
    def has_failed(self) -> bool:
        """Whether its last verification failed."""
        return self.verified is not None and not self.verified.passed

    def as_json(self) -> dict[str, object]:
        """The documented JSON object (``docs/json.md``)."""
        return {
            "domain": self.domain,
            "uuid": self.uuid,
            "snapshot": self.snapshot,
            "run": self.run,
            "level": self.level.value,
            "datasets": list(self.datasets),
            "created": iso(self.created),
            "ram_bytes": self.ram_bytes,
            "stored_bytes": self.stored_bytes,
            "pause_ms": self.pause_ms,
            "pause_parts": self.pause_parts.as_json() if self.pause_parts else None,
            "bundle": self.bundle,
            "state": self.state.value,
            "verified": self.verified.as_json() if self.verified else None,
            "policy": self.policy,
            "group": self.group,
            "group_run": self.group_run,
            "replicated": list(self.replicated),
            "apart": list(self.apart),
            "unchanged": iso(self.unchanged) if self.unchanged else None,
        }


_ISO = "%Y-%m-%dT%H:%M:%SZ"


def iso(moment: datetime) -> str:
    """``moment`` as ISO 8601 in UTC with a trailing ``Z``, to the second."""
    return moment.astimezone(UTC).strftime(_ISO)


def parse_iso(text: str) -> datetime:
    """What :func:`iso` wrote.

    Raises:
        ValueError: it is anything else.
        TypeError: it is no text.
    """
    return datetime.strptime(text, _ISO).replace(tzinfo=UTC)


def moment_of(text: str | None) -> datetime | None:
    """What :func:`iso` wrote; ``None`` for anything else."""
    try:
        return parse_iso(text or "")
    except ValueError:
        return None
