"""The ZFS snapshots of several pools are taken at the same time."""

import threading

import pytest

from snaporch.snapshot.snapshotter import take_in_pools
from snaporch.zfs import PoolError

PATIENCE = 60
NAMES = ["flash/web@s", "tank/db@s", "tank/web@s"]


@pytest.fixture
def pool(world):
    for name in NAMES:
        world.pool.create(name.partition("@")[0])
    return world.pool


def test_each_pool_has_one_call_and_none_waits_for_another(world, pool):
    together = threading.Barrier(2)
    for name in ("flash", "tank"):
        world.hooks.at[f"pool.snapshot {name}"] = lambda: together.wait(PATIENCE)
    take_in_pools(pool, NAMES, {"snaporch:run": "r"})
    assert sorted(world.hooks.log) == [
        "pool.snapshot flash/web@s",
        "pool.snapshot tank/db@s tank/web@s",
    ]
    assert [each.properties for each in pool.snapshots()] == [{"run": "r"}] * 3


def test_a_pool_that_fails_is_reported_when_no_call_runs_any_more(world, pool):
    failed = threading.Event()

    def fail():
        failed.set()
        raise PoolError("flash/web@s", "out of space")

    world.hooks.at["pool.snapshot flash"] = fail
    world.hooks.at["pool.snapshot tank"] = lambda: failed.wait(PATIENCE)
    with pytest.raises(PoolError, match="out of space"):
        take_in_pools(pool, NAMES, {})
    assert {each.full_name for each in pool.snapshots()} == {"tank/db@s", "tank/web@s"}
