"""Consistency groups: all frozen before any pool is snapshotted, and all snapshotted or none."""

import concurrent.futures
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
from fakes.hooks import failing, failing_once
from fakes.hypervisor import Agent

from snaporch import default_paths
from snaporch.bundle.manifest import read_manifest
from snaporch.catalog.records import all_records
from snaporch.config import Config
from snaporch.errors import (
    BusyError,
    CalledOffError,
    ExitCode,
    InterruptedRunError,
    NotFoundError,
    RefusedError,
    RunFailedError,
    raise_bugs,
)
from snaporch.hypervisor import HypervisorError
from snaporch.hypervisor.clone_xml import NAMESPACE
from snaporch.interrupt import Interrupt
from snaporch.journal import Journal
from snaporch.locks import domain_lock, lock_holder
from snaporch.model import DomainState, GroupRun, Level, Strategy
from snaporch.recovery.recover_runs import recover
from snaporch.restore.select import others_of_group
from snaporch.snapshot.group import group_of, members_of_group, snapshot_group
from snaporch.snapshot.group_barrier import (
    GroupBarrier,
    GroupMemberSnapshotter,
    SharedProgress,
)
from snaporch.snapshot.plan import make_plan
from snaporch.snapshot.request import AS_CONFIGURED, SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.zfs import PoolError

PATIENCE = 10
"""Seconds after which a thread hangs."""


@pytest.fixture
def pair(world):
    """Two guests on two pools, in a group."""
    world.add_guest("app", disks={"vda": "tank/app", "vdb": "flash/app"})
    world.add_guest("db", disks={"vda": "tank/db"})
    return configured(world)


def configured(world, *domains, **defaults):
    context = world.with_defaults(**({"ram_strategy": "auto"} | defaults))
    document = context.config.model_dump(exclude_unset=True)
    wanted = {"group": {"pair": {"domains": list(domains or ("app", "db"))}}}
    context.config = Config.model_validate(document | wanted)
    return world


def take(world, **options):
    request = SnapshotRequest(**({"name": "s1"} | options))
    return snapshot_group(world.context, "pair", request)


def records(world):
    return all_records(world.context.store, world.pool.snapshots())


def as_it_was(world):
    return all(world.is_as_it_was(name) for name in ("app", "db")) and world.pool.names() == []


# -- without failures ---------------------------------------------------------------------------


def test_all_members_are_frozen_before_any_pool_is_snapshotted_and_released_after(pair):
    seen = []
    pair.hooks.at["pool.snapshot"] = lambda: seen.append(
        {guest.state for guest in pair.hypervisor.guests.values()}
    )
    outcome = take(pair)
    assert raise_bugs(outcome.failures) == []
    acts = [act for act in pair.hooks.acts() if act != "pool.set_properties"]
    assert acts == ["hypervisor.capture"] * 2 + ["pool.snapshot"] * 2 + ["hypervisor.resume"] * 2
    assert seen == [{DomainState.PAUSED}] * 2
    assert all(pair.is_as_it_was(name) for name in ("app", "db"))


def test_locks_are_taken_in_the_order_of_uuids(pair):
    """Two groups with the same members, in whatever order, never wait for each other."""
    for number in range(9):
        pair.add_guest(f"more{number}", {"vda": f"tank/more{number}"})
    guests = sorted(pair.hypervisor.guests.values(), key=lambda each: each.uuid)
    first = next(g for g in guests if any(other.name < g.name for other in guests))
    second = next(g for g in guests if g.name < first.name)
    assert first.uuid < second.uuid
    configured(pair, first.name, second.name)
    with ExitStack() as held:
        for guest in (first, second):
            lock = domain_lock(
                default_paths.LOCKS, guest.name, guest.uuid, "a test", wait=0, interrupt=Interrupt()
            )
            held.enter_context(lock)
        (busy,) = take(pair, wait=0).failures
    assert isinstance(busy, BusyError)
    assert busy.thing == first.name


def test_one_call_for_each_pool_over_all_domains(pair):
    take(pair)
    calls = [line for line in pair.hooks.log if line.startswith("pool.snapshot")]
    assert calls == ["pool.snapshot flash/app@s1", "pool.snapshot tank/app@s1 tank/db@s1"]
    by_name = {s.full_name: s.createtxg for s in pair.pool.snapshots()}
    assert by_name["tank/app@s1"] == by_name["tank/db@s1"]


