import os
import socket
import subprocess
import sys
import threading

import pytest
from fakes.hooks import failing
from fakes.hypervisor import Agent

from snaporch.catalog.records import all_records
from snaporch.errors import RefusedError, RunFailedError, SnaporchError
from snaporch.hypervisor import HypervisorError
from snaporch.hypervisor.commit_timeouts import CommitTimeouts
from snaporch.model import BundleState, DomainState, Level
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.run import restore
from snaporch.sanoid.hold.messages import JsonConnection, ask, connect
from snaporch.sanoid.hooks import freeze, guests
from snaporch.zfs import PoolError

TWO = {"vda": "tank/web", "vdb": "flash/web"}


def records(world):
    return all_records(world.context.store, world.pool.snapshots())


@pytest.fixture
def sanoid():
    """A process that is sanoid to the hold process."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_the_guest_is_held_from_pre_to_post(world, hold):
    world.add_guest()
    held = hold()
    held.enter(names=["hourly", "daily"])
    assert not world.on_bases()
    held.snapshot("tank/web@daily", "tank/web@hourly")
    assert held.leave() == {"ok": True, "notes": []}
    assert world.on_bases()
    assert held.end() == 0
    daily, hourly = sorted(records(world), key=lambda record: record.snapshot)
    assert (daily.snapshot, hourly.snapshot) == ("daily", "hourly")
    assert daily.bundle == hourly.bundle
    assert {daily.level, hourly.level} == {Level.RAM}
    assert {daily.state, hourly.state} == {BundleState.COMPLETE}
    assert world.is_as_it_was()


def test_the_manifest_names_all_the_snapshots(world, hold):
    world.add_guest(disks=TWO)
    held = hold()
    held.enter("tank/web", datasets=["flash/web", "tank/web"], names=["hourly", "daily"])
    wanted = [f"{dataset}@{name}" for dataset in TWO.values() for name in ("daily", "hourly")]
    held.snapshot(*wanted)
    held.leave()
    held.end()
    record = records(world)[0]
    manifest = world.context.store.manifest(f"{record.uuid}/{record.run}")
    recorded = {(f"{entry.dataset}@{entry.name}", entry.guid) for entry in manifest.snapshots}
    assert recorded == {(snapshot.full_name, snapshot.guid) for snapshot in world.pool.snapshots()}


def test_dataset_by_dataset_it_is_one_window(world, hold):
    world.add_guest(disks=TWO)
    held = hold()
    both = list(TWO.values())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        held.enter("tank/web", process.pid, promised=both, names=["t1"])
        held.snapshot("tank/web@t1")
        assert held.leave("tank/web", process.pid) == {"ok": True, "notes": []}
        assert not world.on_bases()
        held.enter("flash/web", process.pid, promised=both, names=["t2"])
        held.snapshot("flash/web@t2")
        assert held.leave("flash/web", process.pid)["ok"]
        assert world.on_bases()
        process.communicate()
    assert held.end() == 0
    assert world.hooks.acts().count("hypervisor.capture") == 1
    for record in records(world):
        assert record.datasets == ("flash/web", "tank/web")
        assert (record.level, record.state) == (Level.RAM, BundleState.COMPLETE)


def test_a_sanoid_that_ends_is_not_waited_for(world, hold, sanoid):
    world.add_guest(disks=TWO)
    held = hold()
    held.enter("tank/web", sanoid.pid, promised=list(TWO.values()))
    held.snapshot("tank/web@hourly")
    held.leave("tank/web", sanoid.pid)
    sanoid.kill()
    assert held.end() == 0
    (record,) = records(world)
    assert (record.level, record.state) == (Level.CRASH, BundleState.INCOMPLETE)
    assert world.pool.snapshots()[0].properties["level"] == "crash"
    manifest = world.context.store.manifest(f"{record.uuid}/{record.run}")
    assert manifest.level is Level.CRASH
    assert world.is_as_it_was()


@pytest.mark.parametrize("level", [Level.TORN, Level.OFF, Level.CRASH])
def test_a_dataset_without_a_snapshot_does_not_raise_the_level(world, hold, level):
    """Another process has committed the overlays meanwhile, at an unknown time; or it was off."""
    state = DomainState.OFF if level is Level.OFF else DomainState.RUNNING
    world.add_guest(disks=TWO, state=state)
    held = hold()
    held.enter("tank/web", datasets=["tank/web"])
    if level is Level.TORN:
        facts = world.guarded[0]
        world.hypervisor.commit(facts.uuid, facts.overlays, lambda _: None, CommitTimeouts())
    held.snapshot("tank/web@hourly")
    held.leave("tank/web")
    assert held.end() == 0
    (record,) = records(world)
    assert record.level is level


def test_a_sanoid_that_was_killed_before_it_took_anything(world, hold, sanoid):
    world.add_guest()
    held = hold()
    held.enter("tank/web", sanoid.pid)
    sanoid.kill()
    assert held.end() == 8
    assert world.is_as_it_was()
    assert records(world) == []
    assert list(world.paths.bundles.glob("*/*")) == []


def test_a_hook_that_is_killed_while_it_waits_undoes_the_freeze(world, hold):
    world.add_guest()
    lines = []

    def hang_up():
        while not lines:
            pass
        lines[0].close()
        while held.interrupt.signum is None:
            pass

    world.hooks.at["capture.writing"] = hang_up
    held = hold()
    lines.append(held.join())
    assert held.end() == 8 or held.code is not None
    assert world.is_as_it_was()
    assert "hypervisor.commit" not in world.hooks.acts()


def test_a_withdrawn_call_releases_the_guest(world, hold):
    world.add_guest()
    held = hold()
    line = held.join()
    assert line.outcome()["ok"]
    line.send(held.message("withdraw"))
    assert line.outcome()["withdrawn"]
    assert world.is_as_it_was()
    assert held.end() == 8
    line.close()


def entered(world, held, name):
    """A hook's end of the window of a guest that was frozen."""
    line = held.join(f"tank/{name}")
    assert line.outcome()["ok"]
    return client(world, held, line, name, frozen=True)


