"""The external snapshot with memory.

How long it may take is decided by :mod:`snaporch.snapshot.strategies.ram_limits`.

libvirt's call runs in a thread, and the main thread watches it.

The call takes as long as saving the RAM. It has its own thread so that a signal, a failing reader
of the RAM pipe or a time limit can abort the job.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import replace
from typing import Any

import libvirt

from snaporch.hypervisor import domain_xml
from snaporch.hypervisor.events import DomainEvents
from snaporch.hypervisor.interface import (
    CancelledError,
    CaptureRequest,
    HypervisorError,
    OnStop,
    PausedBy,
    Tick,
)
from snaporch.hypervisor.pause_clock import Pause, milliseconds
from snaporch.model import PauseParts

_FLAGS = (
    libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_LIVE
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_ATOMIC
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_NO_METADATA
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_REUSE_EXT
)
_TICK_SECONDS = 0.1


def capture(
    domain: Any, events: DomainEvents, request: CaptureRequest, tick: Tick, stopped: OnStop
) -> Pause:
    """Take the snapshot; see :meth:`Hypervisor.capture`."""
    ran = domain.state()[0] == libvirt.VIR_DOMAIN_RUNNING
    resumes = bool(request.disks) and ran
    call = _SnapshotCall(domain, domain_xml.snapshot_xml(request), events)
    call.start()
    checked_at = asked_at = None
    try:
        while not call.over:
            events.wait(_TICK_SECONDS)
            if events.suspended is not None:
                known = asked_at is not None and asked_at == events.suspended
                stopped(PausedBy.ANOTHER if known else PausedBy.QEMU)
                if checked_at != events.suspended:  # only once: later libvirt may block on the pipe
                    checked_at = events.suspended
                    asked_at = checked_at if _is_suspended_by_request(domain) else None
                    if asked_at is not None:
                        stopped(PausedBy.ANOTHER)
            if not call.over:
                tick()
    except BaseException:
        _abort_until_done(domain, call)
        raise
    if call.error is not None:
        aborted = call.error.get_error_code() == libvirt.VIR_ERR_OPERATION_ABORTED
        raise (CancelledError if aborted else HypervisorError)(
            domain.name(), f"libvirt's snapshot failed: {call.error.get_error_message()}"
        ) from call.error
    pause = _short_pause(events) if resumes else _open_pause(events, ran=ran)
    asked_for = ran and asked_at is not None and asked_at == events.suspended
    return replace(pause, asked_for=asked_for)


def _is_suspended_by_request(domain: Any) -> bool:
    """Whether another program suspended the guest.

    libvirt's reason is different if QEMU paused it.
    """
    state, reason = domain.state()
    paused = libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_SNAPSHOT
    return (state, reason) == paused


def _abort_until_done(domain: Any, call: _SnapshotCall) -> None:
    """Repeat the abort until the call ends.

    One abort can come before the job began, or too late.
    """
    while call.is_alive():
        with contextlib.suppress(libvirt.libvirtError):
            domain.abortJob()
        call.join(_TICK_SECONDS)


def _open_pause(events: DomainEvents, *, ran: bool) -> Pause:
    """The pause of a guest that stays paused."""
    if ran:
        _await(events, lambda: events.suspended is not None)
    began, since = events.paused_since()
    return Pause(began, 0.0, since, _parts(events, since, time.monotonic()))


def _short_pause(events: DomainEvents) -> Pause:
    """The pause of a guest that libvirt has resumed."""
    _await(events, lambda: events.resumed is not None)
    began, since = events.paused_since()
    if since is None or events.resumed is None:
        return Pause(began, 0.0)
    parts = _parts(events, since, events.resumed)
    return Pause(began, milliseconds(events.resumed - since), parts=parts)


def _await(events: DomainEvents, arrived: Callable[[], bool]) -> None:
    """Wait for an event. Events use the call's connection, but may arrive after its end."""
    end = time.monotonic() + events.grace_seconds
    while not arrived() and time.monotonic() < end:
        events.wait(_TICK_SECONDS)


def _parts(events: DomainEvents, since: float | None, end: float) -> PauseParts:
    """The parts of the pause until the disks were frozen.

    QEMU's own part only if libvirt reported it.
    """
    if since is None:
        return PauseParts()
    if events.downtime is None:
        return PauseParts(switch=milliseconds(end - since))
    downtime = min(events.downtime, end - since)
    return PauseParts(milliseconds(downtime), milliseconds(end - since - downtime))


class _SnapshotCall(threading.Thread):
    def __init__(self, domain: Any, xml: str, events: DomainEvents) -> None:
        super().__init__(name="libvirt-snapshot", daemon=True)
        self._domain, self._xml, self._events = domain, xml, events
        self._log_fields = copy_context()
        self.error: libvirt.libvirtError | None = None
        self.over = False
        """Set before the thread ends: with a paused guest every moment counts."""

    def run(self) -> None:
        try:
            self._log_fields.run(self._domain.snapshotCreateXML, self._xml, _FLAGS)
        except libvirt.libvirtError as error:
            self.error = error
        self.over = True
        self._events.wake()
