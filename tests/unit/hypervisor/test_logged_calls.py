"""Which calls of libvirt are logged."""

import libvirt
import pytest

from snaporch.hypervisor import logged_calls
from snaporch.hypervisor.logged_calls import CHANGING, log_calls


@pytest.fixture
def lines(monkeypatch):
    """The words and the domain of each line."""
    found = []

    class Command(logged_calls.LoggedCommand):
        def __init__(self, *words, domain=""):
            super().__init__(*words, domain=domain)
            found.append((words, domain))

    monkeypatch.setattr(logged_calls, "LoggedCommand", Command)
    return found


@pytest.fixture
def connection():
    return log_calls(libvirt.open("test:///default"))


def test_changing_calls_are_logged_with_their_domain(connection, lines):
    domain = log_calls(connection.lookupByName("test"))
    assert domain.suspend() == 0
    assert domain.resume() == 0
    assert lines == [(("libvirt", "suspend"), "test"), (("libvirt", "resume"), "test")]


def test_xml_is_not_logged(connection, lines):
    xml = connection.lookupByName("test").XMLDesc(0)
    connection.defineXML(xml)
    assert lines == [(("libvirt", "defineXML"), "")]


def test_a_call_that_fails_is_logged_and_raises(connection, lines, tmp_path):
    with pytest.raises(libvirt.libvirtError):
        connection.restoreFlags(str(tmp_path / "absent"), None, 0)
    assert lines == [(("libvirt", "restoreFlags", str(tmp_path / "absent")), "")]


def test_other_calls_are_libvirts_own(connection, lines):
    assert connection.isAlive() == 1
    assert connection.lookupByName("test").isActive() == 1
    assert lines == []


def test_libvirt_takes_them_for_its_own(connection):
    """It refuses a list of domains with anything else in it."""
    domain = log_calls(connection.lookupByName("test"))
    assert connection.domainListGetStats([domain], libvirt.VIR_DOMAIN_STATS_STATE)


def test_the_logged_methods_exist():
    known = {*dir(libvirt.virConnect), *dir(libvirt.virDomain)}
    assert known >= CHANGING
