"""Freezing and thawing by an agent that may misbehave."""

import base64
import json
from contextlib import suppress
from pathlib import Path

import libvirt
import libvirt_qemu
import pytest

from snaporch.hypervisor import agent
from snaporch.hypervisor.interface import GuestExit, HypervisorError, NotFrozenByUsError


class Failure(libvirt.libvirtError):
    def __init__(self, text, code=libvirt.VIR_ERR_AGENT_UNRESPONSIVE):
        super().__init__(text)
        self.code = code

    def get_error_message(self):
        return self.args[0]

    def get_error_code(self):
        return self.code


REFUSED = Failure("the command is not allowed", libvirt.VIR_ERR_INTERNAL_ERROR)
LATE = Failure("guest agent did not answer")


class Guest:
    """libvirt's handle of a guest with a scripted agent."""

    def __init__(self):
        self.frozen = False
        self.said = []
        self.limits = []
        self.freeze_fails = None
        self.thaws_to_fail = 0
        self.answer = None
        self.status = None

    def name(self):
        return "web"

    def agentSetResponseTimeout(self, seconds, flags):  # noqa: N802 - libvirt's
        self.limits.append(seconds)

    def hear(self, command, arguments):
        self.said.append((command, *arguments.values()))
        if command in ("guest-fsfreeze-freeze", "guest-fsfreeze-freeze-list"):
            if self.freeze_fails is not REFUSED:
                self.frozen = True
            if self.freeze_fails:
                raise self.freeze_fails
            return 3
        if command == "guest-fsfreeze-thaw":
            if self.thaws_to_fail:
                self.thaws_to_fail -= 1
                raise Failure("guest agent is busy")
            self.frozen = False
            return 3
        if command == "guest-fsfreeze-status":
            if self.status:
                raise self.status
            return "frozen" if self.frozen else "thawed"
        return {}


@pytest.fixture
def guest(monkeypatch):
    made = Guest()

    def ask(domain, question, seconds, flags):
        assert domain is made
        assert 0 < seconds <= 7
        if isinstance(made.answer, Exception):
            raise made.answer
        if made.answer is not None:
            return made.answer
        asked = json.loads(question)
        return json.dumps({"return": made.hear(asked["execute"], asked.get("arguments", {}))})

    monkeypatch.setattr(libvirt_qemu, "qemuAgentCommand", ask)
    return made


def test_it_freezes_all_or_the_named_file_systems(guest):
    assert agent.freeze(guest, (), 7) == 3
    agent.freeze(guest, (Path("/srv"), Path("/a b")), 7)
    assert guest.said == [
        ("guest-fsfreeze-freeze",),
        ("guest-fsfreeze-freeze-list", ["/srv", "/a b"]),
    ]


def test_the_time_limit_of_other_programs_is_not_changed(guest):
    agent.freeze(guest, (), 7)
    agent.thaw(guest, 7)
    assert guest.limits == []


def test_the_limit_for_libvirts_own_requests_is_reset(guest):
    with suppress(KeyError), agent.answering(guest, 5):
        assert guest.limits == [5]
        raise KeyError
    assert guest.limits == [5, libvirt.VIR_DOMAIN_AGENT_RESPONSE_TIMEOUT_BLOCK]


@pytest.mark.parametrize("status", [None, LATE])
def test_a_freeze_without_an_answer_may_have_frozen_some_or_do_so_later(guest, status):
    """It is not thawed here: the caller has recorded that a thaw may be needed."""
    guest.freeze_fails, guest.status = LATE, status
    with pytest.raises(
        HypervisorError, match="web: its agent did not freeze: guest agent did not"
    ) as caught:
        agent.freeze(guest, (), 7)
    assert not isinstance(caught.value, NotFrozenByUsError)
    assert ("guest-fsfreeze-thaw",) not in guest.said


@pytest.mark.parametrize("frozen", [False, True])
def test_after_a_refused_freeze_any_frozen_state_is_another_programs(guest, frozen):
    guest.freeze_fails, guest.frozen = REFUSED, frozen
    with pytest.raises(NotFrozenByUsError, match="not allowed") as caught:
        agent.freeze(guest, (), 7)
    assert ("another program" in caught.value.reason) is frozen
    assert guest.frozen is frozen


