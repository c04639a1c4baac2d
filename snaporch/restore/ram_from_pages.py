"""Rebuild a RAM image from its pages in a page dataset, and copy RAM out of a snapshot."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from snaporch.bundle.compress import Compression, CompressionSettings, choose_compression
from snaporch.bundle.manifest import PagesEntry, Part, Role
from snaporch.bundle.page_file import PAGES_NAME, page_sum
from snaporch.bundle.page_image import build_image
from snaporch.bundle.qemu_stream import StreamError
from snaporch.bundle.save_image import SaveImageError
from snaporch.context import Context
from snaporch.errors import RefusedError, RunFailedError
from snaporch.reserve import RoomWatch
from snaporch.restore.extracted_file import ExtractedFile
from snaporch.restore.new_file import check_destination, new_file
from snaporch.restore.source import IncompleteError, Source
from snaporch.zfs import PoolError

IMAGE_NAME = "ram.save"
_BLOCK = 1 << 20
_RATIO = 0.6
"""Size of a compressed image relative to its pages: the worst case of an ordinary guest."""


def check_pages(context: Context, thing: str, part: Part) -> None:
    """Read the pages of a RAM part and compare them with the manifest.

    Args:
        thing: the subject of progress and errors.

    Raises:
        IncompleteError: pages are missing or damaged.
    """
    entry = _located(context, thing, part)
    try:
        with _page_file(context, entry) as path:
            found = page_sum(path, _ticker(context, thing, entry))
    except OSError as error:
        raise IncompleteError(entry.full_name, error.strerror or "cannot be read") from error
    if found != (entry.bytes, entry.sha256):
        raise IncompleteError(
            entry.full_name, "its checksum is not that of the manifest: it is damaged"
        )


def make_image(
    context: Context,
    thing: str,
    directory: Path,
    part: Part,
    target: Path,
    xml: str | None = None,
    *,
    into: int | None = None,
    plain: bool = False,
) -> None:
    """Write a RAM image that libvirt can restore, from the RAM part and its pages.

    Every byte is compared with the manifest on the way, so damaged RAM is never restored.

    Args:
        thing: the subject of progress and errors.
        directory: the directory of the bundle.
        part: the RAM part of the bundle.
        target: the image; must not exist.
        xml: replaces the definition in the image.
        into: an open, empty file that becomes the image, for a file of a user: it takes no room
            that is kept for others. ``target`` only names it then.
        plain: do not compress it.

    Raises:
        IncompleteError: a piece is missing or damaged; ``target`` does not exist then.
        RefusedError: the file system has too little room.
        RunFailedError: the room that is kept for others would be taken.
        OSError: the image cannot be written.
    """
    entry = _located(context, thing, part)
    how = CompressionSettings(Compression.NONE) if plain else _compressing(context)
    check_room(target.parent, part, how)
    context.progress.step(thing, f"rebuilding the RAM image from {entry.full_name}")
    rest, report = directory / part.name, _ticker(context, thing, entry)
    room, before = RoomWatch(target.parent), 0

    def tick(done: int) -> None:
        nonlocal before
        if into is not None:
            room.wrote(done - before)
        before = done
        report(done)

    try:
        with _page_file(context, entry) as pages:
            build_image(rest, entry, pages, target, how, tick, xml=xml, into=into)
    except StreamError as error:
        raise IncompleteError(str(rest), f"its stream {error.reason}") from error
    except SaveImageError as error:
        raise IncompleteError(error.thing, error.reason) from error


def check_image(context: Context, thing: str, part: Part, place: Path) -> None:
    """Check that an image can be made; the pages are not read.

    Args:
        thing: the subject of errors.
        place: a directory on the file system that gets the image.

    Raises:
        IncompleteError: no dataset has the snapshot of the pages.
        RefusedError: the file system has too little room.
    """
    _located(context, thing, part)
    check_room(place, part, _compressing(context))


def image_bytes(part: Part) -> int:
    """Return the bytes that an image of the part takes, in the worst case of an ordinary guest."""
    if part.pages is None:
        return part.bytes
    return int((part.payload_bytes or part.pages.bytes) * _RATIO)


def check_room(place: Path, part: Part, how: CompressionSettings) -> None:
    """Refuse an image for which the file system of ``place`` has too little room.

    Raises:
        RefusedError: with the bytes that are needed and the bytes that are free.
    """
    needed = image_bytes(part)
    if how.method is Compression.NONE:
        needed = part.payload_bytes or needed
    free = shutil.disk_usage(place).free
    if needed > free:
        raise RefusedError(
            str(place),
            f"no room for the RAM image: about {needed >> 20} MiB needed, {free >> 20} MiB free",
            "make room there",
        )


def _ticker(context: Context, thing: str, entry: PagesEntry) -> Callable[[int], None]:
    """Return a function that reports the number of pages' bytes read, and obeys signals."""

    def tick(done: int) -> None:
        context.interrupt.check(thing)
        context.progress.amount(thing, done, entry.bytes)

    return tick


