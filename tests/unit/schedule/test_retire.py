import shutil
from datetime import timedelta

import pytest
from fakes.hooks import failing
from fakes.schedule import NOW

from snaporch.model import BundleState
from snaporch.pool import ForeignMount, PoolError
from snaporch.replicate.ship import replication_lock_name
from snaporch.run.context import Interrupt
from snaporch.run.lock import domain_lock
from snaporch.run.records import all_records
from snaporch.schedule import retire as retire_module
from snaporch.schedule.outlook import look
from snaporch.schedule.retire import retire


def clean_up(scheduled, outlooks=None):
    return retire(scheduled.context, outlooks or look(scheduled.context, NOW), NOW)


def remaining(scheduled):
    return [r.run for r in all_records(scheduled.context.store, scheduled.world.pool.snapshots())]


def test_snapshots_go_in_every_pool_and_their_bundles_with_them(scheduled):
    scheduled.world.add_guest("two", {"vda": "tank/two", "vdb": "flash/two"})
    old, *new = scheduled.hours_ago(3, 2, 1, guest="two")
    done = clean_up(scheduled)
    assert [(domain, verdict.taken.run) for domain, verdict in done.deleted] == [("two", old.run)]
    assert remaining(scheduled) == [record.run for record in new]
    assert scheduled.context.store.state(f"{old.uuid}/{old.run}")[0] is BundleState.MISSING
    assert (done.failures, done.busy) == ([], [])


def test_a_second_time_nothing_is_left_to_do(scheduled):
    scheduled.hours_ago(3, 2, 1)
    clean_up(scheduled)
    assert clean_up(scheduled).deleted == []


def test_what_a_restore_has_rolled_away_meanwhile_changes_the_verdict(scheduled):
    old, _, newest = scheduled.hours_ago(3, 2, 1)
    foreseen = look(scheduled.context, NOW)
    scheduled.world.pool.destroy_snapshots([f"tank/web@{newest.snapshot}"])
    shutil.rmtree(newest.bundle)
    assert clean_up(scheduled, foreseen).deleted == []
    assert old.run in remaining(scheduled)


def test_a_domain_somebody_works_with_waits(scheduled):
    old, *_ = scheduled.hours_ago(3, 2, 1)
    runtime = scheduled.context.config.paths.runtime
    with domain_lock(runtime, "web", old.uuid, "restore", wait=0, interrupt=Interrupt()):
        done = clean_up(scheduled)
    assert (done.deleted, done.busy) == ([], ["web"])
    assert old.run in remaining(scheduled)


def test_snapshots_that_are_being_copied_wait(scheduled):
    """Whatever ZFS would say: those in the middle of a stream are needed too."""
    old, *_ = scheduled.hours_ago(3, 2, 1)
    runtime, name = scheduled.context.config.paths.runtime, replication_lock_name(old.uuid)
    with domain_lock(runtime, "web", name, "replicate", wait=0, interrupt=Interrupt()):
        done = clean_up(scheduled)
    assert (done.deleted, done.busy) == ([], ["web"])
    assert old.run in remaining(scheduled)
    assert [domain for domain, _ in clean_up(scheduled).deleted] == ["web"]


def test_a_snapshot_that_somebody_has_mounted_waits(scheduled):
    old, *_ = scheduled.hours_ago(3, 2, 1)
    pool = scheduled.world.pool
    pool.foreign = [ForeignMount(f"tank/web@{old.snapshot}", "the guest db")]
    done = clean_up(scheduled)
    assert (done.deleted, done.failures) == ([], [])
    assert [error.reason for error in done.mounted] == [
        f"tank/web@{old.snapshot} is mounted by the guest db"
    ]
    assert old.run in remaining(scheduled)
    pool.foreign.clear()
    assert [verdict.taken.run for _, verdict in clean_up(scheduled).deleted] == [old.run]


def test_a_snapshot_that_cannot_be_destroyed_does_not_keep_others(scheduled):
    world = scheduled.world
    world.add_guest("mail")
    for guest in ("web", "mail"):
        scheduled.hours_ago(5, 4, 2, 1, guest=guest)
    error = PoolError("tank", "dataset is busy")
    world.hooks.at["pool.destroy_snapshots"] = failing(error)
    assert len(clean_up(scheduled).failures) == 4
    del world.hooks.at["pool.destroy_snapshots"]
    assert len(clean_up(scheduled).deleted) == 4


def test_no_policys_snapshot_is_touched_but_its_own(scheduled):
    hand = scheduled.hours_ago(9, policy=None)
    world = scheduled.world
    world.pool.snapshot(["tank/web@autosnap_2026-01-01_00:00:00_hourly"], {})
    scheduled.hours_ago(3, 2, 1)
    clean_up(scheduled)
    assert hand[0].run in remaining(scheduled)
    assert "tank/web@autosnap_2026-01-01_00:00:00_hourly" in world.pool.names()


def test_the_lock_is_not_held_for_long(scheduled, monkeypatch):
    """A snapshot that is due waits for it, and not for ever."""
    scheduled.hours_ago(6, 5, 4, 3, 2, 1)
    clock = iter(range(0, 10_000, 40))
    monkeypatch.setattr(retire_module.time, "monotonic", lambda: next(clock))
    done = clean_up(scheduled)
    assert (len(done.deleted), done.busy) == (1, ["web"])
    done = clean_up(scheduled)
    assert (len(done.deleted), done.busy) == (1, ["web"])


# -- datasets that were renamed ------------------------------------------------------------------


def test_snapshots_of_a_renamed_dataset_expire_and_count(scheduled):
    scheduled.hours_ago(3, 2, 1)
    world = scheduled.world
    world.pool.rename("tank/web", "tank/web2")
    world.named = {"tank/web": "tank/web2"}
    (outlook,) = look(scheduled.context, NOW)
    assert outlook.nexts[0].wanted is not None
    done = retire(scheduled.context, [outlook], NOW)
    assert [verdict.taken.created for _, verdict in done.deleted] == [NOW - timedelta(hours=3)]
    assert len(world.pool.names()) == 2


@pytest.mark.parametrize("taken", [True, False])
def test_what_the_domain_did_not_go_along_with_is_left_alone(scheduled, taken):
    """A clone that was promoted has the snapshots now; or a copy of the pool was imported."""
    scheduled.hours_ago(3, 2, 1)
    world = scheduled.world
    world.pool.rename("tank/web", "tank/web2")
    if taken:
        world.named = {"tank/web": "tank/web2"}
        world.pool.create("tank/web")
    (outlook,) = look(scheduled.context, NOW)
    assert (outlook.records, outlook.doomed) == ((), [])
