"""The guardian's own loop, with a real process to watch over and a real journal."""

import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
from fakes.hooks import failing
from fakes.hypervisor import Agent

from snaporch.catalog.torn import commits_in
from snaporch.disks import overlay_files
from snaporch.errors import ConfigError, UnavailableError
from snaporch.fence import Fence
from snaporch.hypervisor import HypervisorError
from snaporch.journal import Journal, Note, Step, read_journals, release_mark
from snaporch.model import DomainState, Strategy
from snaporch.recovery import guardian, guardian_actions, hold_limits
from snaporch.recovery.guardian_actions import Host, RunningPoll
from snaporch.recovery.release_guest import is_ours_to_resume
from snaporch.snapshot.plan import make_plan
from snaporch.snapshot.request import SnapshotRequest
from snaporch.zfs import PoolError

URI = "qemu:///system"
LEVELS = {"manual": "ram", "overlay": "ram", "paused": "paused", "quiesced": "quiesced"}
STILL = ["manual", "paused", "quiesced"]

pytestmark = pytest.mark.timeout(300)  # one with finite patience never ends


class Recovered(BaseException):
    """The guardian began ``snaporch recover``."""


class Tools:
    """What the guardian is handed: the world's libvirt and ZFS, and short intervals."""

    def __init__(self, world):
        self.host = Host(
            open_hypervisor=lambda _uri: world.hypervisor,
            open_pool=lambda: world.pool,
            fences=world.fences.directory,
        )
        self.times = guardian.GuardianTimes(poll=0.01)
        self.actions = guardian.Actions()

    def use(self, **host):
        self.host = self.host._replace(**host)

    def use_clock(self, clock):
        self.use(monotonic=clock.monotonic, sleep=clock.sleep)

    def use_times(self, **times):
        self.times = self.times._replace(**times)

    def absent(self):
        """Libvirt does not answer."""

        def fail(_uri):
            raise UnavailableError(URI, "does not answer")

        self.use(open_hypervisor=fail)

    def recover_by(self, recover):
        self.actions = self.actions._replace(recover=recover)

    def release_by(self, release):
        self.actions = self.actions._replace(release=release)

    def guardian(self, path, deadline):
        return guardian._Guardian(path, deadline, URI, self.host, self.times, self.actions)


@pytest.fixture
def tools(world):
    return Tools(world)


@pytest.fixture
def process():
    """A process in place of the run; it exits when its standard input is closed."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as made:
        yield made
        with suppress(BrokenPipeError):
            made.stdin.close()
        made.wait()


class Run:
    """A run with a strategy; only its journal exists."""

    def __init__(self, world, tools, strategy, **guest):
        self.tools = tools
        world.add_guest(agent=Agent.ANSWERS, **guest)
        way = strategy if LEVELS[strategy] == "ram" else "auto"
        context = world.with_defaults(ram_strategy=way)
        plan = make_plan(
            context, world.hypervisor.domain("web"), SnapshotRequest("s1", LEVELS[strategy])
        )
        assert plan.strategy == strategy
        self.world, self.facts = world, plan.facts
        self.journal = Journal(world.paths.journal, plan.facts)
        self.path = self.journal.path

    def write(self, event, step):
        self.journal._write(event=event, step=step.value)
        return self

    def frozen(self):
        """Write the journal as far as the frozen window."""
        for step in (Step.PREPARE, Step.FREEZE):
            self.write("begin", step).write("end", step)
        if self.facts.overlays:
            Path(self.facts.overlay_dir).mkdir(parents=True, exist_ok=True)
            for disk in self.facts.overlays:
                Path(disk.overlay).touch()
        return self

    def over(self):
        """The run ends without a failure."""
        with suppress(FileNotFoundError):
            self.journal.close(settled=True)


@pytest.fixture
def begin(world, tools):
    made = []

    def make(strategy="manual", **guest):
        made.append(Run(world, tools, strategy, **guest))
        return made[-1]

    yield make
    for run in made:
        with suppress(OSError):
            run.journal.close(settled=False)


@pytest.fixture
def recovering(tools):
    """The recoveries that the guardian began."""
    commands = []

    def recover(words, *_how):
        commands.append(words)
        raise Recovered

    tools.recover_by(recover)
    return commands


@pytest.fixture
def releases(tools):
    """Counts the guardian's releases of a guest whose run is alive; calls ``then`` at each."""

    class Releases:
        times = 0
        then = staticmethod(lambda: None)

        def __call__(self, window, lines, uri, journal, host, *, run_ended=False):
            if not run_ended:
                self.times += 1
                self.window = window
                self.then()
            return True

    made = Releases()
    tools.release_by(made)
    return made


def lines_of(run):
    return run.tools.guardian(run.path, 60)._read_journal()


def guard(run, pid, deadline="60", *config):
    tools, arguments = run.tools, [str(pid), str(run.path), deadline, URI, *config]
    with suppress(Recovered):
        guardian.main(arguments, tools.host, tools.times, tools.actions)


def looking(run, times, then):
    """Call ``then`` before the given check; until then the guardian must only check."""
    real, left = run.tools.host.await_exit, [times]

    def await_exit(process, seconds):
        exited = real(process, seconds)
        left[0] -= 1
        if left[0] == 0:
            then()
        return exited

    run.tools.use(await_exit=await_exit)


# -- the end of the run -------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
def test_it_ends_when_the_journal_is_removed(begin, process, recovering, frozen):
    run = begin()
    if frozen:
        run.frozen()
    looking(run, 3, run.over)
    guard(run, process.pid)
    assert recovering == []
    assert process.poll() is None


def test_a_run_that_was_killed_is_recovered(begin, process, recovering):
    run = begin().frozen()
    looking(run, 2, process.kill)
    guard(run, process.pid)
    (command,) = recovering
    assert command[:4] == [sys.executable, "-P", "-m", "snaporch"]
    assert command[4:] == ["recover", "--wait", "600s", "--notify", run.facts.uuid]


