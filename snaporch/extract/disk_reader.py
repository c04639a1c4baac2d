"""Read disks of a snapshot: all data, or an error; never zeros in place of damaged data.

That zeros become holes in the copy is done by :mod:`snaporch.extract.extract`.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from typing import BinaryIO

from snaporch.bundle.manifest import DiskEntry
from snaporch.clone.clone import clone_dataset
from snaporch.clone.find_clones import Purpose, new_clone
from snaporch.context import Context
from snaporch.errors import RunFailedError
from snaporch.model import DatasetKind
from snaporch.restore.disk_checks import beneath_inside
from snaporch.restore.safe_path import open_beneath
from snaporch.restore.source import IncompleteError, Source, dataset_kinds, image_path_in_dataset

_BLOCK = 1 << 20


@contextmanager
def open_disk(context: Context, source: Source, disk: DiskEntry, name: str) -> Iterator[BinaryIO]:
    """Open a disk for reading: an image file in the snapshot, or a read-only clone of a volume.

    Args:
        name: the name of the clone, which is removed after the block.

    Raises:
        IncompleteError: the image is not in the snapshot.
        LeadsOutError: a link leads out of the snapshot.
        OSError: the disk cannot be opened.
    """
    assert disk.dataset is not None
    if dataset_kinds(context)[disk.dataset] is DatasetKind.FILESYSTEM:
        with _open_image(context, source, disk) as reading:
            yield reading
        return
    with new_clone(context, name, Purpose.EXTRACT, source.thing) as uuid:
        cloned = clone_dataset(
            context, source, f"extract-{uuid[:8]}", Purpose.EXTRACT, uuid, disk.dataset
        )
        with cloned.root.open("rb", buffering=0) as reading:
            yield reading


@contextmanager
def _open_image(context: Context, source: Source, disk: DiskEntry) -> Iterator[BinaryIO]:
    """Open an image file in the snapshot; no link may lead out of it."""
    home = PurePosixPath(context.resolver.mount_point_of(disk.dataset or ""))
    snapshot = source.member(disk.dataset or "").full_name
    path = PurePosixPath(image_path_in_dataset(context.resolver, disk))
    try:
        with (
            context.pool.mounted_snapshot(snapshot) as root,
            open_beneath(root, path, home, called=snapshot) as beneath,
            open(beneath.descriptor, "rb", buffering=0, closefd=False) as image,
        ):
            yield image
    except FileNotFoundError as error:
        raise IncompleteError(
            f"{disk.target} ({snapshot}: {path})", "the image is not in the snapshot"
        ) from error


def blocks(
    context: Context, source: Source, reading: BinaryIO, size: int
) -> Iterator[tuple[int, bytes]]:
    """Read all data of a disk, block by block; holes are skipped.

    Args:
        size: the size of the disk in bytes.

    Yields:
        The offset of the block, and its data.

    Raises:
        InterruptedRunError: a signal came.
        OSError: a part of the disk cannot be read.
    """
    for start, end in data_extents(reading.fileno(), size):
        for offset in range(start, end, _BLOCK):
            context.interrupt.check(source.thing)
            yield offset, read_fully(reading.fileno(), min(_BLOCK, end - offset), offset)


def read_disks(context: Context, source: Source) -> tuple[int, int]:
    """Read all disks of a snapshot, and the backing files that are in the snapshot.

    Reads at most half of the time, since guests use the same pool.

    Returns:
        The number of disks and files, and the bytes that were read.

    Raises:
        IncompleteError: a disk is damaged or missing.
        RunFailedError: a disk could not be read for another reason.
    """
    disks = {
        (disk.dataset, _inside(context, disk)): disk
        for disk in (*source.disks, *beneath_inside(source.manifest))
        if disk.dataset is not None
    }
    total = 0
    for disk in disks.values():
        context.progress.step(source.thing, f"reading {disk.source}")
        try:
            with open_disk(context, source, disk, f"{source.record.domain}-read") as reading:
                total += _read_through(context, source, reading)
        except OSError as error:
            where = f"{disk.target} ({disk.source})"
            if error.errno == errno.EIO:  # ZFS has no intact copy of the block
                reason = f"cannot be read ({error.strerror})"
                raise IncompleteError(where, reason, "see `zpool status -v`") from error
            raise RunFailedError(where, f"could not be read ({error.strerror})") from error
    return len(disks), total


def _inside(context: Context, disk: DiskEntry) -> str | None:
    """The path of an image in its dataset; None for a volume, which is read as a whole."""
    if dataset_kinds(context)[disk.dataset or ""] is DatasetKind.VOLUME:
        return None
    return str(image_path_in_dataset(context.resolver, disk))


def _read_through(context: Context, source: Source, reading: BinaryIO) -> int:
    size, total, began = reading.seek(0, os.SEEK_END), 0, time.monotonic()
    for offset, block in blocks(context, source, reading, size):
        total += len(block)
        context.progress.amount(source.thing, offset + len(block), size)
        time.sleep(time.monotonic() - began)
        began = time.monotonic()
    return total


def read_fully(descriptor: int, length: int, offset: int) -> bytes:
    """Read exactly ``length`` bytes: a read that meets a damaged block returns fewer.

    Raises:
        OSError: not all bytes can be read.
    """
    block = b""
    while len(block) < length:
        more = os.pread(descriptor, length - len(block), offset + len(block))
        if not more:
            raise OSError(errno.EIO, f"no data can be read at byte {offset + len(block)}")
        block += more
    return block


def data_extents(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Start and end of each part that holds data (lseek(2), SEEK_DATA); else the whole file."""
    position = 0
    while position < size:
        start, end = position, size
        with suppress(OSError):
            start = _seek_data(descriptor, position, size)
            end = os.lseek(descriptor, start, os.SEEK_HOLE) if start < size else size
        if start >= size:
            return
        yield start, end
        position = end


def _seek_data(descriptor: int, position: int, size: int) -> int:
    try:
        return os.lseek(descriptor, position, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # there is a hole up to the end
            return size
        raise
