"""The command that starts a guardian, and one that is really started."""

import fcntl
import json
import os
import sys
from pathlib import Path

import pytest
from fakes.hypervisor import Agent

from snaporch import default_paths
from snaporch.errors import InterruptedRunError, UnavailableError
from snaporch.journal import Journal, Note
from snaporch.locks import domain_lock
from snaporch.model import DomainState
from snaporch.recovery.start_guardian import await_guardian, guard_leftovers, start_guardian
from snaporch.snapshot.plan import make_plan
from snaporch.snapshot.request import SnapshotRequest
from snaporch.systemd.start_detached import start_detached

JOURNAL = Path("/journal/run.jsonl")


@pytest.fixture
def facts(world):
    """Facts of a run at a level."""

    def make(level="ram", **guest):
        domain = world.add_guest(agent=Agent.ANSWERS, **guest)
        return make_plan(world.context, domain, SnapshotRequest("s1", level)).facts

    return make


@pytest.fixture
def started():
    """The units and commands that were started."""
    return []


@pytest.fixture
def start(world, started):
    """Starts a guardian, of which only the unit and the command are noted."""

    def note(unit, command):
        started.append((unit, command))

    def begin(facts, **process):
        world.context.start_detached = note
        start_guardian(world.context, facts, JOURNAL, **process)

    return begin


@pytest.fixture
def no_systemd(tmp_path):
    return tmp_path / "no-systemd"


@pytest.fixture
def systemd_run(tmp_path, monkeypatch):
    """Installs a systemd-run that notes its words and exits with a status; the words' file."""

    def install(status):
        words, program = tmp_path / "words", tmp_path / "bin" / "systemd-run"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nprintf \'%s\\n\' "$0" "$@" > {words}\nexit {status}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent))
        return words

    return install


WRITES_ITSELF = """
import json, os, sys
streams = [os.readlink(f"/proc/self/fd/{each}") for each in range(3)]
leader = os.getsid(0) == os.getpid()
with open(sys.argv[1], "w") as stream:
    json.dump({"streams": streams, "leader": leader, "environment": dict(os.environ)}, stream)
"""