def test_it_is_recovered_with_the_same_configuration(begin, process, recovering):
    run = begin()
    looking(run, 1, process.kill)
    guard(run, process.pid, "60", "/etc/other.toml")
    (command,) = recovering
    assert command[4:6] == ["--config", "/etc/other.toml"]


def test_a_run_that_is_dead_already_is_recovered(begin, process, recovering):
    run = begin()
    process.kill()
    process.wait()
    guard(run, process.pid)
    assert len(recovering) == 1


def test_a_run_that_ended_before_the_guardian_began(begin, process, recovering):
    run = begin()
    run.over()
    process.kill()
    process.wait()
    guard(run, process.pid)
    assert recovering == []


def test_a_zombie_is_dead(begin, process, recovering):
    """The run's parent may not have waited for it yet."""
    run = begin()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    guard(run, process.pid)
    assert len(recovering) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 512])
def test_a_journal_without_facts_is_left_to_the_next_run(begin, process, recovering, content):
    run = begin()
    run.path.write_bytes(content)
    process.kill()
    guard(run, process.pid)
    assert recovering == []


def test_the_recovery_is_a_valid_command(begin, process, recovering):
    """Its arguments are valid: without a host the command fails, but not with wrong usage."""
    from typer.testing import CliRunner

    from snaporch.cli.main import app

    run = begin()
    looking(run, 1, process.kill)
    guard(run, process.pid, "60", str(run.path))
    words = recovering[0][4:]
    answer = CliRunner().invoke(app, words)
    assert isinstance(answer.exception, ConfigError)
    assert answer.exception.thing == str(run.path)


# -- releasing the guest -------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STILL)
def test_a_guest_held_too_long_is_released_once(begin, process, recovering, releases, strategy):
    run = begin(strategy).frozen()
    looking(run, 10, run.over)
    guard(run, process.pid, "0")
    assert releases.times == 1


def test_the_time_counts_from_the_first_check_that_sees_the_window(begin, process, releases):
    run = begin("paused").frozen()
    run.tools.use(monotonic=itertools.count(1).__next__)
    looking(run, 30, run.over)
    guard(run, process.pid, "10")
    assert releases.times == 1


def test_the_mark_is_written_before_the_guest_is_released(begin, process, recovering, releases):
    """The run may check at that moment, and must not take the resume for its own."""
    run, marked = begin("paused").frozen(), []
    releases.then = lambda: (marked.append(release_mark(run.path).exists()), process.kill())
    guard(run, process.pid, "0")
    assert marked == [True]


@pytest.mark.parametrize("strategy", [*STILL, "overlay"])
def test_within_the_deadline_it_is_left_alone(begin, process, releases, strategy):
    run = begin(strategy).frozen()
    looking(run, 5, run.over)
    guard(run, process.pid, "60")
    assert releases.times == 0


@pytest.mark.parametrize("strategy", [*STILL, "overlay"])
def test_before_the_freeze_it_is_left_alone(begin, process, releases, strategy):
    run = begin(strategy).write("begin", Step.PREPARE).write("end", Step.PREPARE)
    looking(run, 5, run.over)
    guard(run, process.pid, "0")
    assert releases.times == 0


@pytest.mark.parametrize("strategy", [*STILL, "overlay"])
def test_after_the_release_it_is_left_alone(begin, process, releases, strategy):
    run = begin(strategy).frozen()
    for step in (Step.POOL_SNAPSHOT, Step.RELEASE):
        run.write("begin", step).write("end", step)
    run.write("begin", Step.SEAL)
    looking(run, 5, run.over)
    guard(run, process.pid, "0")
    assert releases.times == 0


