"""Overlay files: made before the freeze, removed only when nobody needs them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from snaporch.bundle.store import explained_store, private_directory, sync_directory
from snaporch.errors import SnaporchError
from snaporch.hypervisor import OverlayDisk
from snaporch.model import Owner

_PARENT_MODE = 0o711
"""The emulator's user must be able to pass through, not to look around."""


class OverlayError(SnaporchError):
    """An overlay cannot be made, read or committed."""


def make_directory(directory: Path, owner: Owner | None) -> None:
    """A private directory that the emulator's user owns (CVE-2025-13193: overlays may be 0644)."""
    with explained_store(directory.parent):
        private_directory(directory.parent, _PARENT_MODE)
        private_directory(directory)
        if owner is not None:
            os.chown(directory, owner.uid, owner.gid)


def make_overlay(disk: OverlayDisk, size: int, owner: Owner | None) -> None:
    """An empty qcow2 of ``size`` bytes over the base, which is not opened for it.

    Raises:
        OverlayError: no space, no qemu-img.
    """
    options = ["-f", "qcow2", "-u", "-b", disk.base, "-F", disk.base_format]
    _qemu_img("create", "-q", *options, disk.overlay, str(size))
    os.chmod(disk.overlay, 0o600)
    if owner is not None:
        os.chown(disk.overlay, owner.uid, owner.gid)


def holds_writes(overlay: Path) -> bool:
    """Whether anything was ever written to an overlay."""
    regions = json.loads(_qemu_img("map", "-U", "--output=json", "--max-length=9P", str(overlay)))
    return any(region["depth"] == 0 and region.get("present", True) for region in regions)


def holds_what_base_holds(disk: OverlayDisk) -> bool:
    """Whether reading through the overlay gives what its base alone gives: it was committed."""
    command = ["qemu-img", "compare", "-q", "-U", "-f", "qcow2", "-F", disk.base_format]
    done = subprocess.run(
        [*command, disk.overlay, disk.base],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        process_group=0,
    )
    return done.returncode == 0


def quarantine(disk: OverlayDisk, directory: Path) -> Path:
    """Set an overlay aside, under its own name in a directory of its run; its new path."""
    private_directory(directory.parent)
    private_directory(directory)
    target = directory / Path(disk.overlay).name
    Path(disk.overlay).rename(target)
    sync_directory(directory)
    return target


def commit_offline(disk: OverlayDisk) -> None:
    """Bring an overlay's writes into its base while no emulator runs.

    qemu-img locks both images, so a guest that was started meanwhile makes it fail, not corrupt.
    """
    _qemu_img("commit", "-q", "-f", "qcow2", disk.overlay)


def open_somewhere(paths: Sequence[Path]) -> int | None:
    """The id of a process that has one of ``paths`` open, if any (proc(5), ``/proc/PID/fd``)."""
    wanted = {(status.st_dev, status.st_ino) for status in map(os.stat, paths)}
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        with suppress(OSError):  # it ended meanwhile
            for entry in os.listdir(process / "fd"):
                with suppress(OSError):
                    status = os.stat(process / "fd" / entry)
                    if (status.st_dev, status.st_ino) in wanted:
                        return int(process.name)
    return None


def remove(directory: Path, overlays: Sequence[OverlayDisk]) -> None:
    """Remove overlays that hold nothing any more, and their directory."""
    for disk in overlays:
        Path(disk.overlay).unlink(missing_ok=True)
    if directory.is_dir():
        directory.rmdir()


def _qemu_img(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["qemu-img", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            process_group=0,  # a terminal's Ctrl-C is for us, not for what we are finishing
            text=True,
        )
    except FileNotFoundError as error:
        raise OverlayError("qemu-img", "is not installed", "apt install qemu-utils") from error
    if done.returncode != 0:
        raise OverlayError(f"qemu-img {arguments[0]}", done.stderr.strip() or "failed")
    return done.stdout
