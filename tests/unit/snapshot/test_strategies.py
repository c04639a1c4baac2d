"""Runs with every strategy: calls in order, failures, signals, kills, levels, lower levels.

``world`` is a host of fakes. ``world.hooks.at[NAME] = action`` runs ``action`` when a fake gets the
call or reaches the event NAME; an error of the action is the error of the call.
``world.hooks.acts()`` lists the calls that changed something. ``prepare(case)`` makes the guest
``web`` on two pools, and the settings for a strategy. ``snapshot(world)`` takes ``web@s1``.
"""

import itertools
import json
import os
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from xml.etree.ElementTree import fromstring, tostring

import pytest
from fakes.domain_xml import DiskSpec, domain_xml
from fakes.hooks import KilledError, failing, failing_once
from fakes.hypervisor import Agent
from fakes.leftovers import nothing_left_open

from snaporch.catalog.records import all_records
from snaporch.context import Clock
from snaporch.errors import (
    AttentionError,
    ChangedError,
    InterruptedRunError,
    RefusedError,
    RunFailedError,
    SnaporchError,
    UnavailableError,
)
from snaporch.hypervisor import HypervisorError
from snaporch.hypervisor.commit_timeouts import CommitTimeouts
from snaporch.journal import Journal, Note, Step, read_journals, release_mark
from snaporch.model import BundleState, DomainState, Level, PauseParts, Strategy
from snaporch.recovery.hold_limits import GuestHold, hold_of
from snaporch.recovery.recover_runs import recover
from snaporch.snapshot.plan import make_plan
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.snapshot.strategies import make_strategy
from snaporch.snapshot.strategies.base import RunMaterial
from snaporch.snapshot.strategies.ram_limits import SealingWatch, downtime_for
from snaporch.waiting_times import RamTimes
from snaporch.zfs import PoolError

TWO_POOLS = {"vda": "tank/web", "vdb": "flash/web"}
SNAPSHOT_CALLS = ["pool.snapshot", "pool.snapshot"]
RECORD_CALLS = ["pool.set_properties"]


@dataclass
class StrategyCase:
    """A strategy with the guest and settings that lead to it, and the calls that it makes.

    A call is named as the fakes log it, for example ``hypervisor.capture``. An event is a point
    inside a call, for example ``capture.writing`` while RAM is being written.
    """

    strategy: Strategy
    freeze_calls: list[str] = field(default_factory=list)
    release_calls: list[str] = field(default_factory=list)
    settings: dict[str, object] = field(default_factory=dict)
    guest: dict[str, object] = field(default_factory=dict)
    freeze_events: list[str] = field(default_factory=list)

    @property
    def state(self):
        """The guest's state before and after the run."""
        return self.guest.get("state", DomainState.RUNNING)

    @property
    def failing_before_snapshots(self):
        """Calls and events whose failure leaves no snapshot."""
        return [*dict.fromkeys(self.freeze_calls), *self.freeze_events, "pool.snapshot tank"]

    @property
    def failing_after_snapshots(self):
        """Calls whose failure leaves the ZFS snapshots."""
        return [*self.release_calls, "hypervisor.versions"]


MAKE_OVERLAYS = ["overlays.make", "overlays.make"]
CAPTURE_EVENTS = ["capture.writing", "capture.switched"]
PAUSED_GUEST = {"state": DomainState.PAUSED}
CASES = {
    "overlay": StrategyCase(
        Strategy.OVERLAY,
        [*MAKE_OVERLAYS, "hypervisor.capture"],
        ["hypervisor.commit"],
        {"ram_strategy": "overlay"},
        freeze_events=CAPTURE_EVENTS,
    ),
    "manual": StrategyCase(
        Strategy.MANUAL,
        ["hypervisor.capture"],
        ["hypervisor.resume"],
        {"ram_strategy": "manual"},
        freeze_events=CAPTURE_EVENTS,
    ),
    "manual, paused before": StrategyCase(
        Strategy.MANUAL, ["hypervisor.capture"], guest=PAUSED_GUEST, freeze_events=CAPTURE_EVENTS
    ),
    "quiesced": StrategyCase(
        Strategy.QUIESCED,
        ["hypervisor.freeze_file_systems"],
        ["hypervisor.thaw_file_systems"],
        {"level": "quiesced"},
        {"agent": Agent.ANSWERS},
        freeze_events=["agent.frozen"],
    ),
    "paused": StrategyCase(
        Strategy.PAUSED, ["hypervisor.suspend"], ["hypervisor.resume"], {"level": "paused"}
    ),
    "paused, paused before": StrategyCase(
        Strategy.PAUSED, settings={"level": "paused"}, guest=PAUSED_GUEST
    ),
    "crash": StrategyCase(Strategy.CRASH, settings={"level": "crash"}),
    "off": StrategyCase(Strategy.OFF, guest={"state": DomainState.OFF}),
}
FAILURES_BEFORE_SNAPSHOTS = [
    (name, place) for name, case in CASES.items() for place in case.failing_before_snapshots
]
FAILURES_AFTER_SNAPSHOTS = [
    (name, place) for name, case in CASES.items() for place in case.failing_after_snapshots
]
every_strategy = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture
def once_planned(world):
    """Acts once when a run reports its plan, before it looks at the guest again."""

    def arrange(act):
        def once():
            del world.heard.at[""]
            act()

        world.heard.at[""] = once

    return arrange


@pytest.fixture
def prepare(world):
    """Make a guest on two pools, and the settings, for a strategy."""

    def make(case, **settings):
        case = CASES[case] if isinstance(case, str) else case
        world.add_guest(disks=TWO_POOLS, **case.guest)
        world.with_defaults(**{"ram_capture": "stream"} | case.settings | settings)
        return case

    return make


def snapshot(world, name="s1", *, taker=None, **options):
    domain, request = world.hypervisor.domain("web"), SnapshotRequest(name, **options)
    return take_snapshot(world.context, domain, request, taker=taker)


def journal_of(world):
    (path,) = world.paths.journal.glob("*.jsonl")
    return path


def notes(world):
    (journal,) = read_journals(world.paths.journal)
    return set(journal.notes)


def records(world):
    return all_records(world.context.store, world.pool.snapshots())


def sigterm(world):
    def come():
        world.context.interrupt.signum = 15

    return come


