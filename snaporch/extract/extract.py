"""Copy a disk out of a snapshot into an image file, without touching the guest.

Room is checked here, and the destination by :mod:`snaporch.restore.extracted_file`.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from snaporch.bundle.manifest import DiskEntry
from snaporch.context import Context
from snaporch.errors import NotFoundError, RefusedError, RunFailedError
from snaporch.extract.disk_reader import blocks, open_disk
from snaporch.hypervisor.qcow2 import HeaderError, read_qcow2
from snaporch.private_files import sync_directory, write_at
from snaporch.restore.extracted_file import ExtractedFile, check_destination
from snaporch.restore.source import Source, check_whole_disks
from snaporch.zfs.resolver import Resolver

_GRAIN = 64 << 10
"""Runs of zeros of this size become holes."""


def choose_disks(
    resolver: Resolver, source: Source, target: str | None, to: Path
) -> list[tuple[DiskEntry, Path]]:
    """Choose the disks to copy, and the path of each copy.

    Args:
        resolver: finds the volumes that the disks are parts of.
        target: the target of one disk; None for all disks.
        to: a directory, or the image to write for one disk.

    Raises:
        NotFoundError: the snapshot has no such disk.
        RefusedError: the destination exists, or is no directory for several disks.
    """
    disks = [disk for disk in source.disks if target in (None, disk.target)]
    names = ", ".join(disk.target for disk in source.disks) or "none"
    if not disks:
        raise NotFoundError(f"{source.thing} {target}", f"no such disk; its disks are: {names}")
    if len(disks) > 1 and not to.is_dir():
        raise RefusedError(
            source.thing,
            f"has several disks ({names})",
            "choose one with --disk, or give a directory",
        )
    check_whole_disks(resolver, source.thing, disks)
    chosen = [(disk, to / _name(source, disk) if to.is_dir() else to) for disk in disks]
    for _, path in chosen:
        check_destination(path)
    return chosen


def _name(source: Source, disk: DiskEntry) -> str:
    return f"{source.thing}-{disk.target}.{disk.format}".replace("/", "_")


def extract(context: Context, source: Source, disk: DiskEntry, to: Path) -> ExtractedFile:
    """Copy one disk to the sparse file ``to``, with the same bytes as in the snapshot.

    An image file is read from the snapshot, which is mounted for this process alone. A volume is
    read from a read-only clone, which is removed again.

    Raises:
        IncompleteError: the image is not in the snapshot.
        LeadsOutError: a link leads out of the snapshot.
        RunFailedError: the disk cannot be read, or the copy cannot be written; no copy is left.
    """
    context.progress.step(source.thing, f"copying {disk.target} to {to}")
    try:
        with open_disk(context, source, disk, to.name) as reading:
            _copy(context, source, reading, to)
    except OSError as error:
        reason = f"{error.filename or to}: {error.strerror}"
        raise RunFailedError(
            source.thing, f"{disk.target} could not be copied ({reason})"
        ) from error
    status = to.stat()
    _note_missing_files(context, source, disk, to)
    return ExtractedFile(disk.target, str(to), disk.format, status.st_size, status.st_blocks * 512)


def _copy(context: Context, source: Source, reading: BinaryIO, to: Path) -> None:
    """Copy under a temporary name; rename the copy when it is complete and on stable storage."""
    partial = to.with_name(f".{to.name}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # the directory may be a user's
    partial.unlink(missing_ok=True)
    try:
        size = reading.seek(0, os.SEEK_END)
        _check_resources(reading, size, to)
        with os.fdopen(os.open(partial, flags, 0o600), "wb", buffering=0) as writing:
            _copy_data(context, source, reading, writing, size)
            writing.truncate(size)
            os.fsync(writing.fileno())
        partial.rename(to)
        sync_directory(to.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _check_resources(reading: BinaryIO, size: int, to: Path) -> None:
    """Check that there is room for the allocated blocks of an image file.

    For a volume the needed room is unknown: zeros are not written.
    """
    taken = os.fstat(reading.fileno()).st_blocks * 512
    free = shutil.disk_usage(to.parent).free
    if min(taken, size) > free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(to))


def _copy_data(
    context: Context, source: Source, reading: BinaryIO, writing: BinaryIO, size: int
) -> None:
    zeros = bytes(_GRAIN)
    for offset, block in blocks(context, source, reading, size):
        for inner in range(0, len(block), _GRAIN):
            grain = block[inner : inner + _GRAIN]
            if grain != zeros[: len(grain)]:
                write_at(writing.fileno(), grain, offset + inner)
        context.progress.amount(source.thing, offset + len(block), size)


def _note_missing_files(context: Context, source: Source, disk: DiskEntry, to: Path) -> None:
    """Note the backing and data files that the copied image needs."""
    if disk.format != "qcow2":
        return
    with to.open("rb") as image:
        try:
            names = read_qcow2(image.fileno())
        except HeaderError as error:
            context.progress.note(source.thing, f"{to} {error}")
            return
    for what, name in (("backing file", names.backing), ("data file", names.data_file)):
        if name is not None:
            context.progress.note(
                source.thing, f"{to} has a {what}, which is not copied; see `qemu-img info`"
            )
