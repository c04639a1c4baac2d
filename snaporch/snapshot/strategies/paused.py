"""``paused``: the guest is suspended while its disks are snapshotted; no RAM is kept.

All disks are of one instant, and QEMU has flushed its caches. Data in the guest's own cache is not
in the snapshot.
"""

from __future__ import annotations

from snaporch.hypervisor import Pause, milliseconds
from snaporch.journal import Note
from snaporch.model import DomainState, PauseParts
from snaporch.recovery.release_guest import suspend
from snaporch.snapshot.strategies.base import PausingStrategy


class Paused(PausingStrategy):
    """Suspends the guest."""

    def freeze(self) -> None:
        """Suspend a running guest; QEMU flushes every disk when it stops (``vm_stop``)."""
        self.check_unchanged()
        self.work.journal.note(Note.SUSPENDED)
        clock = self.work.clock
        began, since = clock.now(), clock.monotonic()
        if self.work.domain.state is DomainState.RUNNING:
            suspend(self.work.context, self.work.domain)
        parts = PauseParts(switch=milliseconds(clock.monotonic() - since))
        self.pause = Pause(began, 0.0, since, parts)