class Time:
    """A clock that advances at each sleep and each reading."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        self.now += 0.001
        return self.now

    def sleep(self, _seconds):
        self.now += 1.0


def test_a_release_that_fails_is_retried_after_growing_intervals(begin, process, releases):
    run, clock, tries = begin("paused").frozen(), Time(), []
    run.tools.use_clock(clock)

    def fail(*_what):
        tries.append(clock.now)
        if len(tries) == 9:
            run.over()
        return False

    run.tools.use(await_exit=lambda _process, seconds: clock.sleep(seconds))
    run.tools.release_by(fail)
    guard(run, process.pid, "0")
    waited = [round(after - before) for before, after in itertools.pairwise(tries)]
    assert waited == sorted(waited)
    assert waited[0] <= 3
    assert waited[-1] in (60, 61)


@pytest.mark.parametrize(("notes", "longest"), [(["suspended"], 60), (["released"], 3600)])
def test_a_recovery_is_retried_soon_for_a_guest_that_may_be_held(begin, notes, longest):
    run, clock, tries = begin("paused").frozen(), Time(), []
    run.tools.absent()
    for note in notes:
        run.journal.note(Note(note))
    run.tools.use_clock(clock)

    def recover(_words, *_how):
        tries.append(clock.now)
        if len(tries) == 14:
            run.over()
        return b""

    run.tools.recover_by(recover)
    guard(run, 0, "60")
    waited = [after - before for before, after in itertools.pairwise(tries)]
    assert waited == sorted(waited) or max(waited) < longest * 1.1
    assert longest <= max(waited) <= longest * 1.1 + 2


def test_a_recovery_that_hangs_is_killed_and_has_longer_the_next_time(begin, capsys):
    run, limits = begin("paused").frozen(), []
    run.tools.use_times(retry=0.01)

    def recover(words, timeout, *_how):
        limits.append(timeout)
        if len(limits) == 3:
            run.over()
        raise subprocess.TimeoutExpired(words, timeout)

    run.tools.recover_by(recover)
    guard(run, 0, "60")
    assert limits == [3600, 7200, 14400]
    assert "timed out" in capsys.readouterr().err


def test_the_output_of_a_recovery_is_printed_and_it_has_a_time_limit():
    looks = []
    says = [sys.executable, "-c", "import sys; sys.stderr.write('no pool')"]
    assert guardian.run_recovery(says, 60, lambda: looks.append(1), 0.01) == b"no pool"
    with pytest.raises(subprocess.TimeoutExpired):
        guardian.run_recovery(["sleep", "60"], 0.05, lambda: looks.append(1), 0.01)
    assert looks


def test_a_guest_that_a_recovery_suspends_is_watched(begin, host):
    """A recovery may hang or be killed while its commit has the guest suspended."""
    run = begin("overlay").frozen()
    guest = host.guest()

    def recover(_words, _limit, look, _interval):
        look()
        run.journal.note(Note.SUSPENDED)
        guest.state, guest.paused_reason = DomainState.PAUSED, "user"
        look()
        run.over()
        return b""

    run.tools.recover_by(recover)
    guard(run, 0, "0")
    assert guest.state is DomainState.RUNNING


def test_a_recovery_that_commits_is_left_to_it(begin, host, releases):
    host.paths = host.paths.model_copy(update={"overlay_floor_mib": 1 << 30})
    run = begin("overlay").frozen()

    def recover(_words, _limit, look, _interval):
        look()
        look()
        run.over()
        return b""

    run.tools.recover_by(recover)
    guard(run, 0, "0")
    assert releases.times == 0


def test_equal_output_is_printed_again_after_growing_intervals(tools, tmp_path, capsys):
    clock = Time()
    tools.use_clock(clock)
    watching = tools.guardian(tmp_path / "run.jsonl", 60)
    printed = guardian._RepeatFilter(lambda: watching._backoff(tools.times.max_retry))
    for _second in range(100):
        printed.write(b"busy\n")
        clock.sleep(1)
    assert 5 <= capsys.readouterr().err.count("busy") <= 8
    printed.write(b"other\n")
    printed.write(b"")
    printed.write(b"busy\n")
    assert capsys.readouterr().err == "other\nbusy\n"


@pytest.mark.parametrize(
    ("strategy", "frozen", "note", "reason"),
    [
        ("paused", False, "suspended", "user"),
        ("quiesced", False, "freezing", None),
        ("manual", True, None, "snapshot"),
        ("manual", False, "suspended", "user"),
        ("overlay", True, "suspended", "user"),
    ],
)
def test_a_guest_is_released_before_anything_else_is_asked_for(
    begin, host, recovering, strategy, frozen, note, reason
):
    """A recovery opens the configuration and ZFS first."""
    run = begin(strategy)
    run.tools.use(open_pool=lambda: pytest.fail("no pool"))
    run = run.frozen() if frozen else run.write("begin", Step.FREEZE)
    if note:
        run.journal.note(Note(note))
    guest = host.guest()
    guest.frozen = note == "freezing"
    if reason:
        guest.state, guest.paused_reason = DomainState.PAUSED, reason
    guard(run, 0)
    assert len(recovering) == 1
    assert guest.state is DomainState.RUNNING
    assert not guest.frozen
    (journal,) = read_journals(host.paths.journal)
    assert not journal.held
    assert not release_mark(run.path).exists()
    guest.state, guest.paused_reason = DomainState.PAUSED, "user"
    guard(run, 0)
    assert guest.state is DomainState.PAUSED


def test_a_killed_run_on_its_overlays_is_released_by_its_recovery(begin, host, recovering):
    """The recovery has the domain's lock."""
    run = begin("overlay").frozen()
    disk = run.facts.overlays[0]
    host.guest().live = host.guest().live.replace(disk.base, disk.overlay)
    guard(run, 0)
    assert len(recovering) == 1
    assert not host.on_bases()


def test_the_guardian_does_not_wait_for_a_run_that_has_exited(begin, recovering):
    """Process ID 0 stands for a run that has exited."""
    run = begin("paused").frozen()
    guard(run, 0)
    assert len(recovering) == 1


@pytest.mark.parametrize("strategy", STILL)
def test_a_released_guest_is_not_in_the_window(begin, strategy):
    """A later freeze or pause is not the run's."""
    run = begin(strategy).frozen()
    run.journal.note(Note.FREEZING)
    assert hold_limits.hold_of(lines_of(run)) is hold_limits.GuestHold.STOPPED
    run.journal.note(Note.RELEASED)
    assert hold_limits.hold_of(lines_of(run)) is None


@pytest.mark.parametrize("is_fenced", [False, True])
def test_a_guest_that_a_failover_ends_is_left_to_its_recovery(begin, host, recovering, is_fenced):
    """A failover that was killed before its fence exists releases the guest at once."""
    run = begin("manual").frozen()
    run.journal.note(Note.ENDING)
    assert hold_limits.hold_of(lines_of(run)) is None
    guest = host.guest()
    guest.state, guest.paused_reason = DomainState.PAUSED, "snapshot"
    if is_fenced:
        host.fences.put(Fence(guest.uuid, "web", run=run.facts.run))
    guard(run, 0)
    assert len(recovering) == 1
    assert guest.state is (DomainState.PAUSED if is_fenced else DomainState.RUNNING)


def test_a_release_that_comes_with_the_end_of_a_failover_is_not_carried_out(begin, host, tools):
    """The failover notes that it ends the guest, and then looks for the mark."""
    run = begin("manual").frozen()
    guardian_of_run = tools.guardian(run.path, 0)
    tools.release_by(lambda *_more: pytest.fail("released"))
    guardian_of_run = tools.guardian(run.path, -1)
    marks = guardian_of_run._mark_released

    def mark():
        marks()
        run.journal.note(Note.ENDING)

    guardian_of_run._mark_released = mark
    guardian_of_run._check()
    assert release_mark(run.path).exists()


