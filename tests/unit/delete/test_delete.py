import json
import os
import shlex
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest
from fakes import manifests
from fakes.hooks import failing

from snaporch import default_paths
from snaporch.catalog.keep import keep
from snaporch.catalog.records import all_records
from snaporch.config import Config
from snaporch.delete.delete import delete, preview_delete
from snaporch.delete.plan import DeleteRequest, make_delete_plan
from snaporch.errors import BusyError, NotFoundError, RefusedError
from snaporch.fence import Fence
from snaporch.interrupt import Interrupt
from snaporch.journal import FORMAT
from snaporch.locks import domain_lock, replication_lock_name
from snaporch.model import BundleState
from snaporch.prune.decision import PruneAction
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.run import restore
from snaporch.restore.select_undo import choose_copy
from snaporch.restore.undo_plan import make_undo_plan
from snaporch.snapshot.group import snapshot_group
from snaporch.snapshot.request import SnapshotRequest
from snaporch.zfs import PREFIX, BlockingMount, PoolError


@pytest.fixture
def two(story):
    """A guest on two pools with the snapshots s1 and s2."""
    story.second = story.snapshot("s2")
    return story


def run(story, *names, confirm=None, **options):
    request = DeleteRequest(names, **options)
    return delete(story.world.context, request, confirm=confirm, wait=0)


def lines(result):
    return [error.line() for error in result.failures]


def left(story):
    pool, store = story.world.pool, story.world.context.store
    return [record.full_name for record in all_records(store, pool.snapshots())]


def trash(story):
    return [*story.world.paths.bundles.glob(".trash/*")]


def test_it_destroys_the_zfs_snapshots_in_every_pool_and_then_moves_the_bundle(two):
    result = run(two, "web@s1")
    assert result.failures == ()
    assert left(two) == ["web@s2"]
    assert not [name for name in two.world.pool.names() if name.endswith("@s1")]
    (deleted,) = result.deleted
    assert deleted.bundle.action is PruneAction.TRASH
    assert sorted(deleted.item.zfs_names) == ["flash/web@s1", "tank/web@s1"]
    assert result.trashed == sum(f.stat().st_size for f in trash(two)[0].iterdir())
    assert two.world.context.store.state(f"{two.record.uuid}/{two.record.run}")[0] is (
        BundleState.MISSING
    )


def test_the_run_names_a_snapshot_too_and_a_guest_may_be_gone(two):
    two.world.hypervisor.guests.clear()
    assert run(two, f"{two.record.uuid}@{two.record.run}").failures == ()
    assert left(two) == ["web@s2"]


def test_the_newest_good_snapshot_needs_an_option(two):
    result = run(two, "web@s2")
    assert "newest good snapshot" in lines(result)[0]
    assert "last good RAM snapshot" in lines(result)[0]
    assert left(two) == ["web@s1", "web@s2"]
    assert run(two, "web@s2", also_newest=True).failures == ()
    assert left(two) == ["web@s1"]


def test_the_newest_good_one_is_not_the_newest_if_that_is_incomplete(two):
    (Path(two.second.bundle) / "domain.xml").unlink()
    assert "newest good snapshot" in lines(run(two, "web@s1"))[0]
    assert run(two, "web@s2").failures == ()
    assert left(two) == ["web@s1"]


def test_one_refusal_deletes_none(two):
    two.snapshot("s3")
    two.world.pool.hold(["flash/web@s2"], "mine")
    result = run(two, "web@s1", "web@s2")
    assert len(lines(result)) == 1
    assert "flash/web@s2 is held (mine)" in lines(result)[0]
    assert left(two) == ["web@s1", "web@s2", "web@s3"]


