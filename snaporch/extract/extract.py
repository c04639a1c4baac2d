"""Copy a disk out of a snapshot into an image file, without touching the guest.

Room is checked here; the file is made by :mod:`snaporch.restore.new_file`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from snaporch.bundle.manifest import DiskEntry
from snaporch.context import Context
from snaporch.errors import NotFoundError, RefusedError, RunFailedError
from snaporch.extract.disk_reader import blocks, open_disk
from snaporch.hypervisor.qcow2 import HeaderError, read_qcow2
from snaporch.private_files import write_at
from snaporch.reserve import RoomWatch, free_room
from snaporch.restore.extracted_file import ExtractedFile
from snaporch.restore.new_file import check_destination, new_file
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
        NotFoundError: the snapshot has no such disk; says why if the guest has it.
        RefusedError: the destination exists, or is no directory for several disks.
    """
    disks = [disk for disk in source.disks if target in (None, disk.target)]
    names = ", ".join(disk.target for disk in source.disks) or "none"
    if not disks:
        absent = next((each for each in source.manifest.disks if each.target == target), None)
        reason = f"is not in the snapshot: {absent.left_out_reason}" if absent else "no such disk"
        thing = source.thing if target is None else f"{source.thing} {target}"
        raise NotFoundError(thing, f"{reason}; its disks are: {names}")
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
        BusyError: another process writes ``to``.
        IncompleteError: the image is not in the snapshot.
        LeadsOutError: a link leads out of the snapshot.
        RefusedError: ``to`` exists meanwhile, or there is no room.
        RunFailedError: the disk cannot be read, or the copy cannot be written, or it would take the
            room that is kept for others; no copy is left.
    """
    context.progress.step(source.thing, f"copying {disk.target} to {to}")
    try:
        with open_disk(context, source, disk, to.name) as reading:
            status = _copy(context, source, reading, to)
            _note_missing_files(context, source, disk, reading, to)
    except OSError as error:
        reason = f"{error.filename or to}: {error.strerror}"
        raise RunFailedError(
            source.thing, f"{disk.target} could not be copied ({reason})"
        ) from error
    return ExtractedFile(disk.target, str(to), disk.format, status.st_size, status.st_blocks * 512)


def _copy(context: Context, source: Source, reading: BinaryIO, to: Path) -> os.stat_result:
    """Copy all data; what the complete copy is."""
    size = reading.seek(0, os.SEEK_END)
    with new_file(to) as writing:
        _check_resources(reading, size, to)
        _copy_data(context, source, reading, writing.fileno(), RoomWatch(to.parent))
        writing.truncate(size)
        os.fsync(writing.fileno())
        return os.fstat(writing.fileno())


def _check_resources(reading: BinaryIO, size: int, to: Path) -> None:
    """Check that there is room for the allocated blocks of an image file.

    For a volume the needed room is unknown: zeros are not written.

    Raises:
        RefusedError: there is not.
    """
    needed = min(os.fstat(reading.fileno()).st_blocks * 512, size)
    free = free_room(to.parent)
    if needed > free:
        reason = f"has room for {free >> 20} MiB, and {needed >> 20} MiB are needed"
        raise RefusedError(str(to.parent), reason, "free space, or take another place")


def _copy_data(
    context: Context, source: Source, reading: BinaryIO, writing: int, room: RoomWatch
) -> None:
    size, zeros = reading.seek(0, os.SEEK_END), bytes(_GRAIN)
    for offset, block in blocks(context, source, reading, size):
        for inner in range(0, len(block), _GRAIN):
            grain = block[inner : inner + _GRAIN]
            if grain != zeros[: len(grain)]:
                write_at(writing, grain, offset + inner)
                room.wrote(len(grain))
        context.progress.amount(source.thing, offset + len(block), size)


def _note_missing_files(
    context: Context, source: Source, disk: DiskEntry, reading: BinaryIO, to: Path
) -> None:
    """Note the backing and data files that the copied image needs."""
    if disk.format != "qcow2":
        return
    try:
        names = read_qcow2(reading.fileno())
    except HeaderError as error:
        context.progress.note(source.thing, f"{to} {error}")
        return
    for what, name in (("backing file", names.backing), ("data file", names.data_file)):
        if name is not None:
            context.progress.note(
                source.thing, f"{to} has a {what}, which is not copied; see `qemu-img info`"
            )
