"""Limits for saving RAM: seconds, bytes and a rate while the guest runs, a time limit afterwards.

A guest can change RAM faster than it is saved, by itself or because of two limits: the rate, and
the downtime into which the rest of RAM must fit. When so much was changed meanwhile that a quarter
of the guest's RAM was saved again, the rest may be as large as the pipe takes. When all of it was
saved again, the rate is lifted. After that its vCPUs are slowed down
(:mod:`snaporch.snapshot.strategies.vcpu_brake`). When a budget is used up, the guest is suspended,
or the run aborted.

How long RAM may not arrive, or not be stored, is set by ``RamTimes`` in
:mod:`snaporch.waiting_times`; the budgets and the rate are options, in
:mod:`snaporch.config.schema`.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context

from snaporch.config import DomainSettings
from snaporch.errors import RunFailedError, SnaporchError
from snaporch.interrupt import Interrupt
from snaporch.journal import Note
from snaporch.recovery.release_guest import suspend
from snaporch.snapshot.ram_capture import RamCapture
from snaporch.snapshot.strategies.base import RunMaterial
from snaporch.snapshot.strategies.vcpu_brake import VcpuBrake
from snaporch.waiting_times import RamTimes

_REPORT_SECONDS = 0.5
PASSES = 2
"""How many times the guest's RAM is saved before the rate is lifted."""
_DOWNTIME_PASSES = 1.25
"""How many times it is saved before the guest may be paused for a larger rest."""
_SPEED_SECONDS = 0.5
"""So long the speed is measured from which the downtime for a larger rest follows."""
_LONGEST_DOWNTIME_MS = 10_000
_SLOWEST = 0.5
"""The least speed that counts, as a share of the best so far."""
_ALIKE = 0.2
"""A limit that differs by no more than this share is not set again."""
_SHARE = 0.5
"""The share of the budget's seconds in which all of RAM must be saved, whatever the rate."""


def effective_rate(settings: DomainSettings, ram_bytes: int) -> float:
    """Return the rate in MiB a second: the configured one, or higher if the budget needs it."""
    if not settings.ram_rate or not settings.ram_time_budget:
        return settings.ram_rate
    needed = (ram_bytes >> 20) / (settings.ram_time_budget * _SHARE)
    return max(float(settings.ram_rate), needed)


def downtime_for(room: int, speed: float) -> int:
    """The downtime limit with which QEMU leaves a rest that the pipe takes whole.

    QEMU multiplies the limit by the speed so far, at which a slow compressor reads. The rest
    does not pass at that speed: half of the room is used, for QEMU's estimate may be too high.

    Args:
        room: bytes that the pipe takes from a guest that is paused.
        speed: bytes a second at which RAM is saved.

    Returns:
        Milliseconds, at most 10,000.
    """
    if speed <= 0:
        return _LONGEST_DOWNTIME_MS
    return min(round(room / 2 / speed * 1000), _LONGEST_DOWNTIME_MS)


