"""libvirt's events: the event loop of the process, and the events of a domain."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import libvirt


@functools.cache
def start_event_loop() -> None:
    """Run libvirt's event loop in a daemon thread, once; must come before the first connection."""
    libvirt.virEventRegisterDefaultImpl()
    threading.Thread(target=_run_loop, name="libvirt-events", daemon=True).start()


def _run_loop() -> None:
    while True:
        libvirt.virEventRunDefaultImpl()


_CHANGES = (
    libvirt.VIR_DOMAIN_EVENT_DEFINED,
    libvirt.VIR_DOMAIN_EVENT_UNDEFINED,
    libvirt.VIR_DOMAIN_EVENT_STARTED,
    libvirt.VIR_DOMAIN_EVENT_STOPPED,
)


def watch_changes(connection: Any, callback: Callable[[], None]) -> None:
    """Call ``callback`` whenever a domain was defined, undefined, started or stopped.

    The registration lasts as long as the connection.
    """

    def happened(_conn: Any, _dom: Any, event: int, _detail: int, _opaque: Any) -> None:
        if event in _CHANGES:
            callback()

    kind = libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE
    connection.domainEventRegisterAny(None, kind, happened, None)


@dataclass
class DomainEvents:
    """Lifecycle and block job events of one domain, within a ``with`` block.

    Events only wake the waiter and provide times. The state is read from the domain, because an
    event can be missed (a job that dismisses itself, a reconnect).
    """

    connection: Any
    domain: Any
    grace_seconds: float = field(default=2.0, kw_only=True)
    """How long after the end of a call its events may arrive."""
    suspended: float | None = None
    suspended_at: datetime | None = None
    resumed: float | None = None
    completed: float | None = None
    """When the end of a job was reported, such as that of saving RAM (``time.monotonic()``)."""
    downtime: float | None = None
    """QEMU's downtime in that job, in seconds."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _pending: bool = False
    _callbacks: list[int] = field(default_factory=list)

    def __enter__(self) -> Self:
        register = self.connection.domainEventRegisterAny
        self._callbacks = [
            register(self.domain, libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, self._on_lifecycle, None),
            register(
                self.domain, libvirt.VIR_DOMAIN_EVENT_ID_BLOCK_JOB_2, self._on_block_job, None
            ),
        ]
        with contextlib.suppress(libvirt.libvirtError):  # needed only for measurements
            kind = libvirt.VIR_DOMAIN_EVENT_ID_JOB_COMPLETED
            self._callbacks.append(register(self.domain, kind, self._on_job, None))
        return self

    def __exit__(self, *_error: object) -> None:
        for callback in self._callbacks:
            with contextlib.suppress(libvirt.libvirtError):
                self.connection.domainEventDeregisterAny(callback)

    def _on_lifecycle(self, _conn: Any, _dom: Any, event: int, _detail: int, _opaque: Any) -> None:
        now = time.monotonic()
        if event == libvirt.VIR_DOMAIN_EVENT_SUSPENDED:
            self.suspended, self.resumed = now, None
            self.suspended_at = datetime.now(UTC)
        elif event == libvirt.VIR_DOMAIN_EVENT_RESUMED:
            self.resumed = now
        self.wake()

    def _on_job(self, _conn: Any, _dom: Any, statistics: dict[str, Any], _opaque: Any) -> None:
        self.completed = time.monotonic()
        downtime = statistics.get(libvirt.VIR_DOMAIN_JOB_DOWNTIME)
        self.downtime = None if downtime is None else downtime / 1000

    def _on_block_job(
        self, _conn: Any, _dom: Any, _disk: str, _kind: int, _status: int, _opaque: Any
    ) -> None:
        self.wake()

    def paused_since(self) -> tuple[datetime | None, float | None]:
        """When the guest was paused: wall-clock time and ``time.monotonic()``.

        QEMU flushes the disks before it reports the pause, so the event may come late. QEMU's
        downtime, subtracted from the job's end, may give an earlier time.
        """
        if self.suspended is None or self.suspended_at is None:
            return None, None
        since = self.suspended
        if self.completed is not None and self.downtime is not None:
            since = min(since, self.completed - self.downtime)
        return self.suspended_at - timedelta(seconds=self.suspended - since), since

    def wake(self) -> None:
        """End the current or the next :meth:`wait`."""
        with self._changed:
            self._pending = True
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until an event comes, at most ``seconds``."""
        with self._changed:
            if not self._pending:
                self._changed.wait(seconds)
            self._pending = False