def test_common_properties_are_set_with_the_snapshots(pair):
    """The other properties are set when the guests run again; snaporch may be killed before."""
    take(pair, policy="hourly")
    for properties in pair.pool.created_with:
        group = properties.pop("snaporch:group")
        assert group.startswith("pair/")
        assert properties == {"snaporch:level": "crash", "snaporch:retention": "hourly"}  # so far
    assert len(pair.pool.created_with) == 2


def test_each_has_its_own_run_and_all_know_the_group(pair):
    outcome = take(pair)
    assert sorted(record.domain for record in outcome.records) == ["app", "db"]
    assert records(pair) == sorted(outcome.records, key=lambda r: (r.created, r.run))
    assert {record.level for record in outcome.records} == {Level.RAM}
    assert len({record.run for record in outcome.records}) == 2
    assert {(r.group, r.group_run) for r in outcome.records} == {
        ("pair", outcome.records[0].group_run)
    }
    for record in outcome.records:
        group = read_manifest(pair.context.store.path(f"{record.uuid}/{record.run}")).group
        assert group.run == record.group_run
        assert [member.domain for member in group.members] == ["app", "db"]


def test_the_default_name_is_the_same_for_all_members(pair):
    pair.pool.snapshot(["tank/db@x"], {})
    first = take(pair, name=None)
    assert len({record.snapshot for record in first.records}) == 1
    assert first.records[0].snapshot.endswith("_manual")


def test_overlays_if_the_configuration_asks_for_them(pair):
    configured(pair, ram_strategy="overlay")
    outcome = take(pair)
    assert {record.level for record in outcome.records} == {Level.RAM}
    assert pair.hooks.acts().count("hypervisor.commit") == 2


def test_members_that_freeze_at_once_are_frozen_last(world):
    world.add_guest("a", agent=Agent.ANSWERS)
    world.add_guest("b")
    world.add_guest("c")
    world.add_guest("d")
    world.add_guest("off", state=DomainState.OFF)
    configured(world, "*")
    document = world.context.config.model_dump(exclude_unset=True)
    own = {"a": {"level": "quiesced"}, "b": {"level": "paused"}, "d": {"level": "crash"}}
    world.context.config = Config.model_validate(document | {"domain": own})
    outcome = take(world)
    levels = {record.domain: record.level.value for record in outcome.records}
    assert levels == {"a": "quiesced", "b": "paused", "c": "ram", "d": "crash", "off": "off"}
    acts = world.hooks.acts()
    order = [
        acts.index(f"hypervisor.{act}") for act in ("capture", "freeze_file_systems", "suspend")
    ]
    assert order == sorted(order)
    assert acts.index("hypervisor.suspend") < acts.index("pool.snapshot")


# -- all or none --------------------------------------------------------------------------------


def test_a_member_that_cannot_be_frozen_releases_all(pair):
    pair.hooks.at["hypervisor.capture"] = failing_once(HypervisorError("x", "no luck"))
    configured(pair, ram_capture="file")
    outcome = take(pair)
    assert outcome.records == []
    (error,) = raise_bugs(outcome.failures)
    assert "no luck" in error.reason
    assert as_it_was(pair)
    assert records(pair) == []


def test_a_refused_member_refuses_the_group_before_anything_is_touched(pair):
    pair.guest("db").job = "migration out"
    with pytest.raises(RefusedError, match="migration out"):
        take(pair)
    assert pair.hooks.acts() == []


def test_a_member_with_an_allowed_lower_level_does_not_stop_the_others(pair):
    configured(pair, ram_capture="file", on_unavailable="paused")
    pair.hooks.at["hypervisor.capture"] = failing_once(HypervisorError("x", "no luck"))
    outcome = take(pair)
    assert raise_bugs(outcome.failures) == []
    assert sorted(record.level.value for record in outcome.records) == ["paused", "ram"]
    assert any("taking paused instead" in note for note in pair.heard.notes)


def test_a_cancelled_member_tries_no_lower_level(pair):
    document = configured(pair, ram_capture="file").context.config.model_dump(exclude_unset=True)
    own = {"app": {"on_unavailable": "crash"}}
    pair.context.config = Config.model_validate(document | {"domain": own})

    def fail_db():
        if pair.hooks.log[-1] == "hypervisor.capture db":
            raise HypervisorError("db", "no luck")

    pair.hooks.at["hypervisor.capture"] = fail_db
    outcome = take(pair)
    assert outcome.records == []
    assert [error.thing for error in raise_bugs(outcome.failures)] == ["db"]
    assert as_it_was(pair)


