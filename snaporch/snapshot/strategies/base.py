"""What every strategy does, and what it works with."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from snaporch.bundle.manifest import Part
from snaporch.bundle.store import PartialBundle
from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.hypervisor import Hypervisor, Pause
from snaporch.journal import Journal
from snaporch.model import Domain, DomainState, Level
from snaporch.recovery.release_guest import resume
from snaporch.snapshot.guest_changes import check_unchanged
from snaporch.snapshot.plan import Plan

NO_PAUSE = Pause(None, 0.0)


@dataclass(frozen=True, slots=True)
class RunMaterial:
    """One run's material."""

    context: Context
    plan: Plan
    bundle: PartialBundle
    journal: Journal

    @property
    def domain(self) -> Domain:
        """The domain as the plan found it."""
        return self.plan.domain

    @property
    def hypervisor(self) -> Hypervisor:
        """The hypervisor of the run's context."""
        return self.context.hypervisor

    def say(self, text: str) -> None:
        """Report a step."""
        self.context.progress.step(self.domain.name, text)

    def warn(self, text: str) -> None:
        """Report something the user should know."""
        self.context.progress.note(self.domain.name, text)


class StrategyUnavailableError(RefusedError):
    """The strategy found, before touching anything, that it cannot work."""


class FreezeStrategy(ABC):
    """The guest stands still from the end of :meth:`freeze` to the beginning of :meth:`release`.

    Whatever fails or is killed in between, ``recovery/settle.py`` releases the guest from what it
    sees; a strategy has no way back of its own.
    """

    def __init__(self, work: RunMaterial) -> None:
        self.work = work
        self.pause = NO_PAUSE
        """How long the guest stood still; complete after :meth:`release`."""
        self.held = False
        """Somebody else has suspended the guest meanwhile, and it is to stay so."""

    def prepare(self) -> None:  # noqa: B027 - most have nothing to do
        """Make ready what can be made before; touches no guest."""

    @abstractmethod
    def freeze(self) -> None:
        """Make the disks stand still.

        Raises:
            HypervisorError, OSError: it could not be done.
            InterruptedRunError: a signal came first.
        """

    @abstractmethod
    def reached(self) -> Level:
        """The level that the ZFS snapshots just taken have; asked before the release."""

    @abstractmethod
    def release(self) -> None:
        """Let the guest go on as it was."""

    def ram_part(self) -> Part | None:
        """The finished RAM image, if the strategy captures RAM."""
        return None

    def abandon(self) -> None:  # noqa: B027 - most have nothing to do
        """The run failed: let go of pipes and processes."""

    def check_unchanged(self, *, state: bool = True) -> None:
        """See that the guest is still what was planned.

        Args:
            state: whether it must also run, or stand still, as it did.

        Raises:
            ChangedError: it is not.
        """
        plan = self.work.plan
        check_unchanged(self.work.hypervisor, plan.domain, plan.facts.overlays, state=state)

    def disturbed(self, level: Level) -> Level:
        """Say that somebody else moved the guest inside the window, which ends the promise."""
        self.work.warn(f"it did not stay as it was: recorded as crash-consistent, not {level}")
        return Level.CRASH


class StandingStill(FreezeStrategy):
    """A guest that is paused from the end of the freeze until it is released."""

    def reached(self) -> Level:
        """The strategy's level, if nobody let the guest run in between."""
        level = self.work.plan.level
        if self.work.hypervisor.paused_by(self.work.domain.uuid) is None:
            return self.disturbed(level)
        return level

    def release(self) -> None:
        """Let it run again, if it ran."""
        if self.work.domain.state is not DomainState.RUNNING or self.held:
            return
        released = time.monotonic()
        resume(self.work.hypervisor, self.work.domain.uuid, self.work.warn)
        self.pause = self.pause.over(released, time.monotonic())
        self.work.say(f"paused {self.pause.milliseconds:.0f} ms")