@pytest.mark.parametrize(("strategy", "note"), [("paused", "suspended"), ("quiesced", "freezing")])
def test_a_guest_held_after_its_release_is_in_the_window(begin, strategy, note):
    run = begin(strategy).write("begin", Step.FREEZE)
    run.journal.note(Note(note))
    run.journal.note(Note.RELEASED)
    assert hold_limits.hold_of(lines_of(run)) is None
    run.write("end", Step.FREEZE)
    assert hold_limits.hold_of(lines_of(run)) is hold_limits.GuestHold.STOPPED
    (journal,) = read_journals(run.world.paths.journal)
    assert journal.held
    run.journal.note(Note.RELEASED)
    assert hold_limits.hold_of(lines_of(run)) is None


def test_a_guest_paused_only_after_its_release_is_resumed(begin, host, process, recovering):
    """libvirt or QEMU may carry out a suspend late."""
    run = begin("paused").write("begin", Step.FREEZE)
    run.tools.use_times(retry=0.01)
    run.journal.note(Note.SUSPENDED)

    def late():
        host.guest().state, host.guest().paused_reason = DomainState.PAUSED, "user"
        host.hooks.at["hypervisor.resume"] = process.kill

    looking(run, 10, late)
    guard(run, process.pid, "0")
    assert host.guest().state is DomainState.RUNNING


def test_a_guest_paused_just_after_its_release_is_released_again(
    begin, process, recovering, releases
):
    """Between two checks."""
    run = begin("paused").write("begin", Step.FREEZE)
    run.tools.use_times(retry=0.01)
    run.journal.note(Note.SUSPENDED)

    def then():
        run.journal.note(Note.RELEASED)
        run.write("end", Step.FREEZE)
        releases.then = process.kill

    releases.then = then
    looking(run, 40, process.kill)
    guard(run, process.pid, "0")
    assert releases.times == 2


@pytest.mark.parametrize("strategy", STILL)
def test_a_guest_is_not_left_paused_by_a_release_that_hangs(begin, process, releases, strategy):
    run = begin(strategy).frozen()
    run.write("begin", Step.POOL_SNAPSHOT).write("end", Step.POOL_SNAPSHOT)
    run.write("begin", Step.RELEASE)
    looking(run, 5, run.over)
    guard(run, process.pid, "0")
    assert releases.times == 1


@pytest.mark.parametrize(("strategy", "note"), [("paused", "suspended"), ("quiesced", "freezing")])
def test_a_run_that_hangs_while_it_freezes_is_in_the_window(
    begin, process, releases, strategy, note
):
    run = begin(strategy).write("begin", Step.FREEZE)
    run.journal.note(Note(note))
    looking(run, 5, run.over)
    guard(run, process.pid, "0")
    assert releases.times == 1


@pytest.mark.parametrize(("notes", "times"), [(["suspended"], 1), (["suspended", "resumed"], 0)])
def test_a_guest_suspended_for_its_commit_is_released(begin, process, releases, notes, times):
    run = begin("overlay").frozen().write("begin", Step.RELEASE)
    for note in notes:
        run.journal.note(Note(note))
    looking(run, 5, run.over)
    guard(run, process.pid, "0")
    assert releases.times == times


def test_a_guest_suspended_for_its_commit_is_only_resumed(begin, host):
    """The run's own commit goes on without it."""
    run = begin("overlay")
    disk = run.facts.overlays[0]
    host.guest().live = host.guest().live.replace(disk.base, disk.overlay)
    run.journal.note(Note.SUSPENDED)
    host.guest().state, host.guest().paused_reason = DomainState.PAUSED, "user"
    release(run, hold_limits.GuestHold.SUSPENDED_FOR_COMMIT)
    assert host.guest().state is DomainState.RUNNING
    assert not host.on_bases()


def test_a_commit_under_way_is_not_begun_a_second_time(begin, process, releases, world):
    world.paths = world.paths.model_copy(update={"overlay_floor_mib": 1 << 30})
    run = begin("overlay").frozen()
    run.write("begin", Step.RELEASE)
    looking(run, 5, run.over)
    guard(run, process.pid, "0")
    assert releases.times == 0


@pytest.mark.parametrize(
    ("limits", "let"),
    [
        ({"overlay_floor_mib": 1 << 30}, 1),
        ({"overlay_max_mib": 1}, 1),
        ({"overlay_max_mib": 100}, 0),
        ({}, 0),
    ],
)
def test_overlays_have_limits(begin, process, releases, world, limits, let):
    world.paths = world.paths.model_copy(update=limits)
    run = begin("overlay").frozen()
    Path(run.facts.overlays[0].overlay).write_bytes(b"x" * (3 << 20))
    looking(run, 5, run.over)
    guard(run, process.pid, "0")
    assert releases.times == let


@pytest.mark.parametrize(("seconds", "let"), [(90, False), (119, False), (121, True)])
def test_a_window_held_for_sanoid_has_a_deadline(begin, world, seconds, let):
    """The hold process may hang; otherwise it would have ended the window."""
    facts = asdict(begin("overlay").frozen().facts)
    window = hold_limits.GuestHold.ON_OVERLAYS
    assert not hold_limits.exceeds_limits(window, facts, 1e6, 60)
    assert hold_limits.exceeds_limits(window, facts | {"window_seconds": 90}, seconds, 60) is let


def test_overlays_removed_already_do_not_end_the_guardian(begin, process, recovering):
    """A run that failed commits and removes them while its journal is still there."""
    run = begin("overlay").frozen()
    overlay_files.remove(Path(run.facts.overlay_dir), run.facts.overlays)
    looking(run, 3, process.kill)
    guard(run, process.pid, "0")
    assert len(recovering) == 1


def test_a_run_killed_after_the_guest_was_released_is_recovered(
    begin, process, recovering, releases
):
    run = begin("paused").frozen()
    releases.then = process.kill
    guard(run, process.pid, "0")
    assert (releases.times, len(recovering)) == (1, 1)