class FakeClock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def go_on(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(world):
    """The clock of the run, set by the test; to be asked for after ``prepare``."""
    made = FakeClock()
    world.clock = Clock(monotonic=made.monotonic)
    return made


@contextmanager
def killed(world, place):
    """A run is killed at a place, with what it left; then another process acts."""
    world.hooks.at[place] = world.hooks.kill
    with pytest.raises(KilledError):
        yield
    world.hooks.revive()


@contextmanager
def strategy_of(world, **options):
    """A strategy that is prepared, as a run does it."""
    plan = make_plan(
        world.context, world.hypervisor.domain("web"), SnapshotRequest("s1", **options)
    )
    journal = Journal(world.paths.journal, plan.facts)
    bundle = world.context.store.create(plan.domain.uuid, plan.run)
    strategy = make_strategy(RunMaterial(world.context, plan, bundle, journal))
    try:
        strategy.prepare()
        yield strategy
    finally:
        strategy.abandon()
        journal.close(settled=True)


# -- without failures ---------------------------------------------------------------------------


@every_strategy
def test_calls_in_order(world, prepare, case):
    prepare(case)
    record = snapshot(world)
    assert world.hooks.acts() == [
        *case.freeze_calls,
        *SNAPSHOT_CALLS,
        *case.release_calls,
        *RECORD_CALLS,
    ]
    assert world.is_as_it_was(state=case.state)
    assert (record.level, record.state) == (case.strategy.level, BundleState.COMPLETE)
    assert records(world) == [record]
    assert {s.properties["level"] for s in world.pool.snapshots()} == {case.strategy.level.value}


@every_strategy
def test_the_guest_is_frozen_while_its_disks_are_snapshotted(world, prepare, case):
    prepare(case)
    seen = []

    def observe():
        guest = world.guest()
        seen.append((world.on_bases(), guest.state is DomainState.RUNNING, guest.frozen))

    world.hooks.at["pool.snapshot tank"] = observe
    snapshot(world)
    assert seen == [
        {
            Strategy.OVERLAY: (False, True, False),
            Strategy.MANUAL: (True, False, False),
            Strategy.QUIESCED: (True, True, True),
            Strategy.PAUSED: (True, False, False),
            Strategy.CRASH: (True, True, False),
            Strategy.OFF: (True, False, False),
        }[case.strategy]
    ]


@every_strategy
def test_snapshots_are_not_listed_while_the_guest_is_frozen(world, prepare, case):
    """A listing of a pool with many snapshots takes seconds."""
    prepare(case)
    listed = []
    world.hooks.at["pool.snapshot flash"] = lambda: world.hooks.at.update(
        {"pool.snapshots": lambda: listed.append(list(world.hooks.acts()))}
    )
    snapshot(world)
    assert listed
    if case.strategy is not Strategy.OVERLAY:  # that guest runs while it is on its overlays
        assert all(set(case.release_calls) <= set(acts) for acts in listed)


@every_strategy
def test_the_manifest_has_the_level_and_the_pause(world, prepare, case):
    prepare(case)
    record = snapshot(world)
    manifest = world.context.store.verify(f"{record.uuid}/{record.run}")
    assert manifest.level is case.strategy.level
    assert manifest.was_running == (case.state is DomainState.RUNNING)
    assert manifest.pause_ms >= 0
    assert (manifest.ram_bytes is not None) == (case.strategy.level is Level.RAM)


@every_strategy
def test_the_guardian_starts_before_the_guest_is_touched(world, prepare, case):
    prepare(case)
    world.hooks.at["guardian.start"] = lambda: world.hooks.log.append("guardian")
    snapshot(world)
    needed = [] if case.strategy in (Strategy.CRASH, Strategy.OFF) else [case.strategy]
    assert [facts.strategy for facts in world.guarded] == needed
    assert (world.hooks.log[0] == "guardian") == bool(needed)


def test_a_guest_without_a_guardian_is_not_touched(world, prepare):
    prepare("overlay")
    world.context.start_detached = lambda _unit, _command: None
    world.context.clock = Clock(monotonic=itertools.count(step=100).__next__)
    with pytest.raises(UnavailableError, match="the guardian of its run did not start"):
        snapshot(world)
    assert world.is_as_it_was()
    assert not {"hypervisor.capture", "pool.snapshot"} & set(world.hooks.acts())


def test_one_pool_needs_no_overlays(world):
    world.add_guest()
    world.with_defaults(ram_strategy="auto")
    assert snapshot(world).level is Level.RAM
    assert "overlays.make" not in world.hooks.acts()
    assert "hypervisor.resume" in world.hooks.acts()


def test_two_pools_need_no_overlays(world):
    world.add_guest(disks=TWO_POOLS)
    world.with_defaults(ram_strategy="auto")
    assert snapshot(world).level is Level.RAM
    assert "hypervisor.commit" not in world.hooks.acts()


def test_a_pause_is_measured_to_its_end(world, clock, prepare):
    prepare("quiesced")
    world.hooks.at["pool.snapshot tank"] = partial(clock.go_on, 0.25)
    world.hooks.at["hypervisor.thaw_file_systems"] = partial(clock.go_on, 0.5)
    taken = snapshot(world)
    assert taken.pause_ms == 750
    assert taken.pause_parts == PauseParts(switch=0, snapshot=250, resume=500)


def test_only_the_configured_mount_points_are_frozen(world, prepare):
    prepare("quiesced", quiesce_mountpoints=["/srv", "/var/lib/db"])
    snapshot(world)
    assert "hypervisor.freeze_file_systems /srv /var/lib/db" in world.hooks.log
    assert "froze 2 file systems" in world.heard.steps


# -- failure at each step -----------------------------------------------------------------------


def error_at(place):
    return PoolError(place, "no") if place.startswith("pool") else HypervisorError(place, "no")


@pytest.mark.parametrize(("case", "place"), FAILURES_BEFORE_SNAPSHOTS)
def test_a_failure_before_the_zfs_snapshots_leaves_nothing(world, prepare, case, place):
    case = prepare(case)
    world.hooks.at[place] = failing_once(error_at(place))
    with pytest.raises(SnaporchError) as caught:
        snapshot(world)
    assert not isinstance(caught.value, AttentionError)
    assert place in str(caught.value)
    assert world.is_as_it_was(state=case.state)
    assert world.pool.names() == []
    assert list(world.paths.bundles.glob("*/*")) == []


@pytest.mark.parametrize(("case", "place"), FAILURES_AFTER_SNAPSHOTS)
def test_a_failure_after_the_zfs_snapshots_keeps_them_as_crash(world, prepare, case, place):
    case = prepare(case)
    world.hooks.at[place] = failing_once(error_at(place))
    with pytest.raises(RunFailedError, match="@s1 was kept, but only as crash-consistent"):
        snapshot(world)
    assert world.is_as_it_was(state=case.state)
    (record,) = records(world)
    assert (record.level, record.datasets) == (Level.CRASH, ("flash/web", "tank/web"))


@every_strategy
@pytest.mark.parametrize("step", Step)
@pytest.mark.parametrize("event", ["begin", "end"])
def test_the_journals_disk_is_full_at_a_step(world, prepare, refuse_line, case, step, event):
    prepare(case)
    refuse_line(f'"event": "{event}", "step": "{step}"')
    with (
        nothing_left_open(world.kill_guardians),
        pytest.raises(RunFailedError, match="No space left"),
    ):
        snapshot(world)
    assert world.is_as_it_was(state=case.state)


@pytest.mark.parametrize("case", ["paused", "quiesced"])
def test_the_journals_disk_is_full_at_a_note(world, prepare, refuse_line, case):
    """The guest is not touched if the note cannot be written."""
    prepare(case)
    refuse_line('"event": "note"')
    with pytest.raises(RunFailedError, match="No space left"):
        snapshot(world)
    assert world.hooks.acts() == ["hypervisor.rebase_inactive"]
    assert world.is_as_it_was()


@every_strategy
def test_a_bug_is_undone_too(world, prepare, case):
    prepare(case)
    world.hooks.at["pool.snapshot flash"] = failing(ZeroDivisionError("a bug"))
    with pytest.raises(RunFailedError, match="ZeroDivisionError: a bug"):
        snapshot(world)
    assert world.is_as_it_was(state=case.state)
    assert world.pool.names() == []


# -- signals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "place"), [(n, p) for n, p in FAILURES_BEFORE_SNAPSHOTS if not p.startswith("pool")]
)
def test_a_signal_before_the_zfs_snapshots_undoes_the_run(world, prepare, case, place):
    case = prepare(case)
    world.hooks.at[place] = sigterm(world)
    with pytest.raises(InterruptedRunError):
        snapshot(world)
    assert "pool.snapshot" not in world.hooks.acts()
    assert world.is_as_it_was(state=case.state)


@every_strategy
@pytest.mark.parametrize("place", ["pool.snapshot flash", "pool.set_properties"])
def test_a_signal_after_the_zfs_snapshots_lets_the_run_finish(world, prepare, case, place):
    prepare(case)
    world.hooks.at[place] = sigterm(world)
    record = snapshot(world)
    assert (record.level, record.state) == (case.strategy.level, BundleState.COMPLETE)
    assert world.is_as_it_was(state=case.state)


def test_a_freeze_by_the_agent_is_never_interrupted(world, prepare):
    prepare("quiesced")
    seen = []
    world.hooks.at["hypervisor.freeze_file_systems"] = sigterm(world)
    world.hooks.at["agent.frozen"] = lambda: seen.append(world.guest().frozen)
    with pytest.raises(InterruptedRunError):
        snapshot(world)
    assert seen == [True]
    assert world.hooks.acts()[:2] == [
        "hypervisor.freeze_file_systems",
        "hypervisor.thaw_file_systems",
    ]


# -- killed, then recovered ---------------------------------------------------------------------


@pytest.mark.parametrize(("case", "place"), FAILURES_BEFORE_SNAPSHOTS + FAILURES_AFTER_SNAPSHOTS)
def test_a_run_killed_anywhere_is_recovered(world, prepare, case, place):
    case = prepare(case)
    with killed(world, place):
        snapshot(world)
    recover(world.context, world.guest().uuid)
    assert world.is_as_it_was(state=case.state)
    taken = (case, place) in [(CASES[name], after) for name, after in FAILURES_AFTER_SNAPSHOTS]
    assert [record.level for record in records(world)] == ([Level.CRASH] if taken else [])


@every_strategy
def test_a_run_killed_when_its_bundle_was_sealed_is_completed(world, prepare, case):
    prepare(case)
    with killed(world, "pool.set_properties"):
        snapshot(world)
    assert {s.properties["level"] for s in world.pool.snapshots()} == {"crash"}
    said = recover(world.context, world.guest().uuid)
    assert any(f"completed {case.strategy.level} snapshot @s1" in str(each) for each in said)
    (record,) = records(world)
    assert (record.level, record.state) == (case.strategy.level, BundleState.COMPLETE)
    assert world.is_as_it_was(state=case.state)
    assert read_journals(world.paths.journal) == []


# -- changes of the guest by others -------------------------------------------------------------


def attach_disk(world):
    """Attach a disk as an admin does, also to the inactive definition."""
    guest, disk = world.guest(), DiskSpec("vdz", str(world.image("tank/new", "new.img")))
    added = fromstring(domain_xml("x", guest.uuid, [disk])).find("devices/disk")
    for which in ("live", "inactive"):
        if (text := getattr(guest, which)) is not None:
            root = fromstring(text)
            root.find("devices").append(added)
            setattr(guest, which, tostring(root, encoding="unicode"))


def restart_guest(world):
    world.guest().boot += 1


CHANGES = {"a disk attached": attach_disk, "another emulator": restart_guest}