def client(world, held, line, name, **more):
    guest = guests.GuestDatasets(world.hypervisor.domain(held.uuid), {})
    return freeze.HoldClient(
        freeze.FreezeEntry(guest, held.message("", f"tank/{name}")), line, **more
    )


def test_a_sanoid_that_exits_before_the_order_is_given(world, hold, sanoid):
    """Its hook lives on, and waits for others."""
    world.add_guest()
    held = hold()
    line = held.request(sanoid=sanoid.pid)
    assert "estimate" in line.receive()
    sanoid.kill()
    assert held.end() != 0
    assert world.is_as_it_was()
    assert "hypervisor.capture" not in world.hooks.acts()


def test_one_of_two_sanoids_exits_before_the_order_is_given(world, hold, sanoid):
    world.add_guest()
    held = hold()
    first = held.request(sanoid=sanoid.pid)
    assert "estimate" in first.receive()
    second = held.join()
    sanoid.kill()
    assert second.outcome()["ok"]
    second.send(held.message("begin"))
    assert second.outcome() == {"begun": True}
    held.snapshot("tank/web@hourly")
    assert held.leave()["ok"]
    assert held.end() == 0


def test_a_guest_is_released_if_its_hook_gives_no_order(world, hold):
    world.add_guest()
    held = hold(order_seconds=lambda _config: 0)
    line = held.request()
    assert held.end() == 8
    assert "no hook has given the order to freeze it" in line.outcome()["line"]
    assert world.is_as_it_was()


def test_a_holder_that_does_not_answer_is_not_waited_for(world):
    world.add_guest()
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    entry = freeze.FreezeEntry(
        guests.GuestDatasets(world.hypervisor.domain("web"), {}), {}, seconds=0.1
    )
    with there, pytest.raises(RunFailedError, match="web: its hold process has not replied"):
        freeze.freeze_together([freeze.HoldClient(entry, JsonConnection(here))], jobs=4)


