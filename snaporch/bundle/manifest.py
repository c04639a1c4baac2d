"""The manifest: what a bundle is, in JSON, checked on the way in and on the way out."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from snaporch.bundle.compression_tuning import RamSaveTimes
from snaporch.errors import SnaporchError
from snaporch.model import LeftOutCode, Level, PauseParts

FORMAT = 1
MANIFEST_NAME = "manifest.json"

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
PartName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]*$")]


class ManifestError(SnaporchError):
    """A manifest cannot be read or contradicts itself."""


class Role(StrEnum):
    """What a part of a bundle is."""

    RAM = "ram"
    LIVE_XML = "live-xml"
    INACTIVE_XML = "inactive-xml"
    NVRAM = "nvram"
    TPM = "tpm"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PagesEntry(_Frozen):
    """The page file that a RAM part lacks: in a ZFS snapshot of a dataset of its own."""

    dataset: str
    name: str = Field(description="of the ZFS snapshot")
    guid: int
    createtxg: int
    bytes: int = Field(gt=0, description="length of the page file")
    sha256: Sha256 = Field(description="of its MiBs that are not zeros, see the bundle format")
    split: int = Field(gt=0, description="offset in the part where its pages belong")
    stored_bytes: int = Field(ge=0, description="what ZFS had to store for it")

    @property
    def full_name(self) -> str:
        """``dataset@name``."""
        return f"{self.dataset}@{self.name}"


class RamSaveTimesEntry(_Frozen):
    """How RAM was saved while the guest ran; see :mod:`snaporch.bundle.compression_tuning`."""

    level: int = Field(description="of the compressor")
    seconds: float
    waited_for_ram: float = Field(description="seconds in which QEMU was the slowest")
    waited_for_store: float = Field(description="seconds in which the store was")


class Part(_Frozen):
    """One file of the bundle."""

    name: PartName
    role: Role
    bytes: int = Field(ge=0, description="size of the file as stored")
    sha256: Sha256
    payload_bytes: int | None = Field(
        default=None, description="RAM only: size of the QEMU stream before compression"
    )
    compression: str | None = Field(default=None, description="RAM only: none, gzip, zstd, …")
    pace: RamSaveTimesEntry | None = Field(
        default=None, description="RAM only: who held up saving it"
    )
    pages: PagesEntry | None = Field(default=None, description="RAM only: where its pages are")
    source: str | None = Field(default=None, description="where the file lay on the host")
    uid: int | None = None
    gid: int | None = None
    mode: int | None = None
    exact: bool | None = Field(
        default=None,
        description="whether the copy is known to be of the frozen instant: "
        "the file did not change between freeze and copy",
    )


class SnapshotEntry(_Frozen):
    """A ZFS snapshot that the bundle belongs to; ``guid`` decides, the name is for people."""

    dataset: str
    name: str
    guid: int
    createtxg: int


class BackingFileEntry(_Frozen):
    """A file or device beneath a disk: a backing file, or one with the data of an image."""

    path: str = Field(description="as what lies above it names it, made absolute")
    dataset: str | None = Field(
        default=None, description="the one that it was snapshotted with; of no other one"
    )
    inside: str | None = Field(default=None, description="its path below the mount point of that")
    bytes: int | None = Field(default=None, description="size of one that is in no snapshot")
    inode: int | None = Field(default=None, description="its number")
    mtime_ns: int | None = Field(default=None, description="when it was last written to")

    @property
    def is_unknown(self) -> bool:
        """Whether nobody can tell if it is still the same."""
        return self.dataset is None and self.inode is None


class DiskEntry(_Frozen):
    """A disk of the guest, and where its bytes are."""

    target: str
    source: str | None = None
    format: str
    dataset: str | None = None
    inside: str | None = Field(
        default=None, description="its real path below the mount point of a file system"
    )
    partition: int | None = Field(default=None, description="of a volume: its number")
    left_out: LeftOutCode | None = Field(
        default=None, description="why it is not in the snapshot, as a code"
    )
    left_out_detail: str | None = Field(
        default=None, description="what the code does not say, such as the device or file system"
    )
    apart: bool | None = Field(
        default=None,
        description="of one that is left out: the guest can write to it, so that RAM and it are of "
        "different instants after a restore",
    )
    beneath: tuple[BackingFileEntry, ...] | None = Field(
        default=None, description="what lies beneath it, the nearest first"
    )

    @property
    def is_apart(self) -> bool:
        """Whether RAM that is resumed would meet it as of another instant."""
        return bool(self.apart)

    @property
    def left_out_reason(self) -> str:
        """Why it is not in the snapshot, for a message; empty if it is."""
        return self.left_out.describe(self.left_out_detail) if self.left_out else ""


class MemberEntry(_Frozen):
    """A domain of a consistency group."""

    domain: str
    uuid: str


class GroupEntry(_Frozen):
    """The consistency group that the bundle's domain was snapshotted with."""

    name: str
    run: str = Field(description="the same for all members, whose runs have names of their own")
    members: tuple[MemberEntry, ...] = Field(description="all of them, this domain included")