@pytest.fixture
def detached(tmp_path):
    """Starts a process, and returns what it writes of itself."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def start(systemd):
        command = [sys.executable, "-c", WRITES_ITSELF, str(pipe)]
        with start_detached("unit", command, systemd=systemd):
            return json.loads(pipe.read_text())

    return start


@pytest.mark.parametrize("level", ["ram", "quiesced", "paused"])
def test_a_guest_that_may_be_held_is_guarded(world, facts, start, started, level):
    world.with_defaults(freeze_deadline="17s")
    run_facts = facts(level)
    start(run_facts)
    ((unit, words),) = started
    assert unit == f"snaporch-guardian-{run_facts.run}"
    assert words == [
        *[sys.executable, "-P", "-m", "snaporch.recovery.guardian"],
        *[str(os.getpid()), str(JOURNAL), "17", "qemu:///system"],
    ]


def test_a_guest_that_runs_on_needs_no_guardian(facts, start, started):
    start(facts("crash"))
    assert started == []


def test_a_guest_that_is_off_needs_no_guardian(facts, start, started):
    start(facts(state=DomainState.OFF))
    assert started == []


def test_the_deadline_is_the_domains_own(world, facts, start, started):
    config = world.context.config.model_copy(update={"domain": {"web": {"freeze_deadline": "5s"}}})
    world.context.config = config
    start(facts())
    assert started[0][1][-2] == "5"


def test_the_guardian_gets_the_absolute_path_of_the_configuration(
    world, facts, start, started, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    world.context.config_path = Path("other.toml")
    start(facts())
    assert started[0][1][-1] == str(tmp_path / "other.toml")


def test_the_guardian_of_a_run_that_has_exited_waits_for_no_process(facts, start, started):
    start(facts(), process=0)
    assert started[0][1][4] == "0"


def test_with_systemd_a_guardian_is_a_unit_of_its_own(world, facts, systemd_run, tmp_path):
    """The children of a service are killed with it."""
    run_facts, noted, processes = facts(), systemd_run(0), []

    def start(unit, command):
        processes.append(start_detached(unit, command, systemd=tmp_path))

    world.context.start_detached = start
    start_guardian(world.context, run_facts, JOURNAL)
    assert processes == [None]
    words = noted.read_text().splitlines()
    assert Path(words[0]).name == "systemd-run"
    assert f"--unit=snaporch-guardian-{run_facts.run}" in words
    assert {"--collect", "--property=OOMPolicy=continue"} <= set(words)
    # SIGTERM for the run's helpers would make it fail; libvirt-guests is stopped after it
    assert {"--property=KillMode=mixed", "--property=TimeoutStopSec=10min"} <= set(words)
    (after,) = [word.partition("=After=")[2].split() for word in words if "=After=" in word]
    assert {"libvirt-guests.service", "libvirtd.service", "virtqemud.service"} <= set(after)
    assert words[words.index(sys.executable) :][1:4] == ["-P", "-m", "snaporch.recovery.guardian"]


def test_a_detached_process_has_a_session_of_its_own_and_no_streams(
    detached, no_systemd, monkeypatch
):
    monkeypatch.setenv("SANOID_SCRIPT", "pre")
    found = detached(no_systemd)
    assert found["leader"]
    assert found["streams"] == [os.devnull] * 3
    assert not [name for name in found["environment"] if name.startswith("SANOID_")]


def test_a_unit_that_cannot_be_started_is_replaced_by_a_process(detached, systemd_run, tmp_path):
    words = systemd_run(1)
    assert detached(tmp_path)["leader"]
    assert words.exists()


def test_on_a_host_without_systemd_run_a_guardian_is_a_process(detached, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert detached(tmp_path)["leader"]


def test_in_a_container_without_systemd_a_guardian_is_a_process(detached, systemd_run, no_systemd):
    words = systemd_run(0)
    assert detached(no_systemd)["leader"]
    assert not words.exists()


def test_a_run_that_waits_for_a_guardian_that_cannot_be_started_fails(world, facts, no_systemd):
    def fail(unit, _command):
        start_detached(unit, ["/no/such/program"], systemd=no_systemd)

    run_facts = facts()
    journal = Journal(world.paths.journal, run_facts)
    world.context.start_detached = fail
    start_guardian(world.context, run_facts, journal.path)
    with pytest.raises(UnavailableError, match="did not start within 0 s"):
        await_guardian(world.context, run_facts, journal.path, seconds=0)


def test_the_wait_for_a_guardian_ends_with_a_signal(world, facts):
    run_facts = facts()
    journal = Journal(world.paths.journal, run_facts)
    world.context.interrupt.signum = 15
    with pytest.raises(InterruptedRunError):
        await_guardian(world.context, run_facts, journal.path)


@pytest.mark.parametrize("level", ["crash", "off"])
def test_a_run_that_needs_no_guardian_waits_for_none(world, facts, level):
    state = DomainState.OFF if level == "off" else DomainState.RUNNING
    run_facts = facts("crash", state=state)
    await_guardian(world.context, run_facts, JOURNAL)


def test_a_real_guardian_ends_when_the_journal_is_removed(world, facts, no_systemd):
    run_facts, processes = facts(), []
    journal = Journal(world.paths.journal, run_facts)

    def start(unit, command):
        processes.append(start_detached(unit, command, systemd=no_systemd))

    world.context.start_detached = start
    start_guardian(world.context, run_facts, journal.path)
    (process,) = processes
    try:
        await_guardian(world.context, run_facts, journal.path)
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


def test_a_guest_that_may_be_held_has_a_guardian_again(world, left):
    guard_leftovers(world.context)
    assert world.guarded_again == [left[0]]


def test_a_released_guest_needs_no_guardian(world, left):
    journal = Journal.reopen(left[1])
    journal.note(Note.RELEASED)
    journal.close(settled=False)
    guard_leftovers(world.context)
    assert world.guarded_again == []


def test_a_guest_with_a_guardian_gets_no_second_one(world, left):
    with left[1].open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_SH)
        guard_leftovers(world.context)
    assert world.guarded_again == []


def test_a_domain_whose_lock_is_held_gets_no_guardian(world, left):
    run_facts, context = left[0], world.context
    place = {"wait": 0, "interrupt": context.interrupt}
    with domain_lock(default_paths.LOCKS, run_facts.domain, run_facts.uuid, "snapshot", **place):
        guard_leftovers(context)
    assert world.guarded_again == []
