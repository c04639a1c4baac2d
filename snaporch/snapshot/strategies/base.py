"""The interface of all strategies, and what they work with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from snaporch.bundle.manifest import Part
from snaporch.bundle.store import PartialBundle
from snaporch.context import Clock, Context
from snaporch.errors import RefusedError
from snaporch.hypervisor import Hypervisor, Pause
from snaporch.journal import Journal
from snaporch.model import Domain, DomainState, Level
from snaporch.recovery.release_guest import resume
from snaporch.snapshot.plan import Plan
from snaporch.snapshot.plan_still_valid import check_unchanged

NO_PAUSE = Pause(None, 0.0)


@dataclass(frozen=True, slots=True)
class RunMaterial:
    """What a strategy needs of its run."""

    context: Context
    plan: Plan
    bundle: PartialBundle
    journal: Journal
    ends_guest: bool = False
    """Whether the guest stays paused until its bundle is sealed, and is then ended."""
    others_wait: Callable[[], bool] = lambda: False
    """Whether other guests of its group are frozen and wait for it."""

    @property
    def domain(self) -> Domain:
        """The domain as the plan found it."""
        return self.plan.domain

    @property
    def hypervisor(self) -> Hypervisor:
        """The hypervisor of the run's context."""
        return self.context.hypervisor

    @property
    def clock(self) -> Clock:
        """The clock of the run's context."""
        return self.context.clock

    def report(self, text: str) -> None:
        """Report a step."""
        self.context.progress.step(self.domain.name, text)

    def warn(self, text: str) -> None:
        """Report something that the user should know."""
        self.context.progress.note(self.domain.name, text)


class StrategyUnavailableError(RefusedError):
    """The strategy cannot work; it found that out before it touched the guest."""


class FreezeStrategy(ABC):
    """Freezes a guest, from the end of :meth:`freeze` to the beginning of :meth:`release`.

    After a failure or kill in between, ``recovery/recover_runs.py`` releases the guest by the state
    that it observes. So a strategy need not undo anything itself.
    """

    def __init__(self, work: RunMaterial) -> None:
        self.work = work
        self.pause = NO_PAUSE
        """The guest's pause; complete after :meth:`release`."""
        self.held = False
        """Whether the admin has suspended the guest meanwhile, so that it must stay suspended."""

    def prepare(self) -> None:  # noqa: B027 - most have nothing to do
        """Prepare what the freeze needs, without touching the guest."""

    @abstractmethod
    def freeze(self) -> None:
        """Freeze the guest's disks.

        Raises:
            HypervisorError, OSError: the guest cannot be frozen.
            InterruptedRunError: a signal came before it was frozen.
        """

    @abstractmethod
    def reached(self) -> Level:
        """Return the level of the ZFS snapshots; called when they exist, before the release."""

    @abstractmethod
    def release(self) -> None:
        """Return the guest to the state that it had before."""

    def ram_part(self) -> Part | None:
        """Finish the RAM image and return it; ``None`` if the strategy saves no RAM."""
        return None

    def abandon(self) -> None:  # noqa: B027 - most have nothing to do
        """Close pipes and stop processes after a failure."""

    def check_unchanged(self, *, state: bool = True) -> None:
        """Check that the guest is as it was when the run was planned.

        Args:
            state: also check whether it runs or is paused as it did.

        Raises:
            ChangedError: the guest has changed.
        """
        plan = self.work.plan
        check_unchanged(self.work.hypervisor, plan.domain, plan.facts.overlays, state=state)

    def record_disturbance(self, level: Level) -> Level:
        """Warn that the guest did not stay frozen or unchanged; return the lower level."""
        self.work.warn(f"it did not stay as it was: recorded as crash-consistent, not {level}")
        return Level.CRASH


class PausingStrategy(FreezeStrategy):
    """Keeps the guest paused from the end of the freeze until the release."""

    def reached(self) -> Level:
        """Return the strategy's level if the guest has been paused all the time."""
        level = self.work.plan.level
        if self.work.hypervisor.paused_by(self.work.domain.uuid) is None:
            return self.record_disturbance(level)
        return level

    def release(self) -> None:
        """Resume the guest if it was running before."""
        if self.work.domain.state is not DomainState.RUNNING or self.held:
            return
        released = self.work.clock.monotonic()
        times = self.work.context.libvirt_times
        resume(self.work.hypervisor, self.work.domain.uuid, self.work.warn, times=times)
        self.pause = self.pause.over(released, self.work.clock.monotonic())
        self.work.report(f"paused {self.pause.milliseconds:.0f} ms")
