"""What saving RAM may take: seconds, bytes, and a rate while the guest runs, patience afterwards.

A guest can dirty RAM faster than it is saved, be that for its own doing or for the limits set here:
a rate, and a downtime that the rest of RAM must fit in. So the limits are given up when they did
not lead to an end (twice the guest's RAM was saved), and the guest is suspended, or the run
aborted, when a budget is used up.
"""

from __future__ import annotations

import threading
import time
from contextvars import copy_context

from snaporch.config import DomainSettings
from snaporch.context import Interrupt
from snaporch.errors import RunFailedError
from snaporch.journal import Note
from snaporch.recovery.release_guest import suspend
from snaporch.snapshot.bundle_parts import RamCapture
from snaporch.snapshot.strategies.base import RunMaterial

_REPORT_SECONDS = 0.5
_STALL_SECONDS = 120
_SEAL_STALL_SECONDS = 600
"""The guest runs: a slow store may have its time, for all that is written to be on its disks."""
_SEAL_PATIENCE_SECONDS = 30
"""The same when somebody wants the run to end: what goes on may come to its end."""
_PASSES = 2
"""Of the guest's whole RAM, before limits count as what keeps it from coming to an end."""
_SHARE = 0.5
"""Of the budget's seconds, in which all of RAM has to fit in spite of the rate."""


def fair_rate(settings: DomainSettings, ram_bytes: int) -> float:
    """MiB a second: the configured rate, or more if the budget would be used up before the end."""
    if not settings.rate or not settings.ram_budget_seconds:
        return settings.rate
    needed = (ram_bytes >> 20) / (settings.ram_budget_seconds * _SHARE)
    return max(float(settings.rate), needed)


class Downtime:
    """QEMU's limit for the pause at the end of saving RAM; its own is put back afterwards."""

    def __init__(self, work: RunMaterial) -> None:
        self._work = work

    def shorten(self) -> None:
        """Set the configured one."""
        facts = self._work.plan.facts
        if facts.downtime_ms:
            self._work.hypervisor.limit_downtime(facts.uuid, facts.downtime_ms)

    def relax(self) -> None:
        """Put the emulator's own back while RAM is saved, and wait for no answer.

        QEMU's monitor does not answer while a full pipe holds QEMU up.
        """
        threading.Thread(
            target=copy_context().run, args=[self.put_back], name="downtime-limit", daemon=True
        ).start()

    def put_back(self) -> None:
        """Leave the emulator as it was, for migrations that are none of ours."""
        facts = self._work.plan.facts
        if facts.downtime_ms:
            self._work.hypervisor.limit_downtime(facts.uuid, facts.own_downtime_ms)


class RamBudget:
    """Watches over one capture.

    Goes by the bytes that arrive, and asks libvirt nothing: QEMU's monitor does not answer while a
    full pipe holds QEMU up, and whoever waits for it could not stop the run any more.
    """

    def __init__(
        self, work: RunMaterial, capture: RamCapture, downtime: Downtime, expected: int
    ) -> None:
        self._work = work
        self._capture = capture
        self._downtime = downtime
        self._expected = expected
        self._began = self._moved = time.monotonic()
        self._arrived = 0
        self._reported = 0.0
        self._suspended = self._eased = False
        self.suspended_it = False
        """The guest stands still by the run's own doing."""

    def begin(self) -> None:
        """A capture begins now."""
        self._began = self._moved = time.monotonic()
        self._arrived = 0

    def check(self) -> None:
        """Report progress; act when the budget is used up.

        Raises:
            RunFailedError: it is, and the configuration says to abort; or nothing arrives any more.
        """
        now = time.monotonic()
        arrived = self._capture.arrived_bytes
        if arrived != self._arrived:
            self._arrived, self._moved = arrived, now
        if now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            total = max(self._expected, arrived)
            self._work.context.progress.amount(self._work.domain.name, arrived, total)
        if not self._eased and arrived > _PASSES * self._expected:
            self._ease()
        excess = self._excess(now - self._began)
        if excess and not self._suspended:
            self._overrun(excess)
            self._moved = now
        if now - self._moved > _STALL_SECONDS:
            raise RunFailedError(
                self._work.domain.name,
                f"no RAM has arrived for {_STALL_SECONDS} s",
                "see whether the bundle store and the compressor still work",
            )

    def _ease(self) -> None:
        self._eased = True
        if self._capture.limits:
            self._work.warn("its RAM changes faster than the rate: saving it without a limit")
        self._capture.hurry()
        self._downtime.relax()

    def _overrun(self, excess: str) -> None:
        if self._work.plan.settings.on_ram_budget == "abort":
            raise RunFailedError(
                self._work.domain.name, f"saving RAM took more than {excess}", "see on_ram_budget"
            )
        self._suspended = True
        if self._work.hypervisor.paused_by(self._work.domain.uuid) is not None:
            return  # somebody else has suspended it
        self.suspended_it = True
        self._work.warn(f"saving RAM took more than {excess}: suspending the guest to finish it")
        self._work.journal.note(Note.SUSPENDED)
        suspend(self._work.hypervisor, self._work.domain)

    def _excess(self, seconds: float) -> str:
        settings = self._work.plan.settings
        if settings.ram_budget_seconds and seconds > settings.ram_budget_seconds:
            return f"{settings.ram_budget_seconds} s"
        if settings.ram_budget_mib and self._arrived >> 20 > settings.ram_budget_mib:
            return f"{settings.ram_budget_mib} MiB"
        return ""


class SealWatch:
    """Watches over sealing, when the guest runs again: until nothing moves any more."""

    def __init__(self, name: str, interrupt: Interrupt) -> None:
        self._name = name
        self._interrupt = interrupt
        self._bytes = -1
        self._moved = time.monotonic()

    def check(self, moved: int) -> None:
        """Called now and then, with the bytes that were compressed or stored so far.

        Raises:
            InterruptedRunError: a signal came, and nothing has moved for some seconds.
            RunFailedError: nothing has moved for minutes.
        """
        now = time.monotonic()
        if moved != self._bytes:
            self._bytes, self._moved = moved, now
        if now - self._moved > _SEAL_PATIENCE_SECONDS:
            self._interrupt.check(self._name)
        if now - self._moved > _SEAL_STALL_SECONDS:
            raise RunFailedError(
                self._name,
                f"the bundle store has taken nothing for {_SEAL_STALL_SECONDS} s",
                "see whether the bundle store and the compressor still work",
            )
