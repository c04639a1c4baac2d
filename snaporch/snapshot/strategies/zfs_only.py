"""``crash`` and ``off``: the ZFS snapshots alone, of a guest that runs on or is shut off."""

from __future__ import annotations

from datetime import UTC, datetime

from snaporch.hypervisor import Pause
from snaporch.model import Level
from snaporch.snapshot.strategies.base import FreezeStrategy


class ZfsOnly(FreezeStrategy):
    """See the module."""

    def freeze(self) -> None:
        """Nothing."""
        self.pause = Pause(datetime.now(UTC), 0.0)

    def reached(self) -> Level:
        """``off`` only if the guest was off from before to after, and holds no saved state."""
        if self.work.plan.level is not Level.OFF:
            return Level.CRASH
        now = self.work.hypervisor.find(self.work.domain.uuid)
        if now is None or now.active or self.work.domain.managed_save:
            return self.disturbed(Level.OFF)
        return Level.OFF

    def release(self) -> None:
        """Nothing."""