def test_a_refusal_of_an_agent_that_then_does_not_answer_is_in_doubt(guest):
    guest.freeze_fails, guest.status = REFUSED, LATE
    with pytest.raises(HypervisorError) as caught:
        agent.freeze(guest, (), 7)
    assert not isinstance(caught.value, NotFrozenByUsError)


def test_a_thaw_counts_only_if_the_agent_confirms_it(guest):
    guest.frozen, guest.thaws_to_fail = True, 1
    agent.thaw(guest, 7)
    assert not guest.frozen
    assert guest.said.count(("guest-fsfreeze-thaw",)) == 2


def test_a_thaw_of_what_is_not_frozen_is_done(guest):
    agent.thaw(guest, 7)


def test_a_thaw_that_does_not_happen_is_an_error_with_its_cause(guest):
    guest.frozen, guest.thaws_to_fail = True, 99
    with pytest.raises(HypervisorError, match="could not be thawed: guest agent is busy") as caught:
        agent.thaw(guest, 7)
    assert caught.value.step
    assert guest.said.count(("guest-fsfreeze-thaw",)) == 3


def test_a_thaw_that_failed_because_nothing_was_frozen_is_done(guest):
    guest.thaws_to_fail = 99
    agent.thaw(guest, 7)


@pytest.mark.parametrize(
    "answer",
    [libvirt.libvirtError("not connected"), "", "{", "[]", "null", "{}", '{"error": {}}'],
    ids=str,
)
def test_an_invalid_answer_of_the_agent_is_an_error(guest, answer):
    guest.answer = answer
    assert agent.frozen(guest) is None
    assert not agent.answers(guest, 1)
    with pytest.raises(HypervisorError):
        agent.thaw(guest, 7)


def test_frozen_is_as_the_agent_reports(guest):
    assert agent.frozen(guest) is False
    agent.freeze(guest, (), 7)
    assert agent.frozen(guest) is True
    assert agent.answers(guest, 1)


# -- commands in the guest ------------------------------------------------------------------------


def answering(guest, **result):
    guest.answer = json.dumps({"return": result})


def encoded(text):
    return base64.b64encode(text.encode()).decode()


def test_a_command_is_started_with_its_arguments(guest):
    with pytest.raises(HypervisorError, match="its answer is invalid"):
        agent.start_command(guest, ["pg_amcheck", "--all"], 7)  # {}: no process number
    assert guest.said == [("guest-exec", "pg_amcheck", ["--all"], True)]
    answering(guest, pid=815)
    assert agent.start_command(guest, ["true"], 7) == 815


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ({"exited": False}, None),
        ({"exited": True, "exitcode": 0}, GuestExit(0, "")),
        ({"exited": True, "exitcode": 2, "err-data": encoded("no\n")}, GuestExit(2, "no\n")),
        ({"exited": True, "signal": 9, "out-data": encoded("half")}, GuestExit(-9, "half")),
        (
            {"exited": True, "exitcode": 1, "out-data": encoded("a"), "err-data": encoded("b")},
            GuestExit(1, "ab"),
        ),
        ({"exited": True, "exitcode": 1, "out-data": "//8="}, GuestExit(1, "\ufffd\ufffd")),
    ],
)
def test_how_a_command_has_ended(guest, answer, found):
    answering(guest, **answer)
    assert agent.command_exit(guest, 815, 7) == found


def test_of_a_long_output_the_end_is_kept(guest):
    answering(guest, exited=True, exitcode=1, **{"out-data": encoded("x" * 9_000_000 + "the end")})
    output = agent.command_exit(guest, 815, 7).output
    assert output.endswith("xthe end")
    assert len(output) < 4096


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"exited": "yes", "exitcode": 0},
        {"exited": True},
        {"exited": True, "exitcode": None},
        {"exited": True, "exitcode": 0, "out-data": "!"},
    ],
    ids=str,
)
def test_an_invalid_answer_is_never_a_success(guest, answer):
    answering(guest, **answer)
    with suppress(HypervisorError):
        assert agent.command_exit(guest, 815, 7) is None


def test_an_agent_that_does_not_answer_is_asked_again(guest):
    """It may be slow; that the command is unknown is its answer, and final."""
    guest.answer = LATE
    assert agent.command_exit(guest, 815, 7) is None
    guest.answer = REFUSED
    with pytest.raises(libvirt.libvirtError, match="not allowed"):
        agent.command_exit(guest, 815, 7)