def test_holds_clones_and_mounts_in_any_pool_are_found_before_anything_is_destroyed(two):
    pool = two.world.pool
    pool.clone("tank/web@s1", "tank/copy")
    assert "has clones: tank/copy" in lines(run(two, "web@s1"))[0]
    assert "delete them first: zfs destroy tank/copy" in lines(run(two, "web@s1"))[0]
    pool.destroy_dataset("tank/copy")
    mark = {"snaporch:clone": str(uuid4()), "snaporch:clone-name": "test"}
    pool.clone("tank/web@s1", "tank/web-test", mark)
    assert lines(run(two, "web@s1"))[0].endswith("first: snaporch clone --delete test")
    pool.destroy_dataset("tank/web-test")
    pool.clone("tank/web@s1", "tank/web-verify", {"snaporch:verify": str(uuid4())})
    assert lines(run(two, "web@s1"))[0].endswith("first: snaporch recover")
    pool.destroy_dataset("tank/web-verify")
    pool.foreign = [BlockingMount("tank/web@s1", "the guest db")]
    assert "is mounted: the guest db" in lines(run(two, "web@s1"))[0]
    pool.foreign = []
    keep(pool, [s for s in pool.snapshots() if s.name == "s1"], datetime.now(UTC))
    assert "is kept" in lines(run(two, "web@s1"))[0]
    pool.release(["tank/web@s1", "flash/web@s1"][:1], "snaporch-keep")
    pool.release(["flash/web@s1"], "snaporch-keep")
    assert "is kept" in lines(run(two, "web@s1"))[0], "the mark alone keeps it"
    assert left(two) == ["web@s1", "web@s2"]


def test_an_interrupted_delete_can_be_repeated(two):
    """At any of its steps: after the first pool, after the last, and when only files are left."""
    pool = two.world.pool
    pool.destroy_snapshots(["flash/web@s1"])
    two.world.hooks.at["pool.destroy_snapshots"] = failing(PoolError("tank", "suspended"))
    assert "tank: suspended" in lines(run(two, "web@s1"))
    del two.world.hooks.at["pool.destroy_snapshots"]
    assert trash(two) == []
    assert run(two, "web@s1").failures == ()
    assert len(trash(two)) == 1
    with pytest.raises(NotFoundError):
        run(two, "web@s1")


def test_a_bundle_without_snapshots_is_found_by_its_name(two):
    two.world.pool.destroy_snapshots(["tank/web@s1"])
    two.world.pool.destroy_snapshots(["flash/web@s1"])
    (deleted,) = run(two, "web@s1").deleted
    assert deleted.item.zfs_names == ()
    assert deleted.bundle.action is PruneAction.TRASH
    assert run(two, "web@s2", also_newest=True).failures == ()


def test_a_bundle_whose_pool_is_not_imported_stays_and_that_is_reported(two):
    two.world.pool.destroy_snapshots(["tank/web@s1"])
    two.world.pool.exported.add("flash")
    result = run(two, "web@s1")
    assert lines(result) == ["web@s1: its bundle stays: the pool flash is not imported"]
    assert trash(two) == []


def test_another_run_on_the_domain_keeps_it_from_being_deleted(two):
    uuid = two.record.uuid
    for name in (uuid, replication_lock_name(uuid)):
        with domain_lock(
            default_paths.LOCKS, "web", name, "restore", wait=0, interrupt=Interrupt()
        ):
            (error,) = run(two, "web@s1").failures
            assert isinstance(error, BusyError)
            assert "held by restore" in error.line()
    assert left(two) == ["web@s1", "web@s2"]


def test_what_changes_after_the_question_is_seen_under_the_lock(two):
    def hold(plan):
        assert [item.name for item in plan.items] == ["web@s1"]
        two.world.pool.hold(["tank/web@s1"], "mine")

    assert "is held (mine)" in lines(run(two, "web@s1", confirm=hold))[0]
    assert left(two) == ["web@s1", "web@s2"]


def test_another_snapshot_of_that_name_is_not_deleted(two):
    """The names of ZFS snapshots come back; the run shows which snapshot was meant."""
    pool = two.world.pool

    def replaced(_plan):
        for name in two.datasets:
            pool.destroy_snapshots([f"{name}@s1"])
            pool.snapshot([f"{name}@s1"], {})

    assert run(two, "web@s1", confirm=replaced).failures == ()
    assert {"tank/web@s1", "flash/web@s1"} <= {*pool.names()}


