"""``manual``: RAM is saved live, then the guest stays paused until its disks are snapshotted.

There are no overlays, so there is nothing to commit and nothing can be lost. But the guest is
paused while the ZFS snapshots are taken. ``hypervisor/pause_clock.py`` says when the clock of that
pause starts and stops. A guest that was paused before is always saved this way:
QEMU leaves its images inactive after saving RAM, and would refuse to commit an overlay into them.
"""

from __future__ import annotations

from snaporch.snapshot.strategies.base import PausingStrategy
from snaporch.snapshot.strategies.ram import RamStrategy


class Manual(PausingStrategy, RamStrategy):
    """Saves RAM live and then keeps the guest paused."""
