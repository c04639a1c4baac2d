"""How long a guest stood still, by events that may be heard of after the call's end."""

import threading

import libvirt
import pytest

from snaporch.hypervisor.capture import capture
from snaporch.hypervisor.events import DomainEvents
from snaporch.hypervisor.protocol import CaptureRequest, OverlayDisk

LATE_SECONDS = 0.3


class Domain:
    """Its call is over before its events are heard of, and others come in between."""

    def __init__(self, *told):
        self.told = told
        self.events = DomainEvents(None, self)

    def state(self):
        return libvirt.VIR_DOMAIN_RUNNING, 0

    def snapshotCreateXML(self, _xml, _flags):  # noqa: N802 - libvirt has it so
        for number in range(50):
            threading.Timer(number * 0.005, self.events.wake).start()
        for event in self.told:
            threading.Timer(
                LATE_SECONDS, self.events._on_lifecycle, [None, self, event, 0, None]
            ).start()


OVERLAY = OverlayDisk("vda", "/b/vda", "file", "raw", "/o/vda.qcow2")


def captured(domain, *disks):
    request = CaptureRequest("u", disks, (), (), "/run/x.ram")
    return capture(domain, domain.events, request, lambda: None, lambda: None)


def test_a_guest_that_stands_still_and_goes_on_doing_so():
    pause = captured(Domain(libvirt.VIR_DOMAIN_EVENT_SUSPENDED))
    assert pause.began is not None
    assert pause.since is not None


def test_a_guest_that_runs_again():
    events = (libvirt.VIR_DOMAIN_EVENT_SUSPENDED, libvirt.VIR_DOMAIN_EVENT_RESUMED)
    pause = captured(Domain(*events), OVERLAY)
    assert pause.began is not None


@pytest.mark.parametrize("disks", [(), (OVERLAY,)])
def test_events_that_never_come_are_not_waited_for_for_long(disks, monkeypatch):
    monkeypatch.setattr("snaporch.hypervisor.capture._EVENT_GRACE_SECONDS", 0.1)
    assert captured(Domain(), *disks).began is None
