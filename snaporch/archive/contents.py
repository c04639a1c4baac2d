"""The table of contents of an archive: its first member, which lists all others in their order.

The checks are pure functions: an archive may come from anywhere. The format is documented in
``docs/reference/export-format.md``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from snaporch.bundle.firmware_files import LIMIT_BYTES
from snaporch.bundle.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, Role
from snaporch.errors import RefusedError
from snaporch.zfs_names import quoted

FORMAT = 1
CONTENTS_NAME = "contents.json"
CHECKSUMS_NAME = "checksums.json"
MAX_CONTENTS_BYTES = 1 << 20
"""A guest has a few dozen members at most."""
MAX_XML = 1 << 20
MAX_DISK_BYTES = 1 << 60
MAX_EXTENTS = 1 << 20
"""The map of a disk has at most so many runs of data."""
FORMATS = ("raw", "qcow2")
"""Formats of disks: their images refer to no other file, or their header says to which."""
_MAX_MAP_BYTES = 48 << 20
_MAX_SMALL = 128 << 20
"""All members but disks and RAM; an import holds them in memory."""
_BLOCK = 512
_LIMITS = {
    Role.LIVE_XML: MAX_XML,
    Role.INACTIVE_XML: MAX_XML,
    Role.NVRAM: LIMIT_BYTES,
    Role.TPM: LIMIT_BYTES,
}


class ArchiveError(RefusedError):
    """An archive is damaged, incomplete or not made by ``snaporch export``."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class SparseEntry(_Frozen):
    """What a member of a disk has besides its data."""

    size: int = Field(ge=0, le=MAX_DISK_BYTES, description="length of the image in bytes")
    map_bytes: int = Field(gt=0, le=_MAX_MAP_BYTES, multiple_of=_BLOCK)
    target: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9]{0,15}$")]
    format: str


class Member(_Frozen):
    """One member of the archive after the table itself."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9./-]*$", max_length=100)]
    bytes: int = Field(ge=0, le=MAX_DISK_BYTES, description="as stored: of a disk, map and data")
    disk: SparseEntry | None = None


class Contents(_Frozen):
    """The table."""

    format: int = Field(default=FORMAT, ge=1, le=FORMAT)
    snaporch: str = Field(description="the version that made the archive")
    domain: str
    snapshot: str
    mtime: int = Field(ge=0, lt=1 << 33, description="of all members, in seconds since 1970")
    members: tuple[Member, ...] = Field(max_length=1000)

    @property
    def disks(self) -> tuple[Member, ...]:
        """The members that are disks."""
        return tuple(each for each in self.members if each.disk is not None)

    @property
    def data_bytes(self) -> int:
        """Bytes of all members, before compression."""
        return sum(each.bytes for each in self.members)


def disk_name(target: str, image_format: str) -> str:
    """The name of a disk's member."""
    return f"disks/{target}.{image_format}"


def contents_bytes(contents: Contents) -> bytes:
    """The content of the first member."""
    return contents.model_dump_json(indent=2, exclude_none=True).encode() + b"\n"


def parse_contents(data: bytes, thing: str) -> Contents:
    """Read the first member.

    Args:
        data: its content.
        thing: the archive, for errors.

    Raises:
        ArchiveError: it is invalid, or of a later format.
    """
    try:
        return Contents.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = quoted(".".join(str(step) for step in first["loc"]) or "document")
        raise ArchiveError(
            thing, f"its table of contents is invalid: {where}: {first['msg']}"
        ) from (error)


def check_order(contents: Contents, thing: str) -> None:
    """Refuse a table that does not begin with the manifest and end with the checksums.

    Raises:
        ArchiveError: or a name is listed twice, or the manifest is too large.
    """
    names = [each.name for each in contents.members]
    if len(set(names)) < len(names) or CONTENTS_NAME in names:
        twice = next((name for name in names if names.count(name) > 1), CONTENTS_NAME)
        raise ArchiveError(thing, f"its table has the member {quoted(twice)} twice")
    if names[:1] != [MANIFEST_NAME] or names[-1] != CHECKSUMS_NAME:
        reason = f"its table does not begin with {MANIFEST_NAME} and end with {CHECKSUMS_NAME}"
        raise ArchiveError(thing, reason)
    for member, limit in (
        (contents.members[0], MAX_MANIFEST_BYTES),
        (contents.members[-1], MAX_CONTENTS_BYTES),
    ):
        if member.bytes > limit or member.disk is not None:
            raise ArchiveError(thing, f"its member {member.name} is no text of a sensible size")


