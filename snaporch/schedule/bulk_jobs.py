"""Verification and replication in the daemon: one subprocess for each, whenever some is due."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from apscheduler.schedulers.base import BaseScheduler

from snaporch.config import Schedule
from snaporch.errors import ExitCode
from snaporch.schedule.forecast import Forecast
from snaporch.schedule.subprocesses import BulkJobResult, Subprocesses


@dataclass(frozen=True, slots=True)
class BulkJob:
    """A kind of bulk work; ``snaporch NAME --due`` does everything that is due, one by one."""

    name: str
    doing: str
    times: Callable[[Forecast], Iterable[datetime]]
    """When there is work of this kind for a domain."""


BULK_JOBS = (
    BulkJob("verify", "verifying", lambda each: [check.at for check in each.verifications]),
    BulkJob("replicate", "replicating", lambda each: [each.at for each in each.replications]),
)


class BulkJobs:
    """Schedules one job for each kind of bulk work.

    Args:
        schedule: returns the current configuration.
        on_result: is called with the result of each job, in a thread of the scheduler.
    """

    def __init__(
        self,
        scheduler: BaseScheduler,
        subprocesses: Subprocesses,
        schedule: Callable[[], Schedule],
        on_result: Callable[[BulkJobResult], None],
    ) -> None:
        self._scheduler = scheduler
        self._subprocesses = subprocesses
        self._schedule = schedule
        self._on_result = on_result
        self._lock = threading.Lock()
        self._under_way: set[str] = set()
        self._not_before: dict[str, datetime] = {}

    @property
    def ids(self) -> frozenset[str]:
        """IDs of the scheduler's jobs that are bulk work."""
        return frozenset(kind.name for kind in BULK_JOBS)

    def describe(self) -> str:
        """What is running now, for a status line: ``verifying; ``, or nothing."""
        with self._lock:
            return "".join(f"{each.doing}; " for each in BULK_JOBS if each.name in self._under_way)

    def set_times(self, forecasts: Sequence[Forecast]) -> None:
        """Schedule each kind for the first time at which some of it is due."""
        for kind in BULK_JOBS:
            self._set_time(kind, [at for each in forecasts for at in kind.times(each)])

    def _set_time(self, kind: BulkJob, times: Sequence[datetime]) -> None:
        with self._lock:
            if kind.name in self._under_way:
                return
            earliest = self._not_before.get(kind.name, datetime.min.replace(tzinfo=UTC))
        job = self._scheduler.get_job(kind.name)
        if not times:
            if job is not None:
                job.remove()
            return
        at = max(min(times), earliest)
        if job is None or job.next_run_time != at:
            self._scheduler.add_job(
                self._do,
                "date",
                args=[kind.name],
                run_date=at,
                id=kind.name,
                replace_existing=True,
            )

    def _do(self, name: str) -> None:
        """Run a kind of bulk work; called in a thread of the scheduler."""
        with self._lock:
            if name in self._under_way:
                return
            self._under_way.add(name)
        done = BulkJobResult(name, ExitCode.BUG, (), ())
        try:
            done = self._subprocesses.run_bulk_job(name)
        finally:
            schedule = self._schedule()
            pause = schedule.refresh if done.status == 0 else schedule.retry
            with self._lock:
                self._under_way.discard(name)
                self._not_before[name] = datetime.now(UTC) + pause
        self._on_result(done)
