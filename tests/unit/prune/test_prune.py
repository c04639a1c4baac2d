import fcntl
import json
import os
from pathlib import Path

import pytest
from fakes.hooks import failing

from snaporch.bundle.manifest import with_checksum
from snaporch.catalog.safety_copy_holds import UNDO_HOLD
from snaporch.errors import RefusedError
from snaporch.interrupt import Interrupt
from snaporch.journal import Journal
from snaporch.locks import REPLICATION, domain_lock
from snaporch.prune import prune as prune_module
from snaporch.prune import trash as trash_module
from snaporch.prune.decision import PruneAction
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.run import restore
from snaporch.restore.select_undo import choose_copy
from snaporch.restore.undo_plan import make_undo_plan
from snaporch.snapshot.plan import make_plan
from snaporch.snapshot.request import SnapshotRequest
from snaporch.zfs import PoolError


def contents(root):
    """Every file and what it holds."""
    return {p: p.read_bytes() for p in root.rglob("*") if p.is_file() and not p.is_symlink()}


# -- bundles and their snapshots ----------------------------------------------------------------


def test_a_bundle_stays_while_a_snapshot_of_it_exists(shelf):
    bundle = shelf.take("s1")
    assert shelf.actions()["web@s1"] == ("keep", "flash/web@s1 exists")
    shelf.lose("s1", "flash/web")
    assert shelf.actions()["web@s1"] == ("keep", "tank/web@s1 exists")
    assert bundle.is_dir()


def test_a_bundle_is_trashed_with_its_last_snapshot(shelf):
    lost, kept = shelf.take("s1"), shelf.take("s2")
    before = contents(lost)
    shelf.lose("s1")
    actions = shelf.actions()
    assert actions["web@s1"] == ("trash", "flash/web@s1 and tank/web@s1 no longer exist")
    assert not lost.exists()
    assert kept.is_dir()
    (name,) = shelf.trashed()
    assert name.endswith(f".{lost.parent.name}.{lost.name}")
    assert list(contents(shelf.trash / name).values()) == list(before.values())
    assert shelf.trash.stat().st_mode & 0o777 == 0o700


def test_a_bundle_of_a_replica_depends_on_the_pool_of_the_copies(shelf):
    """The other machine has no pool of the guest."""
    bundle = shelf.take("s1")
    for name in ("tank/web@s1", "flash/web@s1"):
        shelf.pool.replicate(name, f"backup/{name.partition('@')[0].replace('/', '-')}")
    shelf.pool.exported |= {"tank", "flash"}
    (bundle / "copy.json").write_text('{"dataset": "backup/kvm"}')
    assert shelf.actions()["web@s1"][0] == "keep"
    for dataset in ("tank", "flash"):
        shelf.pool.destroy_snapshots([f"backup/{dataset}-web@s1"])
    assert shelf.actions()["web@s1"] == (
        "trash",
        "backup/kvm/flash:web@s1 and backup/kvm/tank:web@s1 no longer exist",
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"dataset": 1}'])
def test_a_copy_that_does_not_name_the_dataset_of_its_snapshots_stays(shelf, text):
    bundle = shelf.take("s1")
    (bundle / "copy.json").write_text(text)
    shelf.lose("s1")
    action, reason = shelf.actions()[f"{bundle.parent.name}/{bundle.name}"]
    assert action == "keep"
    assert "does not name the dataset that the copies are below" in reason


def test_the_trash_is_emptied_when_its_time_is_over(shelf):
    shelf.take("s1")
    shelf.lose("s1")
    shelf.prune()
    shelf.age(2.9)
    assert shelf.prune().freed == 0
    assert len(shelf.trashed()) == 1
    size = sum(len(data) for data in contents(shelf.trash).values())
    shelf.age(0.2)
    assert shelf.prune().freed == size > 0
    assert shelf.trashed() == []


