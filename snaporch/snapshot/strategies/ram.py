"""Saving RAM while the guest runs, for the strategies ``overlay`` and ``manual``.

Its limits of time, bytes and rate are in :mod:`snaporch.snapshot.strategies.ram_limits`.
"""

from __future__ import annotations

from pathlib import Path

from snaporch.bundle.manifest import Part
from snaporch.bundle.save_image import SaveImageError
from snaporch.errors import InterruptedRunError, SnaporchError
from snaporch.hypervisor import CancelledError, CaptureRequest, HypervisorError
from snaporch.journal import Note, release_mark
from snaporch.private_files import private_directory, store_errors
from snaporch.recovery.release_guest import suspend
from snaporch.snapshot.ram_capture import RamCapture
from snaporch.snapshot.strategies.base import FreezeStrategy, RunMaterial
from snaporch.snapshot.strategies.ram_limits import (
    DowntimeLimit,
    RamBudget,
    SealingWatch,
    effective_rate,
)
from snaporch.snapshot.strategies.vcpu_brake import VcpuBrake


class RamStrategy(FreezeStrategy):
    """Saves RAM through a pipe into the bundle, or through a file if the pipe fails."""

    def __init__(self, work: RunMaterial) -> None:
        super().__init__(work)
        self._pipe = Path(work.plan.facts.ram_pipe)
        self._capture = RamCapture(
            work.bundle.directory,
            self._pipe,
            work.bundle.raw_ram,
            work.plan.compression,
            work.context.ram_times,
        )
        self._downtime = DowntimeLimit(work)
        self._brake = VcpuBrake(work)
        self._budget = RamBudget(work, self._capture, self._downtime, self._brake, 0)

    def prepare(self) -> None:
        """Make the overlays, if any, and the pipe with its reader."""
        runtime = self.work.context.config.paths.runtime
        with store_errors(runtime):
            private_directory(runtime)
        self.make_overlays()
        self._set_limits()
        if self.work.plan.settings.ram_capture != "file":
            self._pipe.unlink(missing_ok=True)  # left by a run without a journal
            self._capture.open_stream()

    def _set_limits(self) -> None:
        settings = self.work.plan.settings
        expected = self.work.hypervisor.ram_in_use(self.work.domain.uuid)
        rate = effective_rate(settings, expected)
        if rate > settings.ram_rate:
            seconds = settings.ram_time_budget
            self.work.warn(f"saving RAM at {rate:.0f} MiB/s: its budget is {seconds} s")
        self._capture.limit(rate)
        self._budget = RamBudget(self.work, self._capture, self._downtime, self._brake, expected)

    def make_overlays(self) -> None:
        """Make the overlays, if the strategy uses them."""

    def remove_overlays(self) -> None:
        """Remove unused overlays, if the strategy uses them."""

    def freeze(self) -> None:
        """Save RAM through the pipe; if that fails, once more through a file where allowed."""
        self.check_unchanged()
        self.work.report("saving RAM while the guest runs")
        try:
            self._save_ram()
        except (InterruptedRunError, CancelledError):
            raise
        except (HypervisorError, SaveImageError) as error:
            if not self._may_retry():
                raise
            self.work.warn(f"streaming RAM failed ({error}); repeating with a file")
        else:
            return
        self._capture.abandon()
        self.remove_overlays()
        self.make_overlays()
        self.check_unchanged()
        self._save_ram()

    def _may_retry(self) -> bool:
        """Whether RAM may be saved again through a file.

        Only if ``ram_capture`` leaves the choice, and the guest still runs on its base images. Not
        if the guardian released the guest because it was frozen for too long.
        """
        plan = self.work.plan
        if release_mark(self.work.journal.path).exists():
            return False
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
        self._downtime.set()
        try:
            try:
                self.pause = self.work.hypervisor.capture(
                    request, self._tick, self._capture.enlarge_pipe
                )
            finally:
                self._brake.release()
            self._capture.record_times()
            self._note_resumed()
            self._keep_suspended()
        except BaseException as error:
            self._downtime.restore()
            if not isinstance(error, HypervisorError) or isinstance(error, CancelledError):
                raise
            if self._capture.failure is not None:  # the cause of libvirt's "broken pipe"
                raise self._capture.failure from None
            raise

    def _note_resumed(self) -> None:
        """Note that libvirt has resumed a guest on its overlays that the budget had suspended."""
        facts = self.work.plan.facts
        if not facts.overlays or not self._budget.suspended_it:
            return
        if self.work.hypervisor.paused_by(facts.uuid) is None:
            self.work.journal.note(Note.RESUMED)

    def _keep_suspended(self) -> None:
        """Leave the guest suspended if the admin has suspended it meanwhile."""
        if not self.pause.asked_for or self._budget.suspended_it:
            return
        self.held = True
        self.work.journal.note(Note.HELD)
        suspend(self.work.context, self.work.domain)  # with overlays libvirt has resumed it
        self.work.warn("it was suspended while its RAM was saved: it stays suspended")

    def _tick(self) -> None:
        try:
            self.work.context.interrupt.check(self.work.domain.name)
            self._budget.check()
        except SnaporchError:
            self._capture.abort()  # else QEMU would hang in a write to a full pipe
            raise
        if self._capture.failure is not None:
            raise self._capture.failure

    def ram_part(self) -> Part:
        """Finish the image and return it."""
        self._downtime.restore()
        name, progress = self.work.domain.name, self.work.context.progress
        context = self.work.context
        watch = SealingWatch(name, context.interrupt, self.work.clock.monotonic, context.ram_times)
        size = self._capture.arrived_bytes

        def tick(moved: int) -> None:
            if size:
                progress.amount(name, min(self._capture.compressed_bytes, size), size)
            watch.check(moved)

        return self._capture.seal(tick)

    def abandon(self) -> None:
        """Close the pipe."""
        self._capture.abandon()