@pytest.mark.parametrize("first", ["web", "db"])
def test_a_guest_that_is_released_before_all_are_frozen_releases_all(world, hold, first):
    """Its snapshot would be taken while its overlays are committed."""
    world.add_guest("web")
    world.add_guest("db")
    world.context.config = world.context.config.model_copy(
        update={"domain": {"web": {"hook_deadline": "1s"}}}
    )
    holders = {name: hold(name) for name in ("web", "db")}
    lines = {name: entered(world, held, name) for name, held in holders.items()}
    assert holders["web"].end() == 8
    order = sorted(lines, key=lambda name: name != first)
    with pytest.raises(SnaporchError, match="web: its window: ended before all guests were"):
        freeze.freeze_together([lines[name] for name in order], jobs=4)
    assert holders["db"].end() == 8
    assert world.is_as_it_was("web")
    assert world.is_as_it_was("db")


class Clock:
    """The time of a window, which advances only when a test advances it."""

    def __init__(self):
        self._now = self._seen = 1000.0
        self._read = threading.Condition()

    def monotonic(self):
        with self._read:
            self._seen = self._now
            self._read.notify_all()
            return self._now

    def advance(self, seconds):
        """Advance the time, and return when the server has read it."""
        with self._read:
            self._now += seconds
            assert self._read.wait_for(lambda: self._seen == self._now, 30)


@pytest.fixture
def clock(world):
    made = Clock()
    world.window_clock = made.monotonic
    return made


def test_the_time_for_the_snapshots_begins_when_all_are_frozen(world, hold, clock):
    world.add_guest()
    held = hold()
    line = held.join()
    assert line.outcome()["ok"]
    clock.advance(80)  # of 90
    line.send(held.message("begin"))
    assert line.outcome() == {"begun": True}
    line.close()
    clock.advance(80)
    held.snapshot("tank/web@hourly")
    assert held.leave() == {"ok": True, "notes": []}
    held.end()
    assert {record.level for record in records(world)} == {Level.RAM}


def test_the_time_for_the_snapshots_begins_once_for_two_sanoids(world, hold, clock, sanoid):
    world.add_guest()
    held = hold()
    held.enter()
    clock.advance(80)  # of 90
    held.enter(sanoid=sanoid.pid, target="tank/web")
    held.snapshot("tank/web@hourly")
    clock.advance(10)
    assert held.end() == 0
    assert world.is_as_it_was()


def test_a_guest_is_paused_no_longer_although_all_were_frozen_later(world, hold, clock):
    """Its guardian counts from its own freeze."""
    world.add_guest()
    world.with_defaults(level="paused", freeze_deadline="60s", hook_deadline="90s")
    held = hold()
    line = held.join()
    assert line.outcome()["ok"]
    clock.advance(40)
    line.send(held.message("begin"))
    assert line.outcome() == {"begun": True}
    line.close()
    held.snapshot("tank/web@hourly")
    clock.advance(18)
    assert held.end() == 0
    assert world.is_as_it_was()
    (record,) = records(world)
    assert (record.level, record.state) == (Level.PAUSED, BundleState.COMPLETE)


def test_a_guest_that_cannot_be_paused_long_enough_takes_the_lower_level(world, hold, clock):
    """Its turn is then after all guests whose RAM is saved."""
    world.add_guest()
    world.with_defaults(ram_strategy="manual", on_unavailable="paused", freeze_deadline="60s")
    held = hold()
    line = held.join()
    assert line.outcome()["ok"]
    clock.advance(58)
    reply = line.receive()
    assert (reply["estimate"]["strategy"], reply["ordered"]) == ("paused", False)
    assert world.guest().state is DomainState.RUNNING
    line.send(held.message("freeze", attempt=reply["attempt"]))
    assert line.outcome()["ok"]
    assert world.guest().state is DomainState.PAUSED
    line.send(held.message("begin"))
    assert line.outcome() == {"begun": True}
    line.close()
    held.snapshot("tank/web@hourly")
    assert held.leave()["ok"]
    held.end()
    assert {record.level for record in records(world)} == {Level.PAUSED}


def test_half_a_message_does_not_delay_the_holder(world, hold):
    world.add_guest()
    world.with_defaults(hook_deadline="1s")
    held = hold()
    held.enter()
    line = connect(held.socket)
    line.socket.send(b'{"do": "lea')
    held.snapshot("tank/web@hourly")
    assert held.end() == 0
    assert world.is_as_it_was()
    line.close()


