"""Which calls of libvirt are logged."""

import libvirt
import pytest
from fakes.log import recorded_commands

from snaporch.hypervisor.logged_calls import CHANGING, log_calls


@pytest.fixture
def log():
    with recorded_commands() as records:
        yield records


def commands(log):
    """The command and the domain of each line."""
    return [
        (line.split(": ")[0].split("  ")[-1], getattr(record, "DOMAIN", ""))
        for line, record in zip(log.lines, log.records, strict=True)
    ]


@pytest.fixture
def connection():
    return log_calls(libvirt.open("test:///default"))


def test_changing_calls_are_logged_with_their_domain(connection, log):
    domain = log_calls(connection.lookupByName("test"))
    assert domain.suspend() == 0
    assert domain.resume() == 0
    assert commands(log) == [("libvirt suspend", "test"), ("libvirt resume", "test")]


def test_xml_is_not_logged(connection, log):
    xml = connection.lookupByName("test").XMLDesc(0)
    connection.defineXMLFlags(xml, 0)
    assert commands(log) == [("libvirt defineXMLFlags", "")]


def test_a_call_that_fails_is_logged_and_raises(connection, log, tmp_path):
    with pytest.raises(libvirt.libvirtError):
        connection.restoreFlags(str(tmp_path / "absent"), None, 0)
    assert commands(log) == [(f"libvirt restoreFlags {tmp_path}/absent", "")]


def test_other_calls_are_libvirts_own(connection, log):
    assert connection.isAlive() == 1
    assert connection.lookupByName("test").isActive() == 1
    assert log.lines == []


def test_libvirt_takes_them_for_its_own(connection):
    """It refuses a list of domains with anything else in it."""
    domain = log_calls(connection.lookupByName("test"))
    assert connection.domainListGetStats([domain], libvirt.VIR_DOMAIN_STATS_STATE)


def test_the_logged_methods_exist():
    known = {*dir(libvirt.virConnect), *dir(libvirt.virDomain)}
    assert known >= CHANGING
