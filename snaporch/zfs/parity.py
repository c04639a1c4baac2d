"""What a record takes on raidz and draid: pure functions.

A record has parity of its own. On raidz it is then padded to a multiple of ``parity + 1`` sectors,
on draid its data to whole stripes (OpenZFS: ``vdev_raidz_asize``, ``vdev_draid_asize``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_GROUP = re.compile(r"(?:raidz([1-3])|draid([1-3]):([0-9]{1,3})d:[0-9]+c:[0-9]+s)-[0-9]+")


@dataclass(frozen=True, slots=True)
class ParityGroup:
    """A vdev of type raidz or draid."""

    parity: int
    data: int
    """Sectors of data that have their parity together."""
    is_draid: bool = False

    def allocated(self, size: int, sector: int) -> int:
        """The bytes that a record takes.

        Args:
            size: of the record, in bytes.
            sector: of the devices, in bytes.
        """
        sectors = -(-size // sector)
        rows = -(-sectors // self.data)
        if self.is_draid:
            return rows * (self.data + self.parity) * sector
        unit = self.parity + 1
        return -(-(sectors + rows * self.parity) // unit) * unit * sector


def parity_group(name: str, children: str) -> ParityGroup | None:
    """The group of a vdev; None of one without parity, or if it is not known.

    Args:
        name: of the vdev, such as ``raidz2-0`` or ``draid2:4d:11c:1s-0``.
        children: its property ``numchildren``.
    """
    found = _GROUP.fullmatch(name)
    if found is None:
        return None
    if found[2]:
        return ParityGroup(int(found[2]), int(found[3]), is_draid=True) if int(found[3]) else None
    parity = int(found[1])
    data = int(children) - parity if children.isdecimal() else 0
    return ParityGroup(parity, data) if data > 0 else None
