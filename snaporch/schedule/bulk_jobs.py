"""Bulk work for all domains that the daemon has a process of its own do, when some of it is due."""

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

Told = Callable[[BulkJobResult], None]


@dataclass(frozen=True, slots=True)
class BulkJob:
    """One kind of it: ``snaporch NAME --due`` does what is due, one after the other."""

    name: str
    doing: str
    times: Callable[[Forecast], Iterable[datetime]]
    """When there is something to do for a domain."""


BULK_JOBS = (
    BulkJob("verify", "verifying", lambda each: [check.at for check in each.checks]),
    BulkJob("replicate", "replicating", lambda each: [each.at for each in each.shipments]),
)


class BulkJobs:
    """One job for each kind.

    Args:
        schedule: the configuration now.
        told: is called with what came of each, in a thread of the scheduler's.
    """

    def __init__(
        self,
        scheduler: BaseScheduler,
        captures: Subprocesses,
        schedule: Callable[[], Schedule],
        told: Told,
    ) -> None:
        self._scheduler = scheduler
        self._captures = captures
        self._schedule = schedule
        self._told = told
        self._lock = threading.Lock()
        self._under_way: set[str] = set()
        self._not_before: dict[str, datetime] = {}

    @property
    def ids(self) -> frozenset[str]:
        """The jobs that are not captures."""
        return frozenset(kind.name for kind in BULK_JOBS)

    def describe(self) -> str:
        """What is being done now: ``verifying; ``."""
        with self._lock:
            return "".join(f"{each.doing}; " for each in BULK_JOBS if each.name in self._under_way)

    def set_times(self, forecasts: Sequence[Forecast]) -> None:
        """Have each kind done when something of it is due."""
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
        """In a thread of the scheduler's."""
        with self._lock:
            if name in self._under_way:
                return
            self._under_way.add(name)
        done = BulkJobResult(name, ExitCode.BUG, (), ())
        try:
            done = self._captures.run_bulk_job(name)
        finally:
            schedule = self._schedule()
            pause = schedule.refresh if done.status == 0 else schedule.retry
            with self._lock:
                self._under_way.discard(name)
                self._not_before[name] = datetime.now(UTC) + pause
        self._told(done)