def test_a_holder_that_has_exited_releases_all(world, hold):
    world.add_guest("db")
    held = hold("db")
    gone, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.close()
    lost = client(world, held, JsonConnection(gone), "db", frozen=True)
    line = entered(world, held, "db")
    with pytest.raises(RunFailedError, match="was released"):
        freeze.freeze_together([line, lost], jobs=4)
    assert held.end() == 8
    assert world.is_as_it_was("db")


def test_a_holder_that_sends_nonsense_releases_all(world, hold):
    world.add_guest("db")
    held = hold("db")
    line = entered(world, held, "db")
    mad, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    JsonConnection(other).send({"estimate": {"strategy": "magic"}})
    with pytest.raises(RunFailedError, match="was released"):
        freeze.freeze_together([line, client(world, held, JsonConnection(mad), "db")], jobs=4)
    other.close()
    assert held.end() == 8
    assert world.is_as_it_was("db")


def test_a_guest_that_cannot_be_frozen_is_reported_to_the_hook(world, hold):
    world.add_guest()
    world.hooks.at["hypervisor.capture"] = failing(HypervisorError("web", "no"))
    held = hold()
    reply = held.join().outcome()
    assert not reply["ok"]
    assert reply["code"] == 8
    assert "the guest is as it was and nothing was kept" in reply["line"]
    assert held.end() == 8


def test_without_snapshots_by_sanoid_the_run_fails_and_leaves_nothing(world, hold):
    world.add_guest()
    held = hold()
    held.enter()
    reply = held.leave()
    assert (reply["ok"], reply["code"]) == (False, 8)
    assert "web: sanoid: has taken none of its snapshots" in reply["line"]
    held.end()
    assert world.is_as_it_was()
    assert list(world.paths.bundles.glob("*/*")) == []


def test_a_snapshot_from_before_does_not_belong_to_the_window(world, hold):
    world.add_guest()
    world.pool.snapshot(["tank/web@hourly"], {})
    held = hold()
    held.enter(names=["hourly", "daily"])
    held.snapshot("tank/web@daily")
    reply = held.leave()
    assert "sanoid has not taken tank/web@hourly" in reply["notes"][0]
    held.end()
    (record,) = records(world)
    assert (record.snapshot, record.level) == ("daily", Level.RAM)


def test_in_a_repeated_hour_sanoid_changes_the_name(world, hold):
    world.add_guest()
    world.pool.snapshot(["tank/web@autosnap_1_hourly"], {})
    held = hold()
    held.enter(names=["autosnap_1_hourly"])
    held.snapshot("tank/web@autosnap_1dst_hourly")
    assert held.leave() == {"ok": True, "notes": []}
    held.end()
    assert [record.snapshot for record in records(world)] == ["autosnap_1dst_hourly"]


def test_after_the_deadline_the_guest_is_released(world, hold):
    world.add_guest()
    world.with_defaults(hook_deadline="1s")
    held = hold()
    held.enter()
    held.snapshot("tank/web@hourly")
    assert held.end() == 0
    assert world.is_as_it_was()
    assert held.leave() is None
    (record,) = records(world)
    assert record.level is Level.RAM


def test_a_signal_ends_the_window(world, hold):
    world.add_guest()
    held = hold()
    held.enter()
    held.interrupt.signum = 15
    assert held.end() == 8
    assert world.is_as_it_was()


def test_the_socket_is_removed_before_the_commit(world, hold):
    world.add_guest()
    late = []
    held = hold()

    def note():
        late.append(held.socket.exists())

    world.hooks.at["hypervisor.commit"] = note
    held.enter()
    held.snapshot("tank/web@hourly")
    held.leave()
    held.end()
    assert late == [False]


def test_nonsense_on_the_socket_does_no_harm(world, hold):
    world.add_guest()
    held = hold()
    held.enter()
    assert ask(held.socket, {"do": "dance"})["ok"] is False
    assert held.leave("tank/other")["unknown"]
    line = connect(held.socket)
    line.socket.send(b"\xff\x00{\n")
    assert line.receive() is None
    line.close()
    held.snapshot("tank/web@hourly")
    assert held.leave()["ok"]
    assert held.end() == 0


