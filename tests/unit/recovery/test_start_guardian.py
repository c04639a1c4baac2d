"""The command that starts a guardian, and one that is really started."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.hypervisor import Agent

from snaporch.errors import InterruptedRunError, UnavailableError
from snaporch.journal import Journal, Note
from snaporch.locks import domain_lock
from snaporch.model import DomainState
from snaporch.recovery import start_guardian
from snaporch.snapshot.plan import make_plan
from snaporch.snapshot.request import SnapshotRequest

SYSTEMD_RUN = "/usr/bin/systemd-run"
REAL = start_guardian.start_guardian


@pytest.fixture(autouse=True)
def real(world, monkeypatch):
    """The real function instead of the world's, which starts no process."""
    monkeypatch.setattr(start_guardian, "start_guardian", REAL)


@pytest.fixture
def facts(world):
    """Facts of a run at a level."""

    def make(level="ram", **guest):
        domain = world.add_guest(agent=Agent.ANSWERS, **guest)
        return make_plan(world.context, domain, SnapshotRequest("s1", level)).facts

    return make


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The processes that were started, with their options; on a host without systemd."""
    calls = []
    monkeypatch.setattr(
        start_guardian.subprocess, "Popen", lambda words, **how: calls.append((words, how))
    )
    monkeypatch.setattr(start_guardian, "SYSTEMD", tmp_path / "no-systemd")
    return calls


@pytest.fixture
def systemd(monkeypatch, tmp_path):
    """On a host with systemd."""
    monkeypatch.setattr(start_guardian, "SYSTEMD", tmp_path)
    monkeypatch.setattr(start_guardian.shutil, "which", lambda name: SYSTEMD_RUN)


JOURNAL = Path("/journal/run.jsonl")


@pytest.mark.parametrize("level", ["ram", "quiesced", "paused"])
def test_a_guest_that_may_be_held_is_guarded(world, facts, started, level):
    world.with_defaults(freeze_deadline="17s")
    start_guardian.start_guardian(world.context, facts(level), JOURNAL)
    ((words, how),) = started
    assert words == [
        *[sys.executable, "-P", "-m", "snaporch.recovery.guardian"],
        *[str(os.getpid()), str(JOURNAL), "17", "qemu:///system"],
    ]
    assert how["start_new_session"]
    assert {how[stream] for stream in ("stdin", "stdout", "stderr")} == {subprocess.DEVNULL}


def test_a_guest_that_runs_on_needs_no_guardian(world, facts, started):
    start_guardian.start_guardian(world.context, facts("crash"), JOURNAL)
    assert started == []


def test_a_guest_that_is_off_needs_no_guardian(world, facts, started):
    start_guardian.start_guardian(world.context, facts(state=DomainState.OFF), JOURNAL)
    assert started == []


def test_the_deadline_is_the_domains_own(world, facts, started):
    config = world.context.config.model_copy(update={"domain": {"web": {"freeze_deadline": "5s"}}})
    world.context.config = config
    start_guardian.start_guardian(world.context, facts(), JOURNAL)
    assert started[0][0][-2] == "5"


def test_the_guardian_gets_the_absolute_path_of_the_configuration(
    world, facts, started, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    world.context.config_path = Path("other.toml")
    start_guardian.start_guardian(world.context, facts(), JOURNAL)
    assert started[0][0][-1] == str(tmp_path / "other.toml")


def test_with_systemd_a_guardian_is_a_unit_of_its_own(world, facts, started, systemd, monkeypatch):
    """The children of a service are killed with it."""
    run_facts = facts()
    units = []
    monkeypatch.setattr(start_guardian, "_works", lambda words: units.append(words) or True)
    start_guardian.start_guardian(world.context, run_facts, JOURNAL)
    assert started == []
    (words,) = units
    assert words[0] == "systemd-run"
    assert f"--unit=snaporch-guardian-{run_facts.run}" in words
    assert {"--collect", "--property=OOMPolicy=continue"} <= set(words)
    assert words[words.index(sys.executable) :][1:4] == ["-P", "-m", "snaporch.recovery.guardian"]


def test_a_unit_that_cannot_be_started_is_replaced_by_a_process(
    world, facts, started, systemd, monkeypatch
):
    monkeypatch.setattr(start_guardian, "_works", lambda _words: False)
    start_guardian.start_guardian(world.context, facts(), JOURNAL)
    assert started[0][0][0] == sys.executable


def test_on_a_host_without_systemd_run_a_guardian_is_a_process(
    world, facts, started, monkeypatch, tmp_path
):
    monkeypatch.setattr(start_guardian, "SYSTEMD", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    start_guardian.start_guardian(world.context, facts(), JOURNAL)
    assert started[0][0][0] == sys.executable


def test_in_a_container_without_systemd_a_guardian_is_a_process(world, facts, started, monkeypatch):
    monkeypatch.setattr(start_guardian.shutil, "which", lambda name: SYSTEMD_RUN)
    start_guardian.start_guardian(world.context, facts(), JOURNAL)
    assert started[0][0][0] == sys.executable


def test_a_run_that_waits_for_a_guardian_that_cannot_be_started_fails(
    world, facts, started, monkeypatch
):
    def fail(words, **how):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(start_guardian.subprocess, "Popen", fail)
    monkeypatch.setattr(start_guardian, "_START_SECONDS", 0)
    run_facts = facts()
    journal = Journal(world.paths.journal, run_facts)
    start_guardian.start_guardian(world.context, run_facts, journal.path)
    with pytest.raises(UnavailableError, match="did not start within 0 s"):
        start_guardian.await_guardian(world.context, run_facts, journal.path)


def test_the_wait_for_a_guardian_ends_with_a_signal(world, facts):
    run_facts = facts()
    journal = Journal(world.paths.journal, run_facts)
    world.context.interrupt.signum = 15
    with pytest.raises(InterruptedRunError):
        start_guardian.await_guardian(world.context, run_facts, journal.path)


@pytest.mark.parametrize("level", ["crash", "off"])
def test_a_run_that_needs_no_guardian_waits_for_none(world, facts, level):
    state = DomainState.OFF if level == "off" else DomainState.RUNNING
    run_facts = facts("crash", state=state)
    start_guardian.await_guardian(world.context, run_facts, JOURNAL)


def test_a_real_guardian_ends_when_the_journal_is_removed(world, facts, monkeypatch, tmp_path):
    real, processes = subprocess.Popen, []

    def start(words, **how):
        processes.append(real(words, **how))
        return processes[-1]

    monkeypatch.setattr(start_guardian, "SYSTEMD", tmp_path / "no-systemd")
    monkeypatch.setattr(start_guardian.subprocess, "Popen", start)
    run_facts = facts()
    journal = Journal(world.paths.journal, run_facts)
    start_guardian.start_guardian(world.context, run_facts, journal.path)
    (process,) = processes
    try:
        start_guardian.await_guardian(world.context, run_facts, journal.path)
        assert os.getsid(process.pid) == process.pid
        journal.close(settled=True)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


# -- guardians of interrupted runs ---------------------------------------------------------------


@pytest.fixture
def left(world, facts):
    """The journal of a run that suspended its guest, and was killed."""
    run_facts = facts("paused")
    journal = Journal(world.paths.journal, run_facts)
    journal.note(Note.SUSPENDED)
    journal.close(settled=False)
    return run_facts, journal.path


def test_a_guest_that_may_be_held_has_a_guardian_again(world, left, started):
    run_facts, path = left
    start_guardian.guard_leftovers(world.context)
    ((words, _how),) = started
    assert words[4:6] == ["0", str(path)]
    assert run_facts.run in path.name


def test_a_released_guest_needs_no_guardian(world, left, started):
    journal = Journal.reopen(left[1])
    journal.note(Note.RELEASED)
    journal.close(settled=False)
    start_guardian.guard_leftovers(world.context)
    assert started == []


def test_a_guest_with_a_guardian_gets_no_second_one(world, left, started):
    with left[1].open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_SH)
        start_guardian.guard_leftovers(world.context)
    assert started == []


def test_a_domain_whose_lock_is_held_gets_no_guardian(world, left, started):
    run_facts, context = left[0], world.context
    place = {"wait": 0, "interrupt": context.interrupt}
    with domain_lock(
        start_guardian.default_paths.LOCKS, run_facts.domain, run_facts.uuid, "snapshot", **place
    ):
        start_guardian.guard_leftovers(context)
    assert started == []