def test_the_window_is_found_whatever_of_the_last_line_is_there(begin):
    run = begin("paused").frozen()
    whole = run.path.read_bytes()
    run.write("begin", Step.POOL_SNAPSHOT)
    longer = run.path.read_bytes()
    for cut in range(len(whole), len(longer)):
        run.path.write_bytes(longer[:cut])
        lines = lines_of(run)
        assert hold_limits.hold_of(lines) is hold_limits.GuestHold.STOPPED
        assert lines[0]["facts"]["uuid"] == run.facts.uuid


# -- how it releases the guest ------------------------------------------------------------------


@pytest.fixture
def host(world):
    return world


def release(run, window=None):
    overlay = run.facts.strategy is Strategy.OVERLAY
    held = hold_limits.GuestHold.ON_OVERLAYS if overlay else hold_limits.GuestHold.STOPPED
    return guardian_actions.release(window or held, lines_of(run), URI, run.path, run.tools.host)


@pytest.mark.parametrize(("strategy", "reason"), [("manual", "snapshot"), ("paused", "user")])
def test_a_paused_guest_is_resumed(begin, host, strategy, reason):
    run = begin(strategy)
    if reason == "user":
        run.journal.note(Note.SUSPENDED)
    host.guest().state, host.guest().paused_reason = DomainState.PAUSED, reason
    release(run)
    assert host.guest().state is DomainState.RUNNING


@pytest.mark.parametrize(
    ("strategy", "damaged"),
    [("manual", False), ("manual", True), ("overlay", True)],
)
def test_a_guest_that_its_owner_has_paused_meanwhile_is_not_resumed(begin, host, strategy, damaged):
    run = begin(strategy)
    if damaged:
        with run.journal.path.open("a") as stream:
            stream.write("not JSON\n")
    host.guest().state, host.guest().paused_reason = DomainState.PAUSED, "user"
    release(run)
    assert host.guest().state is DomainState.PAUSED
    (journal,) = read_journals(host.paths.journal)
    assert (Note.RELEASED in journal.notes) is not damaged  # the note of the pause may be lost


def test_a_guest_paused_for_its_freeze_is_resumed_without_the_note(begin, host):
    run = begin("paused").frozen()
    host.guest().state, host.guest().paused_reason = DomainState.PAUSED, "user"
    release(run)
    assert host.guest().state is DomainState.RUNNING


@pytest.mark.parametrize("strategy", ["manual", "paused"])
def test_a_guest_that_was_paused_before_is_not_resumed(begin, host, strategy):
    run = begin(strategy, state=DomainState.PAUSED)
    release(run)
    assert host.guest().state is DomainState.PAUSED
    assert host.hooks.log == []


def test_a_guest_that_runs_already_is_not_touched(begin, host):
    run = begin("manual")
    release(run)
    assert host.hooks.log == []


def test_a_frozen_guest_is_thawed_and_a_later_freeze_is_not_the_runs(begin, host):
    run = begin("quiesced").frozen()
    run.journal.note(Note.FREEZING)
    host.guest().frozen = True
    release(run)
    assert not host.guest().frozen
    assert hold_limits.hold_of(lines_of(run)) is None
    (journal,) = read_journals(host.paths.journal)
    assert not journal.held


def test_a_guest_that_was_not_thawed_is_not_noted_as_thawed(begin, host):
    run = begin("quiesced").frozen()
    run.journal.note(Note.FREEZING)
    host.guest().agent = Agent.SILENT
    assert not release(run)
    (journal,) = read_journals(host.paths.journal)
    assert journal.held


def test_overlays_are_committed(begin, host):
    run = begin("overlay")
    disk = run.facts.overlays[0]
    host.guest().live = host.guest().live.replace(disk.base, disk.overlay)
    release(run)
    assert host.on_bases()


def test_a_guest_is_not_suspended_for_a_commit_of_the_guardians(begin, host):
    """If the guardian were killed then, the pause would look like the owner's."""
    run = begin("overlay")
    disk = run.facts.overlays[0]
    host.guest().live = host.guest().live.replace(disk.base, disk.overlay)
    host.guest().writes_fast = True
    suspended = []
    host.hooks.at["commit.suspended"] = lambda: suspended.append(True)
    release(run)
    assert host.on_bases()
    assert suspended == []


@pytest.mark.parametrize("job", ["backup", "snapshot revert"])
def test_another_programs_job_does_not_delay_a_release(saving, host, job):
    run = saving("manual")
    run.journal.note(Note.SUSPENDED)
    host.guest().state, host.guest().paused_reason = DomainState.PAUSED, "user"
    host.guest().job = job
    assert release(run, hold_limits.GuestHold.SAVING_RAM)
    assert (host.guest().job, host.guest().state) == (job, DomainState.RUNNING)


@pytest.mark.parametrize("strategy", [*STILL, "overlay"])
def test_another_emulator_than_the_runs_is_left_alone(begin, host, strategy):
    run = begin(strategy)
    run.journal.note(Note.SUSPENDED)
    host.guest().boot += 1
    host.guest().frozen = True
    host.guest().state, host.guest().paused_reason = DomainState.PAUSED, "migration"
    assert release(run)
    assert host.hooks.log == []


@pytest.mark.parametrize("strategy", ["paused", "manual", "overlay"])
def test_a_paused_guest_that_libvirt_saved_is_left_to_its_recovery(
    begin, host, recovering, strategy
):
    """Whether the guest is off or was started from the saved RAM: only a recovery resumes it."""
    run = begin(strategy).write("begin", Step.FREEZE)
    run.journal.note(Note.SUSPENDED)
    host.guest().boot += 1
    guard(run, 0)
    host.hypervisor.destroy(run.facts.uuid)
    guard(run, 0)
    (journal,) = read_journals(host.paths.journal)
    assert Note.RELEASED not in journal.notes
    assert journal.held


