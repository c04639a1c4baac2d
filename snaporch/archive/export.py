"""Export a snapshot as one archive: definition, UEFI variables, TPM state, disks and RAM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, BinaryIO

from snaporch import __version__
from snaporch.archive.contents import (
    CHECKSUMS_NAME,
    CONTENTS_NAME,
    FORMATS,
    Contents,
    Member,
    SparseEntry,
    disk_name,
    pack_map,
)
from snaporch.archive.import_xml import HostRules, imported_xml
from snaporch.archive.used_extents import used_extents
from snaporch.archive.write_archive import archive_writer, checksums_bytes
from snaporch.bundle.compress import Block, Sink
from snaporch.bundle.manifest import (
    MANIFEST_NAME,
    DiskEntry,
    Manifest,
    Part,
    Role,
    manifest_bytes,
)
from snaporch.clone.find_clones import Purpose, directory_of, new_clone
from snaporch.context import Context
from snaporch.errors import RefusedError, RunFailedError
from snaporch.extract.disk_reader import open_disk, read_fully
from snaporch.hypervisor.clone_xml import CloneDisk, CloneSpec, CloneXml, SharedError
from snaporch.hypervisor.domain_xml import parse
from snaporch.hypervisor.qcow2 import HeaderError, read_qcow2
from snaporch.private_files import sha256_of
from snaporch.reserve import RoomWatch
from snaporch.restore.ram_from_pages import IMAGE_NAME, make_image
from snaporch.restore.source import IncompleteError, Source, check_whole_disks, reading_lock

_BLOCK = 1 << 20
_NO_PLACE = "/import"
"""Stands for the directory that an import will choose."""


@dataclass(frozen=True, slots=True)
class Exported:
    """An archive that was written."""

    of: str
    path: str
    """``-`` for standard output."""
    bytes: int
    """The length of the archive."""
    data_bytes: int
    """Bytes of its members, before compression."""
    with_ram: bool
    left_out: dict[str, str]
    """The disks of the guest that it does not have, by target, and why."""

    def as_json(self) -> dict[str, object]:
        """The documented JSON object."""
        return {
            "of": self.of,
            "path": self.path,
            "bytes": self.bytes,
            "data_bytes": self.data_bytes,
            "with_ram": self.with_ram,
            "left_out": self.left_out,
        }


@dataclass(frozen=True, slots=True)
class _Disk:
    """A disk that is open for reading."""

    entry: DiskEntry
    reading: BinaryIO
    extents: list[tuple[int, int]]
    size: int
    map: bytes

    @property
    def member(self) -> Member:
        """Its entry in the table of contents."""
        data = sum(end - start for start, end in self.extents)
        sparse = SparseEntry(
            size=self.size,
            map_bytes=len(self.map),
            target=self.entry.target,
            format=self.entry.format,
        )
        name = disk_name(self.entry.target, self.entry.format)
        return Member(name=name, bytes=len(self.map) + data, disk=sparse)


def check_export(context: Context, source: Source) -> None:
    """Refuse a snapshot of which an archive would not be the whole guest.

    Raises:
        RefusedError: a disk is a part of a volume, has a backing file or an unknown format, or
            there is no definition or no disk; or no import would accept the definition.
    """
    if not source.disks:
        raise RefusedError(source.thing, "has no disks")
    if not any(source.part(role) for role in (Role.INACTIVE_XML, Role.LIVE_XML)):
        raise RefusedError(source.thing, "has no definition")
    check_whole_disks(context.resolver, source.thing, source.disks)
    for disk in source.disks:
        if disk.beneath:
            below = disk.beneath[0].path
            reason = f"its disk {disk.target} has the backing file {below}"
            step = "put all data into one image with `virsh blockpull`, and snapshot it again"
            raise RefusedError(source.thing, reason, step)
        if disk.format not in FORMATS:
            reason = f"its disk {disk.target} has the format {disk.format}, not raw or qcow2"
            step = "convert it with `qemu-img convert`, and snapshot it again"
            raise RefusedError(source.thing, reason, step)
    _check_import(context, source)


def _check_import(context: Context, source: Source) -> None:
    """Refuse a definition of which no import would make a guest, and note what one needs.

    Raises:
        RefusedError: see :func:`~snaporch.archive.import_xml.imported_xml`.
    """
    formats = {disk.target: disk.format for disk in source.disks}
    disks = {
        target: CloneDisk(f"{_NO_PLACE}/{target}.{kind}", "file", kind)
        for target, kind in formats.items()
    }
    spec = CloneSpec(
        name=source.manifest.domain,
        uuid=source.manifest.uuid,
        of=source.thing,
        disks=disks,
        files=_NO_PLACE,
        network="none",
        resumed=False,
        is_clone=False,
        keeps_addresses=True,
    )
    texts = [_text(source, role) for role in (Role.INACTIVE_XML, Role.LIVE_XML)]
    definition, *more = [text for text in texts if text is not None]
    made = _imported(definition, spec, formats)
    for missing in made.missing:
        context.progress.note(source.thing, f"an import will not have {missing}")
    for text in more:
        try:
            _imported(text, replace(spec, resumed=True), formats)
        except SharedError as error:
            reason = f"an import boots it, and does not resume it: {error.reason}"
            context.progress.note(source.thing, reason)
    try:
        imported_xml(definition, spec, formats, HostRules(()))
    except RefusedError as error:
        context.progress.note(source.thing, f"for an import: {error.explanation}")


def _imported(xml: str, spec: CloneSpec, formats: Mapping[str, str]) -> CloneXml:
    """The definition that an import makes if it accepts all paths."""
    elements = list(parse(xml).iter())
    values = {(each.text or "").strip() for each in elements}
    values |= {value.strip() for each in elements for value in each.attrib.values()}
    return imported_xml(xml, spec, formats, HostRules((), values))


def _text(source: Source, role: Role) -> str | None:
    part = source.part(role)
    if part is None:
        return None
    return (source.directory / part.name).read_text("utf-8", "replace")


def export(
    context: Context, source: Source, path: str, stream: IO[bytes], *, with_ram: bool = True
) -> Exported:
    """Write the archive of a snapshot after :func:`check_export` has passed. The guest runs on.

    Args:
        path: names the archive in the result and in errors.
        stream: takes the archive.
        with_ram: whether the archive gets the RAM, if the snapshot has it.

    Raises:
        IncompleteError: a part of the snapshot is missing or damaged.
        RefusedError: a disk needs another file.
        RunFailedError: the disks cannot be read, or the archive cannot be written; or it would take
            the room that is kept for others.
        InterruptedRunError: a signal came.
    """
    written = 0
    room = RoomWatch(Path(path).absolute().parent) if path != "-" else None

    def count(block: Block) -> None:
        nonlocal written
        stream.write(block)
        written += len(block)
        if room is not None:
            room.wrote(len(block))

    try:
        with reading_lock(context, source.record), ExitStack() as stack:
            ram = stack.enter_context(_ram(context, source, with_ram=with_ram))
            disks = [stack.enter_context(_opened(context, source, each)) for each in source.disks]
            manifest = _manifest(source, ram)
            text = manifest_bytes(manifest)
            contents = _contents(source, manifest, text, disks)
            context.progress.step(source.thing, f"exporting to {path}")
            pieces = _pieces(source, text, manifest, disks, ram[0] if ram else None)
            _write(context, source.thing, contents, pieces, count)
            stream.flush()
    except OSError as error:
        reason = f"{error.filename or path}: {error.strerror or error}"
        raise RunFailedError(source.thing, f"could not be exported ({reason})") from error
    return Exported(
        source.thing, path, written, contents.data_bytes, ram is not None, left_out(source)
    )


def left_out(source: Source) -> dict[str, str]:
    """The disks of the guest that the archive does not have, by target, and why."""
    return {disk.target: disk.left_out_reason for disk in source.manifest.disks if disk.left_out}


@contextmanager
def _ram(context: Context, source: Source, *, with_ram: bool) -> Iterator[tuple[Path, Part] | None]:
    """The image of the RAM, and its part.

    RAM in pages becomes an image, which is removed after the block.
    """
    part = source.part(Role.RAM) if with_ram else None
    if part is None or part.pages is None:
        yield (source.directory / part.name, part) if part else None
        return
    with new_clone(context, f"{source.record.domain}-ram", Purpose.EXTRACT, source.thing) as uuid:
        image = directory_of(context, uuid) / IMAGE_NAME
        make_image(context, source.thing, source.directory, part, image)
        size, digest = image.stat().st_size, sha256_of(image)
        changed = {"name": IMAGE_NAME, "bytes": size, "sha256": digest}
        changed |= {"pages": None, "compression": None}
        yield image, part.model_copy(update=changed)


@contextmanager
def _opened(context: Context, source: Source, entry: DiskEntry) -> Iterator[_Disk]:
    with open_disk(context, source, entry, f"{source.record.domain}-export") as reading:
        if entry.format == "qcow2":
            _check_one_file(source, entry, reading)
        extents, size = used_extents(context, source, reading)
        yield _Disk(entry, reading, extents, size, pack_map(extents, size))


def _check_one_file(source: Source, entry: DiskEntry, reading: BinaryIO) -> None:
    thing = f"{source.thing} {entry.target}"
    try:
        image = read_qcow2(reading.fileno())
    except HeaderError as error:
        raise RefusedError(thing, str(error)) from error
    if image.encrypted:
        step = "decrypt it with `qemu-img convert`, and snapshot it again"
        raise RefusedError(thing, "its image is encrypted, and an import has no key", step)
    other = image.backing if image.backing is not None else image.data_file
    if other is not None:
        step = "put all data into one image with `qemu-img convert`, and snapshot it again"
        raise RefusedError(thing, f"its image needs another file: {other}", step)


def _manifest(source: Source, ram: tuple[Path, Part] | None) -> Manifest:
    parts = [part for part in source.manifest.parts if part.role is not Role.RAM]
    parts += [ram[1]] if ram else []
    return source.manifest.model_copy(update={"parts": tuple(parts)})


def _contents(source: Source, manifest: Manifest, text: bytes, disks: list[_Disk]) -> Contents:
    small = [part for part in manifest.parts if part.role is not Role.RAM]
    large = [part for part in manifest.parts if part.role is Role.RAM]
    members = [
        Member(name=MANIFEST_NAME, bytes=len(text)),
        *(Member(name=part.name, bytes=part.bytes) for part in small),
        *(disk.member for disk in disks),
        *(Member(name=part.name, bytes=part.bytes) for part in large),
    ]
    sums = dict.fromkeys((CONTENTS_NAME, *(each.name for each in members)), "0" * 64)
    members.append(Member(name=CHECKSUMS_NAME, bytes=len(checksums_bytes(sums))))
    return Contents(
        snaporch=__version__,
        domain=source.manifest.domain,
        snapshot=source.manifest.snapshot,
        mtime=int(manifest.created.timestamp()),
        members=tuple(members),
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    """The content of one member."""

    blocks: Iterator[bytes]
    name: str = ""
    sha256: str = ""
    """What it must be; empty if it is not known before."""


def _pieces(
    source: Source, text: bytes, manifest: Manifest, disks: list[_Disk], ram: Path | None
) -> Iterator[_Piece]:
    """The contents of all members but the last, in their order."""
    yield _Piece(iter([text]))
    for part in manifest.parts:
        if part.role is not Role.RAM:
            yield _file(source.directory / part.name, part)
    for disk in disks:
        yield _Piece(_data(disk))
    for part in manifest.parts:
        if part.role is Role.RAM and ram is not None:
            yield _file(ram, part)


def _file(path: Path, part: Part) -> _Piece:
    return _Piece(_blocks_of(path, part.bytes), str(path), part.sha256)


def _blocks_of(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as reading:
        while size:
            block = reading.read(min(size, _BLOCK))
            if not block:
                raise IncompleteError(str(path), "is shorter than its manifest says")
            size -= len(block)
            yield block


def _data(disk: _Disk) -> Iterator[bytes]:
    yield disk.map
    for start, end in disk.extents:
        for offset in range(start, end, _BLOCK):
            length = min(_BLOCK, end - offset)
            yield read_fully(disk.reading.fileno(), length, offset)


def _write(
    context: Context, thing: str, contents: Contents, pieces: Iterator[_Piece], write: Sink
) -> None:
    done = 0
    with archive_writer(contents, write) as writer:
        for piece in pieces:
            writer.begin()
            for block in piece.blocks:
                context.interrupt.check(thing)
                writer.data(block)
                done += len(block)
                context.progress.amount(thing, done, contents.data_bytes)
            digest = writer.end()
            if piece.sha256 and digest != piece.sha256:
                raise IncompleteError(piece.name, "differs from its manifest: it is damaged")
