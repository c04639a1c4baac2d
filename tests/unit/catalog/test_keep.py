from datetime import UTC, datetime, timedelta

import pytest
from fakes.hooks import failing
from fakes.pool import FakePool

from snaporch.catalog.keep import KEEP_HOLD, keep, unkeep
from snaporch.model import iso
from snaporch.zfs import PoolError

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
NAMES = ["flash/web@s", "tank/web@s"]


@pytest.fixture
def pool():
    made = FakePool("flash/web", "tank/web")
    for name in NAMES:
        made.snapshot([name], {})
    return made


def state(pool):
    return [(pool.holds(each.full_name), each.properties.get("kept")) for each in pool.snapshots()]


def test_every_zfs_snapshot_is_held_and_marked(pool):
    keep(pool, pool.snapshots(), NOW)
    assert state(pool) == [([KEEP_HOLD], iso(NOW))] * 2
    unkeep(pool, pool.snapshots())
    assert state(pool) == [([], None)] * 2


def test_repeating_it_changes_nothing_and_completes_what_was_interrupted(pool):
    keep(pool, pool.snapshots()[:1], NOW)
    pool.hold(NAMES[1:], KEEP_HOLD)
    keep(pool, pool.snapshots(), NOW + timedelta(days=1))
    assert [held for held, _ in state(pool)] == [[KEEP_HOLD]] * 2
    assert [since for _, since in state(pool)] == [iso(NOW), iso(NOW + timedelta(days=1))]
    for _ in range(2):
        unkeep(pool, pool.snapshots())
    assert state(pool) == [([], None)] * 2


def test_a_failure_leaves_no_new_hold(pool):
    pool.hold(NAMES[:1], "mine")
    pool.hooks.at["pool.set_properties"] = failing(PoolError("tank", "suspended"))
    with pytest.raises(PoolError):
        keep(pool, pool.snapshots(), NOW)
    assert state(pool) == [(["mine"], None), ([], None)]


def test_a_failure_leaves_the_holds_of_what_is_kept_already():
    pool = FakePool("tank/web", "tank/db")
    names = ["tank/db@s", "tank/web@s"]
    pool.snapshot(names, {})
    pool.hold(names[:1], KEEP_HOLD)
    pool.hooks.at["pool.set_properties"] = failing(PoolError("tank", "suspended"))
    with pytest.raises(PoolError):
        keep(pool, pool.snapshots(), NOW)
    assert [pool.holds(name) for name in names] == [[KEEP_HOLD], []]


def test_a_release_that_fails_leaves_the_hold_and_can_be_repeated(pool):
    keep(pool, pool.snapshots(), NOW)
    pool.hooks.at["pool.clear_properties"] = failing(PoolError("tank", "suspended"))
    with pytest.raises(PoolError):
        unkeep(pool, pool.snapshots())
    assert state(pool) == [([KEEP_HOLD], iso(NOW))] * 2
    del pool.hooks.at["pool.clear_properties"]
    unkeep(pool, pool.snapshots())
    assert state(pool) == [([], None)] * 2
