"""Freezing and thawing through an agent that may do anything."""

import json
from pathlib import Path

import libvirt
import pytest

from snaporch.hypervisor import agent
from snaporch.hypervisor.protocol import HypervisorError


class Failure(libvirt.libvirtError):
    def get_error_message(self):
        return self.args[0]


class Guest:
    """libvirt's handle of a guest whose agent does as told."""

    def __init__(self):
        self.frozen = False
        self.said = []
        self.timeout = None
        self.freeze_fails = False
        self.thaws_to_fail = 0
        self.answer = None

    def name(self):
        return "web"

    def agentSetResponseTimeout(self, seconds, flags):  # noqa: N802 - libvirt's
        self.timeout = seconds

    def fsFreeze(self, mountpoints, flags):  # noqa: N802 - libvirt's
        self.said.append(("freeze", mountpoints))
        self.frozen = True
        if self.freeze_fails:
            raise Failure("guest agent did not answer")
        return 3

    def fsThaw(self, mountpoints, flags):  # noqa: N802 - libvirt's
        self.said.append(("thaw", mountpoints))
        if self.thaws_to_fail:
            self.thaws_to_fail -= 1
            raise Failure("guest agent is busy")
        self.frozen = False
        return 3


@pytest.fixture
def guest(monkeypatch):
    made = Guest()

    def ask(domain, question, seconds, flags):
        assert domain is made
        assert seconds > 0
        made.said.append(json.loads(question)["execute"])
        if isinstance(made.answer, Exception):
            raise made.answer
        if made.answer is not None:
            return made.answer
        status = "frozen" if made.frozen else "thawed"
        return json.dumps({"return": status if "status" in question else {}})

    monkeypatch.setattr(agent.libvirt_qemu, "qemuAgentCommand", ask)
    return made


def test_it_freezes_all_or_what_is_named(guest):
    assert agent.freeze(guest, (), 7) == 3
    assert guest.timeout == 7
    agent.freeze(guest, (Path("/srv"), Path("/a b")), 7)
    assert guest.said == [("freeze", None), ("freeze", ["/srv", "/a b"])]


def test_a_freeze_that_failed_is_thawed_and_told(guest):
    """It may have frozen some file systems before it failed."""
    guest.freeze_fails = True
    with pytest.raises(HypervisorError, match="web: its agent did not freeze: guest agent did not"):
        agent.freeze(guest, (), 7)
    assert not guest.frozen


def test_a_freeze_that_failed_is_told_even_if_the_thaw_fails(guest):
    guest.freeze_fails, guest.thaws_to_fail = True, 99
    with pytest.raises(HypervisorError, match="did not freeze"):
        agent.freeze(guest, (), 7)


def test_a_thaw_is_believed_when_the_agent_says_so(guest):
    guest.frozen, guest.thaws_to_fail = True, 1
    agent.thaw(guest, 7)
    assert not guest.frozen
    assert guest.said.count(("thaw", None)) == 2


def test_a_thaw_of_what_is_not_frozen_is_done(guest):
    agent.thaw(guest, 7)


def test_a_thaw_that_does_not_happen_is_an_error_with_its_cause(guest):
    guest.frozen, guest.thaws_to_fail = True, 99
    with pytest.raises(HypervisorError, match="could not be thawed: guest agent is busy") as caught:
        agent.thaw(guest, 7)
    assert caught.value.step
    assert guest.said.count(("thaw", None)) == 3


def test_a_thaw_that_failed_because_nothing_was_frozen_is_done(guest):
    guest.thaws_to_fail = 99
    agent.thaw(guest, 7)


@pytest.mark.parametrize(
    "answer",
    [libvirt.libvirtError("not connected"), "", "{", "[]", "null", "{}", '{"error": {}}'],
    ids=str,
)
def test_an_agent_that_makes_no_sense(guest, answer):
    guest.answer = answer
    assert not agent.frozen(guest)
    assert not agent.answers(guest, 1)
    with pytest.raises(HypervisorError):
        agent.thaw(guest, 7)


def test_frozen_is_what_the_agent_says(guest):
    assert not agent.frozen(guest)
    agent.freeze(guest, (), 7)
    assert agent.frozen(guest)
    assert agent.answers(guest, 1)
