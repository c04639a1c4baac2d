"""Unpack an archive into a private directory: small members into memory, disks and RAM into files.

Nothing is written outside of the directory, and no name of the archive names a file here: a disk
becomes ``vda.raw`` after the check of its target.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from snaporch.archive.contents import (
    ArchiveError,
    Contents,
    Member,
    SparseEntry,
    check_contents,
    parse_map,
)
from snaporch.archive.read_archive import ArchiveReader
from snaporch.bundle.manifest import Manifest, ManifestError, Part, Role, parse_manifest
from snaporch.disks.foreign_image import named_by
from snaporch.hypervisor.qcow2 import HeaderError, read_qcow2
from snaporch.private_files import write_at
from snaporch.zfs_names import quoted

RAM_NAME = ".ram.save"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Head:
    """What is read of an archive before its disks."""

    contents: Contents
    manifest: Manifest
    parts: dict[str, bytes]
    """The small parts, by name."""

    def text(self, role: Role) -> str | None:
        """The content of an XML part, if there is one."""
        part = self.manifest.part(role)
        return self.parts[part.name].decode("utf-8", "replace") if part else None

    @property
    def formats(self) -> dict[str, str]:
        """The format of each disk, by its target."""
        return {disk.target: disk.format for disk in map(sparse, self.contents.disks)}


def sparse(member: Member) -> SparseEntry:
    """The entry of a member that is a disk."""
    assert member.disk is not None
    return member.disk


def read_head(reader: ArchiveReader, thing: str) -> Head:
    """Read the manifest and the small parts, and check the table.

    Raises:
        ArchiveError: the archive is damaged, or not as the manifest says.
        OSError: it cannot be read.
    """
    _, text = reader.text()
    try:
        manifest = parse_manifest(text, f"{thing}: manifest")
    except ManifestError as error:
        raise ArchiveError(error.thing, error.reason) from error
    check_contents(reader.contents, manifest, thing)
    parts = {}
    for part in manifest.parts:
        if part.role is not Role.RAM:
            member, parts[part.name] = reader.text()
            _check_part(reader, member, part, thing)
    return Head(reader.contents, manifest, parts)


def unpack(
    reader: ArchiveReader, head: Head, to: Path, thing: str, tick: Callable[[int], None]
) -> None:
    """Write all disks and the RAM into files of the directory ``to``, and check all checksums.

    Args:
        reader: after :func:`read_head`.
        tick: is called with the number of bytes of each block; may raise.

    Raises:
        ArchiveError: the archive is damaged or incomplete, or a disk names another file.
        OSError: a file cannot be written.
    """
    for member in head.contents.disks:
        _, blocks = reader.blocks()
        with _new(to / f"{sparse(member).target}.{sparse(member).format}") as descriptor:
            _write_disk(descriptor, member, _ticked(blocks, tick), thing)
    ram = head.manifest.part(Role.RAM)
    if ram is not None:
        member, blocks = reader.blocks()
        with _new(to / RAM_NAME) as descriptor:
            offset = 0
            for block in _ticked(blocks, tick):
                write_at(descriptor, block, offset)
                offset += len(block)
        _check_part(reader, member, ram, thing)
    reader.check_end()


def placed(
    runs: Iterable[tuple[int, int]], blocks: Iterable[bytes]
) -> Iterator[tuple[int, memoryview]]:
    """Where each piece of the data belongs.

    Args:
        runs: start and end of each, together as long as the data.
        blocks: the data, one run after another.

    Yields:
        The offset of a piece, and the piece.
    """
    pending = iter(runs)
    start = end = 0
    for block in blocks:
        view = memoryview(block)
        while view:
            while start == end:
                start, end = next(pending)
            piece = view[: end - start]
            yield start, piece
            start, view = start + len(piece), view[len(piece) :]


def _check_part(reader: ArchiveReader, member: Member, part: Part, thing: str) -> None:
    if reader.checksum(member.name) != part.sha256:
        reason = f"its {quoted(part.name)} has another SHA-256 than in its manifest: it is damaged"
        raise ArchiveError(thing, reason, "get it again from where it was exported")


def _write_disk(descriptor: int, member: Member, blocks: Iterator[bytes], thing: str) -> None:
    disk = sparse(member)
    os.ftruncate(descriptor, disk.size)
    head = b""
    while len(head) < disk.map_bytes:
        head += next(blocks)
    runs = parse_map(head[: disk.map_bytes], member, thing)
    for offset, piece in placed(runs, _after(head[disk.map_bytes :], blocks)):
        write_at(descriptor, piece, offset)
    if disk.format == "qcow2":
        _check_one_file(descriptor, disk, thing)


def _after(first: bytes, blocks: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from blocks


def _check_one_file(descriptor: int, disk: SparseEntry, thing: str) -> None:
    """Refuse an image that names another file, which the emulator would open."""
    try:
        needs_more = named_by(descriptor, disk.format) or read_qcow2(descriptor).encrypted
    except HeaderError as error:
        raise ArchiveError(thing, f"its disk {disk.target} {error}") from error
    if needs_more:
        raise ArchiveError(thing, f"its disk {disk.target} needs another file, or a key")


def _ticked(blocks: Iterable[bytes], tick: Callable[[int], None]) -> Iterator[bytes]:
    for block in blocks:
        tick(len(block))
        yield block


@contextmanager
def _new(path: Path) -> Iterator[int]:
    """A new private file, which is on stable storage after the block."""
    descriptor = os.open(path, _FLAGS, 0o600)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