def test_a_missing_guest_counts_as_released(begin, host):
    run = begin("quiesced")
    host.hypervisor.guests.clear()
    assert release(run)


def test_a_release_that_fails_does_not_end_the_guardian(begin, host):
    run = begin("manual")
    host.guest().paused_reason = "snapshot"
    host.hooks.at["hypervisor.resume"] = failing(HypervisorError("web", "no"))
    release(run)
    run.tools.absent()
    release(run)


# -- while RAM is saved --------------------------------------------------------------------------


SAVING = ["manual", "overlay"]


@pytest.fixture
def saving(begin, host):
    """A run that saves the RAM of a guest."""

    def make(strategy, **guest):
        return begin(strategy, **guest).write("begin", Step.FREEZE)

    return make


@pytest.fixture
def answering(host, tools):
    """Only libvirt's answers advance the time, because a busy machine may ask for them late."""

    def arrange(times, then):
        clock, left = [0.0], [times]

        def answer():
            clock[0] += 0.04
            left[0] -= 1
            if left[0] == 0:
                then()

        host.hooks.at["hypervisor.paused_by"] = answer
        tools.use(monotonic=lambda: clock[0])

    return arrange


@pytest.mark.parametrize("strategy", SAVING)
def test_a_guest_that_runs_has_its_ram_saved_for_as_long_as_it_takes(
    saving, process, releases, answering, strategy
):
    run = saving(strategy)
    answering(20, run.over)
    guard(run, process.pid, "0.1")
    assert releases.times == 0


@pytest.mark.parametrize("strategy", SAVING)
def test_a_guest_suspended_while_its_ram_is_saved_is_released(
    saving, host, process, recovering, releases, strategy
):
    run = saving(strategy)
    run.journal.note(Note.SUSPENDED)
    host.guest().state, host.guest().paused_reason = DomainState.PAUSED, "user"
    releases.then = process.kill
    guard(run, process.pid, "0.1")
    assert (releases.times, releases.window) == (1, hold_limits.GuestHold.SAVING_RAM)


def test_a_guest_for_which_libvirt_does_not_answer_is_released(
    saving, host, process, recovering, releases
):
    """It holds the domain while it waits for a reader of the pipe, with the guest paused."""
    run, asked = saving("manual"), threading.Event()
    host.hooks.at["hypervisor.paused_by"] = asked.wait
    releases.then = process.kill
    guard(run, process.pid, "0.1")
    asked.set()
    assert releases.times == 1


@pytest.mark.parametrize("strategy", SAVING)
@pytest.mark.parametrize("reason", ["user", "snapshot"])
def test_a_guest_that_its_owner_suspends_may_stay_paused(
    saving, host, process, releases, answering, strategy, reason
):
    run = saving(strategy)
    host.guest().state, host.guest().paused_reason = DomainState.PAUSED, reason
    answering(20, run.over)
    guard(run, process.pid, "0.1")
    assert releases.times == 0


@pytest.mark.parametrize(
    ("reason", "noted", "state"),
    [
        ("snapshot", [], DomainState.PAUSED),
        ("snapshot", [Note.SUSPENDED], DomainState.RUNNING),
        ("unknown", [], DomainState.RUNNING),  # QEMU's own, for the end
        ("migration", [], DomainState.RUNNING),
    ],
)
@pytest.mark.parametrize("strategy", SAVING)
def test_the_cause_of_a_pause_while_ram_is_saved(
    saving, host, recovering, strategy, reason, noted, state
):
    run = saving(strategy)
    for note in noted:
        run.journal.note(note)
    host.guest().state, host.guest().paused_reason = DomainState.PAUSED, reason
    (journal,) = read_journals(host.paths.journal)
    ours = is_ours_to_resume(host.context, run.facts, journal.notes)
    assert ours is (state is DomainState.RUNNING)
    release(run, hold_limits.GuestHold.SAVING_RAM)
    assert host.guest().state is state


REDUCED = {"/machine/vcpu0": "1000 10000"}


@pytest.mark.parametrize(
    ("seconds", "quota"),
    [(1, REDUCED["/machine/vcpu0"]), (100, "max 100000")],
)
@pytest.mark.parametrize("strategy", SAVING)
def test_a_guest_that_is_slowed_down_for_too_long_gets_its_cpu_time_back(
    saving, host, process, releases, strategy, seconds, quota
):
    """Its run hangs; the guest runs, so no deadline counts."""
    run = saving(strategy)
    assert run.facts.slowing_seconds == 600
    host.guest().vcpu_quotas = dict(REDUCED)
    run.tools.use(monotonic=itertools.count(1, seconds).__next__)
    looking(run, 20, run.over)
    guard(run, process.pid, "1000000")
    assert host.guest().vcpu_quotas == {"/machine/vcpu0": quota}
    assert releases.times == 0


@pytest.mark.parametrize("strategy", SAVING)
def test_a_guest_that_is_released_gets_its_cpu_time_back(saving, host, recovering, strategy):
    run = saving(strategy)
    host.guest().vcpu_quotas = dict(REDUCED)
    release(run, hold_limits.GuestHold.SAVING_RAM)
    assert host.guest().vcpu_quotas == {"/machine/vcpu0": "max 100000"}


@pytest.mark.parametrize("reason", ["unknown", "migration"])
def test_a_pause_for_the_end_of_ram_has_a_deadline(
    saving, host, process, recovering, releases, reason
):
    run = saving("manual")
    host.guest().state, host.guest().paused_reason = DomainState.PAUSED, reason
    releases.then = process.kill
    guard(run, process.pid, "0.1")
    assert releases.times == 1