def test_another_snapshot_with_the_name_and_the_marks_is_not_deleted(two):
    """Marks can be copied; the GUID shows which snapshot the user was shown."""
    pool = two.world.pool

    def replaced(_plan):
        for each in [found for found in pool.snapshots() if found.name == "s1"]:
            marks = {f"{PREFIX}{key}": text for key, text in each.properties.items()}
            pool.destroy_snapshots([each.full_name])
            pool.snapshot([each.full_name], marks)

    result = run(two, "web@s1", confirm=replaced)
    assert "was changed meanwhile" in lines(result)[0]
    assert {"tank/web@s1", "flash/web@s1"} <= {*pool.names()}


def test_a_snapshot_that_could_not_be_destroyed_is_not_reported_as_deleted(two):
    two.world.hooks.at["pool.destroy_snapshots"] = failing(PoolError("tank", "suspended"))
    result = run(two, "web@s1")
    assert lines(result) == ["tank: suspended"]
    assert result.deleted == ()
    assert trash(two) == []


def test_a_second_delete_of_the_same_snapshot_deletes_nothing_more(two):
    def meanwhile(_plan):
        assert run(two, "web@s1").failures == ()

    result = run(two, "web@s1", confirm=meanwhile)
    assert (result.deleted, result.failures) == ((), ())
    assert len(trash(two)) == 1


def test_a_clone_of_a_command_that_runs_is_not_left_to_recover(two):
    clone = str(uuid4())
    two.world.pool.clone("tank/web@s1", "tank/web-files", {"snaporch:extract": clone})
    locks = default_paths.LOCKS
    with domain_lock(locks, "web-files", clone, "extract", wait=0, interrupt=Interrupt()):
        assert lines(run(two, "web@s1"))[0].endswith(f"delete them first: kill {os.getpid()}")


def test_an_interrupted_run_of_the_domain_is_recovered_first(two):
    journal = two.world.paths.journal / "x.jsonl"
    journal.parent.mkdir(exist_ok=True)
    journal.write_text(
        json.dumps(
            {
                "format": FORMAT,
                "kind": "restore",
                "facts": {"uuid": two.record.uuid, "domain": "web"},
            }
        )
        + "\n"
    )
    assert "was interrupted; snaporch recover web" in lines(run(two, "web@s1"))[0]
    assert left(two) == ["web@s1", "web@s2"]


def test_the_end_of_a_guest_is_not_deleted_before_its_replica_has_it(two):
    second = two.second
    fence = Fence(second.uuid, "web", "2026-01-01T00:00:00+00:00", second.run, "s2", "nas")
    two.world.fences.put(fence)
    (error,) = lines(run(two, "web@s2", also_newest=True))
    assert "its failover to nas at @s2 has not ended; run: snaporch failover" in error
    assert run(two, "web@s1", also_newest=True).failures == ()
    two.world.fences.put(replace(fence, delivered="2026-01-01T00:00:01+00:00"))
    run(two, "web@s2", also_newest=True)
    assert left(two) == []


def test_a_preview_changes_nothing_and_foresees_the_bundle(two):
    context = two.world.context
    plan = make_delete_plan(context, DeleteRequest(("web@s1",)))
    before = {*two.world.root.rglob("*")}
    result = preview_delete(context, plan)
    assert [each.bundle.action for each in result.deleted] == [PruneAction.TRASH]
    assert result.pool_bytes == 2 * len(b"first")
    assert (left(two), trash(two)) == (["web@s1", "web@s2"], [])
    assert {*two.world.root.rglob("*")} == before


def test_a_replica_on_this_host_keeps_the_bundle(two):
    two.world.pool.create("backup")
    two.world.pool.replicate("tank/web@s1", "backup/tank-web")
    plan = make_delete_plan(two.world.context, DeleteRequest(("web@s1",)))
    (foreseen,) = preview_delete(two.world.context, plan).deleted
    (deleted,) = run(two, "web@s1").deleted
    assert foreseen.bundle == deleted.bundle
    assert deleted.bundle.action is PruneAction.KEEP
    assert "backup/tank-web@s1" in two.world.pool.names()


@pytest.mark.parametrize("manifest", ["", "{", None])
def test_copies_on_this_host_are_not_deleted_with_an_original_without_a_manifest(two, manifest):
    two.world.pool.create("backup")
    two.world.pool.replicate("tank/web@s1", "backup/tank-web")
    if manifest is None:
        shutil.rmtree(two.record.bundle)
    else:
        Path(two.record.bundle, "manifest.json").write_text(manifest)
    assert "it has no readable manifest" in lines(run(two, "web@s1"))[0]
    assert {"tank/web@s1", "backup/tank-web@s1"} <= {*two.world.pool.names()}


