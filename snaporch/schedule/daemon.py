"""The daemon: apscheduler starts jobs at their times, and subprocesses take the snapshots.

State is derived from the existing snapshots; only failed attempts are stored. So one snapshot makes
up for all times that were missed while the daemon was not running, even if its files were lost.
New forecasts are made every ``schedule.refresh``, after each snapshot, and when libvirt reports
that a domain was defined, undefined, started or stopped. They also take changes of the clock,
of metadata and of ZFS properties into account.

Forecasts are made in a separate thread: libvirt may not answer while a guest's RAM is saved through
a full pipe, and the daemon must still obey the signal that ends that run.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from apscheduler.events import EVENT_JOB_ERROR
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.base import BaseTrigger

from snaporch.config import Config
from snaporch.context import Context
from snaporch.errors import InterruptedRunError, RunFailedError, SnaporchError
from snaporch.locks import record_check
from snaporch.recovery.start_guardian import guard_leftovers
from snaporch.schedule.apply_retention import RetentionResult, apply_retention, prune_daily
from snaporch.schedule.bulk_jobs import BulkJobs
from snaporch.schedule.concurrency import SnapshotJob
from snaporch.schedule.forecast import Forecast, NextSnapshot, make_forecasts, record_carried_out
from snaporch.schedule.observer import PolicyObserver
from snaporch.schedule.recurrence import Times, times
from snaporch.schedule.run_due import remember, snapshot_job
from snaporch.schedule.subprocesses import BulkJobResult, SnapshotJobResult, Subprocesses
from snaporch.snapshot.group import group_of
from snaporch.systemd.sd_notify import notify, watchdog_seconds

_THREADS = 64
_JOIN_SECONDS = 60
_BURST_SECONDS = 1.0
"""Changes of domains come in bursts: one forecast serves all changes within this time."""
_SOURCE = "snaporch"


class PolicyTrigger(BaseTrigger):  # type: ignore[misc]
    """The times of a policy on a domain, as a trigger of apscheduler."""

    def __init__(self, when: Times) -> None:
        self.when = when

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime:
        """The first time after both: one run makes up for all missed times."""
        return self.when.after(max(previous_fire_time or now, now))


@dataclass(frozen=True, slots=True)
class _Stop:
    """The daemon must end."""


@dataclass(frozen=True, slots=True)
class _ForecastsMade:
    """The forecasts were made."""


@dataclass(frozen=True, slots=True)
class _Reload:
    """The configuration must be loaded again."""


@dataclass(frozen=True, slots=True)
class _DomainChanged:
    """A domain was defined, undefined, started or stopped."""


@dataclass(frozen=True, slots=True)
class _Crashed:
    """An unexpected error occurred in a thread."""

    error: BaseException


_Message = (
    _Stop | _Reload | _ForecastsMade | _DomainChanged | _Crashed | SnapshotJobResult | BulkJobResult
)


class Daemon:
    """Carries out policies until :meth:`stop`.

    Args:
        context: its configuration is replaced by a reload.
        subprocesses: starts the subprocesses.
        load: loads the configuration again.
        observer: hears of results and failures.
        notify: sends lines to systemd.
        long_prune: how long a prune may take before it is reported.
    """

    def __init__(
        self,
        context: Context,
        subprocesses: Subprocesses,
        load: Callable[[], Config],
        observer: PolicyObserver,
        notify: Callable[..., None] = notify,
        long_prune: timedelta = timedelta(days=1),
    ) -> None:
        logging.getLogger("apscheduler").setLevel(logging.ERROR)
        self._context = context
        self._subprocesses = subprocesses
        self._load = load
        self._observer = observer
        self._notify = notify
        # Signal handlers put messages here: a SimpleQueue is reentrant, an Event is not.
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._taken: dict[str, datetime] = {}
        self._busy: set[str] = set()
        self._lock = threading.Lock()
        self._forecaster: threading.Thread | None = None
        self._pruning = threading.Lock()
        self._prune_began = context.clock.now()
        self._long_prune = long_prune
        self._ending = threading.Event()
        self._refresh_again = False
        self._refresh_at: float | None = None
        self._forecasts_began = 0.0
        self._checking_since = context.clock.now()
        self._scheduler = BackgroundScheduler(
            timezone=UTC,
            executors={"default": ThreadPoolExecutor(_THREADS)},
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
        )
        self._bulk_jobs = BulkJobs(
            self._scheduler, subprocesses, lambda: self._context.config.schedule, self._inbox.put
        )

    def stop(self) -> None:
        """End after running snapshots have undone or finished their work. Signal-safe."""
        self._inbox.put(_Stop())

    def reload(self) -> None:
        """Load the configuration again. Signal-safe."""
        self._inbox.put(_Reload())

    def run(self) -> None:
        """Work until :meth:`stop`.

        Raises:
            BaseException: an unexpected error in any thread; systemd restarts the daemon.
        """
        self._scheduler.add_listener(
            lambda event: self._inbox.put(_Crashed(event.exception)), EVENT_JOB_ERROR
        )
        before, threading.excepthook = threading.excepthook, self._thread_crashed
        try:
            self._scheduler.start()
            self._subscribe()
            self._refresh()
            self._notify("READY=1")
            while not isinstance(message := self._next_message(), _Stop):
                if isinstance(message, _Crashed):
                    raise message.error
                if isinstance(message, _ForecastsMade):
                    self._forecasts_made()
                    continue
                if isinstance(message, _DomainChanged):
                    if self._refresh_at is None:
                        self._refresh_at = time.monotonic() + _BURST_SECONDS
                    continue
                if isinstance(message, _Reload):
                    self._reload()
                elif message is not None:
                    self._report(message)
                self._refresh()
        finally:
            threading.excepthook = before
            self._end()

    def _thread_crashed(self, arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value or RuntimeError(f"{arguments.exc_type.__name__} in a thread")
        self._inbox.put(_Crashed(error))

    def _subscribe(self) -> None:
        """Subscribe to changes of domains; without them ``schedule.refresh`` still applies."""
        try:
            self._context.hypervisor.on_change(lambda: self._inbox.put(_DomainChanged()))
        except SnaporchError as error:
            self._context.progress.note(_SOURCE, error.line())

    def _next_message(self) -> _Message | None:
        """The next message; ``None`` when the time for new forecasts has come first."""
        pause = self._context.config.schedule.refresh.total_seconds()
        until = min(time.monotonic() + pause, self._refresh_at or math.inf)
        watchdog = watchdog_seconds()
        while (left := until - time.monotonic()) > 0:
            if watchdog is not None and not self._is_stuck(watchdog):
                self._notify("WATCHDOG=1")
            try:
                return self._inbox.get(timeout=min(left, (watchdog or pause * 2) / 2))
            except queue.Empty:
                continue
        return None

    def _is_stuck(self, watchdog: float) -> bool:
        """Whether making forecasts takes longer than systemd's watchdog allows."""
        return self._forecaster is not None and time.monotonic() - self._forecasts_began > watchdog

    def _end(self) -> None:
        self._ending.set()
        self._notify(
            "STOPPING=1", "STATUS=waiting for running snapshots to undo or finish their work"
        )
        self._subprocesses.stop()
        self._scheduler.shutdown(wait=True)
        if self._forecaster is not None:
            self._forecaster.join(_JOIN_SECONDS)
        self._pruning.acquire(timeout=_JOIN_SECONDS)
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, (SnapshotJobResult, BulkJobResult)):
                self._report(message)

    def _reload(self) -> None:
        self._notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            config = self._load()
        except SnaporchError as error:
            self._context.progress.note(_SOURCE, f"{error.line()}; keeping the old configuration")
        else:
            self._context.config = config
            self._subprocesses.limiter.limit(config.schedule)
            self._context.progress.step(_SOURCE, "configuration loaded")
        self._notify("READY=1")

    # -- forecasts --------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Make new forecasts, now or when those that are being made are done."""
        self._refresh_at = None
        if self._forecaster is not None:
            self._refresh_again = True
            self._notify(
                f"STATUS=checking guests and policies since {self._checking_since:%H:%M:%S} UTC"
            )
            return
        self._refresh_again = False
        context = replace(self._context)  # a reload must not change it meanwhile
        self._forecasts_began, self._checking_since = time.monotonic(), context.clock.now()
        self._forecaster = threading.Thread(target=self._work, args=[context], daemon=True)
        self._forecaster.start()

    def _forecasts_made(self) -> None:
        self._forecaster = None
        if self._refresh_again:
            self._refresh()

    def _work(self, context: Context) -> None:
        updated = self._update(context)
        prunes = updated and self._pruning.acquire(blocking=False)
        self._inbox.put(_ForecastsMade())
        if prunes:  # may take long; new forecasts may be made meanwhile
            self._prune_began = context.clock.now()
            try:
                self._prune(context)
            finally:
                self._pruning.release()
        elif updated:
            self._report_long_prune(context)

    def _report_long_prune(self, context: Context) -> None:
        """Report a prune that seems to hang: until it ends, nothing else is pruned."""
        if context.clock.now() - self._prune_began >= self._long_prune:
            since = f"{self._prune_began:%Y-%m-%d %H:%M} UTC"
            error = RunFailedError(
                "prune",
                f"has been running since {since}, and nothing else is pruned until it ends",
                "see: zpool status; then restart the daemon",
            )
            context.progress.note(_SOURCE, error.line())
            self._observer.failed(context.config, error)

    def _prune(self, context: Context) -> None:
        daily = prune_daily(context, self._ending.is_set)
        for pruned in daily.pruned:
            found = pruned.found
            text = f"{pruned.action.done} {found.path.name}: {pruned.reason}"
            context.progress.step(found.domain or found.uuid, text)
        self._report_failures(context, daily)

    def _report_failures(self, context: Context, retention: RetentionResult) -> None:
        for failure in retention.failures:
            context.progress.note(_SOURCE, failure.line())
            self._observer.failed(context.config, failure)

    def _update(self, context: Context) -> bool:
        """Make forecasts, apply retention and set the times of jobs; False if that failed."""
        now = context.clock.now()
        progress = context.progress
        try:
            guard_leftovers(context)
            forecasts = make_forecasts(context, now)
            self._record_carried_out(context, forecasts, now)
            retention = apply_retention(context, forecasts, now)
        except InterruptedRunError:
            return False
        except SnaporchError as error:
            progress.note(_SOURCE, f"cannot check policies now: {error.line()}")
            self._observer.failed(context.config, error)
            self._notify(f"STATUS={error.line()}")
            return False
        for domain, verdict in retention.deleted:
            progress.step(domain, f"deleted @{verdict.taken.snapshot}: {verdict.reason}")
        for waiting in retention.mounted:
            progress.note(_SOURCE, waiting.line())
        self._report_failures(context, retention)
        self._set_times(context.config, forecasts, now)
        self._bulk_jobs.set_times(forecasts)
        self._scheduler.wakeup()  # otherwise it oversleeps if the clock was put forward
        record_check(context.config.paths.runtime, now)
        self._observer.forecasts_made(context, forecasts, now)
        self._notify(f"STATUS={self._status()}")
        return True

    def _record_carried_out(
        self, context: Context, forecasts: Sequence[Forecast], now: datetime
    ) -> None:
        try:
            record_carried_out(context, forecasts, now)
        except SnaporchError as error:
            context.progress.note(_SOURCE, error.line())
            self._observer.failed(context.config, error)

    def _set_times(self, config: Config, forecasts: Sequence[Forecast], now: datetime) -> None:
        wanted = {
            f"{each.domain.uuid}/{coming.policy}": (each, coming)
            for each in forecasts
            for coming in each.next_snapshots
        }
        for job in self._scheduler.get_jobs():
            if job.id not in (*wanted, *self._bulk_jobs.ids):
                job.remove()
        for key, (each, coming) in wanted.items():
            with self._lock:
                stale = key in self._busy or self._taken.get(key, now) > now
            if not stale:
                self._set_time(config, key, each, coming)

    def _set_time(self, config: Config, key: str, each: Forecast, coming: NextSnapshot) -> None:
        when = times(config, coming.policy, group_of(config, each.domain) or each.domain.uuid)
        job = self._scheduler.get_job(key)
        if job is None or job.next_run_time != coming.at or job.trigger.when != when:
            self._scheduler.add_job(
                self._take,
                PolicyTrigger(when),
                args=[each.domain.uuid, each.domain.name, coming.policy],
                id=key,
                next_run_time=coming.at,
                replace_existing=True,
            )

    def _status(self) -> str:
        snapshots = [job for job in self._scheduler.get_jobs() if job.id not in self._bulk_jobs.ids]
        jobs = sorted(snapshots, key=lambda job: job.next_run_time)
        inside = [f"{c.label} ({c.policy})" for c in self._subprocesses.limiter.inside]
        text = f"taking {', '.join(inside)}; " if inside else ""
        text += self._bulk_jobs.describe()
        began = f"{self._prune_began:%H:%M} UTC"
        pruning = f"; prune runs since {began}" if self._pruning.locked() else ""
        if not jobs:
            return f"{text}no policy has a snapshot to take{pruning}"
        first = jobs[0]
        at = f"{first.next_run_time.astimezone(UTC):%H:%M:%S} UTC"
        return f"{text}{len(jobs)} scheduled, next {first.args[1]} ({first.args[2]}) {at}{pruning}"

    # -- snapshots --------------------------------------------------------------------------

    def _take(self, uuid: str, name: str, policy: str) -> None:
        """Take a snapshot; called in a thread of the scheduler."""
        try:
            domain = self._context.hypervisor.find(uuid)
            if domain is None or policy not in self._context.config.policy:
                return
            job = snapshot_job(self._context, domain, policy)
        except SnaporchError as error:
            job = SnapshotJob(uuid, name, policy, frozenset(), 0)
            self._inbox.put(SnapshotJobResult(job, int(error.exit_code), error.line()))
            return
        with self._lock:
            if self._busy & job.keys or not self._due(job):
                return
            self._busy |= job.keys
        try:
            outcome = self._subprocesses.take(job)
        finally:
            with self._lock:
                self._busy -= job.keys
                self._taken |= dict.fromkeys(job.keys, self._context.clock.now())
        self._inbox.put(outcome)

    def _due(self, job: SnapshotJob) -> bool:
        """Whether a time has come since the last attempt; a job may have been set too early."""
        last = self._taken.get(job.key)
        if last is None:
            return True
        config = self._context.config
        when = times(config, job.policy, job.group or job.uuid)
        soonest = min(when.after(last), last + config.schedule.retry)
        return not last <= self._context.clock.now() < soonest

    def _report(self, message: SnapshotJobResult | BulkJobResult) -> None:
        if isinstance(message, SnapshotJobResult):
            self._finished(message)
            return
        for text in message.results:
            self._context.progress.step(_SOURCE, f"{message.name}: {text}")
        for text in message.complaints:
            self._context.progress.note(_SOURCE, text)

    def _finished(self, outcome: SnapshotJobResult) -> None:
        progress, name = self._context.progress, outcome.job.label
        for text in outcome.notes:
            progress.note(name, text.removeprefix(f"{name}  note: "))
        if outcome.ok:
            progress.step(name, outcome.text)
        else:
            progress.note(name, f"{outcome.job.policy}: {outcome.text}")
        self._observer.ended(self._context.config, outcome)
        try:
            remember(self._context, [outcome])
        except SnaporchError as error:
            progress.note(_SOURCE, error.line())
            self._observer.failed(self._context.config, error)