@pytest.mark.parametrize("strategy", SAVING)
@pytest.mark.parametrize("reason", ["snapshot", "user"])
def test_a_guest_that_its_owner_paused_stays_paused(saving, host, recovering, strategy, reason):
    run = saving(strategy)
    run.journal.note(Note.HELD)
    run.write("end", Step.FREEZE)
    host.guest().state, host.guest().paused_reason = DomainState.PAUSED, reason
    if strategy == "manual":
        assert hold_limits.hold_of(lines_of(run)) is None
    release(run)
    guard(run, 0)
    assert host.guest().state is DomainState.PAUSED
    (journal,) = read_journals(host.paths.journal)
    assert not journal.held


def test_only_snapshots_taken_while_the_guardian_commits_are_torn(begin, host):
    run = begin("overlay")
    disk = run.facts.overlays[0]
    host.guest().live = host.guest().live.replace(disk.base, disk.overlay)
    host.pool.snapshot(["tank/web@before"], {})
    host.hooks.at["commit.pivoting"] = lambda: host.pool.snapshot(["tank/web@meanwhile"], {})
    release(run)
    host.pool.snapshot(["tank/web@later"], {})
    (commit,) = commits_in(run.path)
    torn = {each.name: commit.tears(each) for each in host.pool.snapshots(["tank/web"])}
    assert torn == {"before": False, "meanwhile": True, "later": False}


def test_a_guest_is_committed_although_a_pool_does_not_answer(begin, host):
    run = begin("overlay")
    disk = run.facts.overlays[0]
    host.guest().live = host.guest().live.replace(disk.base, disk.overlay)
    host.hooks.at["pool.snapshots"] = failing(PoolError("tank", "suspended"))
    release(run)
    assert host.on_bases()


def test_a_pivot_by_the_guardian_is_noted(begin, host):
    """If it were interrupted then, recovery must know that either image may be the newer."""
    run = begin("overlay")
    disk = run.facts.overlays[0]
    host.guest().live = host.guest().live.replace(disk.base, disk.overlay)
    release(run)
    assert "pivoting" in [line.get("note") for line in lines_of(run)]


def test_a_guest_is_committed_although_the_disk_is_full(begin, host, fill_disk):
    run = begin("overlay").frozen()
    disk = run.facts.overlays[0]
    host.guest().live = host.guest().live.replace(disk.base, disk.overlay)

    fill_disk()
    assert release(run)
    assert host.on_bases()


def test_a_guest_suspended_for_a_commit_on_the_way_back_is_in_the_window(begin):
    run = begin("overlay").frozen()
    run.journal.note(Note.SUSPENDED)
    assert hold_limits.hold_of(lines_of(run)) is hold_limits.GuestHold.SUSPENDED_FOR_COMMIT


def test_a_guest_that_was_paused_before_may_stay_paused(saving, process, releases):
    run = saving("manual", state=DomainState.PAUSED)
    looking(run, 5, run.over)
    guard(run, process.pid, "0")
    assert releases.times == 0


@pytest.mark.parametrize("strategy", SAVING)
def test_saving_is_ended_before_the_guest_is_resumed(saving, host, strategy):
    run = saving(strategy)
    run.journal.note(Note.SUSPENDED)
    host.guest().state, host.guest().paused_reason = DomainState.PAUSED, "user"
    host.guest().job = "snapshot"
    release(run, hold_limits.GuestHold.SAVING_RAM)
    assert host.guest().job is None
    assert host.guest().state is DomainState.RUNNING


def test_the_deadline_does_not_begin_again_when_the_capture_has_ended(
    saving, host, process, releases
):
    """Paused for the end of its RAM, then for its snapshots: one deadline for both."""
    run, now = saving("manual"), [100.0]
    host.guest().state, host.guest().paused_reason = DomainState.PAUSED, "migration"
    run.tools.use(monotonic=lambda: now[0])
    watching = run.tools.guardian(run.path, 60)
    watching._check()
    now[0] = 150.0
    run.write("end", Step.FREEZE)
    watching._check()
    now[0] = 161.0
    watching._check()
    assert releases.times == 1


# -- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("strategy", ["manual", "paused"])
def test_a_guest_is_released_although_nothing_can_be_written(
    begin, host, process, recovering, monkeypatch, number, strategy
):
    run = begin(strategy).frozen()
    run.journal.note(Note.SUSPENDED)
    host.guest().state, host.guest().paused_reason = DomainState.PAUSED, "user"

    def full(*_what, **_how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "touch", full)
    host.hooks.at["hypervisor.resume"] = process.kill
    guard(run, process.pid, "0")
    assert host.guest().state is DomainState.RUNNING
    assert len(recovering) == 1


def test_a_bug_does_not_end_the_guardian(begin, process, recovering, capsys):
    run, looks = begin("paused").frozen(), itertools.count()

    def faulty(*_what, **_how):
        if next(looks) < 3:
            raise ValueError("a fault")
        process.kill()
        return True

    run.tools.release_by(faulty)
    guard(run, process.pid, "0")
    assert len(recovering) == 1
    assert capsys.readouterr().err == "snaporch: guardian: a fault\n" * 3


def test_if_the_journal_becomes_unreadable_its_last_content_is_used(
    begin, process, releases, recovering, monkeypatch
):
    run, clock = begin("paused").frozen(), Time()
    run.tools.use_clock(clock)

    def unreadable(*_what, **_how):
        raise OSError(errno.EIO, "Input/output error")

    def abort():
        monkeypatch.setattr(Path, "read_text", unreadable)
        monkeypatch.setattr(os, "lstat", unreadable)
        clock.now += 60

    releases.then = process.kill
    looking(run, 2, abort)
    guard(run, process.pid)
    assert (releases.times, len(recovering)) == (1, 1)


BEGUN = b'{"event": "begin", "step": "prepare"}\n'
DAMAGED = [BEGUN, b"\0" * 512 + b"\n" + BEGUN, b'{"facts": 1}\n' + BEGUN, b"1\n" + BEGUN]