class DowntimeLimit:
    """QEMU's limit for the pause at the end of saving RAM, which is restored afterwards."""

    def __init__(self, work: RunMaterial) -> None:
        self._work = work
        self._measured_at = self._arrived = self._best_speed = 0.0
        self._limit = 0
        self._was_limited = False
        self._setting: threading.Thread | None = None

    def set(self) -> None:
        """Set the configured limit: saving RAM begins now."""
        self._measured_at, self._arrived = self._work.clock.monotonic(), 0.0
        self._best_speed = 0.0
        facts = self._work.plan.facts
        self._limit = facts.downtime_ms
        if facts.downtime_ms:
            self._work.hypervisor.limit_downtime(facts.uuid, facts.downtime_ms)

    def follow(self, arrived: int, expected: int, room: int) -> None:
        """Let QEMU leave a larger rest if so much RAM was saved again that it would not end soon.

        Where the pipe takes no larger one, the emulator's own limit follows when RAM was saved
        twice. To be called only while the guest runs and no rate limits. It does not wait for an
        answer: QEMU's monitor gives none while QEMU waits for a full pipe.

        Args:
            arrived: bytes of RAM that were saved so far.
            expected: bytes of RAM that the guest used when saving began.
            room: bytes that the pipe takes from a guest that is paused.
        """
        facts = self._work.plan.facts
        if self._was_limited:
            self._was_limited = False
            self._measured_at, self._arrived = self._work.clock.monotonic(), arrived
        if not facts.downtime_ms or (speed := self._measure(arrived)) is None:
            return
        if arrived <= _DOWNTIME_PASSES * expected or (self._setting and self._setting.is_alive()):
            return
        speed = max(speed, _SLOWEST * self._best_speed)  # after a stall it may be fast at once
        least = max(facts.own_downtime_ms, facts.downtime_ms)
        limit = max(least, downtime_for(room, speed))
        passes = _DOWNTIME_PASSES if limit > least else PASSES
        if arrived <= passes * max(expected, self._work.hypervisor.resident_bytes(facts.uuid)):
            return  # it may use more RAM than at first: this need not be its second time
        if abs(limit - self._limit) <= _ALIKE * self._limit:
            return
        self._limit = limit
        self._setting = threading.Thread(
            target=copy_context().run,
            args=[self._work.hypervisor.limit_downtime, facts.uuid, limit],
            name="downtime-limit",
            daemon=True,
        )
        self._setting.start()

    def measure_limited(self, arrived: int) -> None:
        """Only measure: a rate limits the speed, which will be no less without it."""
        self._was_limited = True
        self._measure(arrived)

    def _measure(self, arrived: int) -> float | None:
        """Return the speed since the last time, in bytes a second; ``None`` if that is too near."""
        now = self._work.clock.monotonic()
        if (seconds := now - self._measured_at) < _SPEED_SECONDS:
            return None
        speed = (arrived - self._arrived) / seconds
        self._measured_at, self._arrived = now, arrived
        self._best_speed = max(self._best_speed, speed)
        return speed

    def settle(self) -> None:
        """Wait until the limit that was set last has arrived; RAM is not saved any more."""
        if self._setting is not None:
            self._setting.join()

    def restore(self) -> None:
        """Restore the emulator's own limit, which later migrations use; note it if that fails."""
        facts = self._work.plan.facts
        if not facts.downtime_ms:
            return
        self.settle()  # else it might come after this
        hypervisor, own = self._work.hypervisor, facts.own_downtime_ms
        hypervisor.limit_downtime(facts.uuid, own)
        with suppress(SnaporchError):
            left = hypervisor.downtime_limit(facts.uuid)
            if left not in (None, own):
                name = shlex.quote(self._work.domain.name)
                self._work.warn(
                    f"its downtime limit for migrations is still {left} ms; set it: "
                    f"virsh migrate-setmaxdowntime {name} {own}"
                )


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
        self._suspended = self._rate_lifted = False
        self.suspended_it = False
        """Whether the run has suspended the guest."""

    def begin(self) -> None:
        """Start to count: saving RAM begins now, for the first time or again."""
        self._forget_suspension()
        self._began = self._moved = self._work.clock.monotonic()
        self._arrived = 0
        self._rate_lifted = False
        self._brake.begin()

    def _forget_suspension(self) -> None:
        """Note that libvirt resumed the guest, which it does when saving RAM failed."""
        if self.suspended_it and self._work.hypervisor.paused_by(self._work.domain.uuid) is None:
            self._work.journal.note(Note.RESUMED)
        self._suspended = self.suspended_it = False

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
        self._follow(arrived)
        if not self._rate_lifted and arrived > PASSES * self._expected:
            self._lift_rate()
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

    def _follow(self, arrived: int) -> None:
        if self._capture.is_limited:
            self._downtime.measure_limited(arrived)
        elif not self._capture.is_enlarged:
            self._downtime.follow(arrived, self._expected, self._capture.room_while_paused)

    def _lift_rate(self) -> None:
        self._rate_lifted = True
        if self._capture.is_limited:
            self._work.warn("its RAM changes faster than the rate: saving it without a limit")
        self._capture.lift_limit()

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
