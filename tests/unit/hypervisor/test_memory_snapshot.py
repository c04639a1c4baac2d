"""The length of a pause, from events that may arrive after the call's end."""

import threading

import libvirt
import pytest

from snaporch.hypervisor.events import DomainEvents
from snaporch.hypervisor.interface import (
    CancelledError,
    CaptureRequest,
    HypervisorError,
    OverlayDisk,
)
from snaporch.hypervisor.memory_snapshot import capture

LATE_SECONDS = 0.3


class Domain:
    """The call ends before its events arrive, with other events in between."""

    def __init__(self, *script, **events):
        self.script = script
        self.events = DomainEvents(None, self, **events)

    def state(self):
        return libvirt.VIR_DOMAIN_RUNNING, 0

    def snapshotCreateXML(self, _xml, _flags):  # noqa: N802 - libvirt has it so
        for number in range(50):
            threading.Timer(number * 0.005, self.events.wake).start()
        threading.Timer(LATE_SECONDS, self.replay).start()

    def replay(self):
        for event in self.script:
            self.events._on_lifecycle(None, self, event, 0, None)


OVERLAY = OverlayDisk("vda", "/b/vda", "file", "raw", "/o/vda.qcow2")


def captured(domain, *disks):
    request = CaptureRequest("u", disks, (), (), "/run/x.ram")
    return capture(domain, domain.events, request, lambda: None, lambda _by: None)


def test_a_guest_that_stays_paused():
    pause = captured(Domain(libvirt.VIR_DOMAIN_EVENT_SUSPENDED))
    assert pause.began is not None
    assert pause.since is not None


def test_a_guest_that_runs_again():
    events = (libvirt.VIR_DOMAIN_EVENT_SUSPENDED, libvirt.VIR_DOMAIN_EVENT_RESUMED)
    pause = captured(Domain(*events), OVERLAY)
    assert pause.began is not None


@pytest.mark.parametrize("disks", [(), (OVERLAY,)])
def test_the_wait_for_missing_events_is_short(disks):
    assert captured(Domain(grace_seconds=0.1), *disks).began is None


class Saving:
    """A domain with a sequence of events while it is saved."""

    def __init__(self, *happening):
        self.happening = happening
        self.events = DomainEvents(None, self)
        self.now = libvirt.VIR_DOMAIN_RUNNING, 0
        self.looked = threading.Event()

    def state(self):
        self.looked.set()
        return self.now

    def snapshotCreateXML(self, _xml, _flags):  # noqa: N802 - libvirt has it so
        for event, state, reason in self.happening:
            self.looked.clear()
            self.now = state, reason
            self.events._on_lifecycle(None, self, event, 0, None)
            if event == libvirt.VIR_DOMAIN_EVENT_SUSPENDED:
                assert self.looked.wait(10)


RESUMED = libvirt.VIR_DOMAIN_EVENT_RESUMED, libvirt.VIR_DOMAIN_RUNNING, 5
BY_QEMU = (
    libvirt.VIR_DOMAIN_EVENT_SUSPENDED,
    libvirt.VIR_DOMAIN_PAUSED,
    libvirt.VIR_DOMAIN_PAUSED_UNKNOWN,
)
BY_ANOTHER_PROGRAM = (*BY_QEMU[:2], libvirt.VIR_DOMAIN_PAUSED_SNAPSHOT)


@pytest.mark.parametrize(
    ("happening", "asked_for"),
    [
        ([BY_QEMU, RESUMED], False),
        ([BY_ANOTHER_PROGRAM, RESUMED], True),
        ([BY_ANOTHER_PROGRAM, RESUMED, BY_QEMU, RESUMED], False),
    ],
)
@pytest.mark.parametrize("disks", [(), (OVERLAY,)])
def test_the_last_program_that_suspended_it_counts(happening, asked_for, disks):
    if not disks:
        happening = happening[:-1]
    assert captured(Saving(*happening), *disks).asked_for == asked_for


class Aborted:
    """A domain whose job another program aborts."""

    def __init__(self, code):
        self.events = DomainEvents(None, self)
        self.code = code

    def name(self):
        return "web"

    def state(self):
        return libvirt.VIR_DOMAIN_RUNNING, 0

    def snapshotCreateXML(self, _xml, _flags):  # noqa: N802 - libvirt has it so
        error = libvirt.libvirtError("x")
        error.err = (self.code, 0, "job 'snapshot' ended", 0, "", None, None, 0, 0)
        raise error


@pytest.mark.parametrize(
    ("code", "cancelled"),
    [(libvirt.VIR_ERR_OPERATION_ABORTED, True), (libvirt.VIR_ERR_OPERATION_FAILED, False)],
)
def test_an_aborted_job_differs_from_a_failed_one(code, cancelled):
    with pytest.raises(HypervisorError, match="job 'snapshot' ended") as caught:
        captured(Aborted(code), OVERLAY)
    assert isinstance(caught.value, CancelledError) == cancelled