def test_without_grace_it_is_deleted_at_once(shelf):
    bundle = shelf.take("s1")
    shelf.lose("s1")
    done = shelf.prune(trash_days=0)
    assert [v.action for v in done.decisions] == [PruneAction.DELETE]
    assert done.freed > 0
    assert not bundle.exists()
    assert shelf.trashed() == []


def test_a_new_snapshot_of_the_same_name_is_another_snapshot(shelf):
    shelf.take("s1")
    for dataset in ("tank/web", "flash/web"):
        shelf.pool.remake(f"{dataset}@s1")
    assert shelf.actions()["web@s1"][0] == "trash"


def test_a_renamed_dataset_keeps_its_bundles(shelf):
    shelf.take("s1")
    shelf.lose("s1", "flash/web")
    shelf.pool.rename("tank/web", "tank/old/web")
    assert shelf.actions()["web@s1"] == ("keep", "its snapshot exists as tank/old/web@s1")


def test_a_replica_keeps_the_bundle(shelf):
    shelf.take("s1")
    shelf.pool.replicate("tank/web@s1", "backup/web")
    shelf.lose("s1", "tank/web", "flash/web")
    assert shelf.actions()["web@s1"] == ("keep", "its snapshot exists as backup/web@s1")


def test_a_pool_that_is_not_imported_keeps_the_bundle_and_is_reported(shelf):
    bundle = shelf.take("s1")
    shelf.lose("s1", "tank/web")
    shelf.pool.exported.add("flash")
    assert shelf.actions()["web@s1"] == ("keep", "the pool flash is not imported")
    assert bundle.is_dir()


def test_a_trashed_bundle_stays_while_its_pool_is_not_imported(shelf):
    shelf.take("s1")
    shelf.lose("s1")
    shelf.prune()
    shelf.age(400)
    shelf.pool.exported.add("flash")
    assert shelf.actions()["web@s1"] == ("keep", "the pool flash is not imported")
    assert len(shelf.trashed()) == 1


def test_a_bundle_in_the_trash_returns_with_its_snapshot(shelf):
    bundle = shelf.take("s1")
    shelf.pool.replicate("tank/web@s1", "backup/web")
    shelf.pool.exported.add("backup")
    before = contents(bundle)
    shelf.lose("s1")
    shelf.prune()
    assert not bundle.exists()
    shelf.age(400)
    shelf.pool.exported.clear()
    assert shelf.actions()["web@s1"] == ("put-back", "backup/web@s1 is back")
    assert contents(bundle) == before
    assert shelf.trashed() == []


def test_a_bundle_does_not_return_over_another(shelf):
    bundle = shelf.take("s1")
    shelf.pool.replicate("tank/web@s1", "backup/web")
    shelf.pool.exported.add("backup")
    shelf.lose("s1")
    shelf.prune()
    shelf.pool.exported.clear()
    bundle.mkdir()
    action, reason = shelf.actions()["web@s1"]
    assert (action, reason) == ("keep", "backup/web@s1 is back, but so is another bundle of it")
    assert os.listdir(bundle) == []


# -- listings that must not be believed ---------------------------------------------------------


def test_a_listing_that_fails_changes_nothing(shelf):
    bundle = shelf.take("s1")
    shelf.lose("s1")
    shelf.world.hooks.at["pool.snapshot_listing"] = failing(PoolError("zfs list", "no"))
    with pytest.raises(PoolError):
        shelf.prune(trash_days=0)
    assert bundle.is_dir()


def test_an_empty_listing_changes_nothing(shelf):
    bundle = shelf.take("s1")
    shelf.pool.exported |= {"tank", "flash"}
    with pytest.raises(PoolError, match="lists nothing"):
        shelf.prune(trash_days=0)
    assert bundle.is_dir()


