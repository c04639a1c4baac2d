"""Domains, disks, datasets and snapshots as frozen data. Imports nothing else of snaporch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

UUID_FORM = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""A domain's UUID, as libvirt writes it."""


class Level(StrEnum):
    """How consistent a snapshot is, best first."""

    RAM = "ram"
    QUIESCED = "quiesced"
    PAUSED = "paused"
    CRASH = "crash"
    OFF = "off"
    TORN = "torn"
    """Taken while overlays were committed: the disks are of no single instant, and unusable."""


class Strategy(StrEnum):
    """How a run freezes the guest while its disks are snapshotted."""

    OVERLAY = "overlay"
    MANUAL = "manual"
    QUIESCED = "quiesced"
    PAUSED = "paused"
    CRASH = "crash"
    OFF = "off"

    @property
    def level(self) -> Level:
        """The level that the strategy reaches if nothing fails."""
        return Level.RAM if self in (Strategy.OVERLAY, Strategy.MANUAL) else Level(self.value)


class BundleState(StrEnum):
    """Whether the bundle and the ZFS snapshots of a snapshot are complete."""

    COMPLETE = "complete"
    DAMAGED = "damaged"
    """No part is missing, but the last verification found a part with a wrong checksum."""
    INCOMPLETE = "incomplete"
    MISSING = "missing"
    NONE = "none"
    """The snapshot is crash-consistent and has no bundle: its run was interrupted before it wrote
    one, or sanoid took it of a guest that was not frozen."""

    @property
    def is_there(self) -> bool:
        """Whether no part is missing; the parts may be damaged."""
        return self in (BundleState.COMPLETE, BundleState.DAMAGED)


class DomainState(StrEnum):
    """A domain's state, as far as a run distinguishes it."""

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
    """The kinds of dataset that can hold a disk, as ``zfs list -o type`` names them."""

    FILESYSTEM = "filesystem"
    VOLUME = "volume"


@dataclass(frozen=True, slots=True, order=True)
class Dataset:
    """A ZFS file system or volume."""

    name: str
    kind: DatasetKind

    @property
    def pool(self) -> str:
        """The name of the dataset's pool."""
        return self.name.split("/", 1)[0]


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """One ZFS snapshot of one dataset.

    ``guid`` and ``createtxg`` identify it. The name does not: after a destroy, another snapshot can
    have it.
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
class SnapshotListing:
    """All snapshots of the imported pools, from one listing."""

    pools: frozenset[str]
    """The pools that were listed."""
    snapshots: Mapping[int, tuple[str, ...]]
    """Full names by GUID; a replica has the GUID of its original."""

    def agreed(self, other: SnapshotListing) -> SnapshotListing:
        """Combine two listings to be on the safe side: pools in both, snapshots in either."""
        guids = dict.fromkeys([*self.snapshots, *other.snapshots])
        merged = {
            guid: tuple(
                dict.fromkeys([*self.snapshots.get(guid, ()), *other.snapshots.get(guid, ())])
            )
            for guid in guids
        }
        return SnapshotListing(self.pools & other.pools, merged)

    def without(self, names: Collection[str]) -> SnapshotListing:
        """The listing as it would be if the snapshots with these full names were destroyed."""
        left = {
            guid: tuple(name for name in own if name not in names)
            for guid, own in self.snapshots.items()
        }
        return SnapshotListing(self.pools, {guid: own for guid, own in left.items() if own})


@dataclass(frozen=True, slots=True)
class PolicyView:
    """The state of ZFS that policies need, at one moment."""

    snapshots: tuple[PoolSnapshot, ...]
    """Oldest first."""
    pinned: Mapping[str, str]
    """By a snapshot's full name: why it cannot be destroyed, a hold or a clone."""
    policies: Mapping[str, str]
    """``snaporch:policy`` of each dataset that has or inherits one."""


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk of a domain, as the domain's XML describes it."""

    target: str
    """The disk's name in the guest: ``vda``."""
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
    """Whether QEMU may discard blocks that the guest discards (``discard``) or fills with zeros
    (``detect_zeroes``)."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The user and group of an emulator process."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class TpmState:
    """The path of an emulated TPM's persistent state."""

    path: str
    is_file: bool = False
    """Whether the path is a file; otherwise a directory has a file for each kind of state."""

    @property
    def directory(self) -> Path:
        """The directory of the state's files."""
        return Path(self.path).parent if self.is_file else Path(self.path)

    def holds(self, file: Path) -> bool:
        """Return whether ``file`` is, or would be, a part of the state."""
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
    """Identifies the emulator process; empty if there is none."""
    problem: str = ""
    """Why libvirt could not report the current state; ``live_xml`` is then only the definition."""

    @property
    def active(self) -> bool:
        """Whether an emulator process exists."""
        return self.live_xml is not None

    def disk(self, target: str) -> Disk | None:
        """Return the disk with the name ``target`` in the guest, or ``None``."""
        return next((disk for disk in self.disks if disk.target == target), None)