@every_strategy
@pytest.mark.parametrize("act", CHANGES.values(), ids=CHANGES)
def test_a_guest_that_is_changed_before_the_freeze_is_not_touched(
    world, prepare, once_planned, case, act
):
    case = prepare(case)
    if act is restart_guest and case.strategy is Strategy.OFF:
        once_planned(partial(world.hypervisor.start, world.guest().uuid, paused=False))
    else:
        once_planned(partial(act, world))
    with pytest.raises(RefusedError, match=r"meanwhile.*run it again"):
        snapshot(world)
    assert world.leftovers() == []
    assert world.pool.names() == []
    assert world.on_bases()
    assert not set(case.freeze_calls) & set(world.hooks.acts())


@pytest.mark.parametrize("case", [name for name in CASES if name != "off"])
def test_a_guest_that_the_admin_suspends_or_resumes_before_the_freeze_stays_so(
    world, prepare, once_planned, case
):
    """An overlay over a suspended guest could not be committed."""
    case = prepare(case)
    guest, running = world.guest(), case.state is DomainState.RUNNING
    act = world.hypervisor.suspend if running else world.hypervisor.resume
    once_planned(partial(act, guest.uuid))
    with pytest.raises(RefusedError, match=r"when the run was planned|agent does not answer"):
        snapshot(world)
    assert world.is_as_it_was(state=DomainState.PAUSED if running else DomainState.RUNNING)
    assert world.pool.names() == []


@pytest.fixture
def when_freeze_begins(world):
    """Run an action when the journal has the begin of the freeze, and the guest is checked."""

    def arrange(act):
        def look():
            if any(Note.SAVING in each.notes for each in read_journals(world.paths.journal)):
                del world.hooks.at["hypervisor.find"]
                act()

        world.hooks.at["hypervisor.find"] = look

    return arrange


@pytest.mark.parametrize("case", ["overlay", "manual", "paused"])
def test_a_guest_that_the_admin_suspends_as_the_freeze_begins_stays_suspended(
    world, prepare, when_freeze_begins, case
):
    prepare(case)
    when_freeze_begins(partial(world.hypervisor.suspend, world.guest().uuid))
    with pytest.raises(RunFailedError, match=r"^web: it is paused, and was r.*nothing was kept"):
        snapshot(world)
    assert world.is_as_it_was(state=DomainState.PAUSED)
    assert world.pool.names() == []


@pytest.mark.parametrize("case", ["overlay", "manual", "paused"])
def test_a_guest_that_is_changed_as_the_freeze_begins_gets_no_overlay(
    world, prepare, when_freeze_begins, case
):
    case = prepare(case)
    when_freeze_begins(partial(attach_disk, world))
    with pytest.raises(RunFailedError, match=r"^web: the disk vdz was attached.*nothing was kept"):
        snapshot(world)
    assert set(case.freeze_calls) & set(world.hooks.acts()) <= {"overlays.make"}
    assert world.is_as_it_was()
    assert world.pool.names() == []


FROZEN_BEFORE_SNAPSHOTS = [
    ("overlay", "capture.switched"),
    ("manual", "capture.switched"),
    ("manual, paused before", "capture.switched"),
    ("quiesced", "agent.frozen"),
    ("paused", "hypervisor.suspend"),
]


@pytest.mark.parametrize(("case", "place"), FROZEN_BEFORE_SNAPSHOTS)
def test_a_guest_that_is_changed_before_the_zfs_snapshots_is_released(world, prepare, case, place):
    case = prepare(case)
    world.hooks.at[place] = partial(attach_disk, world)
    with pytest.raises(RunFailedError, match=r"vdz was attached.*nothing was kept"):
        snapshot(world)
    assert world.is_as_it_was(state=case.state)
    assert world.pool.names() == []


def test_a_guest_that_restarts_just_before_its_suspension_is_resumed(world, prepare):
    """The run has suspended it, though in another emulator process than planned."""
    prepare("paused")
    world.hooks.at["hypervisor.suspend"] = partial(restart_guest, world)
    with pytest.raises(RunFailedError, match=r"restarted meanwhile.*nothing was kept"):
        snapshot(world)
    assert world.is_as_it_was()
    assert world.pool.names() == []


@pytest.mark.parametrize("case", [name for name in CASES if name not in ("crash", "off")])
def test_a_guest_that_is_changed_during_the_zfs_snapshots_is_recorded_as_crash(
    world, prepare, case
):
    case = prepare(case)
    world.hooks.at["pool.snapshot tank"] = partial(attach_disk, world)
    assert_recorded_as(Level.CRASH, world)
    assert any("the disk vdz was attached" in text for text in world.heard.notes)
    assert world.is_as_it_was(state=case.state)


def test_a_running_guest_that_is_changed_during_the_zfs_snapshots_fails(world, prepare):
    prepare("crash")
    world.hooks.at["pool.snapshot tank"] = partial(attach_disk, world)
    with pytest.raises(RunFailedError, match="vdz was attached"):
        snapshot(world)


WITH_RAM = [name for name, case in CASES.items() if case.strategy.level is Level.RAM]
RAM_OF_RUNNING_GUESTS = ["overlay", "manual"]


@pytest.mark.parametrize("case", RAM_OF_RUNNING_GUESTS)
def test_a_guest_that_the_admin_suspends_while_ram_is_saved_stays_suspended(world, prepare, case):
    case = prepare(case)
    world.hooks.at["capture.writing"] = partial(world.hypervisor.suspend, world.guest().uuid)
    record = snapshot(world)
    assert (record.level, record.state) == (Level.RAM, BundleState.COMPLETE)
    assert world.is_as_it_was(state=DomainState.PAUSED)
    assert any("it stays suspended" in text for text in world.heard.notes)


@pytest.mark.parametrize("case", RAM_OF_RUNNING_GUESTS)
@pytest.mark.parametrize("kill", [False, True])
def test_a_guest_that_the_admin_suspends_stays_suspended_after_a_failure(
    world, prepare, case, kill
):
    case = prepare(case)
    world.hooks.at["capture.writing"] = partial(world.hypervisor.suspend, world.guest().uuid)
    if kill:
        with killed(world, "pool.snapshot tank"):
            snapshot(world)
        recover(world.context, world.guest().uuid)
    else:
        world.hooks.at["pool.snapshot tank"] = failing(PoolError("tank", "is full"))
        with pytest.raises(RunFailedError):
            snapshot(world)
    assert world.is_as_it_was(state=DomainState.PAUSED)


@pytest.mark.parametrize("case", RAM_OF_RUNNING_GUESTS)
def test_a_guest_that_the_admin_suspends_and_resumes_runs(world, prepare, case):
    case = prepare(case)
    uuid = world.guest().uuid
    world.hooks.at["capture.writing"] = lambda: (
        world.hypervisor.suspend(uuid),
        world.hypervisor.resume(uuid),
    )
    assert snapshot(world).level is Level.RAM
    assert world.is_as_it_was()


@pytest.mark.parametrize("case", WITH_RAM)
@pytest.mark.parametrize("capture", ["stream", "auto"])
def test_a_run_whose_job_the_admin_aborts_ends(world, prepare, case, capture):
    """It is retried neither with a file nor at a lower level."""
    case = prepare(case, ram_capture=capture, on_unavailable="crash")
    world.hooks.at["capture.writing"] = partial(world.hypervisor.abort_job, world.guest().uuid)
    with pytest.raises(RunFailedError, match="canceled by client"):
        snapshot(world)
    assert world.hooks.acts().count("hypervisor.capture") == 1
    assert world.pool.names() == []
    assert world.is_as_it_was(state=case.state)


def test_after_an_abort_by_the_guardian_a_lower_level_is_tried(world, prepare):
    prepare("manual", on_unavailable="crash")

    def abort():
        release_mark(journal_of(world)).touch()
        world.hypervisor.abort_job(world.guest().uuid)

    world.hooks.at["capture.writing"] = abort
    assert snapshot(world).level is Level.CRASH


@pytest.mark.parametrize("case", RAM_OF_RUNNING_GUESTS)
def test_ram_is_not_saved_again_if_the_guest_has_changed(world, prepare, case):
    prepare(case, ram_capture="auto")

    def fail():
        attach_disk(world)
        raise HypervisorError("web", "no luck")

    world.hooks.at["hypervisor.capture"] = fail
    with pytest.raises(RunFailedError, match="vdz was attached"):
        snapshot(world)
    assert world.hooks.acts().count("hypervisor.capture") == 1


# -- the level that is recorded -----------------------------------------------------------------


def assert_recorded_as(level, world, note="did not stay as it was"):
    record = snapshot(world)
    assert record.level is level
    assert {s.properties["level"] for s in world.pool.snapshots()} == {level}
    manifest = world.context.store.manifest(f"{record.uuid}/{record.run}")
    assert manifest.level is level
    assert any(note in text for text in world.heard.notes)


@pytest.mark.parametrize(
    "case", ["manual", "manual, paused before", "paused", "paused, paused before"]
)
def test_a_guest_that_is_resumed_during_the_zfs_snapshots(world, prepare, case):
    prepare(case)
    world.hooks.at["pool.snapshot tank"] = lambda: world.hypervisor.resume(world.guest().uuid)
    assert_recorded_as(Level.CRASH, world)
    assert world.is_as_it_was()