def test_a_pool_exported_between_two_listings_counts_as_not_imported(shelf):
    bundle = shelf.take("s1")
    shelf.lose("s1")
    listings = []

    def export_after_the_first():
        listings.append(1)
        if len(listings) == 2:
            shelf.pool.exported.add("flash")

    shelf.world.hooks.at["pool.snapshot_listing"] = export_after_the_first
    assert shelf.actions(trash_days=0)["web@s1"] == ("keep", "the pool flash is not imported")
    assert bundle.is_dir()


def test_snapshots_of_the_second_listing_alone_keep_the_bundle(shelf):
    bundle = shelf.take("s1")
    shelf.pool.rename("tank/web", "elsewhere/web")  # as an incomplete listing shows it
    shelf.lose("s1", "flash/web")
    shelf.pool.create("tank/other")
    shelf.pool.exported.add("elsewhere")
    listings = []

    def whole_the_second_time():
        listings.append(1)
        if len(listings) == 2:
            shelf.pool.exported.clear()

    shelf.world.hooks.at["pool.snapshot_listing"] = whole_the_second_time
    assert shelf.actions(trash_days=0)["web@s1"][0] == "keep"
    assert len(listings) == 2
    assert bundle.is_dir()


def test_a_bundle_whose_snapshot_only_the_second_listing_lacks_stays_for_now(shelf):
    shelf.take("s1")
    other = shelf.take("s2")
    shelf.lose("s1")
    listings = []

    def lose_before_the_second():
        listings.append(1)
        if len(listings) == 2:
            shelf.lose("s2")

    shelf.world.hooks.at["pool.snapshot_listing"] = lose_before_the_second
    actions = shelf.actions()
    assert (actions["web@s1"][0], actions["web@s2"][0]) == ("trash", "keep")
    assert other.is_dir()
    assert shelf.actions()["web@s2"][0] == "trash"


def test_a_bundle_sealed_during_a_prune_is_not_looked_at(shelf):
    """Its snapshots may be younger than the listing, so the store is scanned first."""
    shelf.take("s1")
    shelf.lose("s1")
    sealed = []

    def seal():
        if not sealed:
            sealed.append(None)
            sealed[0] = shelf.take("s2")

    shelf.world.hooks.at["pool.snapshot_listing"] = seal
    assert list(shelf.actions()) == ["web@s1"]
    assert sealed[0].is_dir()


# -- runs and restores under way ----------------------------------------------------------------


def test_a_run_with_a_journal_keeps_its_bundle(shelf):
    bundle = shelf.take("s1")
    shelf.lose("s1")
    journal = shelf.world.paths.journal / f"{bundle.name}.jsonl"
    journal.write_text("whatever a later snaporch writes")
    assert shelf.actions(trash_days=0)["web@s1"] == ("keep", "its run is under way")
    assert bundle.is_dir()


def test_a_domain_that_is_held_keeps_its_bundles(shelf):
    bundle = shelf.take("s1")
    shelf.lose("s1")
    lock = shelf.world.paths.runtime / f"{bundle.parent.name}.lock"
    with lock.open("r+b") as held:
        held.write(b'{"doing": "restore", "pid": 1, "since": "now"}')
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        action, reason = shelf.actions(trash_days=0)["web@s1"]
    assert action == "keep"
    assert reason == "its domain is held by restore"
    assert bundle.is_dir()
    assert shelf.actions(trash_days=0)["web@s1"][0] == "delete"


def test_a_run_that_begins_during_a_prune_keeps_its_bundle(shelf):
    bundle = shelf.take("s1")
    shelf.lose("s1")
    journal = shelf.world.paths.journal / f"{bundle.name}.jsonl"
    listings = []

    def begin():
        listings.append(1)
        if len(listings) == 2:
            journal.write_text("{}")

    shelf.world.hooks.at["pool.snapshot_listing"] = begin
    assert shelf.actions(trash_days=0)["web@s1"][0] == "keep"
    assert bundle.is_dir()