class VersionsEntry(_Frozen):
    """What made the bundle."""

    snaporch: str
    libvirt: str
    emulator: str
    machine: str
    cpu: str = Field(
        default="",
        description="the host's CPU as a ``<cpu>`` of libvirt's, if the guest saw it as it is",
    )


class PauseEntry(_Frozen):
    """What the pause was made of, in milliseconds; see :class:`~snaporch.model.PauseParts`."""

    downtime_ms: float | None = None
    switch_ms: float | None = None
    snapshot_ms: float | None = None
    resume_ms: float | None = None


class Manifest(_Frozen):
    """Everything about one bundle."""

    format: int = Field(default=FORMAT, ge=1, le=FORMAT)
    run: str
    domain: str
    uuid: str
    snapshot: str
    level: Level
    was_running: bool = Field(description="the guest ran when it was captured, and not paused")
    started: AwareDatetime
    created: AwareDatetime = Field(description="the frozen instant")
    finished: AwareDatetime
    pause_ms: float | None = None
    pause_parts: PauseEntry | None = None
    snapshots: tuple[SnapshotEntry, ...]
    disks: tuple[DiskEntry, ...]
    parts: tuple[Part, ...]
    versions: VersionsEntry
    group: GroupEntry | None = None

    def part(self, role: Role) -> Part | None:
        """The first part with this role."""
        return next((part for part in self.parts if part.role is role), None)

    @property
    def pages(self) -> PagesEntry | None:
        """Where the pages of its RAM are, if not in the bundle."""
        ram = self.part(Role.RAM)
        return ram.pages if ram else None

    @property
    def pace(self) -> RamSaveTimes | None:
        """How its RAM was saved, if the manifest says so."""
        ram = self.part(Role.RAM)
        if ram is None or ram.pace is None:
            return None
        return RamSaveTimes(**ram.pace.model_dump())

    @property
    def pause(self) -> PauseParts | None:
        """What the pause was made of, if the manifest says so."""
        parts = self.pause_parts
        if parts is None:
            return None
        return PauseParts(parts.downtime_ms, parts.switch_ms, parts.snapshot_ms, parts.resume_ms)

    @property
    def stored_bytes(self) -> int:
        """Size of all parts on disk, and what ZFS had to store for pages."""
        pages = sum(part.pages.stored_bytes for part in self.parts if part.pages)
        return sum(part.bytes for part in self.parts) + pages

    @property
    def ram_bytes(self) -> int | None:
        """Size of the RAM image before compression."""
        ram = self.part(Role.RAM)
        return ram.payload_bytes if ram else None


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a bundle.

    Raises:
        ManifestError: it is not there, not JSON, of a later format, or says something impossible.
    """
    path = directory / MANIFEST_NAME
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ManifestError(str(path), error.strerror or "cannot be read") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in first["loc"]) or "document"
        raise ManifestError(str(path), f"{where}: {first['msg']}") from error


def moment(value: datetime) -> datetime:
    """``value`` to the millisecond: what a manifest keeps of a time."""
    return value.replace(microsecond=value.microsecond // 1000 * 1000)
