"""Saving RAM while the guest runs, for the strategies ``overlay`` and ``manual``.

Its limits of time, bytes and rate are in :mod:`snaporch.snapshot.strategies.ram_limits`.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path

from snaporch.bundle.manifest import Part
from snaporch.bundle.qemu_stream import StreamError
from snaporch.bundle.save_image import SaveImageError
from snaporch.bundle.store import REST_NAME
from snaporch.errors import InterruptedRunError, RunFailedError, SnaporchError
from snaporch.hypervisor import CancelledError, CaptureRequest, HypervisorError, PausedBy
from snaporch.journal import Note, release_mark
from snaporch.private_files import private_directory, store_errors
from snaporch.recovery.release_guest import suspend
from snaporch.snapshot.ram_capture import RamCapture
from snaporch.snapshot.store_pages import (
    PageDataset,
    PageRoom,
    PagesRun,
    pages_target,
    with_pages,
)
from snaporch.snapshot.strategies.base import FreezeStrategy, RunMaterial
from snaporch.snapshot.strategies.ram_limits import (
    DowntimeLimit,
    RamBudget,
    SealingWatch,
    effective_rate,
)
from snaporch.snapshot.strategies.vcpu_brake import VcpuBrake
from snaporch.zfs import PoolError

_PAGES_SECONDS = 10.0
"""How long the pool for pages may take to answer before the guest is frozen."""


class RamStrategy(FreezeStrategy):
    """Saves RAM through a pipe into the bundle, or through a file if the pipe fails.

    With ``ram_store = "pages"`` the pages go into the page dataset as they arrive. If that fails
    while the guest still runs on its base images, RAM is saved again, as a whole image.
    """

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
        self._pages: PageDataset | None = None
        self._rate = 0.0
        self._saved = self._asked = False

    def prepare(self) -> None:
        """Make the overlays, if any, and the pipe with its reader."""
        runtime = self.work.context.config.paths.runtime
        with store_errors(runtime):
            private_directory(runtime)
        self.make_overlays()
        expected = self.work.hypervisor.ram_in_use(self.work.domain.uuid)
        self._set_limits(expected)
        if self.work.plan.settings.ram_capture != "file":
            self._choose_pages()
            self._pipe.unlink(missing_ok=True)  # left by a run without a journal
            self._capture.open_stream()

    def _find_pages(self) -> PageDataset | None:
        """The dataset for pages; ``None`` if there is none, or its pool does not answer."""
        found: list[PageDataset | None] = []
        work = self.work

        def find() -> None:
            found.append(pages_target(work.context, work.domain))

        if not _ends_within(_PAGES_SECONDS, find):
            work.report("RAM is saved as a whole image first: the pool for pages does not answer")
        return found[0] if found else None

    def _choose_pages(self) -> None:
        """Have RAM split into pages as it arrives, if so configured and possible.

        Not before a failover ends the guest: it would stay paused until the pages are read back.
        """
        work = self.work
        if work.ends_guest:
            return
        self._pages = self._find_pages()
        if self._pages is not None:
            settle = partial(self._settle, PageRoom(work.context, self._pages))
            self._capture.split_into(self._pages.page_file, settle)

    def _settle(self, room: PageRoom) -> None:
        """Wait until the pages written so far are on the disks, if the guest still runs.

        The snapshots in a guest's pause, be it this or another one, wait for all that is not yet on
        the disks of the pool. A guest that is paused already is not kept waiting for that.

        Raises:
            OSError: no room is left for more pages.
        """
        room.settle(at_once=not self._saved and not self._capture.is_enlarged)

    def _set_limits(self, expected: int) -> None:
        settings = self.work.plan.settings
        rate = effective_rate(settings, expected)
        if rate > settings.ram_rate:
            seconds = settings.ram_time_budget
            self.work.warn(f"saving RAM at {rate:.0f} MiB/s: its budget is {seconds} s")
        self._rate = rate
        self._capture.limit(rate)
        self._budget = RamBudget(self.work, self._capture, self._downtime, self._brake, expected)

    def make_overlays(self) -> None:
        """Make the overlays, if the strategy uses them."""

    def remove_overlays(self) -> None:
        """Remove unused overlays, if the strategy uses them."""

    def freeze(self) -> None:
        """Save RAM through the pipe; if that fails, once more in another way where allowed."""
        self.check_unchanged()
        self.work.report("saving RAM while the guest runs")
        while True:
            try:
                self._save_ram()
            except InterruptedRunError:
                raise
            except CancelledError:
                if self._was_released():  # pages may take too long
                    self._note_image_first(too_long=True)
                raise
            except RunFailedError:  # the budget: the pages may have taken the time
                self._note_image_first(too_long=True)
                raise
            except (HypervisorError, SaveImageError, StreamError, PoolError, OSError) as error:
                if not self._may_repeat():
                    self._note_image_first(too_long=self._was_released())
                    raise
                self._choose_another_way(error)
            else:
                self._saved = True
                return
            self.remove_overlays()
            self.make_overlays()
            self.check_unchanged()

    def _choose_another_way(self, error: SnaporchError | OSError) -> None:
        """Close the pipe; choose a whole image in place of pages, or a file in place of the pipe.

        Raises:
            SnaporchError, OSError: ``error`` itself; there is no other way.
        """
        if self._capture.splits:
            self.work.warn(f"streaming RAM into pages failed ({error}); repeating with an image")
            self._note_image_first()  # the next way may fail, too; a split image takes it back
            self._pages = None
            self._capture.abandon()
            self._capture.limit(self._rate)  # it was lifted, to end the stream
            self._capture.open_stream()
            return
        may_use_file = self.work.plan.settings.ram_capture == "auto" and self._capture.streams
        if isinstance(error, OSError | StreamError | PoolError) or not may_use_file:
            raise error
        self.work.warn(f"streaming RAM failed ({error}); repeating with a file")
        self._capture.abandon()

    def _may_repeat(self) -> bool:
        """Whether RAM may be saved again: the guest still runs on its base images.

        Not if the guardian released the guest because it was frozen for too long, if its admin has
        suspended it, or while other guests of its group wait frozen.
        """
        plan = self.work.plan
        if self._was_released() or self.held or self.work.others_wait():
            return False
        live, _ = self.work.hypervisor.sources(plan.domain.uuid)
        names = set((live or {}).values())
        if live is None or any(disk.overlay in names for disk in plan.facts.overlays):
            return False
        return self.work.hypervisor.busy_with(plan.domain.uuid) is None

    def _was_released(self) -> bool:
        """Whether the guardian released the guest."""
        return release_mark(self.work.journal.path).exists()

    def _save_ram(self) -> None:
        plan = self.work.plan
        request = CaptureRequest(
            uuid=plan.domain.uuid,
            disks=plan.facts.overlays,
            manual=() if plan.facts.overlays else tuple(d.disk.target for d in plan.disks),
            left_out=tuple(out.disk.target for out in plan.left_out),
            ram_path=str(self._capture.target),
        )
        self._asked = False
        self._budget.begin()
        self._downtime.set()
        try:
            try:
                self.pause = self.work.hypervisor.capture(request, self._tick, self._stopped)
            finally:
                self._brake.release()
            self._capture.record_times()
            self._note_resumed()
            self._keep_suspended()
        except BaseException as error:
            self._downtime.restore()
            self._suspend_again()
            if not isinstance(error, HypervisorError) or isinstance(error, CancelledError):
                raise
            if self._capture.failure is not None:  # the cause of libvirt's "broken pipe"
                raise self._capture.failure from None
            raise

    def _stopped(self, by: PausedBy) -> None:
        """Take all that is left: the guest is paused."""
        self._capture.enlarge_pipe()
        self._asked = by is PausedBy.ANOTHER

    def _suspend_again(self) -> None:
        """Suspend a guest that its admin suspended, and that libvirt resumes after an error."""
        if not self._asked or self._budget.suspended_it or self._was_released():
            return
        with suppress(SnaporchError):  # it has ended, or was restarted
            self._hold()

    def _note_resumed(self) -> None:
        """Note that libvirt has resumed a guest on its overlays that the budget had suspended."""
        facts = self.work.plan.facts
        if not facts.overlays or not self._budget.suspended_it:
            return
        if self.work.hypervisor.paused_by(facts.uuid) is None:
            self.work.journal.note(Note.RESUMED)

    def _keep_suspended(self) -> None:
        """Leave the guest suspended if the admin has suspended it meanwhile."""
        if self.pause.asked_for and not self._budget.suspended_it:
            self._hold()

    def _hold(self) -> None:
        self.held = True
        self.work.journal.note(Note.HELD)
        suspend(self.work.context, self.work.domain)  # libvirt may have resumed it
        step = shlex.join(["virsh", "resume", self.work.domain.name])
        self.work.warn(f"it was suspended while its RAM was saved: it stays suspended; {step}")

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
        """Finish the image and return it.

        After an error that costs the RAM, the next run saves a whole image first, if this one used
        pages.
        """
        try:
            return self._sealed_part()
        except InterruptedRunError:
            raise
        except (SnaporchError, OSError) as error:
            self._note_image_first(too_long=isinstance(error, RunFailedError))
            raise

    def _note_image_first(self, *, too_long: bool = False) -> None:
        """Have the next run save a whole image first, if this one used pages.

        A pool that takes nothing more is not waited for: the guest may be paused.

        Args:
            too_long: whether saving RAM took too long.
        """
        if (pages := self._pages) is None:
            return

        def note() -> None:
            with suppress(OSError):
                pages.note_image_first(too_long=too_long)

        _ends_within(self.work.context.ram_times.abort, note)

    def _sealed_part(self) -> Part:
        self._downtime.restore()
        name, progress = self.work.domain.name, self.work.context.progress
        context = self.work.context
        watch = SealingWatch(name, context.interrupt, self.work.clock.monotonic, context.ram_times)
        size = self._capture.arrived_bytes

        def tick(moved: int) -> None:
            if size:
                progress.amount(name, min(self._capture.compressed_bytes, size), size)
            watch.check(moved)

        part = self._capture.seal(tick)
        if self._pages is None or self._capture.written_pages is None:
            return part
        names = [dataset.name for dataset in self.work.plan.datasets]
        plan = self.work.plan
        of = PagesRun.of(name, plan.domain.uuid, plan.run, plan.snapshot, names)
        rest = self.work.bundle.directory / REST_NAME
        written = self._capture.written_pages
        return with_pages(context, of, self._pages, rest, part, written, watch.check)

    def abandon(self) -> None:
        """Close the pipe."""
        self._capture.abandon()
        self._downtime.settle()  # recovery restores the limit, and nothing may set it afterwards


def _ends_within(seconds: float, call: Callable[[], None]) -> bool:
    """Call a function that uses the page pool, in a thread; whether it has ended in time."""
    thread = threading.Thread(target=copy_context().run, args=[call], name="page-pool", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