def test_a_run_that_begins_before_prune_has_the_lock_keeps_its_bundle(shelf):
    bundle = shelf.take("s1")
    shelf.lose("s1")

    def begin():
        """Asked when all is decided, and nothing is carried out."""
        (shelf.world.paths.journal / f"{bundle.name}.jsonl").write_text("{}")
        return False

    done = shelf.actions(trash_days=0, stopped=begin)
    assert done["web@s1"] == ("keep", "its run is under way")
    assert bundle.is_dir()


def test_the_partial_bundle_of_a_run_stays_and_an_abandoned_one_is_deleted(shelf):
    bundle = shelf.take("s1")
    live = bundle.with_name(".20250601T120000Z-00000001.partial")
    dead = bundle.with_name(".20250601T120000Z-00000002.partial")
    for path in (live, dead):
        path.mkdir()
        (path / "ram.save").write_bytes(b"12345")
    (shelf.world.paths.journal / "20250601T120000Z-00000001.jsonl").write_text("{}")
    done = shelf.prune()
    assert done.freed == 5
    assert live.is_dir()
    assert not dead.exists()
    assert shelf.trashed() == []


def test_ram_in_a_file_stays_during_a_run_and_is_deleted_after_it(shelf, tmp_path):
    """The next run of the guest deletes it too, but there may be none."""
    raw = shelf.take("s1").with_name(".ram.raw")
    raw.write_bytes(b"12345")
    domain = shelf.world.hypervisor.domain("web")
    plan = make_plan(shelf.world.context, domain, SnapshotRequest("s2"))
    journal = Journal(shelf.world.paths.journal, plan.facts)
    assert shelf.actions()["web/.ram.raw"] == ("keep", "its run is under way")
    journal.close(settled=True)
    assert shelf.prune(dry_run=True).freed == 5
    assert raw.exists()
    done = shelf.prune()
    assert (done.freed, raw.exists(), shelf.trashed()) == (5, False, [])
    raw.symlink_to(tmp_path)
    assert shelf.prune().freed == 0
    assert raw.is_symlink()


# -- safety copies ------------------------------------------------------------------------------


@pytest.fixture
def safety(shelf):
    bundle = shelf.take("s1")
    path = bundle.parent / "safety-20250601T120000.000000Z"
    path.mkdir()
    for name in ("000.zfs", "001.zfs", "undo.sh", "domain.xml", "nvram.fd"):
        (path / name).write_bytes(b"x")
    return path


def test_an_old_safety_copy_is_deleted(shelf, safety):
    shelf.prune(safety_days=7)
    shelf.age(7)
    done = shelf.prune(safety_days=7)
    assert done.freed == 5
    assert not safety.exists()
    assert [v.found.title for v in done.of(PruneAction.DELETE)] == [f"web/{safety.name}"]


@pytest.fixture
def base(shelf, safety):
    """The safety copy is incremental to a snapshot, which is held."""
    entry = next(each for each in shelf.pool.snapshots() if each.dataset == "tank/web")
    described = {"dataset": entry.dataset, "name": entry.name, "guid": entry.guid, "createtxg": 1}
    record = {"manifest": {"snapshots": [described]}, "kept": []}
    (safety / "undo.json").write_bytes(with_checksum(json.dumps(record, indent=2)))
    shelf.pool.hold([entry.full_name], UNDO_HOLD)
    return entry.full_name


def test_the_hold_of_the_base_is_released_with_the_safety_copy(shelf, safety, base):
    shelf.prune(safety_days=7)
    assert shelf.pool.holds(base) == [UNDO_HOLD]
    shelf.age(7)
    shelf.prune(safety_days=7)
    assert not safety.exists()
    assert shelf.pool.holds(base) == []