@dataclass(frozen=True, slots=True)
class GroupRun:
    """One snapshot of a consistency group."""

    name: str
    run: str
    """Common to all members; each member's own run has another name."""
    members: tuple[tuple[str, str], ...]
    """UUID and name of each domain."""

    @property
    def mark(self) -> str:
        """The value of the property ``snaporch:group``."""
        return f"{self.name}/{self.run}"


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions of the programs that made a bundle; empty if unknown."""

    snaporch: str
    libvirt: str
    emulator: str
    machine: str
    cpu: str = ""
    """The host's CPU in libvirt's XML, if the guest sees it (``host-passthrough``); else empty."""


@dataclass(frozen=True, slots=True)
class PauseParts:
    """The parts of a pause, in milliseconds; ``None`` if a part did not occur or is unknown."""

    downtime: float | None = None
    """QEMU's own downtime: it saves the last of RAM and the devices' state."""
    switch: float | None = None
    """Until the disks were frozen: libvirt ends the image and switches to overlays."""
    snapshot: float | None = None
    """The ZFS snapshots, if the guest is paused until they exist."""
    resume: float | None = None
    """Resuming the guest."""

    def as_json(self) -> dict[str, object]:
        """Return the documented JSON object."""
        return {
            "downtime_ms": self.downtime,
            "switch_ms": self.switch,
            "snapshot_ms": self.snapshot,
            "resume_ms": self.resume,
        }


class VerifyDepth(StrEnum):
    """The last step that a verification reached."""

    NOTHING = "nothing"
    CHECKED = "checked"
    """All parts exist, and their checksums and GUIDs match."""
    BOOTED = "booted"
    """A clone was booted from the disks."""
    RESUMED = "resumed"
    """A clone was resumed from RAM."""


_STEPS = "steps:"
_DISKS = "disks"
_COMMAND = "command"


def _with_time(word: str, at: datetime | None) -> str:
    return word if at is None else f"{word}@{iso(at)}"


class VerifyStep(StrEnum):
    """A step of a verification, which passes or fails; most verifications leave some out."""

    CHECKSUMS = "checksums"
    """Checksums, GUIDs and backing files; no verification leaves this out."""
    DISKS = "disks"
    """All data of the disks is read."""
    CLONE = "clone"
    """A clone is resumed or booted, and shows signs of life."""
    COMMAND = "command"
    """The guest's ``verify_command`` is run in the clone, by the guest's agent."""
    SCRIPT = "script"
    """The admin's script is run against the clone."""


