"""Saving RAM while the guest runs: what the strategies ``overlay`` and ``manual`` share."""

from __future__ import annotations

import time
from pathlib import Path

from snaporch.bundle.manifest import Part
from snaporch.bundle.ramimage import RamImageError
from snaporch.bundle.store import explained_store, private_directory
from snaporch.errors import InterruptedRunError, RunFailedError, SnaporchError
from snaporch.hypervisor import CaptureRequest, HypervisorError
from snaporch.run.journal import Note
from snaporch.run.parts import Capture
from snaporch.run.strategies.base import Strategy, Work

_REPORT_SECONDS = 0.5
_STALL_SECONDS = 120


class RamStrategy(Strategy):
    """RAM through a pipe into the bundle, or through a file if the pipe fails."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        ram_pipe = Path(work.plan.facts.ram_pipe)
        self._capture = Capture(work.bundle.directory, ram_pipe, work.plan.compressing)
        self._budget = RamBudget(work, self._capture)

    def prepare(self) -> None:
        """Overlays, if any, and the pipe with its reader."""
        runtime = self.work.context.config.paths.runtime
        with explained_store(runtime):
            private_directory(runtime)
        self.make_overlays()
        if self.work.plan.settings.ram_capture != "file":
            self._capture.open_stream()

    def make_overlays(self) -> None:
        """Nothing, unless the strategy uses them."""

    def remove_overlays(self) -> None:
        """Nothing, unless the strategy uses them."""

    def freeze(self) -> None:
        """Save RAM; a broken pipe is no reason to fail where a file would do."""
        self.work.say("saving RAM while the guest runs")
        try:
            self._save_ram()
        except InterruptedRunError:
            raise
        except (HypervisorError, RamImageError) as error:
            if not self._may_retry():
                raise
            self.work.warn(f"streaming RAM failed ({error}); repeating with a file")
        else:
            return
        self._capture.abandon()
        self.remove_overlays()
        self.make_overlays()
        self._save_ram()

    def _may_retry(self) -> bool:
        """Only when streaming was a choice of ours, and the guest still runs on its bases."""
        plan = self.work.plan
        if not self._capture.streams or plan.settings.ram_capture != "auto":
            return False
        live, _ = self.work.hypervisor.sources(plan.domain.uuid)
        names = set((live or {}).values())
        if live is None or any(disk.overlay in names for disk in plan.facts.overlays):
            return False
        return self.work.hypervisor.busy_with(plan.domain.uuid) is None

    def _save_ram(self) -> None:
        plan = self.work.plan
        request = CaptureRequest(
            uuid=plan.domain.uuid,
            disks=plan.facts.overlays,
            manual=() if plan.facts.overlays else tuple(d.disk.target for d in plan.disks),
            left_out=tuple(out.disk.target for out in plan.left_out),
            ram_path=str(self._capture.target),
        )
        self._budget.begin()
        try:
            self.pause = self.work.hypervisor.capture(request, self._tick)
        except HypervisorError:
            if self._capture.failure is not None:  # libvirt's "broken pipe" is only its echo
                raise self._capture.failure from None
            raise

    def _tick(self) -> None:
        try:
            self.work.context.interrupt.check(self.work.domain.name)
            self._budget.check()
        except SnaporchError:
            self._capture.break_off()  # QEMU must not stay in a write to a full pipe
            raise
        if self._capture.failure is not None:
            raise self._capture.failure

    def ram_part(self) -> Part:
        """The finished image."""
        return self._capture.seal()

    def abandon(self) -> None:
        """Close the pipe."""
        self._capture.abandon()


class RamBudget:
    """Seconds and bytes that saving RAM may take; a guest can dirty RAM faster than it is saved.

    Goes by the bytes that arrive, and asks libvirt nothing: QEMU's monitor does not answer while a
    full pipe holds QEMU up, and whoever waits for it could not stop the run any more.
    """

    def __init__(self, work: Work, capture: Capture) -> None:
        self._work = work
        self._capture = capture
        self._expected = 0
        self._began = self._moved = time.monotonic()
        self._arrived = 0
        self._reported = 0.0
        self._suspended = False

    def begin(self) -> None:
        """A capture begins now."""
        self._expected = self._work.hypervisor.ram_in_use(self._work.domain.uuid)
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

    def _overrun(self, excess: str) -> None:
        if self._work.plan.settings.on_ram_budget == "abort":
            raise RunFailedError(
                self._work.domain.name, f"saving RAM took more than {excess}", "see on_ram_budget"
            )
        self._suspended = True
        self._work.warn(f"saving RAM took more than {excess}: suspending the guest to finish it")
        self._work.journal.note(Note.SUSPENDED)
        self._work.hypervisor.suspend(self._work.domain.uuid)

    def _excess(self, seconds: float) -> str:
        settings = self._work.plan.settings
        if settings.ram_budget_seconds and seconds > settings.ram_budget_seconds:
            return f"{settings.ram_budget_seconds} s"
        if settings.ram_budget_mib and self._arrived >> 20 > settings.ram_budget_mib:
            return f"{settings.ram_budget_mib} MiB"
        return ""
