"""Which parts of a guest's tree are not shown, so that an empty directory is not taken for one.

Pure functions. Who mounts what is in :mod:`snaporch.extract.guest_files`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from snaporch.bundle.manifest import DiskEntry
from snaporch.extract.guestfish_text import FileSystem
from snaporch.extract.windows_parts import WindowsParts
from snaporch.model import LeftOutCode

_VOLUME = "btrfsvol:"
_LOGICAL_VOLUME = re.compile("/dev/(?!mapper/)[^/]+/[^/]+")
_OCTAL = re.compile(r"\\([0-3][0-7]{2})")
_AUTOMOUNT = {"x-systemd.automount", "comment=systemd.automount"}
_NO_DATA = re.compile(
    "swap|tmpfs|ramfs|proc|sysfs|devpts|devtmpfs|debugfs|tracefs|securityfs|configfs|mqueue"
    "|hugetlbfs|cgroup2?|bpf|efivarfs|pstore|binfmt_misc"
)
"""Types of an fstab that hold no data of a disk."""


def left_out_disks(disks: Iterable[DiskEntry]) -> list[str]:
    """What to say of the disks that are not in the snapshot; media such as CDs do not count."""
    return [
        f"the disk {each.target} is not in the snapshot: {each.left_out_reason}"
        for each in disks
        if each.left_out not in (None, LeftOutCode.REMOVABLE)
    ]


_NO_WINDOWS = WindowsParts()


def not_mounted(
    found: Sequence[FileSystem],
    places: Iterable[tuple[str, str]],
    windows: WindowsParts = _NO_WINDOWS,
) -> list[str]:
    """What to say of file systems that are mounted nowhere.

    Swap does not count, nor do partitions and disks in which libguestfs knows nothing: a disk's
    boot code has one. The other subvolumes of a btrfs of which one is mounted do not count, either,
    nor do the parts of Windows that have no letter.

    Args:
        found: all file systems.
        places: pairs of mount point and device of those that are mounted.
        windows: what is known of the disks of a Windows guest.
    """
    whole = [each.device for each in found if not each.device.startswith(_VOLUME)]

    def device_of(name: str) -> str:
        path = name.removeprefix(_VOLUME)
        inside = (each for each in whole if path == each or path.startswith(f"{each}/"))
        return max(inside, key=len, default=path) if name != path else path

    mounted = {device_of(device) for _, device in places}

    def what_is_said(each: FileSystem) -> str:
        letter = windows.letters.get(each.device)
        if letter is None:
            return f"{each.device} ({each.kind}) is mounted nowhere"
        return f"its drive {letter}: is not shown: open it with --device {each.device}"

    return [
        what_is_said(each)
        for each in found
        if each.kind != "swap"
        and (each.kind != "unknown" or _LOGICAL_VOLUME.fullmatch(each.device))
        and device_of(each.device) not in mounted
        and each.device not in windows.of_system
    ]


def missing_of_windows(windows: WindowsParts) -> list[str]:
    """What to say of files of Windows that are older than the guest's own view of them."""
    text = "was hibernated, or shut off with fast startup: its last changes may be missing"
    return [text] if windows.hibernated else []


def missing_points(fstab: str, places: Iterable[tuple[str, str]]) -> list[str]:
    """The mount points of a guest's fstab at which nothing is mounted; sorted.

    Kinds without data, such as tmpfs, do not count. Nor do lines with ``noauto``, unless systemd
    mounts them when they are used (``x-systemd.automount``).

    Args:
        fstab: the file's text.
        places: pairs of mount point and device of those that are mounted.
    """
    mounted = {point.rstrip("/") for point, _ in places}
    missing = set()
    for line in fstab.splitlines():
        device, written, kind, options, *_ = [*line.split(), *[""] * 4]
        if device.startswith("#") or _NO_DATA.fullmatch(kind):
            continue
        point = _OCTAL.sub(lambda code: chr(int(code[1], 8)), written).rstrip("/")
        chosen = options.split(",")
        is_mounted_later = "noauto" not in chosen or not _AUTOMOUNT.isdisjoint(chosen)
        if point.startswith("/") and is_mounted_later and point not in mounted:
            missing.add(point)
    return sorted(missing)
