"""``manual``: RAM saved live, then the guest stays paused until its disks are snapshotted.

No overlay, hence nothing to commit and nothing that can be lost; but the ZFS snapshot is inside the
pause. Also the way of a guest that was paused before: QEMU leaves its images inactive after saving
RAM, and would refuse to commit an overlay into them.
"""

from __future__ import annotations

import time
from dataclasses import replace

from snaporch.model import DomainState, Level
from snaporch.run.strategies.ram import RamStrategy


class Manual(RamStrategy):
    """See the module."""

    def reached(self) -> Level:
        """RAM and disks are of one instant if nobody let the guest run in between."""
        if self.work.hypervisor.paused_by(self.work.domain.uuid) is None:
            return self.disturbed(Level.RAM)
        return Level.RAM

    def release(self) -> None:
        """Let it run again, if it ran."""
        if self.work.domain.state is not DomainState.RUNNING:
            return
        self.work.hypervisor.resume(self.work.domain.uuid)
        if self.pause.since is not None:
            stood = (time.monotonic() - self.pause.since) * 1000
            self.pause = replace(self.pause, milliseconds=round(stood, 1))
        self.work.say(f"paused {self.pause.milliseconds:.0f} ms")
