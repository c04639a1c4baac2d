"""Find other users of a volume: the host itself, or users of partitions beside a guest's.

A rollback would change the whole volume while they use it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from snaporch.zfs.resolver import HOST, NotOnZfsError, Resolver


def volume_user(volume: str, resolver: Resolver = HOST) -> str:
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
        return ", ".join(sorted(set(_holders(link, resolver)))) or "this host"
    return ""


def loop_devices(resolver: Resolver = HOST) -> Iterator[tuple[str, str]]:
    """Loop devices of this host, each with the dataset or volume of its backing file.

    They claim nothing, and no process has their backing file open.
    """
    for file in sorted(resolver.host.sys.glob("block/loop*/loop/backing_file")):
        with suppress(OSError, NotOnZfsError):
            path = os.fsdecode(file.read_bytes()).removesuffix("\n")
            yield file.parent.parent.name, resolver.resolve(path).name


def numbers(volume: str, resolver: Resolver = HOST) -> frozenset[int]:
    """The device numbers of a volume and of its partitions.

    Raises:
        OSError: it has no device.
    """
    link = resolver.volume_link(volume)
    place = _device(link, resolver)
    parts = place.glob("*/partition") if place is not None else ()
    found = [(each.parent / "dev").read_text().strip().split(":") for each in parts]
    devices = frozenset(os.makedev(int(major), int(minor)) for major, minor in found)
    return devices | {resolver.stat(link).st_rdev}


def partition_numbers(volume: str, resolver: Resolver = HOST) -> frozenset[int]:
    """The numbers of a volume's partitions, as far as the kernel knows them."""
    place = _device(resolver.volume_link(volume), resolver)
    numbers = place.glob("*/partition") if place is not None else ()
    return frozenset(int(each.read_text()) for each in numbers)


def _holders(link: Path, resolver: Resolver) -> Iterator[str]:
    place = _device(link, resolver)
    if place is None:
        return
    mounts = resolver.mounts()
    for device in (place, *(each.parent for each in place.glob("*/partition"))):
        yield from (each.name for each in device.glob("holders/*"))
        number = (device / "dev").read_text().strip()
        yield from (f"a mount at {mount.mount_point}" for mount in mounts if mount.device == number)


def _device(link: Path, resolver: Resolver) -> Path | None:
    """The directory of a device in sysfs; ``None`` if there is none."""
    try:
        return resolver.sysfs_of(resolver.stat(link).st_rdev)
    except FileNotFoundError:
        return None
