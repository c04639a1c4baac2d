"""Overlay files: made before the freeze, removed only when nobody needs them.

Their directory is root's, and what is in it is the emulator's: it can write into its overlays, and
put nothing else in their place.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from snaporch.bundle.store import explained_store, private_directory, sync_directory
from snaporch.disks.qemu_img import OverlayError, lent, open_layers, open_overlay, qemu_img
from snaporch.hypervisor import OverlayDisk
from snaporch.model import Owner

_PASSABLE = 0o711
"""The emulator's user must be able to pass through, not to look around."""
_INODE = re.compile(rb"^ino:\s*(\d+)$", re.MULTILINE)
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def make_directory(directory: Path) -> None:
    """A directory of root's, which the emulator's user can pass through."""
    with explained_store(directory.parent):
        private_directory(directory.parent, _PASSABLE)
        private_directory(directory, _PASSABLE)


def make_overlay(disk: OverlayDisk, size: int, owner: Owner | None) -> None:
    """An empty qcow2 of ``size`` bytes over the base, which is not opened for it.

    It is 0600, whatever the emulator would make it (CVE-2025-13193).

    Raises:
        OverlayError: no space, no qemu-img.
        FileExistsError: something is in its place.
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
    """Whether anything was ever written to an overlay.

    Raises:
        OverlayError: it cannot be read.
        ValueError: what qemu-img answers is not understood.
    """
    options = ("-U", "--output=json", "--max-length=9P")
    with open_overlay(disk) as layers, lent(layers, owner):
        _, answer = qemu_img(
            "map", *options, layers.alone, owner=owner, descriptors=layers.descriptors
        )
    regions = json.loads(answer)
    return any(region["depth"] == 0 and region.get("present", True) for region in regions)


def holds_what_base_holds(disk: OverlayDisk, owner: Owner | None) -> bool:
    """Whether reading through the overlay gives what its base alone gives: it was committed."""
    with suppress(OverlayError), open_layers(disk) as layers, lent(layers, owner):
        pair = layers.overlay, layers.base
        differ, _ = qemu_img(
            "compare", "-q", "-U", *pair, owner=owner, descriptors=layers.descriptors, good=(0, 1)
        )
        return differ == 0
    return False


def quarantine(disk: OverlayDisk, directory: Path) -> Path:
    """Set an overlay aside, under its own name in a directory of its run; its new path."""
    private_directory(directory.parent)
    private_directory(directory)
    target = directory / Path(disk.overlay).name
    Path(disk.overlay).rename(target)
    sync_directory(directory)
    return target


def commit_offline(disk: OverlayDisk, owner: Owner | None) -> None:
    """Bring an overlay's writes into its base while no emulator runs.

    qemu-img locks both images, so a guest that was started meanwhile makes it fail, not corrupt.

    Raises:
        OverlayError: an image is not what the journal says, or it failed.
    """
    with open_layers(disk) as layers, lent(layers, owner):
        qemu_img("commit", "-q", layers.overlay, owner=owner, descriptors=layers.descriptors)


def open_somewhere(paths: Sequence[Path]) -> int | None:
    """The id of a process that has one of ``paths`` open, if any (proc(5), ``/proc/PID/fdinfo``).

    Only a file of the same number and name is asked for its status: one on a dead NFS or FUSE
    mount would never answer.
    """
    wanted: dict[tuple[int, int], str] = {}
    for path in paths:
        status = os.stat(path, follow_symlinks=False)
        wanted[status.st_dev, status.st_ino] = path.name
    names = {str(inode): name for (_, inode), name in wanted.items()}
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        with suppress(OSError):  # it ended meanwhile
            for entry in os.listdir(process / "fdinfo"):
                with suppress(OSError):
                    if not _may_be(process, entry, names):
                        continue
                    status = os.stat(process / "fd" / entry)
                    if (status.st_dev, status.st_ino) in wanted:
                        return int(process.name)
    return None


def _may_be(process: Path, entry: str, names: Mapping[str, str]) -> bool:
    """Whether what a process has open may be a file of these numbers and names."""
    number = _INODE.search((process / "fdinfo" / entry).read_bytes())
    if number is None:  # Linux before 5.14
        return True
    name = names.get(number[1].decode())
    if name is None:
        return False
    return Path(os.readlink(process / "fd" / entry)).name.removesuffix(" (deleted)") == name


def remove(directory: Path, overlays: Sequence[OverlayDisk]) -> None:
    """Remove overlays that hold nothing any more, and their directory."""
    for disk in overlays:
        Path(disk.overlay).unlink(missing_ok=True)
    if directory.is_dir():
        directory.rmdir()
