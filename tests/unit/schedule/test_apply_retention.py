import errno
import json
import os
import shutil
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from fakes.hooks import failing
from fakes.schedule import NOW

from snaporch.catalog.keep import KEEP_HOLD, keep, unkeep
from snaporch.catalog.records import all_records
from snaporch.context import Clock
from snaporch.errors import ExitCode
from snaporch.interrupt import Interrupt
from snaporch.locks import domain_lock, replication_lock_name
from snaporch.model import BundleState
from snaporch.prune.ages import Ages, ClockReading
from snaporch.prune.decision import PruneAction
from snaporch.schedule.apply_retention import apply_retention, prune_daily
from snaporch.schedule.forecast import make_forecasts
from snaporch.zfs import BlockingMount, PoolError


def clean_up(scheduled, forecasts=None):
    return apply_retention(
        scheduled.context, forecasts or make_forecasts(scheduled.context, NOW), NOW
    )


def prune_store(scheduled, stopped=lambda: False):
    return prune_daily(scheduled.context, stopped)


def remaining(scheduled):
    return [r.run for r in all_records(scheduled.context.store, scheduled.world.pool.snapshots())]


def test_retention_deletes_snapshots_in_every_pool_and_their_bundles(scheduled):
    scheduled.world.add_guest("two", {"vda": "tank/two", "vdb": "flash/two"})
    old, *new = scheduled.hours_ago(3, 2, 1, guest="two")
    done = clean_up(scheduled)
    assert [(domain, verdict.taken.run) for domain, verdict in done.deleted] == [("two", old.run)]
    assert remaining(scheduled) == [record.run for record in new]
    assert scheduled.context.store.state(f"{old.uuid}/{old.run}")[0] is BundleState.MISSING
    assert (done.failures, done.busy) == ([], [])


def test_retention_deletes_nothing_the_second_time(scheduled):
    scheduled.hours_ago(3, 2, 1)
    clean_up(scheduled)
    assert clean_up(scheduled).deleted == []


def test_a_snapshot_that_a_restore_destroyed_meanwhile_changes_the_decision(scheduled):
    old, _, newest = scheduled.hours_ago(3, 2, 1)
    foreseen = make_forecasts(scheduled.context, NOW)
    scheduled.world.pool.destroy_snapshots([f"tank/web@{newest.snapshot}"])
    shutil.rmtree(newest.bundle)
    assert clean_up(scheduled, foreseen).deleted == []
    assert old.run in remaining(scheduled)


def test_snapshots_of_a_locked_domain_are_deleted_the_next_time(scheduled):
    old, *_ = scheduled.hours_ago(3, 2, 1)
    runtime = scheduled.context.config.paths.runtime
    with domain_lock(runtime, "web", old.uuid, "restore", wait=0, interrupt=Interrupt()):
        done = clean_up(scheduled)
    assert (done.deleted, done.busy) == ([], ["web"])
    assert old.run in remaining(scheduled)


def test_snapshots_are_not_deleted_while_they_are_copied(scheduled):
    """Even if ZFS would destroy them: the stream needs also the snapshots in its middle."""
    old, *_ = scheduled.hours_ago(3, 2, 1)
    runtime, name = scheduled.context.config.paths.runtime, replication_lock_name(old.uuid)
    with domain_lock(runtime, "web", name, "replicate", wait=0, interrupt=Interrupt()):
        done = clean_up(scheduled)
    assert (done.deleted, done.busy) == ([], ["web"])
    assert old.run in remaining(scheduled)
    assert [domain for domain, _ in clean_up(scheduled).deleted] == ["web"]


def test_what_no_replication_needs_is_deleted_while_one_runs(scheduled):
    """It may take days: each replica has all of it, and a newer one to continue from."""
    old, middle, *_ = records = scheduled.hours_ago(4, 3, 2, 1)
    place = {"host": "nas", "dataset": "backup", "bundles": "/backup/nas"}
    hourly = {"every": "1h", "keep": {"last": 1}}
    scheduled.configure(
        policy={"hourly": hourly}, defaults={"policies": ["hourly"]}, replica={"nas": place}
    )
    pool = scheduled.world.pool
    runtime, name = scheduled.context.config.paths.runtime, replication_lock_name(old.uuid)
    with domain_lock(runtime, "web", name, "replicate", wait=0, interrupt=Interrupt()):
        assert clean_up(scheduled).deleted == []  # no replica is known to have anything
        for record in records[:2]:
            full = f"tank/web@{record.snapshot}"
            pool.set_properties([full], {"snaporch:replicated": "nas"})
            pool.bookmark(full, f"snaporch-nas-{record.run}")
        assert clean_up(scheduled).deleted == []  # its transfer may begin at the oldest bookmark
        pool.destroy_bookmark(f"tank/web#snaporch-nas-{old.run}")
        done = clean_up(scheduled)
        assert [verdict.taken.run for _, verdict in done.deleted] == [old.run]
        assert done.busy == ["web"]
    assert middle.run in remaining(scheduled)
    with domain_lock(runtime, "web", name, "send", wait=0, interrupt=Interrupt()):
        assert clean_up(scheduled).deleted == []


