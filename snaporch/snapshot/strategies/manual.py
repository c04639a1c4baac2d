"""``manual``: RAM saved live, then the guest stays paused until its disks are snapshotted.

No overlay, hence nothing to commit and nothing that can be lost; but the ZFS snapshot is inside the
pause. Also the way of a guest that was paused before: QEMU leaves its images inactive after saving
RAM, and would refuse to commit an overlay into them.
"""

from __future__ import annotations

from snaporch.snapshot.strategies.base import StandingStill
from snaporch.snapshot.strategies.ram import RamStrategy


class Manual(StandingStill, RamStrategy):
    """See the module."""