def test_a_failing_pool_leaves_no_snapshot_in_the_others(pair):
    def refuse_tank():
        if "tank" in pair.hooks.log[-1]:
            raise PoolError("tank", "is full")

    pair.hooks.at["pool.snapshot"] = refuse_tank
    outcome = take(pair)
    assert outcome.records == []
    (error,) = raise_bugs(outcome.failures)
    assert "is full" in error.reason
    assert as_it_was(pair)


def test_a_member_that_is_changed_while_it_waits_ends_the_attempt(pair):
    """While the RAM of another member is saved, a backup tool takes a snapshot."""
    document = configured(pair).context.config.model_dump(exclude_unset=True)
    own = {"db": {"level": "paused"}}
    pair.context.config = Config.model_validate(document | {"domain": own})
    guest = pair.guest("db")
    tool = pair.image("tank/db", "db-vda.tool")

    def act():
        guest.live = guest.live.replace("db-vda.img", tool.name)

    pair.hooks.at["capture.writing"] = act
    outcome = take(pair)
    (failure,) = raise_bugs(outcome.failures)
    assert isinstance(failure, RefusedError)
    assert f"its disk vda is on {tool}" in failure.reason
    assert as_it_was(pair)


def test_a_signal_undoes_all(pair):
    def come():
        pair.context.interrupt.signum = 15

    pair.hooks.at["hypervisor.capture"] = come
    outcome = take(pair)
    assert outcome.records == []
    assert all(isinstance(error, InterruptedRunError) for error in raise_bugs(outcome.failures))
    assert outcome.failures
    assert as_it_was(pair)


def test_a_failure_after_the_snapshots_affects_only_that_member(pair):
    def fail_app():
        if pair.hooks.log[-1] == "hypervisor.resume app":
            raise HypervisorError("app", "libvirt is away")

    pair.hooks.at["hypervisor.resume"] = fail_app
    outcome = take(pair)
    assert [record.domain for record in outcome.records] == ["db"]
    assert [error.thing for error in raise_bugs(outcome.failures)] == ["app"]
    assert len(pair.pool.names()) == 3


def test_each_member_is_planned_once_under_the_locks_of_all(pair):
    planned = []

    def plan():
        held = {
            d.name for d in pair.hypervisor.domains() if lock_holder(default_paths.LOCKS, d.uuid)
        }
        planned.append(held)

    pair.hooks.at["hypervisor.blockers"] = plan
    assert raise_bugs(take(pair).failures) == []
    assert planned == [{"app", "db"}, {"app", "db"}]


@pytest.mark.parametrize("name", ["app", "db"])
def test_a_member_that_another_process_has_locked_is_busy(pair, name):
    domain, interrupt = pair.hypervisor.domain(name), pair.context.interrupt
    with domain_lock(
        default_paths.LOCKS, domain.name, domain.uuid, "restore", wait="0s", interrupt=interrupt
    ):
        outcome = take(pair)
    (error,) = raise_bugs(outcome.failures)
    assert (error.thing, error.exit_code) == (name, ExitCode.BUSY)
    assert pair.hooks.acts() == []
    assert raise_bugs(take(pair).failures) == []  # the other's lock was released