def test_a_replica_without_bookmarks_needs_all_while_a_replication_runs(scheduled):
    """Its first replication may be under way, although nothing could be bookmarked for it."""
    old, middle, *_ = scheduled.hours_ago(4, 3, 2, 1)
    places = {
        name: {"host": name, "dataset": "backup", "bundles": f"/backup/{name}"}
        for name in ("nas", "new")
    }
    pool = scheduled.world.pool
    pool.set_properties([f"tank/web@{old.snapshot}"], {"snaporch:replicated": "nas"})
    pool.bookmark(f"tank/web@{middle.snapshot}", f"snaporch-nas-{middle.run}")
    runtime, name = scheduled.context.config.paths.runtime, replication_lock_name(old.uuid)
    for replicas, runs in ((["nas", "new"], []), (["nas"], [old.run])):
        hourly = {"every": "1h", "keep": {"last": 1}, "replicate": replicas}
        scheduled.configure(
            policy={"hourly": hourly}, defaults={"policies": ["hourly"]}, replica=places
        )
        with domain_lock(runtime, "web", name, "replicate", wait=0, interrupt=Interrupt()):
            done = clean_up(scheduled)
        assert [verdict.taken.run for _, verdict in done.deleted] == runs
        assert done.busy == ["web"]


def test_a_replica_that_never_answers_holds_nothing_back_while_another_is_copied_to(scheduled):
    """It has a bookmark of long ago, or none: without a replication nothing waits for it either."""
    old, middle, *_ = records = scheduled.hours_ago(4, 3, 2, 1)
    places = {
        name: {"host": name, "dataset": "backup", "bundles": f"/backup/{name}"}
        for name in ("nas", "dead", "new")
    }
    hourly = {"every": "1h", "keep": {"last": 1}, "replicate": ["nas", "dead", "new"]}
    scheduled.configure(
        policy={"hourly": hourly}, defaults={"policies": ["hourly"]}, replica=places
    )
    pool = scheduled.world.pool
    for record in records[:2]:
        pool.set_properties([f"tank/web@{record.snapshot}"], {"snaporch:replicated": "nas"})
    pool.bookmark(f"tank/web@{middle.snapshot}", f"snaporch-nas-{middle.run}")
    pool.bookmark(f"tank/web@{old.snapshot}", f"snaporch-dead-{old.run}")
    runtime, name = scheduled.context.config.paths.runtime, replication_lock_name(old.uuid)

    def cleaned(replica):
        with domain_lock(
            runtime, "web", name, "replicate", wait=0, interrupt=Interrupt(), replica=replica
        ):
            return [verdict.taken.run for _, verdict in clean_up(scheduled).deleted]

    assert cleaned("dead") == cleaned("new") == cleaned("") == []
    assert cleaned("nas") == [old.run]
    assert middle.run in remaining(scheduled)


def test_retention_stops_when_a_replication_to_another_replica_begins(scheduled):
    old, middle, newer, *_ = records = scheduled.hours_ago(5, 4, 3, 2, 1)
    places = {
        name: {"host": name, "dataset": "backup", "bundles": f"/backup/{name}"}
        for name in ("nas", "new")
    }
    hourly = {"every": "1h", "keep": {"last": 1}, "replicate": ["nas", "new"]}
    scheduled.configure(
        policy={"hourly": hourly}, defaults={"policies": ["hourly"]}, replica=places
    )
    pool = scheduled.world.pool
    for record in records[:3]:
        pool.set_properties([f"tank/web@{record.snapshot}"], {"snaporch:replicated": "nas"})
    pool.bookmark(f"tank/web@{newer.snapshot}", f"snaporch-nas-{newer.run}")
    runtime, name = scheduled.context.config.paths.runtime, replication_lock_name(old.uuid)
    with ExitStack() as stack:

        def hold(replica):
            stack.enter_context(
                domain_lock(
                    runtime,
                    "web",
                    name,
                    "replicate",
                    wait=0,
                    interrupt=Interrupt(),
                    replica=replica,
                )
            )

        hold("nas")
        destroy = pool.destroy_snapshots

        def then_another(names):
            destroy(names)
            stack.close()
            hold("new")

        pool.destroy_snapshots = then_another
        done = clean_up(scheduled)
    assert [verdict.taken.run for _, verdict in done.deleted] == [old.run]
    assert done.busy == ["web", "web"]
    assert middle.run in remaining(scheduled)


