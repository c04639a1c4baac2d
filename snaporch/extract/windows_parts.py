"""What of a Windows guest's disks its tree has not: drives with other letters, parts of the system.

libguestfs shows the system's drive (C:) as the whole tree. Which of this is said is decided in
:mod:`snaporch.extract.unseen_parts`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from snaporch.extract.appliance import Appliance
from snaporch.extract.guestfish_text import parse_pairs

_HIBERNATED = (b"hibr", b"HIBR")
"""How ``hiberfil.sys`` begins, of Windows 7 and of later ones."""
_TYPES_OF_SYSTEM = {
    "C12A7328-F81F-11D2-BA4B-00A0C93EC93B",  # EFI
    "E3C9E316-0B5C-4DB8-817D-F92DF00215AE",  # Microsoft reserved
    "DE94BBA4-06D1-4D40-A16A-BFD50179D6AC",  # Windows Recovery
}
_RECOVERY_ID = 0x27
"""The type of Windows Recovery on a disk with an MBR."""
_PARTITION = re.compile(r"(/dev/sd[a-z]+)([0-9]{1,3})")


@dataclass(frozen=True, slots=True)
class WindowsParts:
    """The parts of a Windows guest's disks."""

    letters: Mapping[str, str] = field(default_factory=dict)
    """The guest's drives: a letter by the device that it is on."""
    of_system: Collection[str] = ()
    """Devices that Windows gives no letter: to boot, reserved, recovery."""
    hibernated: bool = False
    """The guest wrote its memory to its disk when it was shut off last."""


def windows_parts(appliance: Appliance, root: str, devices: Collection[str]) -> WindowsParts:
    """Look at the disks of a guest whose system is mounted; empty if it is no Windows.

    Args:
        appliance: it has inspected the disks, and has the system mounted.
        root: the device of the system.
        devices: with file systems.
    """
    if _line(appliance, "inspect-get-type", root) != "windows":
        return WindowsParts()
    drives = parse_pairs(appliance.attempt("inspect-get-drive-mappings", root) or b"")
    letters = {device: letter for letter, device in drives.items() if re.fullmatch("[A-Z]", letter)}
    start = appliance.attempt("pread", b"/hiberfil.sys", "4", "0")
    own = set(_of_system(appliance, devices, letters))
    return WindowsParts(letters, own, start in _HIBERNATED)


def _of_system(
    appliance: Appliance, devices: Collection[str], letters: Collection[str]
) -> Iterator[str]:
    """Devices without a letter that only the system uses.

    An active partition is one only if it is known which have letters: else it may be a drive.
    """
    for device in devices:
        found = _PARTITION.fullmatch(device)
        if found is None or device in letters:
            continue
        disk, number = found[1], found[2]
        if _line(appliance, "part-get-parttype", disk) == "gpt":
            is_own = _line(appliance, "part-get-gpt-type", disk, number).upper() in _TYPES_OF_SYSTEM
        else:
            is_active = (
                bool(letters) and _line(appliance, "part-get-bootable", disk, number) == "true"
            )
            kind = _line(appliance, "part-get-mbr-id", disk, number)
            is_own = (is_active and bool(letters)) or kind == hex(_RECOVERY_ID)
        if is_own:
            yield device


def _line(appliance: Appliance, *words: str) -> str:
    return (appliance.attempt(*words) or b"").decode("utf-8", "replace").strip()
