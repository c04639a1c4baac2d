"""``crash`` and ``off``: only ZFS snapshots, of a guest that is running or shut off."""

from __future__ import annotations

from datetime import UTC, datetime

from snaporch.hypervisor import Pause
from snaporch.model import Level
from snaporch.snapshot.strategies.base import FreezeStrategy


class ZfsOnly(FreezeStrategy):
    """Does not freeze the guest."""

    def freeze(self) -> None:
        """Note the time; the guest is not touched."""
        self.pause = Pause(datetime.now(UTC), 0.0)

    def reached(self) -> Level:
        """Return ``off`` if the guest was off all the time and has no managed save image."""
        if self.work.plan.level is not Level.OFF:
            return Level.CRASH
        now = self.work.hypervisor.find(self.work.domain.uuid)
        if now is None or now.active or self.work.domain.managed_save:
            return self.record_disturbance(Level.OFF)
        return Level.OFF

    def release(self) -> None:
        """Release nothing: the guest was not frozen."""