def test_a_bug_is_raised_and_not_reported_as_a_failure(pair):
    pair.heard.at["ram snapshot"] = failing(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        raise_bugs(take(pair).failures)


def failing_with(error):
    def fail(*_arguments, **_options):
        raise error

    return fail


# -- members ------------------------------------------------------------------------------------


def test_names_uuids_and_patterns(pair):
    db = pair.hypervisor.domain("db")
    pair.add_guest("db-2")
    configured(pair, "db*", "app")
    assert [d.name for d in members_of_group(pair.context, "pair")] == ["app", "db", "db-2"]
    configured(pair, db.uuid)
    assert [d.name for d in members_of_group(pair.context, "pair")] == ["db"]
    assert group_of(pair.context.config, db) == "pair"
    assert group_of(pair.context.config, pair.hypervisor.domain("app")) is None


def test_patterns_do_not_match_clones(pair):
    configured(pair, "db", "a*")
    app = pair.guest("app")
    mark = f'<clone xmlns="{NAMESPACE}" uuid="{app.uuid}" of="web@s1"/>'
    for which in ("live", "inactive"):
        xml = getattr(app, which)
        setattr(app, which, xml.replace("</domain>", f"<metadata>{mark}</metadata></domain>"))
    assert [d.name for d in members_of_group(pair.context, "pair")] == ["db"]


@pytest.mark.parametrize(
    ("domains", "words"),
    [(("app", "bd"), "no such domain"), (("x*",), "no domain matches")],
)
def test_a_missing_domain_is_not_found(pair, domains, words):
    configured(pair, *domains)
    with pytest.raises(NotFoundError, match=words):
        take(pair)


def test_a_missing_group_is_not_found(pair):
    with pytest.raises(NotFoundError, match="there are pair"):
        snapshot_group(pair.context, "pear", AS_CONFIGURED)


def test_disks_on_one_dataset_are_refused(pair):
    pair.add_guest("mail", disks={"vda": "tank/db"})
    configured(pair, "mail", "db")
    with pytest.raises(RefusedError, match="a dataset of its own"):
        take(pair)
    assert pair.hooks.acts() == []


# -- killed -------------------------------------------------------------------------------------


def killed(world, name, mark):
    """A run that was killed when the snapshots existed and had only the group's property."""
    group = GroupRun("pair", "r", ())
    domain = world.hypervisor.domain(name)
    plan = make_plan(world.context, domain, SnapshotRequest("s1"), group=group)
    Journal(world.paths.journal, replace(plan.facts, group=mark))
    return plan


def test_killed_before_its_properties_it_is_a_crash_snapshot_of_its_domain(pair):
    plan = killed(pair, "app", "pair/r")
    pair.pool.snapshot(["tank/app@s1", "tank/db@s1"], {"snaporch:group": "pair/r"})
    pair.pool.snapshot(["flash/app@s1"], {"snaporch:group": "pair/r"})
    recover(pair.context, plan.domain.uuid)
    (record,) = records(pair)
    assert (record.domain, record.level, record.group) == ("app", Level.CRASH, "pair")
    assert record.datasets == ("flash/app", "tank/app")
    assert len(pair.pool.names()) == 3


def test_killed_between_two_pools_the_first_pools_snapshot_is_destroyed(pair):
    plan = killed(pair, "app", "pair/r")
    pair.pool.snapshot(["flash/app@s1"], {"snaporch:group": "pair/r"})
    pair.pool.snapshot(["tank/app@s1"], {"snaporch:group": "pair/other"})
    recover(pair.context, plan.domain.uuid)
    assert pair.pool.names() == ["tank/app@s1"]


def test_a_snapshot_of_that_name_without_properties_is_not_touched(pair):
    plan = killed(pair, "db", "")
    pair.pool.snapshot(["tank/db@s1"], {})
    recover(pair.context, plan.domain.uuid)
    assert pair.pool.names() == ["tank/db@s1"]
    assert records(pair) == []


# -- the window ---------------------------------------------------------------------------------


class WaitsError(Exception):
    """The member would have to wait."""


def waits(_name):
    raise WaitsError


@pytest.fixture
def window(pair):
    domains = [pair.hypervisor.domain(name) for name in ("app", "db")]
    pair.guest("app").ram = b"x" * 5000
    pair.guest("db").ram = b"x" * 1000
    group = GroupRun("pair", "r", tuple((d.uuid, d.name) for d in domains))
    made = GroupBarrier(pair.context, group)
    made.plans = {
        d.name: make_plan(pair.context, d, SnapshotRequest("s1"), group=group) for d in domains
    }
    made.turn = lambda name: made.await_turn(made.plans[name].domain.uuid, made.plans[name], waits)
    return made


def test_no_member_begins_before_all_are_ready(window):
    with pytest.raises(WaitsError):
        window.turn("app")
    with pytest.raises(WaitsError):
        window.turn("db")  # its turn comes later
    window.turn("app")


def test_a_smaller_member_begins_when_the_larger_has_as_little_left(window, pair):
    whole = pair.hypervisor.ram_in_use(window.plans["app"].domain.uuid)
    small = pair.hypervisor.ram_in_use(window.plans["db"].domain.uuid)
    with pytest.raises(WaitsError):
        window.turn("app")
    with pytest.raises(WaitsError):
        window.turn("db")
    window.record_saved("app", whole - small - 1, whole)
    with pytest.raises(WaitsError):
        window.turn("db")
    window.record_saved("app", whole - small, whole)
    window.turn("db")


def test_a_member_that_freezes_at_once_waits_for_the_slower_ones(window, pair):
    as_paused(window, "db")
    with pytest.raises(WaitsError):
        window.turn("app")
    with pytest.raises(WaitsError):
        window.turn("db")
    uuids = {name: plan.domain.uuid for name, plan in window.plans.items()}
    assert not window.others_wait(uuids["db"])
    with frozen(window, "app"):
        window.turn("db")
        assert window.others_wait(uuids["db"])
        assert not window.others_wait(uuids["app"])
        window.fail(window.plans["db"].domain.uuid, RunFailedError("db", "over"))


def test_a_member_that_saves_no_ram_after_all_blocks_no_other(window):
    with pytest.raises(WaitsError):
        window.turn("app")
    with pytest.raises(WaitsError):
        window.turn("db")
    as_paused(window, "app")
    with pytest.raises(WaitsError):
        window.turn("app")
    window.turn("db")


def test_a_waiting_member_is_woken_at_its_turn(window, pair):
    window.poll_seconds = 2 * PATIENCE
    app, db = (window.plans[name] for name in ("app", "db"))
    whole = pair.hypervisor.ram_in_use(app.domain.uuid)
    with ThreadPoolExecutor(2) as threads:
        large = threads.submit(window.await_turn, app.domain.uuid, app, lambda _name: None)
        assert not concurrent.futures.wait([large], 0.1).done
        small = threads.submit(window.await_turn, db.domain.uuid, db, lambda _name: None)
        large.result(PATIENCE)
        assert not concurrent.futures.wait([small], 0.1).done
        window.record_saved("app", whole, whole)
        small.result(PATIENCE)


def test_a_domain_that_was_removed_is_reported_by_its_run(window, pair):
    del pair.hypervisor.guests[window.plans["app"].domain.uuid]
    with pytest.raises(WaitsError):
        window.turn("app")
    window.turn("db")


def test_progress_is_the_sum_over_all_members(window, pair):
    as_paused(window, "db")
    ready(window)
    whole = pair.hypervisor.ram_in_use(window.plans["app"].domain.uuid)
    progress = SharedProgress(pair.heard, window, "pair")
    for done in (0, whole - 1, whole, whole + 5):
        progress.amount("app", done, whole)
    assert pair.heard.amounts == [(0, whole), (whole - 1, whole), (whole, whole), (whole, whole)]


def test_progress_is_the_sum_over_two_members(window, pair):
    ready(window)
    large, small = (
        pair.hypervisor.ram_in_use(window.plans[name].domain.uuid) for name in ("app", "db")
    )
    assert window.record_saved("app", 70, large) == (70, large + small)
    assert window.record_saved("db", 7, small) == (77, large + small)


def test_the_first_failure_is_reported(window):
    app, db = (window.plans[name].domain.uuid for name in ("app", "db"))
    early = RunFailedError("app", "early")
    window.fail(app, early)
    window.fail(db, RunFailedError("db", "late"))
    assert window.failed == ("app", early)
    with pytest.raises(CalledOffError) as caught:
        window.check(db)
    assert caught.value.signum == 0, "no signal came"


@contextmanager
def frozen(window, name):
    """Have a member wait frozen for the others in a thread; yield its future."""
    waiting, plan = threading.Event(), window.plans[name]

    def check(_name):
        window.check(plan.domain.uuid)
        waiting.set()

    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(window.take, plan.domain.uuid, plan, {}, check)
        assert waiting.wait(PATIENCE)
        yield future


def as_paused(window, name):
    plan = window.plans[name]
    window.plans[name] = replace(plan, facts=replace(plan.facts, strategy=Strategy.PAUSED))


def ready(window):
    for plan in window.plans.values():
        with pytest.raises(WaitsError):
            window.await_turn(plan.domain.uuid, plan, waits)


def take_as_a_member(window, name, check=None):
    plan = window.plans[name]
    window.take(plan.domain.uuid, plan, {}, check or (lambda _name: window.check(plan.domain.uuid)))


def impatient(window, name):
    plan = window.plans[name]
    settings = plan.settings.model_copy(update={"freeze_deadline": 1})
    window.plans[name] = replace(plan, settings=settings)


def test_a_member_that_is_frozen_for_too_long_ends_the_attempt(window, pair):
    """While the failed member is being released, another may become frozen."""
    ready(window)
    impatient(window, "app")
    with pytest.raises(RunFailedError, match="was frozen for 1 s, and db was not frozen yet"):
        take_as_a_member(window, "app")
    with pytest.raises(CalledOffError, match="because app failed"):
        take_as_a_member(window, "db")
    assert pair.pool.names() == []


@pytest.mark.parametrize(
    ("strategy", "deadline", "seconds"),
    [
        (Strategy.MANUAL, 30, 28),
        (Strategy.PAUSED, 30, 28),
        (Strategy.QUIESCED, 30, 28),
        (Strategy.QUIESCED, 2, 1),
        (Strategy.OVERLAY, 30, math.inf),  # it runs meanwhile
        (Strategy.CRASH, 30, math.inf),
        (Strategy.OFF, 30, math.inf),
    ],
)
def test_a_frozen_member_fails_before_its_guardian_releases_it(window, strategy, deadline, seconds):
    plan = window.plans["app"]
    settings = plan.settings.model_copy(update={"freeze_deadline": deadline})
    facts = replace(plan.facts, strategy=strategy)
    assert replace(plan, settings=settings, facts=facts).max_frozen == seconds


def test_a_signal_to_a_frozen_member_ends_the_attempt(window, pair):
    ready(window)
    with pytest.raises(InterruptedRunError):
        take_as_a_member(window, "app", failing_with(InterruptedRunError("app", "SIGTERM", 15)))
    with pytest.raises(CalledOffError, match="because app failed"):
        take_as_a_member(window, "db")
    assert pair.pool.names() == []


def test_no_snapshot_is_taken_while_a_member_is_being_released(pair):
    """Otherwise the snapshots would be of a running guest."""
    configured(pair, freeze_deadline="1s", ram_strategy="manual")
    releasing, over = threading.Event(), threading.Event()

    def before_db():
        if pair.hooks.log[-1] == "hypervisor.capture db":
            assert releasing.wait(PATIENCE)

    def resume():
        if pair.hooks.log[-1] == "hypervisor.resume app":
            releasing.set()
            assert over.wait(PATIENCE)

    def step(subject, text):
        if (subject, text) == ("db", "undoing the run"):
            over.set()

    pair.heard.step = step
    pair.hooks.at |= {
        "hypervisor.capture": before_db,
        "hypervisor.resume": resume,
        "pool.snapshot": over.set,
    }
    outcome = take(pair)
    assert outcome.records == []
    assert [error.thing for error in raise_bugs(outcome.failures)] == ["app"]
    assert as_it_was(pair)


def test_after_the_snapshots_a_failure_cancels_no_member(window, pair):
    ready(window)
    window.poll_seconds = 2 * PATIENCE
    app, db = (window.plans[name] for name in ("app", "db"))
    with frozen(window, "app") as future:
        GroupMemberSnapshotter(pair.context, window, db.domain.uuid).take(db, {})
        future.result(PATIENCE)
    window.fail(app.domain.uuid, RunFailedError("app", "late"))
    window.check(db.domain.uuid)
    assert window.failed is None


def test_before_the_snapshots_a_failure_cancels_the_others_at_once(window):
    ready(window)
    window.poll_seconds = 2 * PATIENCE
    with frozen(window, "db") as future:
        window.fail(window.plans["app"].domain.uuid, RunFailedError("app", "early"))
        with pytest.raises(CalledOffError, match="because app failed"):
            future.result(PATIENCE)


def test_a_pool_that_fails_cancels_all_members_at_once(window, pair):
    """The others are frozen, and must not wait until the failed run has been undone."""
    pair.hooks.at["pool.snapshot"] = failing_with(PoolError("tank", "is full"))
    ready(window)
    window.poll_seconds = 2 * PATIENCE
    with frozen(window, "app") as future:
        with pytest.raises(PoolError):
            take_as_a_member(window, "db")
        with pytest.raises(CalledOffError, match="because db failed"):
            future.result(PATIENCE)


# -- afterwards ---------------------------------------------------------------------------------


def test_a_restore_names_the_other_members(pair):
    take(pair)
    app, db = sorted(records(pair), key=lambda record: record.domain)
    assert others_of_group(pair.context, db) == (
        "of the group pair: app@s1 would be of the same instant, and is not restored with it"
    )
    for dataset in app.datasets:
        pair.pool.destroy_snapshots([f"{dataset}@s1"])
    assert "have no snapshots of that instant any more" in others_of_group(pair.context, db)
    alone = take_snapshot(pair.context, pair.hypervisor.domain("db"), SnapshotRequest("s2"))
    assert others_of_group(pair.context, alone) is None
