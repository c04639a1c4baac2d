"""Find other users of a volume: the host itself, or users of partitions beside a guest's.

A rollback would change the whole volume while they use it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from snaporch.zfs import resolver

_SYS = Path("/sys/dev/block")
_LOOPS = Path("/sys/block")


def holder_of(volume: str) -> str:
    """The users on this host of a volume's device or of one of its partitions; else empty.

    The kernel decides: mounts, swap, device mapper, RAID and pools all claim their devices, and
    then opening them exclusively fails (open(2), ``O_EXCL``). An emulator claims nothing.

    Raises:
        OSError: the device exists but cannot be opened.
    """
    link = resolver.volume_link(volume)
    try:
        os.close(os.open(link, os.O_RDONLY | os.O_EXCL | os.O_NONBLOCK | os.O_CLOEXEC))
    except FileNotFoundError:
        return ""
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return ", ".join(sorted(set(_holders(link)))) or "this host"
    return ""


def loop_devices() -> Iterator[tuple[str, str]]:
    """Loop devices of this host, each with the dataset or volume of its backing file.

    They claim nothing, and no process has their backing file open.
    """
    for file in sorted(_LOOPS.glob("loop*/loop/backing_file")):
        with suppress(OSError, resolver.NotOnZfsError):
            path = os.fsdecode(file.read_bytes()).removesuffix("\n")
            yield file.parent.parent.name, resolver.resolve(path).name


def numbers(volume: str) -> frozenset[int]:
    """The device numbers of a volume and of its partitions.

    Raises:
        OSError: it has no device.
    """
    link = resolver.volume_link(volume)
    place = _device(link)
    parts = place.glob("*/partition") if place is not None else ()
    found = [(each.parent / "dev").read_text().strip().split(":") for each in parts]
    devices = frozenset(os.makedev(int(major), int(minor)) for major, minor in found)
    return devices | {os.stat(link).st_rdev}


def partition_numbers(volume: str) -> frozenset[int]:
    """The numbers of a volume's partitions, as far as the kernel knows them."""
    place = _device(resolver.volume_link(volume))
    numbers = place.glob("*/partition") if place is not None else ()
    return frozenset(int(each.read_text()) for each in numbers)


def _holders(link: Path) -> Iterator[str]:
    place = _device(link)
    if place is None:
        return
    mounts = resolver.read_mounts()
    for device in (place, *(each.parent for each in place.glob("*/partition"))):
        yield from (each.name for each in device.glob("holders/*"))
        number = (device / "dev").read_text().strip()
        yield from (f"a mount at {mount.mount_point}" for mount in mounts if mount.device == number)


def _device(link: Path) -> Path | None:
    """The directory of a device in sysfs; ``None`` if there is none."""
    try:
        number = os.stat(link).st_rdev
    except FileNotFoundError:
        return None
    return _SYS / f"{os.major(number)}:{os.minor(number)}"
