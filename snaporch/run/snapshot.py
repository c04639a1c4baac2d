"""The run: freeze, snapshot the pools inside the frozen instant, release, seal.

``PREPARE`` and ``CAPTURE`` can be undone and stop for a signal. From ``POOL_SNAPSHOT`` on the run
finishes what it began: the guest is on overlays, and the way forward is as short as the way back.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from snaporch.bundle.ramimage import RamImageError
from snaporch.bundle.store import PartialBundle, explained_store, private_directory
from snaporch.errors import AttentionError, InterruptedRunError, RunFailedError, SnaporchError
from snaporch.hypervisor import CaptureRequest, HypervisorError, Pause
from snaporch.model import Domain, Level, PoolSnapshot, SnapshotRecord
from snaporch.pool.protocol import PoolError
from snaporch.pool.resolver import flush_device
from snaporch.run import overlays
from snaporch.run.context import Context
from snaporch.run.journal import Journal, Step
from snaporch.run.lock import domain_lock
from snaporch.run.parts import Capture, build_manifest, side_parts
from snaporch.run.plan import Plan, make_plan
from snaporch.run.records import record_of
from snaporch.run.settle import own_snapshots, recover, remove_unused, settle

PREFIX = "snaporch:"


def take_snapshot(
    context: Context, domain: Domain, *, name: str | None, wait: int | None
) -> SnapshotRecord:
    """Snapshot one domain.

    Args:
        name: of the snapshot, or ``None`` for ``snaporch_<UTC time>_manual``.
        wait: seconds to wait for another run on the domain; ``None`` for the configured ones.

    Raises:
        RefusedError, BusyError, UnavailableError: nothing was touched.
        RunFailedError: it failed and the guest is back on its base images.
        AttentionError: it failed and the guest may still be on overlays; says what to do.
    """
    settings = context.config.settings(domain.name, domain.uuid)
    patience = settings.wait if wait is None else wait
    with domain_lock(
        context.config.paths.runtime,
        domain.name,
        domain.uuid,
        "snapshot",
        wait=patience,
        interrupt=context.interrupt,
    ):
        for text in recover(context, domain.uuid):
            context.progress.note(domain.name, text)
        current = context.hypervisor.domain(domain.uuid)
        return _Run(context, make_plan(context, current, name)).execute()


class _Run:
    def __init__(self, context: Context, plan: Plan) -> None:
        self._context = context
        self._plan = plan
        self._domain = plan.domain
        self._started = datetime.now(UTC)
        self._touched = False
        self._taken = False

    def execute(self) -> SnapshotRecord:
        plan, progress = self._plan, self._context.progress
        self._announce()
        self._context.interrupt.check(self._domain.name)
        journal = Journal(self._context.config.paths.journal, plan.facts)
        try:
            record = self._forward(journal)
        except BaseException as error:
            outcome = self._backward(journal, error)
            if outcome is error:
                raise
            raise outcome from error
        journal.close(settled=True)
        progress.step(plan.domain.name, f"done: {record.level} snapshot {record.snapshot}")
        return record

    def _announce(self) -> None:
        progress, name = self._context.progress, self._domain.name
        places = ", ".join(dataset.name for dataset in self._plan.datasets)
        progress.step(name, f"{self._plan.level} snapshot @{self._plan.snapshot} of {places}")
        for out in self._plan.left_out:
            tell = progress.note if out.matters else progress.step
            tell(name, f"left out: {out.describe()}")

    def _forward(self, journal: Journal) -> SnapshotRecord:
        plan = self._plan
        capture: Capture | None = None
        with journal.step(Step.PREPARE):
            bundle = self._context.store.create(plan.domain.uuid, plan.run)
            if plan.domain.active:
                capture = self._prepare(bundle)
        try:
            pause = Pause(None, 0.0)
            if capture is not None:
                with journal.step(Step.CAPTURE):
                    pause = self._capture(capture)
            self._context.interrupt.check(plan.domain.name)
            self._touched = True
            with journal.step(Step.POOL_SNAPSHOT):
                snapshots = self._snapshot_pools(bundle)
            level = self._reached()
            parts = side_parts(bundle, plan.domain, pause)
            if capture is not None:
                with journal.step(Step.RELEASE):
                    self._release(pause)
            with journal.step(Step.SEAL):
                self._context.progress.step(plan.domain.name, "sealing the bundle")
                if capture is not None:
                    parts.insert(0, capture.seal())
                created = pause.began or snapshots[0].created
                versions = self._context.hypervisor.versions(plan.domain)
                manifest = build_manifest(
                    plan, level, parts, snapshots, versions, pause, self._started, created
                )
                bundle.seal(manifest)
        except BaseException:
            if capture is not None:
                capture.abandon()
            raise
        with journal.step(Step.RECORD):
            names = [snapshot.full_name for snapshot in snapshots]
            self._context.pool.set_properties(names, {f"{PREFIX}level": level.value})
        return record_of(
            self._context.store, self._context.pool.snapshots(plan.facts.datasets), plan.run
        )

    # -- steps ------------------------------------------------------------------------------

    def _prepare(self, bundle: PartialBundle) -> Capture:
        plan, settings = self._plan, self._plan.settings
        runtime = self._context.config.paths.runtime
        with explained_store(runtime):
            private_directory(runtime)
        self._make_overlays()
        capture = Capture(bundle.directory, Path(plan.facts.ram_pipe), plan.compressing)
        if settings.ram_capture != "file":
            capture.open_stream()
        return capture

    def _make_overlays(self) -> None:
        if not self._plan.facts.overlays:
            return
        owner = self._domain.emulator_owner
        overlays.make_directory(Path(self._plan.facts.overlay_dir), owner)
        for disk in self._plan.facts.overlays:
            size = self._context.hypervisor.disk_capacity(self._domain.uuid, disk.target)
            overlays.make_overlay(disk, size, owner)

    def _capture(self, capture: Capture) -> Pause:
        self._context.progress.step(self._domain.name, "saving RAM while the guest runs")
        try:
            return self._call_capture(capture)
        except InterruptedRunError:
            raise
        except (HypervisorError, RamImageError, OSError) as error:
            if not self._may_retry(capture, error):
                raise
            self._context.progress.note(
                self._domain.name, f"streaming RAM failed ({error}); repeating with a file"
            )
        capture.use_file()
        overlays.remove(Path(self._plan.facts.overlay_dir), self._plan.facts.overlays)
        self._make_overlays()
        return self._call_capture(capture)

    def _may_retry(self, capture: Capture, error: BaseException) -> bool:
        """Only when streaming was a choice of ours, and the guest never left its bases."""
        if not capture.streams or self._plan.settings.ram_capture != "auto":
            return False
        if isinstance(error, OSError) and not isinstance(error, SnaporchError):
            return False  # the store is full or broken: a larger, uncompressed file will not fit
        live, _ = self._context.hypervisor.sources(self._domain.uuid)
        names = set((live or {}).values())
        return live is not None and not any(d.overlay in names for d in self._plan.facts.overlays)

    def _call_capture(self, capture: Capture) -> Pause:
        facts = self._plan.facts
        self._touched = True
        request = CaptureRequest(
            uuid=self._domain.uuid,
            disks=facts.overlays,
            manual=() if facts.overlays else tuple(d.disk.target for d in self._plan.disks),
            left_out=tuple(out.disk.target for out in self._plan.left_out),
            ram_path=str(capture.target),
        )
        try:
            return self._context.hypervisor.capture(request, self._tick(capture))
        except HypervisorError:
            if capture.failure is not None:  # libvirt's "broken pipe" is only the echo of it
                raise capture.failure from None
            raise

    def _tick(self, capture: Capture) -> Callable[[], None]:
        countdown = 0

        def tick() -> None:
            nonlocal countdown
            try:
                self._context.interrupt.check(self._domain.name)
            except InterruptedRunError:
                capture.break_off()
                raise
            if capture.failure is not None:
                raise capture.failure
            countdown -= 1
            if countdown <= 0:
                countdown = 5
                amount = self._context.hypervisor.ram_progress(self._domain.uuid)
                if amount is not None:
                    self._context.progress.amount(self._domain.name, *amount)

        return tick

    def _snapshot_pools(self, bundle: PartialBundle) -> list[PoolSnapshot]:
        plan = self._plan
        for planned in plan.disks:
            if stat.S_ISBLK(Path(planned.path).stat().st_mode):
                flush_device(planned.path)
        properties = {
            f"{PREFIX}run": plan.run,
            f"{PREFIX}uuid": plan.domain.uuid,
            f"{PREFIX}domain": plan.domain.name,
            f"{PREFIX}bundle": bundle.reference,
            f"{PREFIX}level": Level.CRASH.value,  # until the bundle is sealed, that is all it is
        }
        for names in plan.by_pool().values():
            self._context.pool.snapshot(names, properties)
        self._taken = True
        mine = set(own_snapshots(self._context, plan.facts))
        found = self._context.pool.snapshots(plan.facts.datasets)
        snapshots = [snapshot for snapshot in found if snapshot.full_name in mine]
        if len(snapshots) != len(plan.datasets):
            raise PoolError(f"@{plan.snapshot}", "was destroyed by someone else while it was taken")
        return snapshots

    def _release(self, pause: Pause) -> None:
        progress, facts = self._context.progress, self._plan.facts
        if not facts.overlays:
            return
        progress.step(self._domain.name, f"paused {pause.milliseconds:.0f} ms; committing overlays")
        self._context.hypervisor.commit(facts.uuid, facts.overlays, lambda: None)
        remove_unused(self._context, facts)

    def _reached(self) -> Level:
        """What the ZFS snapshots just taken are worth.

        Overlays keep the bases still. Without them nothing but the guest's own stillness does: one
        that was resumed or started by someone meanwhile was snapshotted in the middle of its life.
        """
        domain = self._plan.domain
        if self._plan.facts.overlays:
            return Level.RAM
        if domain.active:
            still = self._context.hypervisor.paused_by(domain.uuid) is not None
            return self._unless_disturbed(Level.RAM, still=still)
        now = self._context.hypervisor.find(domain.uuid)
        still = now is not None and not now.active and not domain.managed_save
        return self._unless_disturbed(Level.OFF, still=still)

    def _unless_disturbed(self, level: Level, *, still: bool) -> Level:
        if still:
            return level
        self._context.progress.note(
            self._domain.name,
            f"it did not stay as it was: recorded as crash-consistent, not {level}",
        )
        return Level.CRASH

    # -- the way back -----------------------------------------------------------------------

    def _backward(self, journal: Journal, error: BaseException) -> BaseException:
        """Settle, and say what happened; the journal stays when settling failed."""
        name = self._domain.name
        self._context.progress.step(
            name, "undoing the run" if not self._taken else "finishing the run"
        )
        try:
            settle(self._context, self._plan.facts, keep_snapshots=self._taken)
        except AttentionError as trouble:
            journal.close(settled=False)
            return trouble
        except (SnaporchError, OSError) as trouble:
            journal.close(settled=False)
            step = f"run: snaporch recover {self._domain.uuid}"
            return AttentionError(
                name, f"{_reason(error)}; then cleaning up failed: {trouble}", step
            )
        journal.close(settled=True)
        if isinstance(error, InterruptedRunError) or not isinstance(error, Exception):
            return error
        if isinstance(error, SnaporchError) and not self._touched:
            return error  # refused before anything was touched, with its own exit code
        return RunFailedError(name, _reason(error), self._remains())

    def _remains(self) -> str:
        if not self._taken:
            return "the guest is as it was and nothing was kept"
        return (
            f"the guest is as it was; @{self._plan.snapshot} was kept, but only as crash-consistent"
        )


def _reason(error: BaseException) -> str:
    if isinstance(error, SnaporchError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    return f"{type(error).__name__}: {error}"
