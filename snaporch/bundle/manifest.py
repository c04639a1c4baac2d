"""The manifest: a JSON description of a bundle, validated whenever it is read or made.

The file ends with its own checksum, so damage is noticed also where the JSON is still valid.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
)

from snaporch.bundle.compression_tuning import RamSaveTimes
from snaporch.errors import SnaporchError
from snaporch.model import LeftOutCode, Level, PauseParts

FORMAT = 1
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 20
"""Far more than the manifest of any guest; a bundle may come from another host."""
MAX_MANIFESTS_BYTES = 32 << 20
"""Of the newest manifests of all guests on a replica, which are read at once."""

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CHECKSUM = ',\n  "sha256": "{}"\n}}\n'
"""The end of the file: the SHA-256 of all bytes before this text."""
_END = re.compile(_CHECKSUM.format("([0-9a-f]{64})").encode())
_END_BYTES = len(_CHECKSUM.format("0" * 64))

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
PartName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]*$", max_length=100)]


class ManifestError(SnaporchError):
    """A manifest cannot be read, or is invalid."""


class Role(StrEnum):
    """What a part of a bundle contains."""

    RAM = "ram"
    LIVE_XML = "live-xml"
    INACTIVE_XML = "inactive-xml"
    NVRAM = "nvram"
    TPM = "tpm"


class _Frozen(BaseModel):
    # Built at the first use: only the manifest itself, and only by commands that read one.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class PagesEntry(_Frozen):
    """The page file of a RAM part, in a ZFS snapshot of a dataset of its own."""

    dataset: str
    name: str = Field(description="of the ZFS snapshot")
    guid: int
    createtxg: int
    bytes: int = Field(gt=0, description="length of the page file")
    sha256: Sha256 = Field(description="of its MiBs that are not all zeros, see the bundle format")
    split: int = Field(gt=0, description="offset in the part where its pages belong")
    stored_bytes: int = Field(ge=0, description="bytes that ZFS stored for it")

    @property
    def full_name(self) -> str:
        """``dataset@name``."""
        return f"{self.dataset}@{self.name}"


class PlainEntry(_Frozen):
    """What an encrypted part is when it is decrypted."""

    bytes: int = Field(ge=0)
    sha256: Sha256


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
    pace: RamSaveTimes | None = Field(
        default=None, description="RAM only: how long its parts took to save"
    )
    pages: PagesEntry | None = Field(default=None, description="RAM only: where its pages are")
    source: str | None = Field(default=None, description="path of the original on the host")
    uid: int | None = None
    gid: int | None = None
    mode: int | None = None
    exact: bool | None = Field(
        default=None,
        description="whether the copy is known to be of the frozen instant: "
        "the file did not change between the freeze and the copy",
    )
    plain: PlainEntry | None = Field(
        default=None, description="only on a replica, if the file is encrypted"
    )


class SnapshotEntry(_Frozen):
    """A ZFS snapshot that the bundle belongs to. ``guid`` identifies it, the name is for people."""

    dataset: str
    name: str
    guid: int
    createtxg: int


class BackingFileEntry(_Frozen):
    """A file or device beneath a disk: a backing file, or the data file of an image."""

    path: str = Field(description="absolute, from the name in the image above it")
    dataset: str | None = Field(
        default=None, description="only if it was snapshotted with the disk"
    )
    inside: str | None = Field(
        default=None, description="path below the mount point of the dataset"
    )
    bytes: int | None = Field(default=None, description="size; only if it is in no snapshot")
    inode: int | None = Field(default=None, description="its inode number")
    mtime_ns: int | None = Field(default=None, description="time of the last write to it")

    @property
    def is_unknown(self) -> bool:
        """Whether a later check cannot find out if the file is still the same."""
        return self.dataset is None and self.inode is None


class DiskEntry(_Frozen):
    """A disk of the guest, and where its data is."""

    target: str
    source: str | None = None
    format: str
    dataset: str | None = None
    inside: str | None = Field(
        default=None, description="real path of an image below its file system's mount point"
    )
    partition: int | None = Field(default=None, description="number of the partition of a volume")
    left_out: LeftOutCode | None = Field(
        default=None, description="why the disk is not in the snapshot, as a code"
    )
    left_out_detail: str | None = Field(
        default=None, description="what the code does not say, such as the device or file system"
    )
    apart: bool | None = Field(
        default=None,
        description="only if it was left out: whether the guest can write to it, so that RAM and "
        "disk are of different instants after a restore",
    )
    beneath: tuple[BackingFileEntry, ...] | None = Field(
        default=None, description="the images and data files beneath it, the nearest first"
    )

    @property
    def is_apart(self) -> bool:
        """Whether resumed RAM would meet this disk in the state of another point in time."""
        return bool(self.apart)

    @property
    def left_out_reason(self) -> str:
        """Why the disk is not in the snapshot, for a message; empty if it is."""
        return self.left_out.describe(self.left_out_detail) if self.left_out else ""


class MemberEntry(_Frozen):
    """A domain of a consistency group."""

    domain: str
    uuid: str


class GroupEntry(_Frozen):
    """The consistency group that the bundle's domain was snapshotted with."""

    name: str
    run: str = Field(description="the same for all members; each member also has its own run")
    members: tuple[MemberEntry, ...] = Field(description="all of them, this domain included")


class DatasetEntry(_Frozen):
    """What was set on a dataset of the guest."""

    dataset: str
    properties: dict[str, str] = Field(description="those of zfsprops(7) that were set locally")
    encryption_root: str | None = Field(default=None, description="only if it is encrypted")