def test_a_safety_copy_whose_hold_cannot_be_released_stays(shelf, safety, base):
    shelf.prune(safety_days=7)
    shelf.age(7)
    shelf.pool.hooks.at["pool.release"] = failing(PoolError("zfs release", "dataset is busy"))
    done = shelf.prune(safety_days=7)
    assert "dataset is busy" in done.failures[0].line()
    assert safety.is_dir()
    assert shelf.pool.holds(base) == [UNDO_HOLD]


def test_a_safety_copy_stays_while_its_domain_is_held(shelf, safety, base):
    """An undo may be reading it."""
    shelf.prune(safety_days=7)
    shelf.age(7)
    runtime, uuid = shelf.world.paths.runtime, safety.parent.name
    with domain_lock(runtime, "web", uuid, "undo", wait=0, interrupt=Interrupt()):
        action, reason = shelf.actions(safety_days=7)[f"web/{safety.name}"]
    assert (action, reason) == ("keep", "its domain is held by undo")
    assert safety.is_dir()
    assert shelf.pool.holds(base) == [UNDO_HOLD]


@pytest.mark.parametrize(
    "record",
    [b"", b"[]", b'{"manifest": {"snapshots": []}}', with_checksum("{\n}")],
    ids=["empty", "list", "no checksum", "another document"],
)
def test_an_unreadable_safety_copy_stays_with_all_that_it_may_need(shelf, safety, base, record):
    """It may need the base of the other copy, and the bundle in the trash."""
    other = safety.with_name("safety-20250602T120000.000000Z")
    other.mkdir()
    (other / "undo.json").write_bytes(record)
    lost = shelf.take("s2")
    shelf.lose("s2")
    first = shelf.prune()
    shelf.age(8)
    second = shelf.prune()
    for done in (first, second):
        (reason,) = [each.reason for each in done.decisions if each.found.path == other]
        assert reason.startswith(f"{other}/undo.json: ")
    assert reason in second.failures[0].line()
    assert other.is_dir()
    assert (safety.is_dir(), shelf.pool.holds(base)) == (True, [UNDO_HOLD])
    assert [name for name in shelf.trashed() if lost.name in name] == shelf.trashed() != []
    (other / "undo.json").unlink()
    shelf.age(8)
    shelf.prune()
    assert (safety.is_dir(), shelf.trashed()) == (False, [])


def test_a_safety_copy_stays_while_its_guest_may_be_barred(shelf, safety):
    shelf.prune(safety_days=7)
    shelf.age(7)
    (kept,) = (
        verdict
        for verdict in shelf.prune(safety_days=7, may_be_barred=lambda _: True).decisions
        if verdict.found.path == safety
    )
    assert (kept.action, "an interrupted undo" in kept.reason) == (PruneAction.KEEP, True)
    assert safety.is_dir()
    shelf.prune(safety_days=7, may_be_barred=lambda uuid: uuid != safety.parent.name)
    assert not safety.exists()


def test_a_young_safety_copy_stays_and_is_reported(shelf, safety):
    shelf.prune(safety_days=7)
    shelf.age(6.9)
    action, reason = shelf.actions(safety_days=7)[f"web/{safety.name}"]
    assert action == "keep"
    assert reason.startswith("undoes a restore; stays until ")
    assert safety.is_dir()


# -- what is not snaporch's ---------------------------------------------------------------------


def test_foreign_files_are_neither_followed_nor_removed(shelf, tmp_path):
    bundle = shelf.take("s1")
    shelf.lose("s1")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "manifest.json").write_bytes((bundle / "manifest.json").read_bytes())
    domain = bundle.parent
    (domain / "20250601T120000Z-00000003").symlink_to(precious)
    (domain / "notes").mkdir()
    (domain / "notes" / "todo").write_text("x")
    (domain / ".hidden").write_text("x")
    (shelf.root / "lost+found").mkdir()
    (shelf.root / "7f1c0d4e-4f7d-4a6e-9d0a-0d7c5a1b2c3d").symlink_to(domain)
    before = contents(tmp_path) | {"link": (domain / "20250601T120000Z-00000003").is_symlink()}
    actions = shelf.actions()
    assert {title: action for title, (action, _) in actions.items()} == {
        "web@s1": "trash",
        "web/notes": "keep",  # it could be a bundle without its manifest
    }
    (moved,) = shelf.trash.iterdir()
    after = contents(tmp_path) | {"link": (domain / "20250601T120000Z-00000003").is_symlink()}
    names = {str(p).replace(str(moved), str(bundle)) for p in after}
    assert names == {str(p) for p in before} | {str(shelf.root / "ages.json")}


