"""Takes snapshots, and does bulk jobs, in subprocesses.

A run handles signals and holds a domain's lock for its whole process, so parallel runs need several
processes. A run must also survive the scheduler: if its parent is killed it finishes by itself (the
units have ``KillMode=process``), and if the run is killed its guardian releases the guest.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snaporch.context import Context
from snaporch.errors import ExitCode
from snaporch.model import Level
from snaporch.schedule.concurrency import ConcurrencyLimiter, LimiterClosedError, SnapshotJob

Command = Callable[[SnapshotJob], list[str]]
_PREFIX = "snaporch: "


@dataclass(frozen=True, slots=True)
class SnapshotJobResult:
    """The result of a snapshot job."""

    job: SnapshotJob
    status: int
    """The exit code of ``snaporch snapshot``; ``128 + N`` after signal N."""
    text: str
    """The result or the error, in one line for each domain; only for messages."""
    notes: tuple[str, ...] = ()
    documents: tuple[Mapping[str, Any], ...] = ()
    """The snapshot of each domain, as printed by ``snaporch snapshot --json``."""

    @property
    def ok(self) -> bool:
        """Whether the snapshot was taken."""
        return self.status == ExitCode.OK

    @property
    def level(self) -> Level | None:
        """The lowest level of the snapshots; of guests that are off only if all are off."""
        reached = [Level(each["level"]) for each in self.documents]
        running = [level for level in reached if level is not Level.OFF]
        return max(running or reached, key=list(Level).index, default=None)


@dataclass(frozen=True, slots=True)
class BulkJobResult:
    """The output of ``snaporch NAME --due``, to be printed."""

    name: str
    status: int
    """Its exit code; ``128 + N`` after signal N."""
    results: tuple[str, ...]
    """The lines on standard output."""
    complaints: tuple[str, ...]
    """The lines on standard error."""


def snapshot_command(context: Context) -> Command:
    """Returns a function from a snapshot job to its command line."""

    def command(job: SnapshotJob) -> list[str]:
        policy = ["--policy", job.policy, "--if-changed"]
        return [*own_command(context), "snapshot", job.uuid, *policy, "--json", "--quiet"]

    return command


def bulk_job_command(context: Context) -> Callable[[str], list[str]]:
    """Returns a function from ``verify`` or ``replicate`` to its command line."""
    return lambda name: [*own_command(context), name, "--due", "--quiet"]


def own_command(context: Context) -> list[str]:
    """The command line that starts this snaporch with the same configuration."""
    config = context.config_path
    return [*context.program, *(["--config", str(config.absolute())] if config else [])]


class Subprocesses:
    """Starts and stops the subprocesses.

    Args:
        limiter: limits how many jobs run at once.
        command: the command line of a snapshot job.
        bulk_job: the command line of a bulk job.
    """

    def __init__(
        self,
        limiter: ConcurrencyLimiter,
        command: Command,
        bulk_job: Callable[[str], Sequence[str]],
    ) -> None:
        self.limiter = limiter
        self.command = command
        self.bulk_job = bulk_job
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def take(self, job: SnapshotJob) -> SnapshotJobResult:
        """Wait until the limits allow it, and take a snapshot; a failure is in the result."""
        try:
            with self.limiter.through(job):
                return self._take(job)
        except LimiterClosedError:
            return SnapshotJobResult(job, 128 + signal.SIGTERM, "not started: stopped by a signal")

    def run_bulk_job(self, name: str) -> BulkJobResult:
        """Run the bulk job ``name``; a failure is in the result."""
        try:
            status, out, err = self._run(self.bulk_job(name))
        except LimiterClosedError:
            return BulkJobResult(name, 128 + signal.SIGTERM, (), ())
        except OSError as error:
            return BulkJobResult(name, ExitCode.UNAVAILABLE, (), (f"cannot be started: {error}",))
        return BulkJobResult(name, status, tuple(out.splitlines()), tuple(_lines(err)))

    def _take(self, job: SnapshotJob) -> SnapshotJobResult:
        try:
            return _outcome(job, *self._run(self.command(job)))
        except OSError as error:
            return SnapshotJobResult(job, ExitCode.UNAVAILABLE, f"cannot be started: {error}")

    def _run(self, command: Sequence[str]) -> tuple[int, str, str]:
        """Run a command; returns its exit code, output and errors."""
        with self._lock:
            if self._stopped:
                raise LimiterClosedError
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # a terminal's Ctrl-C reaches only the parent
            )
            self._running.add(process)
        try:
            out, err = process.communicate()
        finally:
            with self._lock:
                self._running.discard(process)
        returned = process.returncode
        return returned if returned >= 0 else 128 - returned, out, err

    def stop(self) -> None:
        """Start no further process, and send SIGTERM to the running ones."""
        self.limiter.close()
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.send_signal(signal.SIGTERM)


def _lines(err: str) -> list[str]:
    return [line.removeprefix(_PREFIX) for line in err.splitlines() if line.strip()]


def _documents(out: str) -> tuple[Mapping[str, Any], ...]:
    """The JSON objects in the output: a list for a group, one object for a domain."""
    try:
        printed = json.loads(out)
    except ValueError:
        return ()
    return tuple(printed if isinstance(printed, list) else [printed])


def _line(document: Mapping[str, Any]) -> str:
    text = f"{document['domain']}@{document['snapshot']}  {document['level']}  {document['state']}"
    pause = document["pause_ms"]
    if document["unchanged"] is not None:
        return f"{text}  unchanged, no other was taken"
    return text if pause is None else f"{text}  paused {pause:.0f} ms"


def _outcome(job: SnapshotJob, status: int, out: str, err: str) -> SnapshotJobResult:
    lines = _lines(err)
    if status == ExitCode.OK:
        documents = _documents(out)
        text = "\n".join(map(_line, documents)) or out.strip()
        return SnapshotJobResult(job, status, text, tuple(lines), documents)
    last = lines.pop() if lines else f"exited with status {status} without output"
    return SnapshotJobResult(job, status, last.removeprefix(f"{job.label}: "), tuple(lines))