def test_a_guest_that_is_thawed_during_the_zfs_snapshots(world, prepare):
    prepare("quiesced")
    world.hooks.at["pool.snapshot tank"] = lambda: setattr(world.guest(), "frozen", False)
    assert_recorded_as(Level.CRASH, world)
    assert world.is_as_it_was()


@pytest.mark.parametrize(("late", "level"), [(0.4, Level.QUIESCED), (0.6, Level.CRASH)])
def test_a_freeze_longer_than_its_budget_is_recorded_as_crash(world, clock, prepare, late, level):
    prepare("quiesced", quiesce_budget="500ms")
    world.hooks.at["pool.snapshot tank"] = partial(clock.go_on, late)
    assert snapshot(world).level is level
    reported = any("more than 500 ms" in text for text in world.heard.notes)
    assert reported == (level is Level.CRASH)
    assert world.is_as_it_was()


def test_the_budget_counts_from_before_the_freeze(world, clock, prepare):
    """The first file system may be frozen long before the agent has frozen the last."""
    prepare("quiesced", quiesce_budget="500ms")
    world.hooks.at["agent.frozen"] = partial(clock.go_on, 1)
    assert snapshot(world).level is Level.CRASH


def test_overlays_that_the_guardian_commits_during_the_zfs_snapshots(world, prepare):
    prepare("overlay")

    def commit():
        facts = world.guarded[0]
        world.hypervisor.commit(facts.uuid, facts.overlays, lambda _stage: None, CommitTimeouts())

    world.hooks.at["pool.snapshot flash"] = commit
    assert_recorded_as(Level.TORN, world)
    assert world.is_as_it_was()


@pytest.mark.parametrize(
    "case", [name for name, case in CASES.items() if name not in ("crash", "off")]
)
def test_a_guest_that_the_guardian_released_is_always_recorded_as_crash(world, prepare, case):
    """It may have released the guest, and another process may have suspended it again."""
    case = prepare(case)
    world.hooks.at["pool.snapshot tank"] = lambda: release_mark(journal_of(world)).touch()
    assert_recorded_as(Level.CRASH, world)
    assert world.is_as_it_was(state=case.state)


def test_one_overlay_of_two_that_is_committed_during_the_zfs_snapshots(world, prepare):
    prepare("overlay")

    def commit():
        facts = world.guarded[0]
        stage = lambda _stage: None  # noqa: E731
        world.hypervisor.commit(facts.uuid, facts.overlays[:1], stage, CommitTimeouts())

    world.hooks.at["pool.snapshot flash"] = commit
    assert_recorded_as(Level.TORN, world)


def test_a_commit_that_begins_during_the_zfs_snapshots(world, prepare):
    prepare("overlay")
    world.hooks.at["pool.snapshot tank"] = lambda: world.guest().committing.add("vda")
    assert_recorded_as(Level.TORN, world)


def test_a_commit_is_noted_only_when_it_has_ended(world, prepare):
    """An overlay that is noted as committed is removed without a check of its contents."""
    prepare("overlay")
    noted = []
    world.hooks.at["hypervisor.commit"] = lambda: noted.append(notes(world))
    snapshot(world)
    assert noted == [set()]


def test_an_overlay_that_another_domain_uses_is_not_removed_after_the_commit(world, prepare):
    prepare("overlay")

    def use():
        disk = world.guarded[0].overlays[0]
        world.add_guest("other", more=(DiskSpec("vdb", disk.overlay, format="qcow2"),))

    world.hooks.at["commit.pivoting"] = use
    with pytest.raises(AttentionError, match="the domain other still uses"):
        snapshot(world)
    assert Path(world.guarded[0].overlays[0].overlay).exists()


@every_strategy
def test_volumes_are_flushed_while_the_guest_is_frozen(world, prepare, case):
    """What QEMU wrote may still be in the host's cache of the device."""
    case = prepare(case)
    flush = "flush"
    world.context.flush_volume = lambda path: world.hooks.act(flush, Path(path).name)
    snapshot(world)
    flushed = [line for line in world.hooks.log if line.startswith(flush)]
    assert flushed == ["flush web-vda.img", "flush web-vdb.img"]
    acts = world.hooks.acts()
    inside = acts[acts.index(flush) :]
    assert not set(case.freeze_calls) & set(inside)
    assert inside[:4] == [flush, flush, *SNAPSHOT_CALLS]


def test_an_agent_that_falls_silent_while_frozen_needs_attention(world, prepare):
    prepare("quiesced")
    world.hooks.at["pool.snapshot tank"] = lambda: setattr(world.guest(), "agent", Agent.SILENT)
    with pytest.raises(AttentionError, match="snaporch recover"):
        snapshot(world)
    assert [record.level for record in records(world)] == [Level.CRASH]
    assert len(read_journals(world.paths.journal)) == 1
    world.guest().agent = Agent.ANSWERS
    said = recover(world.context, world.guest().uuid)
    assert any("thawed the guest" in str(each) for each in said)
    assert world.is_as_it_was()


@pytest.mark.parametrize("case", ["overlay", "manual", "quiesced", "paused"])
def test_a_guest_that_shuts_off_during_the_zfs_snapshots(world, prepare, case):
    """There is no RAM and the freeze did not last, but the ZFS snapshots exist."""
    prepare(case)
    world.hooks.at["pool.snapshot tank"] = lambda: world.hypervisor.destroy(world.guest().uuid)
    with suppress(RunFailedError):
        snapshot(world)
    assert world.is_as_it_was(state=DomainState.OFF)
    assert [record.level for record in records(world)] in ([Level.CRASH], [Level.RAM])
    if case in ("manual", "quiesced", "paused"):
        assert records(world)[0].level is Level.CRASH


def test_a_guest_that_qemu_paused_for_want_of_room_runs_after_the_commit(world, prepare):
    prepare("overlay")

    def pause():
        world.guest().state, world.guest().paused_reason = DomainState.PAUSED, "ioerror"

    world.hooks.at["commit.pivoting"] = pause
    assert snapshot(world).level is Level.RAM
    assert world.is_as_it_was()
    assert any("its overlay was full" in text for text in world.heard.notes)


def test_a_guest_that_writes_faster_than_the_commit_runs_afterwards(world, prepare):
    prepare("overlay")
    world.guest().writes_fast = True
    seen = []
    world.hooks.at["commit.suspended"] = lambda: seen.append(world.guest().state)
    assert snapshot(world).level is Level.RAM
    assert seen == [DomainState.PAUSED]
    assert world.is_as_it_was()


@pytest.mark.parametrize("step", ["hypervisor.commit", "pool.snapshot tank"])
def test_an_ended_guest_is_not_reported_as_it_was(world, prepare, step):
    prepare("overlay")

    def end():
        world.guest().live, world.guest().state = None, DomainState.OFF
        raise HypervisorError("web", "domain is not running")

    world.hooks.at[step] = end
    with pytest.raises(SnaporchError) as caught:
        snapshot(world)
    assert "QEMU ended" in str(caught.value)
    assert "as it was" not in str(caught.value)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (DomainState.SUSPENDED, "the guest is suspended, and was running .*dompmwakeup"),
        (DomainState.CRASHED, "the guest is crashed, and was running"),
    ],
)
def test_a_guest_that_stopped_itself_is_not_reported_as_it_was(world, prepare, state, said):
    """While its RAM is saved: libvirt does not resume it then."""
    prepare("manual")

    def stop():
        world.guest().state, world.guest().paused_reason = state, None
        raise HypervisorError("web", "domain is not paused")

    world.hooks.at["hypervisor.resume"] = stop
    with pytest.raises(RunFailedError, match=said) as caught:
        snapshot(world)
    assert "as it was" not in str(caught.value)
    assert "@s1 was kept, but only as crash-consistent" in str(caught.value)


@pytest.mark.parametrize("case", ["overlay", "manual"])
@pytest.mark.parametrize("job", ["backup", "snapshot"])
def test_no_ram_is_saved_beside_a_job_that_began_after_the_plan(
    world, prepare, once_planned, case, job
):
    """libvirt would wait half a minute for its end, and again to have the downtime put back."""
    prepare(case)

    def begin():
        world.guest().job = job

    once_planned(begin)
    with pytest.raises(RefusedError, match=rf"libvirt is busy with it \({job}\)"):
        snapshot(world)
    assert not {"hypervisor.capture", "hypervisor.abort_job"} & set(world.hooks.acts())
    assert world.guest().job == job
    assert world.guest().state is DomainState.RUNNING


def test_a_run_killed_while_its_commit_had_suspended_the_guest(world, prepare):
    prepare("overlay")
    world.guest().writes_fast = True
    with killed(world, "commit.suspended"):
        snapshot(world)
    assert world.guest().state is DomainState.PAUSED
    recover(world.context, world.guest().uuid)
    assert world.is_as_it_was()