@pytest.mark.parametrize("kind", ["file", "directory", "symlink", "part is a symlink"])
def test_a_bundle_with_a_foreign_file_stays_and_is_reported(shelf, tmp_path, kind):
    bundle = shelf.take("s1")
    shelf.lose("s1")
    foreign = bundle / ("ram.save" if kind == "part is a symlink" else "notes.txt")
    foreign.unlink(missing_ok=True)
    if kind == "file":
        foreign.write_text("mine")
    elif kind == "directory":
        foreign.mkdir()
    else:
        foreign.symlink_to(tmp_path / "x")
    (verdict,) = shelf.prune(trash_days=0).decisions
    assert verdict.action is PruneAction.KEEP
    assert verdict.reason == f"{bundle} holds {foreign.name}, which snaporch did not put there"
    assert os.path.lexists(foreign)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b'{"format": 99}', None])
def test_a_manifest_that_cannot_be_read_keeps_the_bundle(shelf, text):
    bundle = shelf.take("s1")
    shelf.lose("s1")
    manifest = bundle / "manifest.json"
    manifest.unlink() if text is None else manifest.write_bytes(text)
    (verdict,) = shelf.prune(trash_days=0).decisions
    assert verdict.action is PruneAction.KEEP
    assert str(manifest) in verdict.reason
    assert bundle.is_dir()


def test_a_bundle_with_a_manifest_of_another_domain_stays(shelf):
    """Otherwise the other domain's snapshots would decide whether this one's RAM is deleted."""
    other = shelf.world.add_guest("mail", disks={"vda": "tank/mail"})
    bundle = shelf.take("s1")
    moved = shelf.root / other.uuid / bundle.name
    moved.parent.mkdir()
    bundle.rename(moved)
    shelf.lose("s1")
    (kept,) = shelf.prune(trash_days=0).of(PruneAction.KEEP)
    assert (kept.found.path, moved.is_dir()) == (moved, True)
    assert "is of another bundle" in kept.reason


def test_a_bundle_with_a_manifest_of_another_bundle_stays(shelf):
    first, second = shelf.take("s1"), shelf.take("s2")
    shelf.lose("s1")
    (second / "manifest.json").write_bytes((first / "manifest.json").read_bytes())
    kept = {v.found.path: v for v in shelf.prune(trash_days=0).of(PruneAction.KEEP)}
    assert "is of another bundle" in kept[second].reason
    assert second.is_dir()
    assert not first.exists()


def test_a_manifest_that_is_a_pipe_does_not_block_pruning(shelf):
    bundle = shelf.take("s1")
    (bundle / "manifest.json").unlink()
    os.mkfifo(bundle / "manifest.json")
    (verdict,) = shelf.prune().decisions
    assert "is not a plain file" in verdict.reason


def test_a_trash_that_is_a_link_is_refused(shelf, tmp_path):
    bundle = shelf.take("s1")
    shelf.lose("s1")
    shelf.trash.symlink_to(tmp_path)
    with pytest.raises(RefusedError, match="is not a directory"):
        shelf.prune()
    assert bundle.is_dir()


def test_files_put_into_the_trash_by_hand_stay(shelf):
    shelf.take("s1")
    shelf.trash.mkdir()
    (shelf.trash / "mine").mkdir()
    (shelf.trash / "note").write_text("x")
    shelf.prune(trash_days=0)
    assert shelf.trashed() == ["mine", "note"]


