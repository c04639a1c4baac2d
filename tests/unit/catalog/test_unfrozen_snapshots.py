"""Other programs that snapshot a guest's datasets, and how they change the choice of a strategy."""

from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
from fakes.hooks import failing_once

from snaporch.catalog import unfrozen_snapshots
from snaporch.context import Clock
from snaporch.errors import SnaporchError
from snaporch.hypervisor import HypervisorError
from snaporch.model import DomainState, Level, Strategy
from snaporch.snapshot.plan import make_plan
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.snapshot.snapshotter import LocalSnapshotter

TWO = {"vda": "tank/web", "vdb": "flash/web"}
CONFIGURED = "sanoid snapshots tank/web by [tank] without holding the guest"


@pytest.fixture
def guest(world):
    world.with_defaults(ram_strategy="auto")
    return world.add_guest("web", TWO)


class ForSanoid(LocalSnapshotter):
    """Takes the snapshots as sanoid does in its hooks."""

    taken_by_other_program = True
    window_seconds = 60


def planned(world, guest, level=None, awaited=60):
    return make_plan(world.context, guest, SnapshotRequest(level=level), awaited=awaited)


def take(world, guest):
    request = SnapshotRequest("s1")
    return take_snapshot(world.context, guest, request, taker=ForSanoid(world.context))


def test_without_other_takers_a_guest_gets_overlays_for_sanoid(world, guest):
    assert planned(world, guest).strategy is Strategy.OVERLAY


@pytest.mark.parametrize("awaited", [None, 60])
@pytest.mark.parametrize(
    "name", ["syncoid_host_2026-11-22", "zrepl_1", "zfs-auto-snap_hourly-1", "autosnap_1_hourly"]
)
def test_a_snapshot_of_another_program_means_no_overlays(world, guest, name, awaited):
    world.pool.snapshot([f"flash/web@{name}"], {})
    plan = planned(world, guest, awaited=awaited)
    assert plan.strategy is Strategy.MANUAL
    assert plan.other_program == f"flash/web@{name} is not snaporch's"


def test_a_torn_snapshot_of_another_program_counts_too(world, guest):
    world.pool.snapshot(["tank/web@x"], {"snaporch:level": "torn", "snaporch:torn": "yes"})
    assert planned(world, guest).other_program


@pytest.mark.parametrize(
    ("name", "properties"),
    [
        ("before-upgrade", {"snaporch:run": "r"}),
        ("autosnap_1_hourly", {"snaporch:run": "r"}),  # a hook held the guest for it
        ("snaporch-safety_1", {}),
        ("snaporch_20261122T000000Z_daily", {}),  # back from a replica
    ],
)
def test_snaporch_and_its_hooks_are_no_other_takers(world, guest, name, properties):
    world.pool.snapshot([f"tank/web@{name}"], properties)
    assert planned(world, guest).strategy is Strategy.OVERLAY


@pytest.mark.parametrize(
    ("name", "strategy"), [("autosnap_1_hourly", "overlay"), ("syncoid_host_1", "manual")]
)
def test_snapshots_of_sanoid_count_only_where_no_hook_holds_the_guest(world, guest, name, strategy):
    world.context.frozen_by_hooks = lambda datasets: {"tank/web"} & set(datasets)
    world.pool.snapshot([f"tank/web@{name}"], {})
    assert planned(world, guest).strategy == strategy
    world.pool.snapshot(["flash/web@autosnap_1_hourly"], {})
    assert planned(world, guest).strategy is Strategy.MANUAL


def test_snapshots_taken_long_ago_do_not_count(world, guest):
    world.pool.snapshot(["tank/web@by-hand"], {})
    later = datetime.now(UTC) + unfrozen_snapshots.RECENT + timedelta(minutes=1)
    world.context.clock = Clock(now=lambda: later)
    assert planned(world, guest).strategy is Strategy.OVERLAY


def test_another_dataset_of_the_pool_is_not_the_guests(world, guest):
    world.pool.create("tank/other")
    world.pool.snapshot(["tank/other@by-hand"], {})
    assert planned(world, guest).strategy is Strategy.OVERLAY


def test_a_configured_taker_counts_before_its_first_snapshot(world, guest):
    asked = []
    world.context.unfrozen_by = lambda datasets: asked.append(set(datasets)) or CONFIGURED
    plan = planned(world, guest)
    assert (plan.strategy, plan.other_program) == (Strategy.MANUAL, CONFIGURED)
    assert asked == [{"tank/web", "flash/web"}]


@pytest.mark.parametrize("level", ["crash", "paused"])
def test_without_overlays_no_other_takers_are_searched(world, guest, level):
    def fail(_datasets):
        raise AssertionError

    world.context.unfrozen_by = fail
    assert planned(world, guest, level=level).other_program == ""


def test_the_reason_for_no_overlays_is_noted(world, guest):
    world.pool.snapshot(["tank/web@by-hand"], {})
    take(world, guest)
    assert "tank/web@by-hand is not snaporch's: manual, without overlays" in world.heard.notes


def test_where_it_makes_no_difference_nothing_is_noted(world):
    world.with_defaults(ram_strategy="auto")
    guest = world.add_guest("web", {"vda": "tank/web"})
    world.pool.snapshot(["tank/web@by-hand"], {})
    take_snapshot(world.context, guest, SnapshotRequest("s1"))
    assert not [text for text in world.heard.notes if "by-hand" in text]


@pytest.mark.parametrize("lower", ["fail", "paused"])
def test_overlays_are_used_where_manual_fails(world, guest, lower):
    world.with_defaults(ram_strategy="auto", on_unavailable=lower, ram_capture="stream")
    world.pool.snapshot(["tank/web@by-hand"], {})
    world.hooks.at["hypervisor.capture"] = failing_once(HypervisorError("web", "no"))
    record = take(world, guest)
    assert record.level is Level.RAM
    assert any("taking overlay instead" in text for text in world.heard.notes)
    assert any("will be torn" in text for text in world.heard.notes)
    assert "hypervisor.commit" in world.hooks.acts()


def test_overlays_that_are_requested_anyway_are_noted(world, guest):
    world.with_defaults(ram_strategy="overlay")
    world.pool.snapshot(["tank/web@by-hand"], {})
    take_snapshot(world.context, guest, SnapshotRequest("s1"))
    (note,) = [text for text in world.heard.notes if "torn" in text]
    assert note == (
        "tank/web@by-hand is not snaporch's; what it takes during the commit will be torn"
    )


def test_a_guest_that_suspended_itself_is_noted_beside_the_overlays(world, guest):
    world.with_defaults(ram_strategy="auto", ram_capture="stream")
    world.pool.snapshot(["tank/web@by-hand"], {})

    def stop():
        world.guest().state = DomainState.SUSPENDED
        raise HypervisorError("web", "no")

    world.hooks.at["hypervisor.capture"] = stop
    with suppress(SnaporchError):
        take(world, guest)
    (note,) = [text for text in world.heard.notes if "taking overlay instead" in text]
    assert "; the guest is suspended, and was running" in note
