"""Sends notifications in the background: a slow channel delays no run and no exit.

One thread handles the events one by one, and runs each channel in a thread with a time limit. A
channel that exceeds its limit is abandoned; its thread ends with the process at the latest.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from snaporch.config import Config, NotifyOptions
from snaporch.errors import SnaporchError, one_line
from snaporch.notify.channels import Channel, NotifyError, open_channels
from snaporch.notify.history import read_history, remembered, should_notify, write_history
from snaporch.notify.notification import Notification, notification_of_error, notification_of_run
from snaporch.progress import Progress
from snaporch.schedule.subprocesses import SnapshotJobResult

_MOST_WAITING = 1000
_SOURCE = "notify"
_EXTRA_SECONDS = 2
"""Added to the time limit: a channel that times out by itself has the better message."""


@dataclass(frozen=True, slots=True)
class _Job:
    config: Config
    event: Notification
    succeeded: datetime | None = None
    """When what failed succeeded last."""


@dataclass(frozen=True, slots=True)
class _Resolved:
    """Problems outside of runs that did not occur again."""

    config: Config
    keys: frozenset[str]


class Notifier:
    """Sends the configured notifications; no method raises.

    Args:
        progress: reports what could not be sent.
        open_channels: opens the configured channels, by name.
        extra_seconds: added to the time limit of a channel.
    """

    def __init__(
        self,
        progress: Progress,
        open_channels: Callable[[NotifyOptions], Mapping[str, Channel]] = open_channels,
        extra_seconds: float = _EXTRA_SECONDS,
    ) -> None:
        self._progress = progress
        self._open_channels = open_channels
        self._extra_seconds = extra_seconds
        self._host = socket.gethostname()
        self._jobs: queue.Queue[_Job | _Resolved | None] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._failing: set[str] = set()
        """Problems outside of runs since the last :meth:`forecasts_made`."""
        self._before: set[str] = set()
        """Those of the period before that."""

    def forecasts_made(self, config: Config) -> None:
        """Forecasts were made: problems that did not occur again since the last time are over."""
        over = frozenset(self._before - self._failing)
        self._before, self._failing = self._failing, set()
        if over:
            self._put(_Resolved(config, over))

    def ended(self, config: Config, outcome: SnapshotJobResult) -> None:
        """A run of a policy ended."""
        event = notification_of_run(config, outcome, self._host, datetime.now(UTC))
        if event is not None:
            self._put(_Job(config, event))

    def failed(
        self, config: Config, error: SnaporchError, succeeded: datetime | None = None
    ) -> None:
        """Something other than a run failed, which succeeded last at ``succeeded``."""
        event = notification_of_error(error, self._host, datetime.now(UTC))
        self._failing.add(event.key)
        self._put(_Job(config, event, succeeded))

    def close(self, seconds: float) -> None:
        """Wait until all notifications are sent, for ``seconds`` at most."""
        if self._thread is None:
            return
        try:
            self._jobs.put_nowait(None)
        except queue.Full:
            self._progress.note(_SOURCE, "too many notifications are waiting; some are dropped")
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._progress.note(_SOURCE, f"not all notifications were sent within {seconds:.0f} s")

    def _put(self, job: _Job | _Resolved) -> None:
        if not self._open_channels(job.config.notify):
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=_SOURCE, daemon=True)
            self._thread.start()
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            if isinstance(job, _Job):
                self._progress.note(job.event.domain, "notification dropped: too many are waiting")

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if isinstance(job, _Job):
                    self._notify(job)
                else:
                    _remove_resolved(job)
            except SnaporchError as error:
                self._progress.note(_SOURCE, error.line())

    def _notify(self, job: _Job) -> None:
        event, notify, directory = job.event, job.config.notify, job.config.paths.schedule
        known = read_history(directory)
        wanted = event.kind in notify.on
        if wanted and not should_notify(event, known, notify.repeat, job.succeeded):
            return
        channels = self._open_channels(notify).items() if wanted else ()
        sent = [self._send(way, event, notify.timeout) for way in channels]
        if any(sent) or not wanted:
            changed = remembered(event, known)
            if changed != known and (wanted or event.key in known):
                write_history(directory, changed)

    def _send(self, way: tuple[str, Channel], event: Notification, seconds: int) -> bool:
        """Whether the channel sent the event; an error is printed as a note."""
        name, send = way
        problem: list[str] = []
        done = threading.Event()

        def run() -> None:
            try:
                send(event)
            except NotifyError as error:
                problem.append(error.line())
            except Exception as error:  # noqa: BLE001 - of a library; it must not end the daemon
                problem.append(f"{type(error).__name__} while sending")
            finally:
                done.set()

        threading.Thread(target=run, name=name, daemon=True).start()
        if not done.wait(seconds + self._extra_seconds):
            problem.append(f"did not end within {seconds} s")
        if problem:
            self._progress.note(event.domain, one_line(f"{name}: {problem[0]}"))
        return not problem


def _remove_resolved(over: _Resolved) -> None:
    directory = over.config.paths.schedule
    known = read_history(directory)
    left = {key: record for key, record in known.items() if key not in over.keys}
    if left != known:
        write_history(directory, left)


def close_seconds(config: Config) -> float:
    """How long to wait for pending notifications before a process exits, in seconds."""
    return float(
        (config.notify.timeout + _EXTRA_SECONDS) * max(len(open_channels(config.notify)), 1)
    )