# -- interrupted -------------------------------------------------------------------------------


class Killed(BaseException):
    """The process ends as by SIGKILL."""


def test_a_prune_killed_between_rename_and_delete_is_finished_by_the_next(shelf, monkeypatch):
    bundle = shelf.take("s1")
    shelf.lose("s1")
    with monkeypatch.context() as patched:
        patched.setattr(prune_module, "remove", failing_with(Killed()))
        with pytest.raises(Killed):
            shelf.prune(trash_days=0)
    assert not bundle.exists()
    (name,) = shelf.trashed()
    assert name.endswith(".deleting")
    done = shelf.prune()
    assert done.freed > 0
    assert [v.reason for v in done.decisions] == ["its removal was interrupted"]
    assert shelf.trashed() == []


def test_a_prune_killed_while_it_deletes_is_finished_by_the_next(shelf, monkeypatch):
    shelf.take("s1")
    shelf.lose("s1")
    shelf.prune()
    shelf.age(4)
    unlinked = []
    real = trash_module._unlink

    def unlink(name, directory):
        if unlinked:
            raise Killed
        unlinked.append(name)
        real(name, directory)

    with monkeypatch.context() as patched:
        patched.setattr(trash_module, "_unlink", unlink)
        with pytest.raises(Killed):
            shelf.prune()
    assert [path.name.endswith(".deleting") for path in shelf.trash.iterdir()] == [True]
    shelf.prune()
    assert shelf.trashed() == []


def test_remains_with_a_foreign_file_stay(shelf):
    shelf.take("s1")
    uuid = next(p.name for p in shelf.root.iterdir() if p.name[0] != ".")
    remains = shelf.trash / f"20250601T120000Z.{uuid}.r1.deleting"
    (remains / "mine").mkdir(parents=True)
    verdict = next(v for v in shelf.prune().decisions if v.found.path == remains)
    assert verdict.action is PruneAction.KEEP
    assert (remains / "mine").is_dir()


def test_a_bundle_that_cannot_be_moved_is_reported_and_stops_no_other(shelf, monkeypatch):
    first, second = shelf.take("s1"), shelf.take("s2")
    shelf.lose("s1")
    shelf.lose("s2")
    real = Path.rename

    def rename(self, target):
        if self == first:
            raise OSError(18, "Invalid cross-device link", str(self))
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    done = shelf.prune()
    (failure,) = done.failures
    assert str(first) in failure.line()
    assert "cross-device" in failure.line()
    assert first.is_dir()
    assert not second.exists()


def test_an_item_that_another_process_moved_is_no_error(shelf):
    bundle = shelf.take("s1")
    shelf.lose("s1")
    listings = []

    def move():
        listings.append(1)
        if len(listings) == 2:
            bundle.rename(bundle.with_name("elsewhere"))

    shelf.world.hooks.at["pool.snapshot_listing"] = move
    done = shelf.prune()
    assert (done.decisions, done.failures) == ([], [])


def test_the_rename_is_on_stable_storage_before_anything_is_deleted(shelf, monkeypatch):
    bundle = shelf.take("s1")
    shelf.lose("s1")
    files = len(list(bundle.iterdir()))
    synced, real = [], os.fsync

    def fsync(descriptor):
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        synced.append((name, sum(1 for _ in (shelf.root / ".trash").glob("*/*"))))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    shelf.prune(trash_days=0)
    assert synced[:2] == [(".trash", files), (bundle.parent.name, files)]
    assert shelf.trashed() == []


# -- choosing -----------------------------------------------------------------------------------


def test_a_dry_run_changes_nothing(shelf):
    shelf.take("s1")
    shelf.lose("s1")
    before = contents(shelf.root)
    done = shelf.prune(trash_days=0, dry_run=True)
    assert [v.action for v in done.decisions] == [PruneAction.DELETE]
    assert contents(shelf.root) == before
    assert not shelf.trash.exists()


