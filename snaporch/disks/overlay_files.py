"""Overlay files: made before the freeze; removed, committed offline or quarantined afterwards.

An image that is opened is checked by :mod:`snaporch.disks.image_layers`: it may be refused there.

Whether one is still needed is decided by :mod:`snaporch.recovery.overlay_removal`.

Their directory belongs to root, the files to the emulator's user: the emulator can write into its
overlays, and cannot replace them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from snaporch.disks.image_layers import given_to, open_layers, open_overlay
from snaporch.disks.qemu_img import OverlayError, qemu_img
from snaporch.hypervisor import OverlayDisk
from snaporch.model import Owner
from snaporch.private_files import private_directory, store_errors, sync_directory

_PASSABLE = 0o711
"""The emulator's user must be able to pass through, and not to list the directory."""
_INODE = re.compile(rb"^ino:\s*(\d+)$", re.MULTILINE)
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def make_directory(directory: Path) -> None:
    """Make a directory that belongs to root and that the emulator's user can pass through."""
    with store_errors(directory.parent):
        private_directory(directory.parent, _PASSABLE)
        private_directory(directory, _PASSABLE)


def make_overlay(disk: OverlayDisk, size: int, owner: Owner | None) -> None:
    """Make an empty qcow2 overlay over the base; the base is not opened.

    The overlay's mode is 0600, whatever the emulator would choose (CVE-2025-13193).

    Args:
        size: in bytes.
        owner: the emulator's user and group.

    Raises:
        OverlayError: there is no space or no qemu-img.
        FileExistsError: the path exists.
    """
    descriptor = os.open(disk.overlay, _CREATE, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        if owner is not None:
            os.fchown(descriptor, owner.uid, owner.gid)
        options = ["-f", "qcow2", "-u", "-b", disk.base, "-F", disk.base_format]
        place = f"/proc/self/fd/{descriptor}"
        qemu_img("create", "-q", *options, place, str(size), owner=owner, descriptors=(descriptor,))
    except BaseException:
        os.unlink(disk.overlay)
        raise
    finally:
        os.close(descriptor)


def holds_writes(disk: OverlayDisk, owner: Owner | None) -> bool:
    """Whether an overlay holds any write.

    Raises:
        OverlayError: it cannot be read.
        ValueError: qemu-img's answer is malformed.
    """
    options = ("-U", "--output=json", "--max-length=9P")
    with open_overlay(disk) as layers, given_to(layers, owner):
        _, answer = qemu_img(
            "map", *options, layers.alone, owner=owner, descriptors=layers.descriptors
        )
    regions = json.loads(answer)
    return any(region["depth"] == 0 and region.get("present", True) for region in regions)


def holds_what_base_holds(disk: OverlayDisk, owner: Owner | None) -> bool:
    """Whether overlay and base read the same as the base alone, so that no write is uncommitted.

    It compares all data of both (``qemu-img compare``), which takes long for a large disk.
    :mod:`snaporch.recovery.observe` decides when; ``False`` if an image cannot be opened.
    """
    with suppress(OverlayError), open_layers(disk) as layers, given_to(layers, owner):
        pair = layers.overlay, layers.base
        differ, _ = qemu_img(
            "compare", "-q", "-U", *pair, owner=owner, descriptors=layers.descriptors, good=(0, 1)
        )
        return differ == 0
    return False


QUARANTINE = "quarantine"
"""Below ``paths.overlays``: for each run, a directory of overlays that were not committed."""


def quarantine(disk: OverlayDisk, directory: Path) -> Path:
    """Move an overlay to a quarantine directory, under its own name; its new path."""
    private_directory(directory.parent)
    private_directory(directory)
    target = directory / Path(disk.overlay).name
    Path(disk.overlay).rename(target)
    sync_directory(directory)
    return target


def commit_offline(disk: OverlayDisk, owner: Owner | None) -> None:
    """Commit an overlay's writes into its base while no emulator runs.

    qemu-img locks both images: if the guest was started meanwhile the commit fails, and corrupts
    nothing.

    Raises:
        OverlayError: an image differs from the journal, or qemu-img failed.
    """
    with open_layers(disk) as layers, given_to(layers, owner):
        qemu_img("commit", "-q", layers.overlay, owner=owner, descriptors=layers.descriptors)


def open_somewhere(paths: Sequence[Path]) -> int | None:
    """The ID of a process that has one of ``paths`` open, if any (proc(5), ``/proc/PID/fdinfo``).

    stat(2) is called only on a file with the same inode number and name: on a dead NFS or FUSE
    mount it would never return.
    """
    expected: dict[tuple[int, int], str] = {}
    for path in paths:
        status = os.stat(path, follow_symlinks=False)
        expected[status.st_dev, status.st_ino] = path.name
    names = {str(inode): name for (_, inode), name in expected.items()}
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # the process exited meanwhile
            for entry in os.listdir(f"/proc/{process}/fdinfo"):
                with suppress(OSError):
                    if not _may_be(process, entry, names):
                        continue
                    status = os.stat(f"/proc/{process}/fd/{entry}")
                    if (status.st_dev, status.st_ino) in expected:
                        return int(process)
    return None


def _may_be(process: str, entry: str, names: Mapping[str, str]) -> bool:
    """Whether a process's open file may be one of these, by inode number and name.

    A host may have many thousands of open files: this takes as few calls as it can.
    """
    descriptor = os.open(f"/proc/{process}/fdinfo/{entry}", os.O_RDONLY)
    try:
        number = _INODE.search(os.read(descriptor, 4096))  # among the first lines
    finally:
        os.close(descriptor)
    if number is None:  # Linux before 5.14
        return True
    name = names.get(number[1].decode())
    if name is None:
        return False
    opened = Path(os.readlink(f"/proc/{process}/fd/{entry}"))
    return opened.name.removesuffix(" (deleted)") == name


def remove(directory: Path, overlays: Sequence[OverlayDisk]) -> None:
    """Remove overlays that are no longer needed, and their directory."""
    for disk in overlays:
        Path(disk.overlay).unlink(missing_ok=True)
    if directory.is_dir():
        directory.rmdir()


def is_empty(directory: Path) -> bool:
    """Whether a directory holds nothing, or is gone; one that cannot be read may hold something."""
    try:
        with os.scandir(directory) as entries:
            return next(entries, None) is None
    except FileNotFoundError:
        return True
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class OverlayImages:
    """What qemu-img does with overlays."""

    make_overlay: Callable[[OverlayDisk, int, Owner | None], None] = make_overlay
    holds_writes: Callable[[OverlayDisk, Owner | None], bool] = holds_writes
    holds_what_base_holds: Callable[[OverlayDisk, Owner | None], bool] = holds_what_base_holds
    commit_offline: Callable[[OverlayDisk, Owner | None], None] = commit_offline
