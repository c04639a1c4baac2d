"""The external snapshot with memory, run beside a watchful main thread.

The call into libvirt lasts as long as RAM takes to save. It runs in a thread of its own so that a
signal, a failing reader of the RAM stream or a budget can abort the job.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import libvirt

from snaporch.hypervisor import xml as domain_xml
from snaporch.hypervisor.events import DomainEvents
from snaporch.hypervisor.protocol import CaptureRequest, HypervisorError, Pause, Tick

_FLAGS = (
    libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_LIVE
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_ATOMIC
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_NO_METADATA
    | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_REUSE_EXT
)
_TICK_SECONDS = 0.1
_EVENT_GRACE_SECONDS = 2.0


def capture(domain: Any, events: DomainEvents, request: CaptureRequest, tick: Tick) -> Pause:
    """Create the snapshot; see :meth:`Hypervisor.capture`."""
    resumes = bool(request.disks) and domain.state()[0] == libvirt.VIR_DOMAIN_RUNNING
    call = _SnapshotCall(domain, domain_xml.snapshot_xml(request), events)
    call.start()
    try:
        while call.is_alive():
            events.wait(_TICK_SECONDS)
            tick()
    except BaseException:
        _abort_until_done(domain, call)
        raise
    if call.error is not None:
        raise HypervisorError(
            domain.name(), f"libvirt's snapshot failed: {call.error.get_error_message()}"
        ) from call.error
    if not resumes:
        return Pause(events.suspended_at, 0.0, events.suspended)
    return _pause(events)


def _abort_until_done(domain: Any, call: _SnapshotCall) -> None:
    """An abort can come before the job began or too late for it: ask until the call ended."""
    while call.is_alive():
        with contextlib.suppress(libvirt.libvirtError):
            domain.abortJob()
        call.join(_TICK_SECONDS)


def _pause(events: DomainEvents) -> Pause:
    """Both events come on the same connection; the second may trail the end of the call."""
    waited = 0.0
    while events.resumed is None and waited < _EVENT_GRACE_SECONDS:
        events.wait(_TICK_SECONDS)
        waited += _TICK_SECONDS
    if events.suspended is None or events.resumed is None:
        return Pause(events.suspended_at, 0.0)
    return Pause(events.suspended_at, round((events.resumed - events.suspended) * 1000, 1))


class _SnapshotCall(threading.Thread):
    def __init__(self, domain: Any, xml: str, events: DomainEvents) -> None:
        super().__init__(name="libvirt-snapshot", daemon=True)
        self._domain, self._xml, self._events = domain, xml, events
        self.error: libvirt.libvirtError | None = None

    def run(self) -> None:
        try:
            self._domain.snapshotCreateXML(self._xml, _FLAGS)
        except libvirt.libvirtError as error:
            self.error = error
        self._events.wake()
