"""``quiesced``: the guest's own agent freezes its file systems while its disks are snapshotted.

A freeze is never cut off half way: a signal waits until the agent has answered. An agent that does
not answer in time leaves the guest in doubt, so it is thawed until it says that it is. What
somebody else has frozen is theirs to thaw: no snapshot is taken of it at this level. Windows thaws
by itself after ten seconds (VSS); past the budget the snapshot is recorded as ``crash``.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from snaporch.hypervisor import NotFrozenByUsError, Pause, milliseconds
from snaporch.journal import Note
from snaporch.model import Level, PauseParts
from snaporch.snapshot.strategies.base import FreezeStrategy, StrategyUnavailableError


class Quiesced(FreezeStrategy):
    """See the module."""

    def prepare(self) -> None:
        """See that the agent answers: one that does not must not be sent a freeze to do later.

        Raises:
            StrategyUnavailableError: it does not.
        """
        seconds = self.work.plan.settings.agent_timeout
        if not self.work.hypervisor.agent_answers(self.work.domain.uuid, seconds):
            raise StrategyUnavailableError(
                self.work.domain.name,
                f"its guest agent does not answer within {seconds} s",
                "restart qemu-guest-agent in the guest",
            )
        self._check_nobodys()

    def _check_nobodys(self) -> None:
        """See that nobody has frozen the guest.

        Raises:
            StrategyUnavailableError: somebody has, or the agent does not say.
        """
        frozen = self.work.hypervisor.file_systems_frozen(self.work.domain.uuid)
        if frozen:
            raise StrategyUnavailableError(
                self.work.domain.name,
                "its file systems are frozen already, and not by snaporch: by a backup tool, or "
                "`virsh domfsfreeze`",
                "try again when they are thawed; if nobody needs them so: virsh domfsthaw",
            )
        if frozen is None:
            raise StrategyUnavailableError(
                self.work.domain.name,
                "its guest agent does not say whether its file systems are frozen",
                "allow guest-fsfreeze-status in the agent's configuration",
            )

    def freeze(self) -> None:
        """Ask the agent to freeze."""
        settings = self.work.plan.settings
        self._check_nobodys()  # a member of a group has waited for the others
        self.work.journal.note(Note.FREEZING)
        self.work.say("freezing the guest's file systems")
        since = time.monotonic()
        try:
            count = self.work.hypervisor.freeze_file_systems(
                self.work.domain.uuid, settings.quiesce_mountpoints, settings.agent_timeout
            )
        except NotFrozenByUsError:
            self.work.journal.note(Note.LET_GO)
            raise
        parts = PauseParts(switch=milliseconds(time.monotonic() - since))
        self.pause = Pause(datetime.now(UTC), 0.0, since, parts)
        self.work.say(f"froze {count} file system{'' if count == 1 else 's'}")

    def reached(self) -> Level:
        """Quiesced, if the freeze held until the snapshots were there."""
        budget = self.work.plan.settings.quiesce_budget / timedelta(milliseconds=1)
        stood = self._stood()
        if stood > budget:
            self.work.warn(
                f"frozen for {stood:.0f} ms, more than {budget:.0f} ms: the guest may have thawed "
                "by itself; recorded as crash-consistent"
            )
            return Level.CRASH
        if not self.work.hypervisor.file_systems_frozen(self.work.domain.uuid):
            return self.disturbed(Level.QUIESCED)
        return Level.QUIESCED

    def release(self) -> None:
        """Thaw."""
        released = time.monotonic()
        self.work.hypervisor.thaw_file_systems(
            self.work.domain.uuid, self.work.plan.settings.agent_timeout
        )
        self.pause = self.pause.over(released, time.monotonic())
        self.work.say(f"file systems were frozen for {self.pause.milliseconds:.0f} ms")

    def _stood(self) -> float:
        return (time.monotonic() - self.pause.since) * 1000 if self.pause.since else 0.0