def check_contents(contents: Contents, manifest: Manifest, thing: str) -> None:
    """Refuse a table that is not the manifest's: exactly its parts and its disks, in their order.

    Raises:
        ArchiveError: with the first difference.
    """
    if (contents.domain, contents.snapshot) != (manifest.domain, manifest.snapshot):
        raise ArchiveError(thing, "its table and its manifest are of different snapshots")
    if manifest.is_encrypted or manifest.pages is not None:
        raise ArchiveError(thing, "its manifest is of a replica, and not of an archive")
    _check_sizes(manifest, thing)
    found, expected = contents.members[1:-1], _expected(manifest)
    for member, (name, size) in zip(found, expected, strict=False):
        if member.name != name or size not in (None, member.bytes):
            names = f"{quoted(member.name)}, its manifest {quoted(name)} of {size} bytes"
            raise ArchiveError(thing, f"its table has the member {names}")
        if (size is None) != (member.disk is not None):
            raise ArchiveError(thing, f"its manifest has {quoted(name)} as another kind of member")
    if len(found) != len(expected):
        counts = f"{len(found)} members, its manifest {len(expected)}"
        raise ArchiveError(thing, f"its table has {counts}")
    for member in contents.disks:
        _check_disk(member, thing)


def _check_sizes(manifest: Manifest, thing: str) -> None:
    roles = [part.role for part in manifest.parts if part.role is not Role.TPM]
    if twice := [role for role, count in Counter(roles).items() if count > 1]:
        raise ArchiveError(thing, f"its manifest has two parts of the role {twice[0]}")
    for part in manifest.parts:
        if part.bytes > _LIMITS.get(part.role, MAX_DISK_BYTES):
            raise ArchiveError(thing, f"its {part.role} has {part.bytes >> 10} KiB")
    if sum(part.bytes for part in manifest.parts if part.role is not Role.RAM) > _MAX_SMALL:
        raise ArchiveError(thing, f"its definitions and firmware have over {_MAX_SMALL >> 20} MiB")


def _expected(manifest: Manifest) -> list[tuple[str, int | None]]:
    """The names and sizes of the members that a manifest requires; disks have any size."""
    small: list[tuple[str, int | None]] = []
    large: list[tuple[str, int | None]] = []
    for part in manifest.parts:
        (large if part.role is Role.RAM else small).append((part.name, part.bytes))
    inside = [disk for disk in manifest.disks if disk.dataset and not disk.left_out]
    return [*small, *((disk_name(each.target, each.format), None) for each in inside), *large]


def _check_disk(member: Member, thing: str) -> None:
    disk = member.disk
    assert disk is not None
    if disk.format not in FORMATS or member.name != disk_name(disk.target, disk.format):
        raise ArchiveError(thing, f"its disk {quoted(member.name)} has an unknown format")
    if not 0 <= member.bytes - disk.map_bytes <= disk.size:
        raise ArchiveError(thing, f"its disk {disk.target} has more data than the image is long")


def pack_map(extents: Sequence[tuple[int, int]], size: int) -> bytes:
    """The map of a sparse member (GNU tar's format 1.0): decimal numbers, filled up to 512 bytes.

    Args:
        extents: start and end of each run of data, in bytes.
        size: of the whole file. If it ends with a hole, an entry without data follows.
    """
    entries = [(start, end - start) for start, end in extents]
    if not extents or extents[-1][1] < size:
        entries.append((size, 0))
    numbers = [len(entries), *(number for entry in entries for number in entry)]
    text = "".join(f"{number}\n" for number in numbers).encode()
    return text + bytes(-len(text) % _BLOCK)


def parse_map(data: bytes, member: Member, thing: str) -> list[tuple[int, int]]:
    """Read the map of a sparse member.

    Returns:
        Start and end of each run of data: in order, apart, inside the image, and together as long
        as the member says.

    Raises:
        ArchiveError: otherwise.
    """
    disk = member.disk
    assert disk is not None
    damaged = ArchiveError(thing, f"the map of its disk {disk.target} is damaged")
    text, filler = data.rstrip(b"\0"), len(data) - len(data.rstrip(b"\0"))
    if filler >= _BLOCK or text.count(b"\n") > 2 * MAX_EXTENTS + 3:
        raise damaged
    lines = text.split(b"\n")
    if lines.pop() != b"":
        raise damaged
    if not all(line.isdigit() and len(line) < 20 for line in lines):  # noqa: PLR2004
        raise damaged
    numbers = [int(line) for line in lines]
    if not numbers or len(numbers) != 1 + 2 * numbers[0]:
        raise damaged
    runs = list(_runs(numbers[1:]))
    ends = [0, *(end for _, end in runs)]
    in_order = all(start >= before for (start, _), before in zip(runs, ends, strict=False))
    total = sum(end - start for start, end in runs)
    if not in_order or ends[-1] > disk.size or total != member.bytes - disk.map_bytes:
        raise damaged
    return [run for run in runs if run[0] < run[1]]


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    for start, length in zip(numbers[::2], numbers[1::2], strict=True):
        yield start, start + length