# -- the RAM budget -----------------------------------------------------------------------------


@pytest.fixture
def slow_ram(world, clock):
    """Saving RAM takes longer than its budget."""
    world.hooks.at["capture.writing"] = partial(clock.go_on, 60)
    return clock


@pytest.mark.parametrize("case", ["overlay", "manual"])
def test_a_guest_that_changes_ram_too_fast_is_suspended(world, prepare, slow_ram, case):
    prepare(case, ram_time_budget="30s")
    assert snapshot(world).level is Level.RAM
    assert world.hooks.acts().count("hypervisor.suspend") == 1
    assert any("more than 30 s: suspending" in text for text in world.heard.notes)
    assert world.is_as_it_was()


@pytest.mark.parametrize("case", ["overlay", "manual"])
def test_a_guest_that_changes_ram_too_fast_aborts_the_run_if_configured(
    world, prepare, slow_ram, case
):
    prepare(case, ram_time_budget="30s", on_ram_budget="abort")
    with pytest.raises(RunFailedError, match="more than 30 s"):
        snapshot(world)
    assert "hypervisor.suspend" not in world.hooks.acts()
    assert world.is_as_it_was()
    assert world.pool.names() == []


@pytest.mark.parametrize("case", ["overlay", "manual"])
def test_a_run_that_fails_after_it_suspended_the_guest_resumes_it(world, prepare, slow_ram, case):
    prepare(case, ram_time_budget="30s")
    world.hooks.at["hypervisor.suspend"] = sigterm(world)
    with pytest.raises(InterruptedRunError):
        snapshot(world)
    assert world.is_as_it_was()


@pytest.mark.parametrize("case", ["overlay", "manual"])
def test_a_guest_that_was_restarted_before_the_budget_suspended_it_runs(
    world, prepare, slow_ram, case
):
    prepare(case, ram_time_budget="30s")
    world.hooks.at["hypervisor.suspend"] = partial(restart_guest, world)
    with pytest.raises(RunFailedError, match="restarted meanwhile"):
        snapshot(world)
    assert world.guest().state is DomainState.RUNNING
    assert world.pool.names() == []


@pytest.mark.parametrize("case", ["overlay", "manual"])
def test_a_guest_that_the_admin_had_suspended_before_the_budget_ended_stays_suspended(
    world, prepare, slow_ram, case
):
    prepare(case, ram_time_budget="30s")

    def suspend_and_go_on():
        world.hypervisor.suspend(world.guest().uuid)
        slow_ram.go_on(60)

    world.hooks.at["capture.writing"] = suspend_and_go_on
    assert snapshot(world).level is Level.RAM
    assert world.hooks.acts().count("hypervisor.suspend") == 2  # the admin's, and to keep it so
    assert world.is_as_it_was(state=DomainState.PAUSED)
    assert any("it stays suspended" in text for text in world.heard.notes)


@pytest.mark.parametrize("case", ["overlay", "manual"])
def test_the_suspension_is_noted_before_it_is_done(world, prepare, slow_ram, case):
    """After a kill in between, recovery could not know that the run suspended it."""
    prepare(case, ram_time_budget="30s")
    noted = []
    world.hooks.at["hypervisor.suspend"] = lambda: noted.append(notes(world))
    snapshot(world)
    assert noted == [{Note.SAVING, Note.SUSPENDED}]