def test_kept_snapshots_stay_even_without_their_hold(scheduled):
    old, *_ = scheduled.hours_ago(3, 2, 1)
    pool = scheduled.world.pool
    keep(pool, pool.snapshots()[:1], NOW)
    assert clean_up(scheduled).deleted == []
    pool.release([f"tank/web@{old.snapshot}"], KEEP_HOLD)
    assert clean_up(scheduled).deleted == []
    unkeep(pool, pool.snapshots())
    assert [verdict.taken.run for _, verdict in clean_up(scheduled).deleted] == [old.run]


def test_a_mounted_snapshot_is_deleted_the_next_time(scheduled):
    old, *_ = scheduled.hours_ago(3, 2, 1)
    pool = scheduled.world.pool
    pool.foreign = [BlockingMount(f"tank/web@{old.snapshot}", "the guest db")]
    done = clean_up(scheduled)
    assert (done.deleted, done.failures) == ([], [])
    assert [error.reason for error in done.mounted] == [
        f"tank/web@{old.snapshot} is mounted by the guest db"
    ]
    assert old.run in remaining(scheduled)
    pool.foreign.clear()
    assert [verdict.taken.run for _, verdict in clean_up(scheduled).deleted] == [old.run]


def test_a_snapshot_that_cannot_be_destroyed_does_not_stop_the_others(scheduled):
    world = scheduled.world
    world.add_guest("mail")
    for guest in ("web", "mail"):
        scheduled.hours_ago(5, 4, 2, 1, guest=guest)
    error = PoolError("tank", "dataset is busy")
    world.hooks.at["pool.destroy_snapshots"] = failing(error)
    assert len(clean_up(scheduled).failures) == 4
    del world.hooks.at["pool.destroy_snapshots"]
    assert len(clean_up(scheduled).deleted) == 4


def test_snapshots_by_hand_or_of_other_programs_are_not_deleted(scheduled):
    hand = scheduled.hours_ago(9, policy=None)
    world = scheduled.world
    world.pool.snapshot(["tank/web@autosnap_2026-01-01_00:00:00_hourly"], {})
    scheduled.hours_ago(3, 2, 1)
    clean_up(scheduled)
    assert hand[0].run in remaining(scheduled)
    assert "tank/web@autosnap_2026-01-01_00:00:00_hourly" in world.pool.names()


def test_a_domain_that_libvirt_does_not_know_keeps_its_snapshots(scheduled):
    taken = scheduled.hours_ago(3, 2, 1)
    foreseen = make_forecasts(scheduled.context, NOW)
    scheduled.world.hypervisor.guests.clear()
    assert make_forecasts(scheduled.context, NOW) == []
    clean_up(scheduled, foreseen)
    assert remaining(scheduled) == [record.run for record in taken]


def test_retention_holds_the_lock_for_a_limited_time(scheduled):
    """A due snapshot waits for the lock, but not for ever."""
    scheduled.hours_ago(6, 5, 4, 3, 2, 1)
    clock = iter(range(0, 10_000, 40))
    scheduled.context.clock = Clock(monotonic=lambda: next(clock))
    done = clean_up(scheduled)
    assert (len(done.deleted), done.busy) == (1, ["web"])
    done = clean_up(scheduled)
    assert (len(done.deleted), done.busy) == (1, ["web"])


# -- datasets that were renamed ------------------------------------------------------------------


def test_snapshots_of_a_renamed_dataset_expire_and_count(scheduled):
    scheduled.hours_ago(3, 2, 1)
    world = scheduled.world
    world.pool.rename("tank/web", "tank/web2")
    world.resolver.named["tank/web"] = "tank/web2"
    (forecast,) = make_forecasts(scheduled.context, NOW)
    assert forecast.next_snapshots[0].scheduled is not None
    done = apply_retention(scheduled.context, [forecast], NOW)
    assert [verdict.taken.created for _, verdict in done.deleted] == [NOW - timedelta(hours=3)]
    assert len(world.pool.names()) == 2


