"""Limits for saving RAM: seconds, bytes and a rate while the guest runs, a time limit afterwards.

A guest can change RAM faster than it is saved, by itself or because of two limits: the rate, and
the downtime into which the rest of RAM must fit. Both limits are lifted when twice the guest's RAM
was saved. After that its vCPUs are slowed down
(:mod:`snaporch.snapshot.strategies.vcpu_brake`). When a budget is used up, the guest is suspended,
or the run aborted.

How long RAM may not arrive, or not be stored, is set by ``RamTimes`` in
:mod:`snaporch.waiting_times`; the budgets and the rate are options, in
:mod:`snaporch.config.schema`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context

from snaporch.config import DomainSettings
from snaporch.errors import RunFailedError
from snaporch.interrupt import Interrupt
from snaporch.journal import Note
from snaporch.recovery.release_guest import suspend
from snaporch.snapshot.ram_capture import RamCapture
from snaporch.snapshot.strategies.base import RunMaterial
from snaporch.snapshot.strategies.vcpu_brake import VcpuBrake
from snaporch.waiting_times import RamTimes

_REPORT_SECONDS = 0.5
_PASSES = 2
"""How many times the guest's RAM is saved before the limits are lifted."""
_SHARE = 0.5
"""The share of the budget's seconds in which all of RAM must be saved, whatever the rate."""


def effective_rate(settings: DomainSettings, ram_bytes: int) -> float:
    """Return the rate in MiB a second: the configured one, or higher if the budget needs it."""
    if not settings.ram_rate or not settings.ram_time_budget:
        return settings.ram_rate
    needed = (ram_bytes >> 20) / (settings.ram_time_budget * _SHARE)
    return max(float(settings.ram_rate), needed)


class DowntimeLimit:
    """QEMU's limit for the pause at the end of saving RAM, which is restored afterwards."""

    def __init__(self, work: RunMaterial) -> None:
        self._work = work

    def set(self) -> None:
        """Set the configured limit."""
        facts = self._work.plan.facts
        if facts.downtime_ms:
            self._work.hypervisor.limit_downtime(facts.uuid, facts.downtime_ms)

    def restore_in_background(self) -> None:
        """Restore the emulator's own limit while RAM is saved, without waiting for an answer.

        QEMU's monitor does not answer while QEMU waits for a full pipe.
        """
        threading.Thread(
            target=copy_context().run, args=[self.restore], name="downtime-limit", daemon=True
        ).start()

    def restore(self) -> None:
        """Restore the emulator's own limit, which later migrations use."""
        facts = self._work.plan.facts
        if facts.downtime_ms:
            self._work.hypervisor.limit_downtime(facts.uuid, facts.own_downtime_ms)


class RamBudget:
    """Watches over saving RAM.

    It counts the bytes that arrive and does not ask libvirt: QEMU's monitor does not answer while
    QEMU waits for a full pipe, and a run that waits for the monitor could not be stopped.
    """

    def __init__(
        self,
        work: RunMaterial,
        capture: RamCapture,
        downtime: DowntimeLimit,
        brake: VcpuBrake,
        expected: int,
    ) -> None:
        self._work = work
        self._capture = capture
        self._downtime = downtime
        self._brake = brake
        self._expected = expected
        self._began = self._moved = work.clock.monotonic()
        self._arrived = 0
        self._reported = 0.0
        self._suspended = self._limits_lifted = False
        self.suspended_it = False
        """Whether the run has suspended the guest."""

    def begin(self) -> None:
        """Start to count: saving RAM begins now."""
        self._began = self._moved = self._work.clock.monotonic()
        self._arrived = 0

    def check(self) -> None:
        """Report progress; suspend the guest when the budget is used up.

        Raises:
            RunFailedError: the budget is used up and ``on_ram_budget`` is ``abort``, or no RAM has
                arrived for :attr:`~RamTimes.arrival`.
        """
        now = self._work.clock.monotonic()
        arrived = self._capture.arrived_bytes
        if arrived != self._arrived:
            self._arrived, self._moved = arrived, now
        if now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            total = max(self._expected, arrived)
            self._work.context.progress.amount(self._work.domain.name, arrived, total)
        if not self._limits_lifted and arrived > _PASSES * self._expected:
            self._lift_limits()
        self._brake.follow(arrived, self._expected)
        excess = self._excess(now - self._began)
        if excess and not self._suspended:
            self._overrun(excess)
            self._moved = now
        patience = self._work.context.ram_times.arrival
        if now - self._moved > patience:
            raise RunFailedError(
                self._work.domain.name,
                f"no RAM has arrived for {patience} s",
                "check the bundle store and the compressor",
            )

    def _lift_limits(self) -> None:
        self._limits_lifted = True
        if self._capture.is_limited:
            self._work.warn("its RAM changes faster than the rate: saving it without a limit")
        self._capture.lift_limit()
        self._downtime.restore_in_background()

    def _overrun(self, excess: str) -> None:
        if self._work.plan.settings.on_ram_budget == "abort":
            raise RunFailedError(
                self._work.domain.name, f"saving RAM took more than {excess}", "see on_ram_budget"
            )
        self._suspended = True
        if self._work.hypervisor.paused_by(self._work.domain.uuid) is not None:
            return  # the admin has suspended it
        self.suspended_it = True
        self._work.warn(f"saving RAM took more than {excess}: suspending the guest to finish it")
        self._work.journal.note(Note.SUSPENDED)
        suspend(self._work.context, self._work.domain)

    def _excess(self, seconds: float) -> str:
        settings = self._work.plan.settings
        if settings.ram_time_budget and seconds > settings.ram_time_budget:
            return f"{settings.ram_time_budget} s"
        if settings.ram_budget_mib and self._arrived >> 20 > settings.ram_budget_mib:
            return f"{settings.ram_budget_mib} MiB"
        return ""


class SealingWatch:
    """Watches over sealing, while the guest runs again, and ends it when it does not progress."""

    def __init__(
        self, name: str, interrupt: Interrupt, monotonic: Callable[[], float], times: RamTimes
    ) -> None:
        self._name = name
        self._interrupt = interrupt
        self._bytes = -1
        self._monotonic = monotonic
        self._times = times
        self._moved = monotonic()

    def check(self, moved: int) -> None:
        """Compare the bytes that were compressed or stored so far with the last call.

        Raises:
            InterruptedRunError: a signal came, and there was no progress for
                :attr:`~RamTimes.interrupted`.
            RunFailedError: there was no progress for :attr:`~RamTimes.sealing`.
        """
        now = self._monotonic()
        if moved != self._bytes:
            self._bytes, self._moved = moved, now
        if now - self._moved > self._times.interrupted:
            self._interrupt.check(self._name)
        if now - self._moved > self._times.sealing:
            raise RunFailedError(
                self._name,
                f"the bundle store has taken nothing for {self._times.sealing} s",
                "check the bundle store and the compressor",
            )