class HostObjectEntry(_Frozen):
    """A network or a storage pool of libvirt that the domain names."""

    name: str
    xml: str = Field(description="its definition")
    starts_at_boot: bool


class SurroundingsEntry(_Frozen):
    """What surrounds the guest on its host, as far as it could be read before the freeze."""

    starts_at_boot: bool | None = Field(default=None, description="None if it is not known")
    datasets: tuple[DatasetEntry, ...] = ()
    networks: tuple[HostObjectEntry, ...] = ()
    storage_pools: tuple[HostObjectEntry, ...] = ()


class VersionsEntry(_Frozen):
    """The versions of the programs that made the bundle."""

    snaporch: str
    libvirt: str
    emulator: str
    machine: str
    cpu: str = Field(
        default="",
        description="the host's CPU as a ``<cpu>`` of libvirt's, if the guest saw it as it is",
    )


class PauseEntry(_Frozen):
    """The parts of the pause in milliseconds; see :class:`~snaporch.model.PauseParts`."""

    downtime_ms: float | None = None
    switch_ms: float | None = None
    snapshot_ms: float | None = None
    resume_ms: float | None = None


class Manifest(_Frozen):
    """The manifest of one bundle."""

    format: int = Field(default=FORMAT, ge=1, le=FORMAT)
    run: str
    domain: str
    uuid: str
    snapshot: str
    level: Level
    was_running: bool = Field(description="the guest ran when it was captured, and was not paused")
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
    surroundings: SurroundingsEntry | None = None
    recipients: tuple[str, ...] | None = Field(
        default=None, description="only of an encrypted bundle: the public keys of age"
    )

    @field_validator("parts")
    @classmethod
    def _names_differ(cls, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        if len({part.name for part in parts}) < len(parts):
            raise ValueError("two parts have the same name")
        return parts

    def part(self, role: Role) -> Part | None:
        """The first part with this role."""
        return next((part for part in self.parts if part.role is role), None)

    @property
    def is_encrypted(self) -> bool:
        """Whether it describes encrypted files; see :mod:`~snaporch.bundle.encrypted_bundles`."""
        return self.recipients is not None or any(part.plain for part in self.parts)

    @property
    def pages(self) -> PagesEntry | None:
        """Where the pages of the RAM are, if not in the bundle."""
        ram = self.part(Role.RAM)
        return ram.pages if ram else None

    @property
    def pace(self) -> RamSaveTimes | None:
        """The times of saving the RAM, if they were recorded."""
        ram = self.part(Role.RAM)
        return ram.pace if ram else None

    @property
    def pause(self) -> PauseParts | None:
        """The parts of the pause, if they were recorded."""
        parts = self.pause_parts
        if parts is None:
            return None
        return PauseParts(parts.downtime_ms, parts.switch_ms, parts.snapshot_ms, parts.resume_ms)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all parts on disk, plus the bytes that ZFS stored for pages."""
        pages = sum(part.pages.stored_bytes for part in self.parts if part.pages)
        return sum(part.bytes for part in self.parts) + pages

    @property
    def ram_bytes(self) -> int | None:
        """Bytes of the RAM image before compression."""
        ram = self.part(Role.RAM)
        return ram.payload_bytes if ram else None


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a bundle.

    Raises:
        ManifestError: it does not exist, is too large, or is invalid: see :func:`parse_manifest`.
    """
    path = directory / MANIFEST_NAME
    try:
        with open(os.open(path, _READ), "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise ManifestError(str(path), "is not a regular file")
            data = stream.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise ManifestError(str(path), error.strerror or "cannot be read") from error
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(str(path), f"is larger than {MAX_MANIFEST_BYTES >> 20} MiB")
    return parse_manifest(data, str(path))


def manifest_bytes(manifest: Manifest) -> bytes:
    """The content of the file."""
    return with_checksum(manifest.model_dump_json(indent=2, exclude_none=True))


def with_checksum(document: str) -> bytes:
    """A JSON object, indented by two, with its checksum as the last member."""
    text = document.removesuffix("\n}").encode()
    return text + _CHECKSUM.format(hashlib.sha256(text).hexdigest()).encode()


def without_checksum(data: bytes, thing: str) -> bytes:
    """The JSON object in the content of a file that :func:`with_checksum` made.

    Args:
        data: the content.
        thing: the file, for errors.

    Raises:
        ManifestError: it differs from the SHA-256 at its end.
    """
    text, end = data[:-_END_BYTES], _END.fullmatch(data[-_END_BYTES:])
    if end is None or hashlib.sha256(text).hexdigest().encode() != end[1]:
        raise ManifestError(thing, "its SHA-256 differs from the one at its end: it is damaged")
    return text + b"\n}"


def parse_manifest(data: bytes, thing: str) -> Manifest:
    """The manifest in the content of a file.

    Args:
        data: the content.
        thing: the file, for errors.

    Raises:
        ManifestError: it differs from the SHA-256 at its end, has a later format, or has an invalid
            value.
    """
    document = without_checksum(data, thing)
    try:
        return Manifest.model_validate_json(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in first["loc"]) or "document"
        raise ManifestError(thing, f"{where}: {first['msg']}") from error


def cut_to_milliseconds(value: datetime) -> datetime:
    """``value`` cut to milliseconds, the precision of times in a manifest."""
    return value.replace(microsecond=value.microsecond // 1000 * 1000)