def _located(context: Context, thing: str, part: Part) -> PagesEntry:
    """Return the part's page entry with the present name of its snapshot, the original or a copy.

    The snapshot is found by its GUID.

    Raises:
        IncompleteError: no dataset has it.
    """
    assert part.pages is not None
    entry, own = part.pages, part.pages.full_name
    names = context.pool.snapshot_listing().snapshots.get(entry.guid, ())
    if not names or (context.foreign and own not in names):
        raise IncompleteError(thing, f"the pages of its RAM are missing: {own} (GUID {entry.guid})")
    dataset, _, name = (own if own in names else min(names)).partition("@")
    return entry.model_copy(update={"dataset": dataset, "name": name})


@contextmanager
def _page_file(context: Context, entry: PagesEntry) -> Iterator[Path]:
    """Mount the snapshot and yield the path of its page file.

    Raises:
        IncompleteError: the snapshot cannot be mounted, or has no page file.
    """
    with ExitStack() as stack:
        try:
            root = stack.enter_context(context.pool.mounted_snapshot(entry.full_name))
        except PoolError as error:
            raise IncompleteError(error.thing, error.reason, error.step) from error
        path = root / PAGES_NAME
        if not path.is_file():
            raise IncompleteError(entry.full_name, "the page file is not in the snapshot")
        yield path


def _compressing(context: Context) -> CompressionSettings:
    """Choose a compression that libvirt can read; the image is read only once."""
    return CompressionSettings(
        choose_compression("auto", reads_zstd=context.hypervisor.reads_zstd())
    )


def extract_ram(context: Context, source: Source, to: Path) -> ExtractedFile:
    """Write the RAM of a snapshot as an image that ``virsh restore`` can resume from.

    Args:
        to: the new file, or an existing directory for it.

    Raises:
        RefusedError: the destination exists, or the snapshot has no RAM.
        IncompleteError: a piece is missing or damaged; no file is left.
        RunFailedError: the RAM could not be read or written; no file is left.
    """
    part = source.part(Role.RAM)
    if part is None:
        raise RefusedError(source.thing, "has no RAM")
    target = to / f"{source.thing}-{IMAGE_NAME}".replace("/", "_") if to.is_dir() else to
    check_destination(target)
    try:
        with new_file(target) as writing:
            if part.pages is not None:
                directory = source.directory
                make_image(context, source.thing, directory, part, target, into=writing.fileno())
            else:
                _copy(context, source, part, writing, RoomWatch(target.parent))
            size = os.fstat(writing.fileno())
    except OSError as error:
        reason = f"{error.filename or target}: {error.strerror}"
        raise RunFailedError(source.thing, f"its RAM could not be copied ({reason})") from error
    return ExtractedFile("ram", str(target), "save", size.st_size, size.st_blocks * 512)


def _copy(context: Context, source: Source, part: Part, writing: BinaryIO, room: RoomWatch) -> None:
    image, digest, done = source.directory / part.name, hashlib.sha256(), 0
    with image.open("rb") as reading:
        while block := reading.read(_BLOCK):
            context.interrupt.check(source.thing)
            room.wrote(len(block))
            writing.write(block)
            digest.update(block)
            done += len(block)
            context.progress.amount(source.thing, done, part.bytes)
    writing.flush()
    if digest.hexdigest() != part.sha256:
        raise IncompleteError(str(image), "its SHA-256 is not that of the manifest: it is damaged")
