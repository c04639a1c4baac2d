"""The external snapshot with memory, run beside a watchful main thread.

The call into libvirt lasts as long as RAM takes to save. It runs in a thread of its own so that a
signal, a failing reader of the RAM stream or a budget can abort the job.
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
    Pause,
    Tick,
    milliseconds,
)
from snaporch.model import PauseParts

_FLAGS = (
    libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_LIVE
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_ATOMIC
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_NO_METADATA
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_REUSE_EXT
)
_TICK_SECONDS = 0.1
_EVENT_GRACE_SECONDS = 2.0


def capture(
    domain: Any, events: DomainEvents, request: CaptureRequest, tick: Tick, stopped: Tick
) -> Pause:
    """Create the snapshot; see :meth:`Hypervisor.capture`."""
    ran = domain.state()[0] == libvirt.VIR_DOMAIN_RUNNING
    resumes = bool(request.disks) and ran
    call = _SnapshotCall(domain, domain_xml.snapshot_xml(request), events)
    call.start()
    looked_at = asked_at = None
    try:
        while not call.over:
            events.wait(_TICK_SECONDS)
            if events.suspended is not None:
                stopped()
                if looked_at != events.suspended:  # once: later libvirt may wait for the pipe
                    looked_at = events.suspended
                    asked_at = looked_at if _is_asked_for(domain) else None
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


def _is_asked_for(domain: Any) -> bool:
    """Whether somebody has suspended it: when QEMU stops it for the end, libvirt has no reason."""
    state, reason = domain.state()
    paused = libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_SNAPSHOT
    return (state, reason) == paused


def _abort_until_done(domain: Any, call: _SnapshotCall) -> None:
    """An abort can come before the job began or too late for it: ask until the call ended."""
    while call.is_alive():
        with contextlib.suppress(libvirt.libvirtError):
            domain.abortJob()
        call.join(_TICK_SECONDS)


def _open_pause(events: DomainEvents, *, ran: bool) -> Pause:
    """The guest stands still, and goes on doing so."""
    if ran:
        _await(events, lambda: events.suspended is not None)
    began, since = events.stood_still()
    return Pause(began, 0.0, since, _parts(events, since, time.monotonic()))


def _short_pause(events: DomainEvents) -> Pause:
    _await(events, lambda: events.resumed is not None)
    began, since = events.stood_still()
    if since is None or events.resumed is None:
        return Pause(began, 0.0)
    parts = _parts(events, since, events.resumed)
    return Pause(began, milliseconds(events.resumed - since), parts=parts)


def _await(events: DomainEvents, told: Callable[[], bool]) -> None:
    """Events come on the call's own connection, and may yet be heard of after its end."""
    end = time.monotonic() + _EVENT_GRACE_SECONDS
    while not told() and time.monotonic() < end:
        events.wait(_TICK_SECONDS)


def _parts(events: DomainEvents, since: float | None, end: float) -> PauseParts:
    """What came before the disks stood still; QEMU's own share of it only if libvirt told it."""
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
        """Told before the thread itself has ended: with a paused guest every moment counts."""

    def run(self) -> None:
        try:
            self._log_fields.run(self._domain.snapshotCreateXML, self._xml, _FLAGS)
        except libvirt.libvirtError as error:
            self.error = error
        self.over = True
        self._events.wake()
