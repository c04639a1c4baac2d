"""What one contestant costs: the guest's pause, time, bytes, CPU seconds, peak memory."""

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import libvirt

_TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Spent:
    """The cost of a contestant's processes, in seconds and KiB."""

    cpu: float = 0.0
    peak_kib: int = 0
    said: str = ""

    def run(self, command: Sequence[str | Path], *, stdout: Any = subprocess.PIPE) -> str:
        """Run a command to its end; raises if it fails."""
        process = subprocess.Popen(command, stdout=stdout, stdin=subprocess.DEVNULL)
        return self.wait(process)

    def wait(self, process: subprocess.Popen[bytes]) -> str:
        """Wait until it has ended; raises if it failed."""
        said = process.stdout.read().decode() if process.stdout else ""
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.stdout:
            process.stdout.close()
        if process.returncode:
            raise RuntimeError(f"{process.args}: {process.returncode}\n{said}")
        self.cpu += usage.ru_utime + usage.ru_stime
        self.peak_kib = max(self.peak_kib, usage.ru_maxrss)
        self.said = said
        return said


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return sum(int(value) for value in fields[11:15]) / _TICK


def sync_file(path: Path) -> None:
    """Sync a file: data counts as stored only on stable storage."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass
class Events:
    """The pauses of a domain that libvirt reported."""

    pauses: list[tuple[float, float]] = field(default_factory=list)
    """When each began and ended, on the monotonic clock."""
    job: dict[str, int] = field(default_factory=dict)
    """What libvirt reported of the last job, such as saving RAM, by libvirt's own names."""
    _since: float | None = None
    _done: threading.Event = field(default_factory=threading.Event)

    def take(self, _conn: Any, _domain: Any, event: int, _detail: int, _opaque: Any) -> None:
        """A lifecycle event."""
        now = time.monotonic()
        if event in (libvirt.VIR_DOMAIN_EVENT_SUSPENDED, libvirt.VIR_DOMAIN_EVENT_STOPPED):
            self._since = self._since or now
        elif event == libvirt.VIR_DOMAIN_EVENT_RESUMED and self._since is not None:
            self.pauses.append((self._since, now))
            self._since = None

    def take_job(self, _conn: Any, _domain: Any, statistics: dict[str, int], _opaque: Any) -> None:
        """The end of a job."""
        self.job = dict(statistics)

    def longest_ms(self) -> float:
        """The longest pause in milliseconds; 0 if there was none."""
        return 1000 * max((ended - began for began, ended in self.pauses), default=0.0)


def start_event_loop() -> None:
    """Start libvirt's event loop; call it once, before the first connection."""
    libvirt.virEventRegisterDefaultImpl()

    def loop() -> None:
        while True:
            libvirt.virEventRunDefaultImpl()

    threading.Thread(target=loop, daemon=True).start()


@contextlib.contextmanager
def listening(connection: Any) -> Iterator[Events]:
    """Record every domain's pauses and jobs during the block."""
    events = Events()
    kinds = {
        libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE: events.take,
        libvirt.VIR_DOMAIN_EVENT_ID_JOB_COMPLETED: events.take_job,
    }
    callbacks = [
        connection.domainEventRegisterAny(None, kind, take, None) for kind, take in kinds.items()
    ]
    try:
        yield events
    finally:
        for callback in callbacks:
            connection.domainEventDeregisterAny(callback)