@pytest.mark.parametrize(
    ("case", "suspended", "window"),
    [("overlay", False, GuestHold.ON_OVERLAYS), ("manual", True, GuestHold.STOPPED)],
)
def test_a_guest_that_runs_on_overlays_is_no_longer_noted_as_suspended(
    world, prepare, slow_ram, case, suspended, window
):
    prepare(case, ram_time_budget="30s")
    seen = []

    def observe():
        (path,) = world.paths.journal.glob("*.jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        seen.append((Note.SUSPENDED in notes(world), hold_of(lines)))

    world.hooks.at["pool.snapshot tank"] = observe
    assert snapshot(world).level is Level.RAM
    assert seen == [(suspended, window)]
    assert world.is_as_it_was()


def test_a_guest_that_libvirt_has_not_resumed_is_not_noted_as_resumed(world, prepare, slow_ram):
    """Recovery resumes it."""
    prepare("overlay", ram_time_budget="30s")
    world.guest().misses_resume = True
    seen = []
    world.hooks.at["pool.snapshot tank"] = lambda: seen.append(notes(world))
    with pytest.raises(RunFailedError):
        snapshot(world)
    assert Note.SUSPENDED in seen[0]
    assert world.is_as_it_was()


def suspend_and_fail(world, clock, strategy, again, *, resumed=True):
    """The budget suspends the guest, and its RAM cannot be saved in this way.

    Args:
        again: called while RAM is saved in another way.
        resumed: whether libvirt resumes the guest after the error.
    """

    def fail():
        clock.go_on(60)
        strategy._budget.check()
        assert notes(world) >= {Note.SUSPENDED}
        world.guest().misses_resume = not resumed
        world.hooks.at["capture.writing"] = again
        raise HypervisorError("web", "odd thing")

    world.hooks.at["capture.writing"] = fail


@pytest.mark.parametrize("case", ["overlay", "manual"])
def test_a_guest_whose_ram_is_saved_again_has_a_budget_again(world, prepare, clock, case):
    prepare(case, ram_time_budget="30s", ram_capture="auto")
    seen = []

    def again():
        seen.append(notes(world))
        clock.go_on(60)

    with strategy_of(world) as strategy:
        suspend_and_fail(world, clock, strategy, again)
        strategy.freeze()
        assert (Note.SUSPENDED in notes(world)) is (case == "manual")
        strategy.release()
        strategy.ram_part()
    assert Note.SUSPENDED not in seen[0]
    assert world.hooks.acts().count("hypervisor.suspend") == 2
    assert world.guest().state is DomainState.RUNNING


def test_a_guest_that_the_admin_suspends_while_its_ram_is_saved_again_stays_suspended(
    world, prepare, clock
):
    prepare("overlay", ram_time_budget="30s", ram_capture="auto")
    with strategy_of(world) as strategy:
        admin = partial(world.hypervisor.suspend, world.guest().uuid)
        suspend_and_fail(world, clock, strategy, admin)
        strategy.freeze()
        strategy.release()
        strategy.ram_part()
        assert Note.HELD in notes(world)
    assert world.guest().state is DomainState.PAUSED


def test_a_guest_that_libvirt_has_not_resumed_after_an_error_is_not_noted_as_resumed(
    world, prepare, clock
):
    """Recovery resumes it."""
    prepare("overlay", ram_time_budget="30s", ram_capture="auto")
    with strategy_of(world) as strategy:
        suspend_and_fail(world, clock, strategy, lambda: None, resumed=False)
        with pytest.raises(ChangedError, match="it is paused, and was running"):
            strategy.freeze()
        assert Note.SUSPENDED in notes(world)


def test_no_budget_is_no_limit(world, prepare, slow_ram):
    prepare("overlay", ram_time_budget="0s")
    snapshot(world)
    assert "hypervisor.suspend" not in world.hooks.acts()


def test_a_budget_of_bytes(world, prepare):
    prepare("overlay", ram_budget_mib=1)
    world.guest().ram = b"QEVM" + bytes(5 << 20)
    with strategy_of(world) as strategy:
        observe_slowing(world, strategy, enough=2 << 20)
        strategy.freeze()
        strategy.release()
        strategy.ram_part()
    assert world.hooks.acts().count("hypervisor.suspend") == 1
    assert any("more than 1 MiB" in text for text in world.heard.notes)


@pytest.mark.parametrize("case", ["overlay", "manual"])
def test_a_run_fails_if_no_ram_arrives(world, prepare, slow_ram, case):
    prepare(case, ram_time_budget="0s")
    world.guest().ram = b"QEVM"  # which may be the end, and is not counted before it is known
    world.hooks.at["capture.writing"] = partial(slow_ram.go_on, 200)
    with pytest.raises(RunFailedError) as caught:
        snapshot(world)
    assert "no RAM has arrived for 120 s" in str(caught.value)
    assert world.is_as_it_was()
    assert world.pool.names() == []


# -- sealing ------------------------------------------------------------------------------------


@pytest.fixture
def sealing(world, clock, ram_store):
    """A store that takes nothing more; time passes at every check, and the checks are recorded."""
    looks = []

    def look():
        looks.append(clock.now)
        clock.go_on(10)
        return clock.now

    def begin():
        world.context.clock = Clock(monotonic=look)

    world.ram_times = RamTimes(tick=0, abort=0)
    world.heard.at["sealing the bundle"] = begin
    return looks


@pytest.mark.parametrize("capture", ["stream", "file"])
def test_sealing_reports_the_ram_that_was_compressed(world, prepare, sealing, capture):
    prepare("overlay", ram_capture=capture)
    begin = world.heard.at["sealing the bundle"]
    world.heard.at["sealing the bundle"] = lambda: (begin(), world.heard.amounts.clear())
    with pytest.raises(RunFailedError, match="has taken nothing for 600 s"):
        snapshot(world)
    done, total = world.heard.amounts[-1]
    assert done <= total > 0


@pytest.mark.parametrize("case", ["overlay", "manual"])
def test_sealing_fails_if_the_store_takes_nothing(world, prepare, sealing, case):
    prepare(case)
    with pytest.raises(RunFailedError, match="has taken nothing for 600 s") as caught:
        snapshot(world)
    assert sealing[-1] - sealing[0] == pytest.approx(610, abs=20)
    assert "only as crash-consistent" in str(caught.value)
    assert world.is_as_it_was()
    assert sorted(world.pool.names()) == ["flash/web@s1", "tank/web@s1"]


def test_after_a_signal_sealing_fails_earlier(world, prepare, sealing):
    prepare("overlay")
    world.hooks.at["hypervisor.commit"] = sigterm(world)
    with pytest.raises(InterruptedRunError) as caught:
        snapshot(world)
    assert "stopped by SIGTERM; the guest is as it was; @s1 was kept" in str(caught.value)
    assert "only as crash-consistent" in str(caught.value)
    assert caught.value.signum == 15
    assert sealing[-1] - sealing[0] == pytest.approx(40, abs=20)
    assert world.is_as_it_was()


def test_a_hanging_store_does_not_keep_the_guest_paused(world, prepare, ram_store):
    """If the run fails while the guest is frozen."""
    prepare("manual", compression="none")
    stuck_at, resumed_at = [], []

    def fail():
        assert ram_store.reached.wait(60)
        stuck_at.append(time.monotonic())
        raise PoolError("tank", "is suspended")

    world.hooks.at["pool.snapshot tank"] = fail
    world.hooks.at["hypervisor.resume"] = lambda: resumed_at.append(time.monotonic())
    with pytest.raises(RunFailedError):
        snapshot(world)
    assert resumed_at[0] - stuck_at[0] < 5


def test_the_times_of_saving_ram_end_with_the_capture(world, prepare):
    """Waiting after the capture must not count as the compressor's time."""
    prepare("overlay")
    world.hypervisor.reports_pauses = False
    with strategy_of(world) as strategy:
        strategy.freeze()
        captured = strategy._capture._stream.pace
        strategy.release()
        assert strategy.ram_part().pace == captured


def test_after_a_signal_sealing_that_progresses_is_finished(world, clock, prepare):
    """However long it takes, also after a signal."""
    prepare("overlay")
    watch = SealingWatch("web", world.context.interrupt, clock.monotonic, RamTimes())
    sigterm(world)()
    for stored in range(100):
        clock.go_on(60)
        watch.check(stored)
    clock.go_on(31)
    with pytest.raises(InterruptedRunError):
        watch.check(99)


@pytest.mark.parametrize("leftover", [os.mkfifo, Path.touch])
def test_a_pipe_that_was_left_over_is_replaced(world, prepare, leftover):
    prepare("manual")
    runtime = world.context.config.paths.runtime
    runtime.mkdir(exist_ok=True)
    leftover(runtime / f"{world.hypervisor.domain('web').uuid}.ram")
    assert snapshot(world).level is Level.RAM


# -- limits while RAM is saved -----------------------------------------------------------------


@pytest.mark.parametrize("case", ["overlay", "manual"])
def test_a_pause_is_recorded_in_its_parts(world, prepare, case):
    prepare(case)
    taken = snapshot(world)
    parts = taken.pause_parts.as_json()
    recorded = [part for part, value in parts.items() if value is not None]
    with_snapshot = ["downtime_ms", "switch_ms", "snapshot_ms", "resume_ms"]
    assert recorded == (with_snapshot if case == "manual" else with_snapshot[:2])
    total = sum(value for value in parts.values() if value is not None)
    assert total == pytest.approx(taken.pause_ms, abs=0.5)
    assert taken.as_json()["pause_parts"] == parts


@pytest.mark.parametrize("case", ["overlay", "manual"])
@pytest.mark.parametrize("failing_place", [None, "capture.writing", "hypervisor.capture"])
def test_the_emulators_own_downtime_limit_is_restored(world, prepare, case, failing_place):
    prepare(case, downtime_limit="40ms", ram_capture="stream")
    seen = []

    def observe():
        seen.append(world.guest().downtime_limit)
        if failing_place == "capture.writing":
            raise HypervisorError("web", "odd thing")

    world.hooks.at["capture.writing"] = observe
    if failing_place == "hypervisor.capture":
        world.hooks.at[failing_place] = failing(HypervisorError("web", "odd thing"))
    with suppress(RunFailedError):
        snapshot(world)
    assert seen == ([] if failing_place == "hypervisor.capture" else [40])
    assert world.guest().downtime_limit == 300


def test_a_downtime_limit_of_none_is_left_alone(world, prepare):
    prepare("overlay", downtime_limit="0ms")
    world.hooks.at["capture.writing"] = lambda: seen.append(world.guest().downtime_limit)
    seen: list[int] = []
    snapshot(world)
    assert seen == [300]


def test_a_rate_ends_when_the_guest_is_paused(world, prepare):
    prepare("overlay", ram_rate=1)
    limits = []
    with strategy_of(world) as strategy:
        for place in ("capture.writing", "capture.switched"):
            world.hooks.at[place] = lambda: limits.append(strategy._capture.is_limited)
        # the fake stops the guest in the middle of its RAM, as a suspension would
        strategy.freeze()
    assert limits == [True, False]


@pytest.mark.parametrize(("rate", "limited"), [(0, False), (5, True), (None, True)])
def test_a_rate_on_the_command_line(world, prepare, rate, limited):
    prepare("overlay", ram_rate=1)
    with strategy_of(world, rate=rate) as strategy:
        assert strategy._capture.is_limited == limited
        assert strategy._capture._throttle._bytes_per_second == (1 if rate is None else rate) << 20


def test_a_rate_is_raised_if_the_budget_needs_it(world, prepare):
    prepare("overlay", ram_rate=1, ram_time_budget="10s")
    world.guest().ram_bytes = 100 << 20
    with strategy_of(world) as strategy:
        assert strategy._capture._throttle._bytes_per_second == 20 << 20
    assert any("saving RAM at 20 MiB/s" in text for text in world.heard.notes)


def test_the_rate_is_lifted_if_ram_changes_faster(world, prepare):
    prepare("overlay", ram_rate=1000, downtime_limit="40ms")
    world.guest().ram_bytes = 1
    world.hypervisor.reports_pauses = False  # a pause lifts it, too
    with strategy_of(world) as strategy:
        capture, arrived = strategy._capture, threading.Event()
        write = capture._writer.write

        def counted(data):
            write(data)
            if capture.arrived_bytes > 2:
                arrived.set()

        capture._writer.write = counted
        world.hooks.at["capture.writing"] = lambda: arrived.wait(30)
        assert capture.is_limited
        strategy.freeze()
        assert not capture.is_limited
        strategy.release()
        strategy.ram_part()
    assert len([text for text in world.heard.notes if "changes faster than the rate" in text]) == 1
    assert world.guest().downtime_limit == 300


def test_a_larger_rest_is_left_when_a_quarter_of_ram_was_saved_again(world, clock, prepare):
    prepare("overlay", downtime_limit="40ms")
    world.guest().resident_bytes = 0
    limits = []
    with strategy_of(world) as strategy:
        downtime = strategy._budget._downtime
        for _attempt in range(2):
            downtime.set()
            looks = [(0, 1), (300, 1), (500, 1), (600, 0.4), (700, 0.6), (880, 1), (1030, 1)]
            for arrived, seconds in looks:
                clock.go_on(seconds)
                downtime.follow(arrived, 400, 1000)
                downtime.settle()
                limits.append(world.guest().downtime_limit)
        downtime.restore()
    assert limits == [40, 40, 40, 40, 2500, 2500, 3333] * 2
    assert world.guest().downtime_limit == 300


def followed(world, clock, prepare, arrivals, *, room=1000, limit="40ms"):
    """The limits after each second of a run that expects 400 bytes of RAM."""
    prepare("overlay", downtime_limit=limit)
    world.guest().resident_bytes = 0
    limits = []
    with strategy_of(world) as strategy:
        downtime = strategy._budget._downtime
        downtime.set()
        for arrived in arrivals:
            clock.go_on(1)
            downtime.follow(arrived, 400, room)
            downtime.settle()
            limits.append(world.guest().downtime_limit)
        downtime.restore()
    return limits


def test_a_stall_does_not_make_the_rest_larger_than_the_pipe(world, clock, prepare):
    assert followed(world, clock, prepare, [1000, 1000]) == [500, 1000]


def test_where_the_pipe_takes_little_the_own_limit_comes_back_after_two_passes(
    world, clock, prepare
):
    assert followed(world, clock, prepare, [790, 810], room=1) == [40, 300]


def test_a_configured_limit_is_not_lowered(world, clock, prepare):
    assert followed(world, clock, prepare, [790, 810, 5000], limit="2s") == [2000] * 3


@pytest.mark.parametrize("cause", ["rate", "pause"])
def test_no_larger_rest_is_left_while_a_rate_limits_or_the_guest_is_paused(
    world, clock, prepare, cause
):
    prepare("overlay", downtime_limit="40ms", ram_rate=1000 if cause == "rate" else 0)
    world.guest().resident_bytes = 0
    with strategy_of(world) as strategy:
        budget = strategy._budget
        budget._downtime.set()
        if cause == "pause":
            strategy._capture.enlarge_pipe()
        clock.go_on(1)
        budget._follow(1 << 40)
        assert budget._downtime._setting is None
        strategy._capture.lift_limit()
        budget._follow(1 << 40)
        clock.go_on(1)
        budget._follow((1 << 40) + (1 << 20))
        assert (budget._downtime._setting is None) == (cause == "pause")
        assert (budget._downtime._best_speed > 1 << 20) == (cause == "rate")  # measured before


def test_a_stall_after_the_rate_was_lifted_does_not_make_the_pause_longer(world, clock, prepare):
    """The limited speed is the least that the pipe is known to have."""
    prepare("overlay", downtime_limit="40ms", ram_rate=1000)
    world.guest().resident_bytes = 0
    with strategy_of(world) as strategy:
        budget, downtime, speed = strategy._budget, strategy._budget._downtime, 100 << 20
        downtime.set()
        for second in (1, 2, 3):
            clock.go_on(1)
            budget._follow(second * speed)
        strategy._capture.lift_limit()
        budget._follow(3 * speed)
        clock.go_on(1)
        downtime.follow(3 * speed, 400, 64 << 20)
        downtime.settle()
        assert world.guest().downtime_limit == downtime_for(64 << 20, speed / 2)


def test_what_came_before_the_rate_was_lifted_says_nothing_of_the_speed_afterwards(
    world, clock, prepare
):
    prepare("overlay", downtime_limit="40ms", ram_rate=1000)
    world.guest().resident_bytes = 0
    with strategy_of(world) as strategy:
        budget, downtime, speed = strategy._budget, strategy._budget._downtime, 10 << 20
        downtime.set()
        for half in (1, 2):
            clock.go_on(0.5)
            budget._follow(half * speed)
        clock.go_on(0.4)  # limited to a twentieth
        budget._follow(3 * speed)
        strategy._capture.lift_limit()
        budget._follow(3 * speed)
        clock.go_on(0.1)
        budget._follow(13 * speed)
        assert downtime._setting is None  # not from 0.4 slow seconds and a fast tenth
        clock.go_on(0.4)
        downtime.follow(53 * speed, 400, 64 << 20)
        downtime.settle()
        own = world.guest().downtime_limit
        assert own == max(300, downtime_for(64 << 20, 50 * speed / 0.5))


def test_a_limit_that_another_job_kept_from_being_restored_is_noted(world, prepare):
    prepare("overlay", downtime_limit="40ms")
    own = world.guest().downtime_limit
    with strategy_of(world) as strategy:
        downtime = strategy._budget._downtime
        downtime.set()
        world.hypervisor.limit_downtime = lambda _uuid, _milliseconds: None
        downtime.restore()
    (note,) = [text for text in world.heard.notes if "downtime limit" in text]
    assert note.endswith(f"is still 40 ms; set it: virsh migrate-setmaxdowntime web {own}")


@pytest.mark.parametrize("case", ["overlay", "manual"])
@pytest.mark.parametrize("error", [HypervisorError("web", "odd thing"), KeyboardInterrupt])
def test_a_guest_that_the_admin_suspended_stays_suspended_after_an_error(
    world, prepare, case, error
):
    """libvirt resumes it then."""
    prepare(case, ram_capture="auto")

    def suspend_and_fail():
        world.hypervisor.suspend(world.guest().uuid)
        world.hooks.at["capture.paused"] = failing(error)

    world.hooks.at["capture.writing"] = suspend_and_fail
    with pytest.raises((SnaporchError, KeyboardInterrupt)):
        snapshot(world)
    assert world.guest().state is DomainState.PAUSED
    assert any("it stays suspended" in text for text in world.heard.notes)
    assert world.hooks.acts().count("hypervisor.capture") == 1
    assert world.leftovers() == []


def test_a_guest_for_which_others_wait_is_not_saved_again(world, prepare):
    prepare("manual", ram_capture="auto")
    world.hooks.at["capture.writing"] = failing(HypervisorError("web", "odd thing"))
    with strategy_of(world) as strategy:
        strategy.work = replace(strategy.work, others_wait=lambda: True)
        with pytest.raises(HypervisorError, match="odd thing"):
            strategy.freeze()
    assert world.hooks.acts().count("hypervisor.capture") == 1


def test_after_a_pause_that_failed_a_larger_rest_is_left_as_before(world, clock, prepare):
    """The guest was suspended, and its RAM is saved again while it runs."""
    prepare("overlay", downtime_limit="40ms")
    world.guest().resident_bytes = 0
    with strategy_of(world) as strategy:
        capture, budget = strategy._capture, strategy._budget
        capture.enlarge_pipe()
        capture.abandon()
        capture.open_stream()
        budget._downtime.set()
        clock.go_on(1)
        budget._follow(1 << 30)
        assert budget._downtime._setting is not None


def test_a_guest_that_began_to_use_more_ram_is_not_paused_for_longer(world, clock, prepare):
    prepare("overlay", downtime_limit="40ms")
    world.guest().resident_bytes = 8000
    with strategy_of(world) as strategy:
        downtime = strategy._budget._downtime
        downtime.set()
        clock.go_on(1)
        downtime.follow(9000, 4000, 1000)
        assert downtime._setting is None


@pytest.mark.parametrize(
    ("room", "speed", "expected"),
    [(128, 64, 1000), (128, 640, 100), (0, 64, 0), (128, 0, 10_000), (128, 0.1, 10_000)],
)
def test_the_downtime_in_which_the_pipe_takes_the_rest(room, speed, expected):
    assert downtime_for(room << 20, speed * (1 << 20)) == expected


QUOTAS = {"/machine/vcpu0": "max 100000"}


def observe_slowing(world, strategy, end=lambda: None, *, enough=4):
    """Have more bytes of RAM arrive; the quotas seen after each check, in order."""
    guest, seen, arrived = world.guest(), [], threading.Event()
    write = strategy._capture._writer.write

    def counted(data):
        write(data)
        if strategy._capture.arrived_bytes > enough:
            arrived.set()

    def observe():
        assert arrived.wait(30)
        for _ in range(4):
            strategy._budget.check()
            seen.append(guest.vcpu_quotas["/machine/vcpu0"])
        end()

    strategy._capture._writer.write = counted
    world.hooks.at["capture.writing"] = observe
    return seen


def fast_guest(world, prepare, **settings):
    prepare("overlay", **settings)
    world.guest().ram_bytes, world.guest().resident_bytes = 1, 0


@pytest.mark.parametrize(
    ("floor", "quotas"),
    [
        (10, ["5000 10000", "2500 10000", "1000 10000"]),
        (30, ["5000 10000", "3000 10000"]),
        (100, ["max 100000"]),
    ],
)
def test_a_guest_that_changes_ram_faster_is_slowed_down_in_steps(world, prepare, floor, quotas):
    fast_guest(world, prepare, vcpu_floor=floor)
    with strategy_of(world) as strategy:
        seen = observe_slowing(world, strategy)
        strategy.freeze()
        assert world.guest().vcpu_quotas == QUOTAS
        strategy.release()
        strategy.ram_part()
    assert list(dict.fromkeys(seen)) == quotas
    noted = [text for text in world.heard.notes if "slowing its vCPUs down" in text]
    assert len(noted) == (0 if floor == 100 else 1)


def test_a_guest_that_uses_more_ram_than_at_first_is_not_slowed_down(world, prepare):
    fast_guest(world, prepare)
    world.guest().resident_bytes = 1 << 30
    with strategy_of(world) as strategy:
        seen = observe_slowing(world, strategy)
        strategy.freeze()
        strategy.release()
        strategy.ram_part()
    assert set(seen) == {"max 100000"}


def test_a_guest_that_was_slowed_down_gets_its_cpu_time_back_after_an_error(world, prepare):
    fast_guest(world, prepare)
    with strategy_of(world) as strategy:
        fail = failing(HypervisorError("web", "odd thing"))
        seen = observe_slowing(world, strategy, fail)
        with pytest.raises(HypervisorError, match="odd thing"):
            strategy.freeze()
    assert seen[-1] == "1000 10000"
    assert world.guest().vcpu_quotas == QUOTAS


def test_a_guest_whose_ram_is_saved_again_is_slowed_down_again(world, prepare):
    fast_guest(world, prepare, ram_capture="auto")
    again = []

    def second():
        for _ in range(4):
            strategy._budget.check()
            again.append(world.guest().vcpu_quotas["/machine/vcpu0"])

    def fail():
        world.hooks.at["capture.writing"] = second
        raise HypervisorError("web", "odd thing")

    with strategy_of(world) as strategy:
        observe_slowing(world, strategy, fail)
        strategy.freeze()
        strategy.release()
        strategy.ram_part()
    assert again[-1] == "1000 10000"
    assert world.guest().vcpu_quotas == QUOTAS


@pytest.mark.parametrize("refused", ["5000 10000", "max 100000"])
def test_a_kernel_that_refuses_a_quota_fails_no_run(world, prepare, refused):
    fast_guest(world, prepare)
    with strategy_of(world) as strategy:
        observe_slowing(world, strategy)
        setting = world.hypervisor.set_vcpu_quotas

        def refuse(quotas):
            if refused in quotas.values():
                raise HypervisorError("cpu.max of a vCPU", "cannot be set")
            setting(quotas)

        world.hypervisor.set_vcpu_quotas = refuse
        strategy.freeze()
        strategy.release()
        strategy.ram_part()
    assert any("cpu.max of a vCPU: cannot be set" in text for text in world.heard.notes)


# -- a lower level instead ----------------------------------------------------------------------


def test_a_blocker_known_before_lowers_the_planned_level(world):
    world.add_guest()
    world.with_defaults(level="quiesced", on_unavailable="paused")
    record = snapshot(world)
    assert record.level is Level.PAUSED
    assert any("no guest agent is connected" in text for text in world.heard.notes)
    assert world.guarded[0].strategy is Strategy.PAUSED


@pytest.mark.parametrize(
    ("case", "place"),
    [
        ("overlay", "hypervisor.capture"),
        ("overlay", "capture.switched"),
        ("manual", "capture.switched"),
        ("quiesced", "hypervisor.freeze_file_systems"),
        ("quiesced", "agent.frozen"),
        ("paused", "hypervisor.suspend"),
    ],
)
def test_a_freeze_that_fails_is_followed_by_a_lower_level(world, prepare, case, place):
    prepare(case, on_unavailable="crash")
    world.hooks.at[place] = failing_once(HypervisorError("web", "odd thing"))
    record = snapshot(world)
    assert (record.level, record.state) == (Level.CRASH, BundleState.COMPLETE)
    assert any("odd thing" in text and "crash" in text for text in world.heard.notes)
    assert world.is_as_it_was()
    assert len(records(world)) == 1


@pytest.mark.parametrize("state", [DomainState.SUSPENDED, DomainState.RUNNING])
def test_the_note_about_a_lower_level_has_the_guests_state(world, prepare, state):
    prepare("paused", on_unavailable="crash")

    def stop():
        world.guest().state = state
        raise HypervisorError("web", "odd thing")

    world.hooks.at["hypervisor.suspend"] = stop
    snapshot(world)
    (note,) = [text for text in world.heard.notes if "taking crash instead" in text]
    assert "odd thing" in note
    stopped = "; the guest is suspended, and was running (if `virsh dompmwakeup` does not wake it"
    assert (stopped in note) == (state is DomainState.SUSPENDED)
    assert ("the guest is" in note) == (state is DomainState.SUSPENDED)


def test_a_slow_agent_is_followed_by_a_lower_level(world, prepare):
    prepare("quiesced", on_unavailable="crash")
    world.guest().agent = Agent.SLOW
    assert snapshot(world).level is Level.CRASH
    assert world.is_as_it_was()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_another_programs_freeze_is_left_alone(world, prepare, when):
    prepare("quiesced", on_unavailable="paused" if when == "meanwhile" else "fail")
    if when == "before":
        world.guest().frozen = True
        with pytest.raises(RefusedError, match="frozen already, and not by snaporch"):
            snapshot(world)
        assert records(world) == []
    else:  # between the last check and the freeze
        world.hooks.at["hypervisor.freeze_file_systems"] = lambda: setattr(
            world.guest(), "frozen", True
        )
        assert snapshot(world).level is Level.PAUSED
        assert any("another program has frozen it" in text for text in world.heard.notes)
    assert world.guest().frozen
    assert "hypervisor.thaw_file_systems" not in world.hooks.acts()
    world.guest().frozen = False
    assert world.is_as_it_was()


def test_another_programs_freeze_while_a_group_waits_is_left_alone(world, prepare):
    prepare("quiesced")
    seen = iter([False, True])
    world.hypervisor.file_systems_frozen = lambda _uuid: next(seen)
    with pytest.raises(RunFailedError, match="frozen already, and not by snaporch"):
        snapshot(world)
    assert "hypervisor.freeze_file_systems" not in world.hooks.acts()
    assert "hypervisor.thaw_file_systems" not in world.hooks.acts()


def test_an_agent_that_does_not_report_the_freeze_state_is_refused(world, prepare):
    prepare("quiesced")
    world.guest().agent = Agent.DUMB
    with pytest.raises(RefusedError, match="does not say whether its file systems are frozen"):
        snapshot(world)
    assert "hypervisor.freeze_file_systems" not in world.hooks.acts()


def test_a_late_freeze_is_thawed_by_recovery(world, prepare):
    prepare("quiesced")
    world.guest().agent = Agent.LATE
    with pytest.raises(AttentionError, match="snaporch recover"):
        snapshot(world)
    (journal,) = read_journals(world.paths.journal)
    assert journal.held
    world.guest().agent = Agent.ANSWERS
    assert world.guest().frozen
    recover(world.context, world.guest().uuid)
    assert world.is_as_it_was()


def test_another_programs_freeze_after_the_release_is_not_thawed(world, prepare):
    """The run is killed while its bundle is sealed; a backup tool freezes the guest meanwhile."""
    prepare("quiesced")
    world.hooks.at |= dict.fromkeys(
        ["hypervisor.versions", "hypervisor.find"], failing(KeyboardInterrupt())
    )
    with pytest.raises(KeyboardInterrupt):
        snapshot(world)
    world.hooks.at.clear()
    world.guest().frozen = True
    recover(world.context, world.guest().uuid)
    assert world.guest().frozen


def test_a_silent_agent_is_never_asked_to_freeze(world, prepare):
    """It might carry out the freeze later."""
    prepare("quiesced", on_unavailable="paused")
    world.guest().agent = Agent.SILENT
    assert snapshot(world).level is Level.PAUSED
    assert "hypervisor.freeze_file_systems" not in world.hooks.acts()
    assert world.is_as_it_was()


def test_a_silent_agent_without_a_lower_level_is_refused(world, prepare):
    prepare("quiesced")
    world.guest().agent = Agent.SILENT
    with pytest.raises(RefusedError, match="does not answer within 10 s"):
        snapshot(world)
    assert world.hooks.acts() in ([], ["hypervisor.rebase_inactive"])
    assert world.is_as_it_was()


@pytest.mark.parametrize(
    ("case", "lower"),
    [("quiesced", "fail"), ("quiesced", "quiesced"), ("paused", "quiesced"), ("paused", "paused")],
)
def test_without_a_lower_level_there_is_no_second_try(world, prepare, case, lower):
    prepare(case, on_unavailable=lower)
    world.hooks.at[CASES[case].freeze_calls[0]] = failing_once(HypervisorError("web", "odd thing"))
    with pytest.raises(RunFailedError, match="odd thing"):
        snapshot(world)
    assert world.is_as_it_was()
    assert records(world) == []


@pytest.mark.parametrize("place", ["pool.snapshot tank", "hypervisor.resume"])
def test_a_failure_after_the_freeze_tries_no_lower_level(world, prepare, place):
    prepare("paused", on_unavailable="crash")
    world.hooks.at[place] = failing_once(error_at(place))
    with pytest.raises(RunFailedError):
        snapshot(world)
    assert world.hooks.acts().count("pool.snapshot") == 2
    assert world.is_as_it_was()


def test_a_signal_tries_no_lower_level(world, prepare):
    prepare("overlay", on_unavailable="crash")
    world.hooks.at["capture.writing"] = sigterm(world)
    with pytest.raises(InterruptedRunError):
        snapshot(world)
    assert records(world) == []
    assert world.is_as_it_was()


def test_the_lower_level_may_fail_too(world, prepare):
    prepare("overlay", on_unavailable="paused")
    world.hooks.at["hypervisor.capture"] = failing(HypervisorError("web", "first"))
    world.hooks.at["hypervisor.suspend"] = failing(HypervisorError("web", "second"))
    with pytest.raises(RunFailedError, match="second"):
        snapshot(world)
    assert world.is_as_it_was()
    assert records(world) == []


# -- a requested level --------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["ram", "quiesced", "paused", "crash"])
def test_a_level_overrides_the_configured_one(world, level):
    world.add_guest(agent=Agent.ANSWERS)
    world.with_defaults(level="paused" if level == "crash" else "crash")
    assert snapshot(world, level=level).level == level


def test_a_level_for_a_guest_that_is_off_is_off(world):
    world.add_guest(state=DomainState.OFF)
    assert snapshot(world, level="ram").level is Level.OFF


def test_a_level_that_is_not_possible_touches_nothing(world):
    world.add_guest()
    with pytest.raises(RefusedError, match="no quiesced snapshot is possible: no guest agent"):
        snapshot(world, level="quiesced")
    assert world.hooks.log == []
    assert world.leftovers() == []