@pytest.fixture
def shop(world):
    """Two guests with two snapshots of their group."""
    for name in ("web", "db"):
        world.add_guest(name)
    document = world.with_defaults(ram_strategy="auto").config.model_dump(exclude_unset=True)
    group = {"group": {"shop": {"domains": ["web", "db"]}}}
    world.context.config = Config.model_validate(document | group)
    for name in ("g1", "g2"):
        snapshot_group(world.context, "shop", SnapshotRequest(name))
    return SimpleNamespace(world=world)


def test_a_group_is_deleted_together_on_request(shop):
    plan = make_delete_plan(shop.world.context, DeleteRequest(("web@g1",)))
    assert plan.left == ("db@g1",)
    assert run(shop, "web@g1", group=True).failures == ()
    assert sorted(left(shop)) == ["db@g2", "web@g2"]


def test_guests_that_share_a_dataset_are_deleted_together_or_not_at_all(two):
    """As sanoid's hook takes them: one ZFS snapshot, and a bundle of each guest."""
    world, of_web = two.world, Path(two.record.bundle)
    world.add_guest("db", disks={"vda": "tank/web", "vdb": "flash/web"})
    of_db = world.paths.bundles / world.guest("db").uuid / "20260101T000000Z-00000000"
    shutil.copytree(of_web, of_db)
    manifest = manifests.load(of_db / "manifest.json")
    manifest |= {"domain": "db", "uuid": of_db.parent.name, "run": of_db.name}
    manifests.store(of_db / "manifest.json", manifest)
    assert left(two)[:2] == ["db@s1", "web@s1"] or left(two)[:2] == ["web@s1", "db@s1"]
    assert "is also db@s1" in lines(run(two, "web@s1"))[0]
    assert run(two, "web@s1", "db@s1", also_newest=True).failures == ()
    assert left(two) == ["web@s2"]
    assert len(trash(two)) == 2


def test_a_signal_ends_it_between_two_snapshots(two):
    two.snapshot("s3")
    world = two.world
    world.hooks.at["pool.reclaimable"] = lambda: setattr(world.context.interrupt, "signum", 15)
    result = run(two, "web@s1", "web@s2")
    assert [each.item.snapshot for each in result.deleted] == ["s1"]
    assert left(two) == ["web@s2", "web@s3"]
    assert len(trash(two)) == 1, "the bundle of the deleted one is moved nevertheless"


def test_a_misspelt_name_deletes_nothing(two):
    with pytest.raises(NotFoundError):
        run(two, "web@s1", "web@nope")
    assert left(two) == ["web@s1", "web@s2"]


def test_a_wrong_answer_deletes_nothing(two):
    def no(_plan):
        raise RefusedError("delete", "not confirmed")

    with pytest.raises(RefusedError):
        run(two, "web@s1", confirm=no)
    assert left(two) == ["web@s1", "web@s2"]


def test_the_step_that_gives_an_undo_up_lets_the_snapshot_be_deleted(two):
    """An undo does not: its own safety copy is on the same snapshot."""
    context, pool = two.world.context, two.world.pool
    made = make_restore_plan(context, "web", "s1", discard_newer=True)
    restore(context, made, safety=True, keep_running=False)
    restore(
        context,
        make_undo_plan(context, choose_copy(context, "web", None)),
        safety=True,
        keep_running=False,
    )
    (refused,) = lines(run(two, "web@s1"))
    assert "is needed to undo a restore" in refused
    program, act, tag, *names = shlex.split(refused.rpartition("give that undo up: ")[2])
    assert (program, act, sorted(names)) == ("zfs", "release", ["flash/web@s1", "tank/web@s1"])
    pool.release(names[:1], tag)
    assert "is needed to undo a restore" in lines(run(two, "web@s1"))[0]
    pool.release(names[1:], tag)
    assert run(two, "web@s1").failures == ()
    assert left(two) == ["web@s2"]