@pytest.mark.parametrize("content", DAMAGED)
def test_if_the_journal_loses_its_facts_those_read_last_are_used(
    begin, host, process, recovering, content
):
    run = begin("paused").frozen()
    run.journal.note(Note.SUSPENDED)
    host.hypervisor.suspend(run.facts.uuid)
    rest = b"".join(run.path.read_bytes().splitlines(keepends=True)[1:])
    looking(run, 3, lambda: (run.path.write_bytes(content + rest), process.kill()))
    guard(run, process.pid)
    assert host.guest().state is DomainState.RUNNING
    (command,) = recovering
    assert command[-1] == run.facts.uuid


@pytest.mark.parametrize("kept", [0, 1])
def test_if_the_journal_loses_its_last_lines_those_read_before_are_used(
    begin, host, process, recovering, kept
):
    run = begin("paused").frozen()
    run.journal.note(Note.SUSPENDED)
    host.hypervisor.suspend(run.facts.uuid)
    rest = b"".join(run.path.read_bytes().splitlines(keepends=True)[:kept])
    looking(run, 3, lambda: (run.path.write_bytes(rest), process.kill()))
    guard(run, process.pid)
    assert host.guest().state is DomainState.RUNNING
    assert len(recovering) == 1


@pytest.mark.parametrize("stopping", [False, True])
@pytest.mark.parametrize("content", DAMAGED)
def test_a_journal_that_never_had_facts_does_not_end_the_guardian(
    begin, process, recovering, content, stopping
):
    """The recovery of all guests reports it."""
    run = begin("paused")
    run.path.write_bytes(content)
    process.kill()
    process.wait()
    if stopping:
        looking(run, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    guard(run, process.pid)
    (command,) = recovering
    assert command[4:] == ["recover", "--wait", "600s", "--notify"]


def test_a_recovery_that_fails_is_retried(begin, process):
    run, tries = begin("paused").frozen(), []
    run.tools.use_times(retry=0.02)

    def recover(words, *_how):
        tries.append(words)
        if len(tries) == 2:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        if len(tries) == 3:
            run.over()
        return b""

    run.tools.recover_by(recover)
    process.kill()
    process.wait()
    guard(run, process.pid)
    assert len(tries) == 3


# -- SIGTERM ------------------------------------------------------------------------------------


def released(run):
    """Write the journal as far as the end of the release."""
    for step in (Step.POOL_SNAPSHOT, Step.RELEASE):
        run.write("begin", step).write("end", step)
    return run


@pytest.mark.parametrize("strategy", [*STILL, "overlay"])
def test_after_sigterm_it_stays_until_the_run_has_released_its_guest(
    begin, process, recovering, tools, strategy
):
    """libvirt-guests is stopped after it, and needs the guest on its bases."""
    run, checks = begin(strategy), itertools.count(1)
    real = tools.host.await_exit

    def await_exit(process, seconds):
        if (count := next(checks)) == 2:
            signal.raise_signal(signal.SIGTERM)
        elif count == 4:
            run.frozen()
        elif count == 6:
            released(run)
        assert count <= 6
        return real(process, seconds)

    tools.use(await_exit=await_exit)
    guard(run, process.pid)
    assert next(checks) == 7
    assert (recovering, process.poll()) == ([], None)
    assert run.path.exists()


def test_after_sigterm_a_killed_run_is_recovered_once_more(begin, tools):
    """Also if the next try would be an hour away."""
    run, clock, tries = begin("paused").frozen(), Time(), []
    run.journal.note(Note.RELEASED)

    def recover(_words, *_how):
        tries.append(clock.now)
        assert len(tries) < 11
        return b""

    def sleep(_seconds):
        clock.now += 1
        if len(tries) == 9:
            signal.raise_signal(signal.SIGTERM)

    tools.use(monotonic=clock.monotonic, sleep=sleep)
    tools.recover_by(recover)
    guard(run, 0)
    assert len(tries) == 10
    assert tries[9] - tries[8] < 5


def test_a_recovery_under_way_ends_before_the_guardian(begin, tools):
    run, tries = begin("overlay").frozen(), []

    def recover(words, *_how):
        tries.append(words)
        assert len(tries) == 1
        signal.raise_signal(signal.SIGTERM)
        return b""

    tools.recover_by(recover)
    guard(run, 0)
    assert len(tries) == 1


def test_after_sigterm_a_run_that_was_killed_after_its_release_is_left_to_the_boot(
    begin, process, recovering
):
    run = released(begin().frozen())
    looking(run, 1, lambda: signal.raise_signal(signal.SIGTERM))
    guard(run, process.pid)
    assert recovering == []


# -- as a process -------------------------------------------------------------------------------


def test_as_a_process_it_ends_with_the_run(begin, process):
    run = begin()
    words = [sys.executable, "-P", "-m", "snaporch.recovery.guardian"]
    words += [str(process.pid), str(run.path), "60", URI]
    with subprocess.Popen(words, stderr=subprocess.PIPE) as guardian:
        run.over()
        process.kill()
        assert guardian.wait(20) == 0
        assert guardian.stderr.read() == b""


def test_it_imports_few_modules_before_it_has_to_act():
    code = "import sys; import snaporch.recovery.guardian; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"libvirt", "pydantic", "typer", "snaporch.hypervisor"} & set(done.stdout.split())


def test_every_strategy_is_known():
    assert set(hold_limits._HELD) | {"overlay", "crash", "off"} == set(Strategy)


def test_a_libvirt_that_does_not_answer_is_no_sign_that_the_guest_runs():
    now, asked = [0.0], threading.Semaphore(0)

    def fail(_uri):
        asked.release()
        raise HypervisorError("web", "libvirt does not answer")

    host = Host(monotonic=lambda: now[0], open_hypervisor=fail)
    poll = RunningPoll("fake", "u-1", host, 0.001)
    now[0] = 100.0
    for _ in range(3):  # the last two were asked after the time had passed
        assert asked.acquire(timeout=60)
    poll.over.set()
    poll.join(60)
    assert poll.ran_at == 0.0