def test_two_sanoids_share_the_window(world, hold, sanoid):
    world.add_guest()
    held = hold()
    held.enter("tank/web", sanoid.pid, names=["daily"])
    held.enter("tank/web", os.getpid(), names=["hourly"])
    held.snapshot("tank/web@daily")
    assert held.leave("tank/web", sanoid.pid)["ok"]
    assert not world.on_bases()
    held.snapshot("tank/web@hourly")
    assert held.leave("tank/web", os.getpid())["ok"]
    held.end()
    assert world.hooks.acts().count("hypervisor.capture") == 1
    assert {record.level for record in records(world)} == {Level.RAM}


@pytest.mark.parametrize("level", ["quiesced", "paused", "crash"])
def test_every_level_can_be_held(world, hold, level):
    world.add_guest(agent=Agent.ANSWERS)
    world.with_defaults(level=level)
    held = hold()
    held.enter()
    held.snapshot("tank/web@hourly")
    assert held.leave()["ok"]
    held.end()
    (record,) = records(world)
    assert (record.level, record.state) == (Level(level), BundleState.COMPLETE)
    assert world.is_as_it_was()


def test_a_guest_that_is_off_gets_level_off(world, hold):
    world.add_guest(state=DomainState.OFF)
    held = hold()
    held.enter()
    held.snapshot("tank/web@hourly")
    assert held.leave()["ok"]
    held.end()
    assert records(world)[0].level is Level.OFF


def test_properties_that_cannot_be_written_do_not_delay_the_release(world, hold):
    world.add_guest()
    held = hold()
    held.enter()
    held.snapshot("tank/web@hourly")
    world.hooks.at["pool.set_properties"] = failing(PoolError("zfs set", "pool is suspended"))
    assert held.leave()["ok"]
    assert world.on_bases()
    held.end()
    assert "hourly" in world.pool.names()[0]


def test_auto_takes_overlays_so_that_the_guest_runs_meanwhile(world, hold):
    world.add_guest()
    world.with_defaults(ram_strategy="auto")
    held = hold()
    held.enter()
    assert world.guest().state is DomainState.RUNNING
    held.snapshot("tank/web@hourly")
    held.leave()
    held.end()
    assert "hypervisor.commit" in world.hooks.acts()


def test_without_a_hook_nothing_is_touched(world, hold):
    world.add_guest()
    assert hold(join_seconds=0.05).end() == 0
    assert world.hooks.log == []


# -- restores -----------------------------------------------------------------------------------


@pytest.fixture
def a_round(world, hold):
    """daily and hourly of two datasets that held ``first``; now they hold ``now``."""
    world.add_guest(disks=TWO)
    held = hold()
    held.enter("tank/web", datasets=["flash/web", "tank/web"], names=["daily", "hourly"])
    for name in ("daily", "hourly"):
        held.snapshot(f"tank/web@{name}", f"flash/web@{name}")
    held.leave()
    held.end()
    for dataset in TWO.values():
        world.pool.write(dataset, b"now")
    world.hooks.log.clear()


@pytest.mark.parametrize("name", ["daily", "hourly"])
@pytest.mark.parametrize("gone", [None, "tank/web@hourly", "flash/web@daily"])
def test_each_name_of_a_round_can_be_restored_without_destroying_the_others(
    world, a_round, name, gone
):
    if gone:
        world.pool.destroy_snapshots([gone])
    there = world.pool.names()
    plan = make_restore_plan(world.context, "web", name, cold=False, discard_newer=False)
    assert plan.newer == ()
    assert plan.ram is not None
    restore(world.context, plan, safety=False)
    assert {world.pool.read(dataset) for dataset in TWO.values()} == {b"first"}
    assert world.pool.names() == there


def test_a_snapshot_after_the_round_is_newer(world, a_round):
    world.pool.snapshot(["tank/web@later"], {})
    with pytest.raises(RefusedError, match="tank/web@later"):
        make_restore_plan(world.context, "web", "daily", cold=False, discard_newer=False)


def test_a_dataset_without_any_snapshot_of_the_round_is_reported(world, a_round):
    world.pool.destroy_snapshots(["tank/web@daily", "tank/web@hourly"])
    with pytest.raises(RefusedError, match="are missing: tank/web@hourly"):
        make_restore_plan(world.context, "web", "hourly", cold=True, discard_newer=False)