@dataclass(frozen=True, slots=True)
class VerificationResult:
    """The result of the verifications of a snapshot, as the last one left it."""

    at: datetime
    """When the last verification ended."""
    passed: bool
    """Whether the last verification passed, and no step of an earlier one is still failed."""
    reached: VerifyDepth
    """The last step that was reached, by the last verification or by an earlier one."""
    disks: bool = False
    """Whether all data of the disks was read, by the last verification or by an earlier one."""
    failed_steps: tuple[VerifyStep, ...] = ()
    """The steps that failed and have not passed since, in their order."""
    earlier_reached: datetime | None = None
    """When the earlier verification ended that reached ``reached``; ``None`` for the last one."""
    earlier_disks: datetime | None = None
    """When the earlier verification ended that read the disks; ``None`` for the last one."""
    command: bool = False
    """Whether ``verify_command`` passed in a clone, by the last verification or an earlier one."""
    earlier_command: datetime | None = None
    """When the earlier verification ended in which it passed; ``None`` for the last one."""

    @property
    def reached_at(self) -> datetime:
        """When the verification ended that reached ``reached``."""
        return self.earlier_reached or self.at

    @property
    def disks_at(self) -> datetime | None:
        """When the verification ended that read all data of the disks; ``None`` if none did."""
        return (self.earlier_disks or self.at) if self.disks else None

    @property
    def command_at(self) -> datetime | None:
        """When the verification ended in which ``verify_command`` passed; ``None`` without one."""
        return (self.earlier_command or self.at) if self.command else None

    def after(self, before: VerificationResult | None) -> VerificationResult:
        """Return this result with what ``before`` proves beyond it.

        A snapshot that failed has proved nothing: a failure is never hidden by an older pass, and
        after a failure only what was verified since counts.
        """
        if before is None or not (self.passed and before.passed):
            return self
        found, order = self, list(VerifyDepth)
        if order.index(before.reached) > order.index(self.reached):
            found = replace(found, reached=before.reached, earlier_reached=before.reached_at)
        if before.disks and not self.disks:
            found = replace(found, disks=True, earlier_disks=before.disks_at)
        if before.command and not self.command:
            found = replace(found, command=True, earlier_command=before.command_at)
        return found

    def as_text(self) -> str:
        """Return the value of the property ``snaporch:verified``.

        Such as ``2026-11-21T14:00:00Z passed resumed``. A word ``disks`` says that all data of the
        disks was read, a word ``command`` that ``verify_command`` passed. Behind each of the three
        stands ``@`` and the time, if an earlier verification did it. A last word such as
        ``steps:disks,script`` has the failed steps.
        """
        words = [iso(self.at), "passed" if self.passed else "failed"]
        words.append(_with_time(self.reached.value, self.earlier_reached))
        words += [_with_time(_DISKS, self.earlier_disks)] if self.disks else []
        words += [_with_time(_COMMAND, self.earlier_command)] if self.command else []
        words += [_STEPS + ",".join(self.failed_steps)] if self.failed_steps else []
        return " ".join(words)

    @classmethod
    def parse(cls, text: str | None) -> VerificationResult | None:
        """Parse the text of :meth:`as_text`; ``None`` for any other text."""
        try:
            at, word, depth, *rest = (text or "").split(" ")
            names = rest.pop().removeprefix(_STEPS) if rest and rest[-1].startswith(_STEPS) else ""
            reached, _, reached_at = depth.partition("@")
            done = {key: at for key, _, at in (each.partition("@") for each in rest)}
            disks_at, command_at = done.get(_DISKS), done.get(_COMMAND)
            result = cls(
                parse_iso(at),
                word == "passed",
                VerifyDepth(reached),
                _DISKS in done,
                tuple(VerifyStep(name) for name in names.split(",") if name),
                parse_iso(reached_at) if reached_at else None,
                parse_iso(disks_at) if disks_at else None,
                _COMMAND in done,
                parse_iso(command_at) if command_at else None,
            )
        except ValueError:
            return None
        return result if result.as_text() == text else None

    @property
    def is_restored(self) -> bool:
        """Whether it passed, and a clone ran."""
        return self.passed and self.reached in (VerifyDepth.BOOTED, VerifyDepth.RESUMED)

    @property
    def is_damage(self) -> bool:
        """Whether a stored part has changed."""
        return not self.passed and self.reached is VerifyDepth.NOTHING

    def as_json(self) -> dict[str, object]:
        """Return the fields of the documented JSON objects."""
        return {
            "at": iso(self.at),
            "passed": self.passed,
            "reached": self.reached.value,
            "reached_at": iso(self.reached_at),
            "disks_read": self.disks,
            "disks_read_at": iso(self.disks_at) if self.disks_at else None,
            "command_passed": self.command,
            "command_passed_at": iso(self.command_at) if self.command_at else None,
            "failed_steps": [step.value for step in self.failed_steps],
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
    """The policy that it was taken for, and whose retention deletes it."""
    group: str | None = None
    """The consistency group it was taken with."""
    group_run: str | None = None
    """Common to all snapshots that were taken in the same window."""
    pause_parts: PauseParts | None = None
    replicated: tuple[str, ...] = ()
    """The replicas that have the complete snapshot."""
    dropped: tuple[str, ...] = ()
    """The replicas that lack it, and cannot get it any more because they have a newer one."""
    apart: tuple[str, ...] = ()
    """Writable disks that are not in the snapshot; after a restore they are of another instant."""
    unchanged: datetime | None = None
    """When the guest was last found off, with disks that had not changed since the snapshot."""
    renamed: tuple[str, ...] = ()
    """The old names of its datasets that were renamed since, if that was checked."""
    kept: datetime | None = None
    """Since when the admin keeps it; nothing of snaporch deletes it meanwhile."""
    note: str = ""
    """The admin's note on it."""

    @property
    def full_name(self) -> str:
        """``domain@snapshot``, the argument of commands."""
        return f"{self.domain}@{self.snapshot}"

    @property
    def has_failed(self) -> bool:
        """Whether its last verification failed."""
        return self.verified is not None and not self.verified.passed

    def as_json(self) -> dict[str, object]:
        """Return the documented JSON object (``docs/reference/json.md``)."""
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
            "kept": iso(self.kept) if self.kept else None,
            "note": self.note or None,
        }


_ISO = "%Y-%m-%dT%H:%M:%SZ"


def iso(moment: datetime) -> str:
    """Return ``moment`` as ISO 8601 in UTC with a trailing ``Z``, to the second."""
    return moment.astimezone(UTC).strftime(_ISO)


def parse_iso(text: str) -> datetime:
    """Parse the text of :func:`iso`.

    Raises:
        ValueError: the text has another form.
        TypeError: it is not text.
    """
    return datetime.strptime(text, _ISO).replace(tzinfo=UTC)


def moment_at(seconds: float) -> datetime:
    """The time of so many seconds since the epoch; the epoch for a number that is no time.

    The time of a received snapshot is the sender's, and may be any number.
    """
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OSError, OverflowError, ValueError):
        return datetime.fromtimestamp(0, UTC)


def moment_of(text: str | None) -> datetime | None:
    """Parse the text of :func:`iso`; ``None`` for any other text."""
    try:
        return parse_iso(text or "")
    except ValueError:
        return None