@pytest.mark.parametrize("taken", [True, False])
def test_snapshots_of_a_dataset_that_the_domain_does_not_use_are_not_deleted(scheduled, taken):
    """A promoted clone has the snapshots now; or a copy of the pool was imported."""
    scheduled.hours_ago(3, 2, 1)
    world = scheduled.world
    world.pool.rename("tank/web", "tank/web2")
    if taken:
        world.resolver.named["tank/web"] = "tank/web2"
        world.pool.create("tank/web")
    (forecast,) = make_forecasts(scheduled.context, NOW)
    assert (forecast.records, forecast.to_delete) == ((), [])


# -- the rest of the store, once a day ------------------------------------------------------------


@pytest.fixture
def aged(scheduled):
    """A safety copy that prune has seen for eight days."""
    scheduled.hours_ago(1)
    store = scheduled.world.paths.bundles
    copy = store / scheduled.world.guest().uuid / "safety-20260601T000000.000000Z"
    copy.mkdir()
    (copy / "undo.sh").touch()
    Ages(store, ClockReading.now()).write([copy])
    ages = json.loads((store / "ages.json").read_text())
    ages["seconds"] = {str(copy.relative_to(store)): 8 * 86400.0}
    (store / "ages.json").write_text(json.dumps(ages))
    return copy


def test_safety_copies_are_deleted_without_a_prune_by_hand(scheduled, aged):
    done = prune_store(scheduled)
    assert (done.failures, aged.exists()) == ([], False)
    assert [(each.action, each.found.path) for each in done.pruned] == [(PruneAction.DELETE, aged)]


def test_a_bundle_that_is_trashed_or_put_back_is_reported(scheduled):
    (record,) = scheduled.hours_ago(1)
    pool, mark = scheduled.world.pool, scheduled.context.config.paths.schedule / "pruned"
    pool.replicate(f"tank/web@{record.snapshot}", "backup/web")
    pool.exported.add("backup")
    pool.destroy_snapshots([f"tank/web@{record.snapshot}"])
    assert [each.action for each in prune_store(scheduled).pruned] == [PruneAction.TRASH]
    assert not Path(record.bundle).exists()
    mark.unlink()
    pool.exported.clear()
    assert [each.action for each in prune_store(scheduled).pruned] == [PruneAction.PUT_BACK]
    assert Path(record.bundle).exists()


def test_an_item_that_cannot_be_removed_or_judged_is_a_failure(scheduled, aged, monkeypatch):
    def refuse(_path):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rmdir", refuse)
    unknown = aged.parent / "20260601T100000Z-0123abcd"
    unknown.mkdir()
    failed, undecided_items = prune_store(scheduled).failures
    assert "Read-only file system" in failed.reason
    assert str(unknown) in undecided_items.reason
    assert undecided_items.exit_code == ExitCode.ATTENTION


def test_the_store_is_pruned_once_a_day_whatever_the_clock_does(scheduled, aged):
    mark = scheduled.context.config.paths.schedule / "pruned"
    mark.parent.mkdir()
    mark.touch()
    prune_store(scheduled)
    assert aged.exists()
    for seconds in (-86_400, 3600):
        aged.mkdir(exist_ok=True)
        moment = time.time() + seconds
        os.utime(mark, (moment, moment))
        prune_store(scheduled)
        assert abs(mark.stat().st_mtime - time.time()) < 60


def test_a_store_that_cannot_be_judged_is_reported_once_a_day(scheduled, aged):
    scheduled.world.hooks.at["pool.snapshot_listing"] = failing(
        PoolError("zfs list", "lists nothing")
    )
    assert [error.reason for error in prune_store(scheduled).failures] == ["lists nothing"]
    assert prune_store(scheduled).failures == []
    assert aged.exists()


def test_a_safety_copy_stays_while_its_guest_may_need_it(scheduled, aged):
    scheduled.world.hooks.at["hypervisor.find"] = failing(PoolError("libvirt", "away"))
    prune_store(scheduled)
    assert aged.exists()


def test_a_stop_ends_pruning_between_two_items(scheduled, aged):
    other = aged.with_name(".20260601T100000Z-0123abcd.partial")
    other.mkdir()
    asked = iter([False, False, True])
    done = prune_store(scheduled, lambda: next(asked, True))
    assert (len(done.pruned), done.failures) == (1, [])
    assert aged.exists() != other.exists()


def test_retention_alone_does_not_prune_the_store(scheduled, aged):
    """Other processes wait for retention."""
    clean_up(scheduled)
    assert aged.exists()
