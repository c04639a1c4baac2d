"""The measurement of how fast guests change their RAM, with answers of libvirt."""

import libvirt
import pytest

from snaporch.hypervisor.dirty_rate import measure_dirty_rates

MEASURED = {"dirtyrate.calc_status": 2, "dirtyrate.megabytes_per_second": 7}
MEASURING = {"dirtyrate.calc_status": 1, "dirtyrate.megabytes_per_second": 3}
MEMORY = "<memory unit='MiB'>256</memory>"


class Guest:
    """A domain whose answers are given one after the other."""

    def __init__(self, *answers, memory=MEMORY, job=0, refuses=False):
        self.answers, self.memory = list(answers), memory
        self.job, self.refuses = job, refuses
        self.started = []

    def jobStats(self):  # noqa: N802 - libvirt's
        return {"type": self.job}

    def XMLDesc(self, _flags):  # noqa: N802 - libvirt's
        return f"<domain>{self.memory}</domain>"

    def startDirtyRateCalc(self, seconds, flags):  # noqa: N802 - libvirt's
        if self.refuses:
            raise libvirt.libvirtError("not supported")
        self.started.append((seconds, flags))


class Libvirt:
    def domainListGetStats(self, handles, kinds, flags):  # noqa: N802 - libvirt's
        assert kinds == libvirt.VIR_DOMAIN_STATS_DIRTYRATE
        assert flags == libvirt.VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT
        (guest,) = handles
        answer = guest.answers.pop(0) if guest.answers else None
        if answer == "gone":
            raise libvirt.libvirtError("domain is not running")
        return [] if answer is None else [(guest, answer)]


def measure(**guests):
    waits = []
    return measure_dirty_rates(Libvirt(), guests, waits.append), sum(waits)


def test_all_guests_are_measured_at_the_same_time():
    web, mail = Guest(MEASURING, MEASURED), Guest(MEASURED)
    found, waited = measure(web=web, mail=mail)
    assert found == {"web": 7, "mail": 7}
    assert web.started == mail.started == [(1, 0)]
    assert waited == pytest.approx(0.2)


@pytest.mark.parametrize(
    "guest",
    [
        Guest(MEASURED, refuses=True),
        Guest(MEASURED, job=libvirt.VIR_DOMAIN_JOB_UNBOUNDED),
        Guest(MEASURED, memory="<memory unit='MiB'>127</memory>"),
        Guest(
            MEASURED,
            memory="<memory unit='MiB'>4096</memory><cpu><numa><cell memory='4' unit='GiB'/>"
            "<cell memory='64' unit='MiB'/></numa></cpu>",
        ),
        Guest(MEASURED, memory="<memory>much</memory>"),
    ],
)
def test_a_guest_that_cannot_be_measured_is_not_waited_for(guest):
    assert measure(web=guest) == ({}, 0)
    assert guest.started == []


def test_a_guest_that_has_no_answer_is_not_waited_for_without_end():
    found, waited = measure(gone=Guest("gone"), busy=Guest(), web=Guest(None, "gone", MEASURED))
    assert found == {"web": 7}
    assert waited == pytest.approx(5)
