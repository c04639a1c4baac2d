"""``paused``: the guest is suspended while its disks are snapshotted; no RAM is kept.

All disks are of one instant, and QEMU has flushed what it had in hand. What the guest's own kernel
still holds in its cache is not in the snapshot.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime

from snaporch.hypervisor import Pause
from snaporch.model import DomainState, Level
from snaporch.run.journal import Note
from snaporch.run.strategies.base import Strategy


class Paused(Strategy):
    """See the module."""

    def freeze(self) -> None:
        """Suspend a running guest; QEMU flushes every disk when it stops (``vm_stop``)."""
        self.work.journal.note(Note.SUSPENDED)
        began, since = datetime.now(UTC), time.monotonic()
        if self.work.domain.state is DomainState.RUNNING:
            self.work.hypervisor.suspend(self.work.domain.uuid)
        self.pause = Pause(began, 0.0, since)

    def reached(self) -> Level:
        """Paused, if nobody let it run in between."""
        if self.work.hypervisor.paused_by(self.work.domain.uuid) is None:
            return self.disturbed(Level.PAUSED)
        return Level.PAUSED

    def release(self) -> None:
        """Let it run again, if it ran."""
        if self.work.domain.state is not DomainState.RUNNING:
            return
        self.work.hypervisor.resume(self.work.domain.uuid)
        if self.pause.since is not None:
            stood = (time.monotonic() - self.pause.since) * 1000
            self.pause = replace(self.pause, milliseconds=round(stood, 1))
        self.work.say(f"paused {self.pause.milliseconds:.0f} ms")