@pytest.mark.parametrize("by", ["name", "uuid"])
def test_a_prune_of_one_domain_touches_no_other(shelf, by):
    other = shelf.world.add_guest("mail", disks={"vda": "tank/mail"})
    mail, web = shelf.take("m1", "mail"), shelf.take("s1")
    shelf.lose("m1")
    shelf.lose("s1")
    assert list(shelf.actions(domain="mail" if by == "name" else other.uuid)) == ["mail@m1"]
    assert not mail.exists()
    assert web.is_dir()


def test_an_empty_store_needs_no_zfs(shelf):
    shelf.world.hooks.at["pool.snapshot_listing"] = failing(PoolError("zfs", "no"))
    assert shelf.prune().decisions == []


def test_snapshots_of_given_bundles_are_searched_in_their_own_datasets_first(shelf):
    """While their own datasets have them, no pool is listed completely."""
    bundle = shelf.take("s1")
    reference = f"{bundle.parent.name}/{bundle.name}"
    shelf.world.hooks.at["pool.snapshot_listing"] = failing(PoolError("zfs", "no"))
    assert shelf.actions(only=[reference])["web@s1"][0] == "keep"
    shelf.lose("s1")
    with pytest.raises(PoolError):
        shelf.prune(only=[reference])
    assert bundle.is_dir()


def failing_with(error):
    def fail(*_arguments):
        raise error

    return fail


@pytest.mark.parametrize("trash_days", [0, 3])
def test_a_bundle_that_an_undo_brings_back_stays_as_long_as_the_safety_copy(shelf, trash_days):
    """An undo on the fourth day brings the snapshot back with its RAM."""
    shelf.take("s1")
    bundle = shelf.take("s2")
    plan = make_restore_plan(shelf.world.context, "web", "s1", discard_newer=True)
    restore(shelf.world.context, plan, safety=True)
    assert shelf.actions(trash_days=trash_days)["web@s2"][0] == "trash"
    (name,) = shelf.trashed()
    shelf.age(6)
    action, reason = shelf.actions(trash_days=trash_days)["web@s2"]
    assert (action, reason.endswith("; an undo may bring it back")) == ("keep", True)
    copy = choose_copy(shelf.world.context, "web", None)
    restore(shelf.world.context, make_undo_plan(shelf.world.context, copy), safety=False)
    assert shelf.actions(trash_days=trash_days)["web@s2"][0] == "put-back"
    assert bundle.is_dir()
    assert not (shelf.trash / name).exists()


# -- encrypted bundles of replicas ---------------------------------------------------------------


def encrypted(shelf, bundle):
    place = shelf.root / ".encrypted" / "nas" / bundle.parent.name / bundle.name
    place.mkdir(parents=True)
    (place / "manifest.json").write_bytes(b"{}")
    return place


def test_the_record_of_an_encrypted_bundle_goes_with_the_bundle(shelf):
    lost, kept = (encrypted(shelf, shelf.take(name)) for name in ("s1", "s2"))
    shelf.lose("s1")
    shelf.prune()
    assert lost.exists()  # the trash may give the bundle back
    shelf.age(4)
    assert shelf.prune(dry_run=True).failures == []
    assert lost.exists()
    shelf.prune()
    assert not lost.exists()
    assert kept.exists()


def test_encrypted_bundles_stay_while_a_replication_or_a_rebuild_uses_them(shelf):
    left = encrypted(shelf, shelf.root / shelf.take("s1").parent.name / "20200101T000000Z-0000")
    runtime = shelf.world.paths.runtime
    with domain_lock(runtime, REPLICATION, REPLICATION, "x", wait=0, interrupt=Interrupt()):
        assert shelf.prune().failures == []
    assert left.exists()
    shelf.prune()
    assert not left.exists()
