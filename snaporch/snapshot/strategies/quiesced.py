"""``quiesced``: the guest agent freezes the guest's file systems while its disks are snapshotted.

The times are options in :mod:`snaporch.config.schema`: ``agent_timeout`` for each request,
``quiesce_budget`` for the whole freeze.

A freeze is never interrupted: a signal takes effect when the agent has answered. If the agent does
not answer in time, the guest may be frozen or not, so it is thawed until the agent confirms that.
File systems that another program has frozen are left to that program, and no snapshot is taken at
this level. ``choose_strategy.py`` (``lower_level``) decides whether a run without an agent fails or
takes a lower level. Windows thaws by itself after ten seconds (VSS); after the budget
(``quiesce_budget``) the snapshot is recorded as ``crash``.
"""

from __future__ import annotations

from datetime import timedelta

from snaporch.hypervisor import NotFrozenByUsError, Pause, milliseconds
from snaporch.journal import Note
from snaporch.model import Level, PauseParts
from snaporch.snapshot.strategies.base import FreezeStrategy, StrategyUnavailableError


class Quiesced(FreezeStrategy):
    """Freezes file systems through the guest agent."""

    def prepare(self) -> None:
        """Check that the agent answers: a silent agent might carry out a freeze later.

        Raises:
            StrategyUnavailableError: it does not answer, or file systems are frozen already.
        """
        seconds = self.work.plan.settings.agent_timeout
        if not self.work.hypervisor.agent_answers(self.work.domain.uuid, seconds):
            raise StrategyUnavailableError(
                self.work.domain.name,
                f"its guest agent does not answer within {seconds} s",
                "restart qemu-guest-agent in the guest",
            )
        self._check_not_frozen()

    def _check_not_frozen(self) -> None:
        """Check that no other program has frozen the guest.

        Raises:
            StrategyUnavailableError: another program has, or the agent does not report it.
        """
        frozen = self.work.hypervisor.file_systems_frozen(self.work.domain.uuid)
        if frozen:
            raise StrategyUnavailableError(
                self.work.domain.name,
                "its file systems are frozen already, and not by snaporch: by a backup tool, or "
                "`virsh domfsfreeze`",
                "retry when they are thawed; if no program needs them frozen: virsh domfsthaw",
            )
        if frozen is None:
            raise StrategyUnavailableError(
                self.work.domain.name,
                "its guest agent does not say whether its file systems are frozen",
                "allow guest-fsfreeze-status in the agent's configuration",
            )

    def freeze(self) -> None:
        """Have the agent freeze the file systems."""
        settings = self.work.plan.settings
        self._check_not_frozen()  # again, because a member of a group has waited for the others
        self.work.journal.note(Note.FREEZING)
        self.work.report("freezing the guest's file systems")
        since = self.work.clock.monotonic()
        try:
            count = self.work.hypervisor.freeze_file_systems(
                self.work.domain.uuid, settings.quiesce_mountpoints, settings.agent_timeout
            )
        except NotFrozenByUsError:
            self.work.journal.note(Note.RELEASED)
            raise
        parts = PauseParts(switch=milliseconds(self.work.clock.monotonic() - since))
        self.pause = Pause(self.work.clock.now(), 0.0, since, parts)
        self.work.report(f"froze {count} file system{'' if count == 1 else 's'}")

    def reached(self) -> Level:
        """Return ``quiesced`` if the guest was still frozen when the snapshots existed."""
        budget = self.work.plan.settings.quiesce_budget / timedelta(milliseconds=1)
        frozen_ms = self._frozen_ms()
        if frozen_ms > budget:
            self.work.warn(
                f"frozen for {frozen_ms:.0f} ms, more than {budget:.0f} ms: the guest may have "
                "thawed by itself; recorded as crash-consistent"
            )
            return Level.CRASH
        if not self.work.hypervisor.file_systems_frozen(self.work.domain.uuid):
            return self.record_disturbance(Level.QUIESCED)
        return Level.QUIESCED

    def release(self) -> None:
        """Thaw the file systems."""
        released = self.work.clock.monotonic()
        self.work.hypervisor.thaw_file_systems(
            self.work.domain.uuid, self.work.plan.settings.agent_timeout
        )
        self.pause = self.pause.over(released, self.work.clock.monotonic())
        self.work.report(f"file systems were frozen for {self.pause.milliseconds:.0f} ms")

    def _frozen_ms(self) -> float:
        return (self.work.clock.monotonic() - self.pause.since) * 1000 if self.pause.since else 0.0
