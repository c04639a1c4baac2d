"""Copies in a pool of this machine, with their bundles, and what pruning them leaves."""

import hashlib
import json
import os
import time
from datetime import UTC, datetime, timedelta

import pytest
from fakes.pool import FakePool

from snaporch import default_paths
from snaporch.bundle.manifest import (
    MANIFEST_NAME,
    Manifest,
    PagesEntry,
    Part,
    Role,
    SnapshotEntry,
    VersionsEntry,
    manifest_bytes,
)
from snaporch.config import Config
from snaporch.interrupt import Interrupt
from snaporch.locks import readers_lock
from snaporch.model import Level, VerificationResult, VerifyDepth
from snaporch.prune.decision import ItemKind, PruneAction
from snaporch.schedule.prune_received_copies import prune_copies, prune_copies_daily
from snaporch.verify.copy_decision import Source
from snaporch.verify.copy_results import CopyResult, CopyResults
from snaporch.zfs import PoolError

ROOT = "backup/kvm"
UUID = "4b1d2f0e-0000-4000-8000-000000000001"
NOW = datetime.now(UTC).replace(microsecond=0)
CHECKED = VerificationResult(NOW, passed=True, reached=VerifyDepth.CHECKED).as_text()
PASSED = VerificationResult(NOW, passed=True, reached=VerifyDepth.BOOTED).as_text()


class Holder:
    """A machine with copies of the guest ``web``, which has a disk on each of two pools."""

    def __init__(self, place):
        self.place = place
        self.bundles = place / "bundles"
        self.bundles.mkdir()
        self.pool = FakePool("backup", ROOT, f"{ROOT}/tank:web", f"{ROOT}/flash:web")
        self.options = {"keep": {"last": 2}, "keep_all": "0s"}

    @property
    def config(self):
        copies = {"dataset": ROOT, "bundles": str(self.bundles), **self.options}
        paths = {each: str(self.place / each) for each in ("bundles", "journal", "schedule")}
        paths["bundles"] += "-own"
        return Config.model_validate({"paths": paths, "copies": {"nas": copies}})

    def prune(self, **more):
        done = prune_copies(self.config, self.pool, **more)
        assert done.failures == []
        return done

    def deleted(self, **more):
        done = self.prune(**more)
        gone = [each for each in done.of(PruneAction.DELETE) if each.found.kind is ItemKind.COPY]
        return [each.found.name[-4:] for each in gone]

    def run(self, number):
        return f"20260601T00000{number}Z-000{number}"

    def take(self, number, *, hours=None, pages=False, manual=False, bundle=True, **changes):
        """A copy of a snapshot, whose bundle arrived."""
        policy = "manual" if manual else "hourly"
        run, name = self.run(number), f"snaporch_{number}_{policy}"
        datasets = [f"{ROOT}/tank:web", f"{ROOT}/flash:web"]
        marks = {"uuid": UUID, "run": run, "domain": "web", "copy": "nas", "level": "ram"}
        marks["bundle"] = f"{UUID}/{run}"
        if not manual:
            marks["retention"] = policy
        names = [f"{each}@{name}" for each in datasets]
        self.pool.snapshot(names, {f"snaporch:{key}": value for key, value in marks.items()})
        if pages:
            ram = f"{ROOT}/tank:ram:{UUID}"
            if ram not in {each.name for each in self.pool.datasets()}:
                self.pool.create(ram)
            marks = {"snaporch:ram": f"{UUID}/{run}", "snaporch:copy": "nas"}
            self.pool.snapshot([f"{ram}@{name}"], marks)
            names.append(f"{ram}@{name}")
        created = NOW - timedelta(hours=20 - number if hours is None else hours)
        for each in names:
            self.pool.age(each, created)
        if bundle:
            self.bundle(run, name, pages=pages, **changes)
        return names

    def bundle(self, run, name, *, pages, root=ROOT, **changes):
        own = [each for each in self.pool.snapshots() if each.name == name]
        entries = {each.dataset.rpartition("/")[2].replace(":", "/"): each for each in own}
        page = next((entries.pop(key) for key in list(entries) if key.startswith("tank/ram")), None)
        entry = pages and PagesEntry(
            dataset=f"tank/ram/{UUID}",
            name=name,
            guid=page.guid,
            createtxg=1,
            bytes=1,
            sha256="0" * 64,
            split=1,
            stored_bytes=1,
        )
        part = Part(
            name="ram.save",
            role=Role.RAM,
            bytes=3,
            sha256=hashlib.sha256(b"ram").hexdigest(),
            pages=entry or None,
        )
        manifest = Manifest(
            run=run,
            domain="web",
            uuid=UUID,
            snapshot=name,
            level=Level.RAM,
            was_running=True,
            started=NOW,
            created=NOW,
            finished=NOW,
            disks=(),
            parts=(part,),
            snapshots=tuple(
                SnapshotEntry(dataset=key, name=e.name, guid=e.guid, createtxg=e.createtxg)
                for key, e in entries.items()
            ),
            versions=VersionsEntry(snaporch="1", libvirt="1", emulator="", machine="pc"),
        ).model_copy(update=changes)
        directory = self.bundles / UUID / run
        directory.mkdir(parents=True)
        (directory / "ram.save").write_bytes(b"ram")
        (directory / "copy.json").write_text(json.dumps({"dataset": root}))
        (directory / MANIFEST_NAME).write_bytes(manifest_bytes(manifest))


@pytest.fixture
def holder(tmp_path):
    return Holder(tmp_path)


def test_a_copy_that_a_test_restore_reads_stays_until_the_next_prune(holder):
    for number in range(1, 5):
        holder.take(number)
    shared = readers_lock(default_paths.LOCKS, "web", UUID, alone=False, interrupt=Interrupt())
    with shared:
        decisions = holder.prune().decisions
        kept = [e for e in decisions if e.reason.startswith("in use (a snapshot of it is being")]
        assert [each.found.name for each in kept] == [holder.run(1), holder.run(2)]
    assert holder.deleted() == [holder.run(1)[-4:], holder.run(2)[-4:]]


def test_whole_runs_go_with_all_their_copies_and_their_bundles(holder):
    for number in range(1, 5):
        holder.take(number)
    assert holder.deleted() == ["0001", "0002"]
    assert {each.partition("@")[2] for each in holder.pool.names()} == {
        "snaporch_3_hourly",
        "snaporch_4_hourly",
    }
    assert len(holder.pool.names()) == 4
    assert sorted(os.listdir(holder.bundles / UUID)) == [holder.run(3), holder.run(4)]
    assert len(os.listdir(holder.bundles / ".trash")) == 2


def test_a_dry_run_says_the_same_and_changes_nothing(holder):
    for number in range(1, 5):
        holder.take(number)
    before = holder.pool.names()
    done = holder.prune(dry_run=True)
    trashed = [each.found.name[-4:] for each in done.of(PruneAction.TRASH)]
    assert trashed == ["0001", "0002"]
    assert holder.deleted(dry_run=True) == ["0001", "0002"]
    assert holder.pool.names() == before
    assert holder.deleted() == ["0001", "0002"]


def test_pages_of_ram_go_with_their_run(holder):
    for number in range(1, 5):
        holder.take(number, pages=True)
    assert holder.deleted() == ["0001", "0002"]
    assert len([each for each in holder.pool.names() if "tank:ram" in each]) == 2


def test_what_is_still_arriving_stays_and_is_no_newest_whole_one(holder):
    for number in range(1, 5):
        holder.take(number)
    holder.take(5, bundle=False)
    assert holder.deleted() == ["0001", "0002"]
    assert f"{ROOT}/tank:web@snaporch_5_hourly" in holder.pool.names()


def test_snapshots_of_others_and_by_hand_stay(holder):
    holder.pool.snapshot([f"{ROOT}/tank:web@autosnap_2026"], {})
    holder.take(1, manual=True)
    for number in range(2, 6):
        holder.take(number)
    assert holder.deleted() == ["0002", "0003"]
    assert f"{ROOT}/tank:web@autosnap_2026" in holder.pool.names()


def test_what_lacks_a_part_stays_and_does_not_count(holder):
    for number in range(1, 5):
        names = holder.take(number)
    holder.pool.destroy_snapshots([names[1]])
    holder.take(5)
    (holder.bundles / UUID / holder.run(5) / "ram.save").unlink()
    assert holder.deleted() == ["0001"]


def test_held_and_cloned_ones_stay(holder):
    held, cloned = holder.take(1), holder.take(2)
    for number in range(3, 6):
        holder.take(number)
    holder.pool.hold(held[1:], "keep")
    holder.pool.clone(cloned[0], "backup/clone")
    assert holder.deleted() == ["0003"]
    decisions = {each.found.name[-4:]: each.reason for each in holder.prune().decisions[:2]}
    assert "held" in decisions["0001"]
    assert "cloned as backup/clone" in decisions["0002"]


def test_one_that_is_in_use_meanwhile_is_tried_again_and_the_others_go(holder):
    for number in range(1, 6):
        names = holder.take(number)
        if number == 1:
            held = names[0]
    destroy = holder.pool.destroy_snapshots

    def held_meanwhile(names):
        if held in names:
            holder.pool.hold([held], "sent")
        destroy(names)

    holder.pool.destroy_snapshots = held_meanwhile
    done = holder.prune()
    assert done.failures == []
    reasons = {e.found.name[-4:]: e.reason for e in done.decisions if e.kind_now == "copy"}
    assert reasons["0001"] == "in use (dataset is busy); the next prune tries again"
    assert held in holder.pool.names()
    gone = {e.found.name[-4:] for e in done.of(PruneAction.DELETE)}
    assert gone == {"0002", "0003"}


def test_the_copy_that_passed_its_verification_here_stays(holder):
    for number in range(1, 5):
        holder.take(number)
    run, name = holder.run(1), "snaporch_1_hourly"
    CopyResults(holder.place / "schedule").record(
        CopyResult("nas", "web", UUID, run, name, NOW, passed=True, source=Source.REPLICA)
    )
    assert holder.deleted() == ["0002"]


def test_the_copy_that_passed_its_test_restore_here_stays(holder):
    for number in range(1, 5):
        for each in holder.take(number):
            if number == 1:
                holder.pool.set_properties([each], {"snaporch:verified-here": PASSED})
    assert holder.deleted() == ["0002"]


def test_the_one_that_was_restored_here_stays_although_a_mark_says_that_a_later_one_passed(holder):
    for number in range(1, 7):
        key = {1: "verified-here", 3: "verified"}.get(number)  # the second one is forged
        for each in holder.take(number):
            if key is not None:
                holder.pool.set_properties([each], {f"snaporch:{key}": PASSED})
    assert holder.deleted() == ["0002", "0004"]


def test_a_copy_whose_test_restore_failed_here_did_not_pass_by_its_mark(holder):
    for number in range(1, 5):
        for each in holder.take(number):
            if number == 1:
                marks = {"snaporch:verified": PASSED}
                marks["snaporch:verified-here"] = PASSED.replace("passed", "failed")
                holder.pool.set_properties([each], marks)
    assert holder.deleted() == ["0001", "0002"]


def test_a_copy_of_which_no_clone_ran_was_not_restored_here(holder):
    for number in range(1, 5):
        for each in holder.take(number):
            if number == 1:
                holder.pool.set_properties([each], {"snaporch:verified-here": CHECKED})
    assert holder.deleted() == ["0001", "0002"]


def test_one_member_that_failed_here_is_a_failure(holder):
    """Of a shared or unmarked member the result could not be written."""
    for number in range(1, 5):
        first, second = holder.take(number)
        if number == 1:
            failed = PASSED.replace("passed", "failed")
            holder.pool.set_properties([first, second], {"snaporch:verified": PASSED})
            holder.pool.set_properties([first], {"snaporch:verified-here": failed})
    assert holder.deleted() == ["0001", "0002"]


def test_keep_all_counts_from_when_the_bundle_came_and_no_time_of_a_file_changes_that(holder):
    holder.options["keep_all"] = "7d"
    for number in range(1, 5):
        holder.take(number)
        bundle = holder.bundles / UUID / holder.run(number)
        for each in (bundle, *bundle.iterdir()):
            os.utime(each, (0, 0))
    assert holder.deleted() == []
    soon = time.time() + 7 * 86_400
    assert holder.deleted(now=lambda: datetime.fromtimestamp(soon - 60, UTC)) == []
    assert len(holder.deleted(now=lambda: datetime.fromtimestamp(soon + 60, UTC))) == 2


def test_a_bundle_that_a_replication_read_again_did_not_come_again(holder):
    holder.options["keep_all"] = "7d"
    for number in range(1, 5):
        holder.take(number)
    bundles = [*(holder.bundles / UUID).iterdir()]
    came = max(each.lstat().st_ctime for each in bundles)
    for each in bundles:
        while (each / "copy.json").stat().st_ctime <= came + 0.02:
            os.utime(each / "copy.json")
    after = datetime.fromtimestamp(came + 7 * 86_400 + 0.01, UTC)
    assert len(holder.deleted(now=lambda: after)) == 2


def test_a_bundle_whose_manifest_was_replaced_came_then(holder):
    holder.options["keep_all"] = "7d"
    for number in range(1, 5):
        holder.take(number)
    bundles = [*(holder.bundles / UUID).iterdir()]
    came = max(each.lstat().st_ctime for each in bundles)
    for each in bundles:
        while (each / MANIFEST_NAME).stat().st_ctime <= came + 0.02:
            (each / MANIFEST_NAME).write_bytes((each / MANIFEST_NAME).read_bytes())
    after = datetime.fromtimestamp(came + 7 * 86_400 + 0.01, UTC)
    assert holder.deleted(now=lambda: after) == []


def test_the_one_that_passed_here_stays_although_marks_say_that_later_ones_passed(holder):
    for number in range(1, 7):
        names = holder.take(number)
        if number == 3:  # forged
            for each in names:
                holder.pool.set_properties([each], {"snaporch:verified": PASSED})
    run, name = holder.run(1), "snaporch_1_hourly"
    CopyResults(holder.place / "schedule").record(
        CopyResult("nas", "web", UUID, run, name, NOW, passed=True, source=Source.REPLICA)
    )
    assert holder.deleted() == ["0002", "0004"]


def test_a_bundle_of_other_copies_decides_nothing(holder):
    holder.take(1, root="backup/other")
    for number in range(2, 5):
        holder.take(number)
    assert holder.deleted() == ["0002"]


def test_a_snapshot_that_was_replaced_is_not_destroyed(holder):
    names = holder.take(1)
    for number in range(2, 5):
        holder.take(number)
    holder.pool.remake(names[0])
    assert holder.deleted() == ["0002"]


def test_a_second_listing_must_agree(holder):
    for number in range(1, 5):
        names = holder.take(number)
    views = []

    def second():
        views.append(1)
        if len(views) == 2:  # the newest ones are rolled back between the listings
            holder.pool.destroy_snapshots([each.replace("_4_", "_3_") for each in names])
            holder.pool.destroy_snapshots(names)

    holder.pool.hooks.at["pool.policy_view"] = second
    assert holder.deleted() == []
    left = {each.partition("@")[2] for each in holder.pool.names()}
    assert left == {"snaporch_1_hourly", "snaporch_2_hourly"}


def test_a_time_in_the_future_is_named(holder):
    holder.take(1, hours=-9000)
    for number in range(2, 5):
        holder.take(number)
    done = holder.prune()
    (named,) = [e for e in done.decisions if e.action is PruneAction.KEEP and "future" in e.reason]
    assert not named.usual
    assert named.found.name == holder.run(1)


def test_only_the_named_guest_is_pruned(holder):
    for number in range(1, 5):
        holder.take(number)
    assert holder.deleted(domain="db") == []
    assert holder.deleted(domain="web") == ["0001", "0002"]


def test_a_place_that_is_not_there_is_an_error(holder):
    for number in range(1, 5):
        holder.take(number)
    holder.bundles.rename(holder.place / "away")
    (failure,) = prune_copies(holder.config, holder.pool).failures
    assert "is its file system mounted" in failure.line()
    (holder.place / "away").rename(holder.bundles)
    holder.options["dataset"] = "backup/other"
    (failure,) = prune_copies(holder.config, holder.pool).failures
    assert "no such dataset" in failure.line()
    assert len(holder.pool.names()) == 8


def test_a_place_without_any_bundle_of_the_copies_is_an_error(holder):
    (holder.bundles / "lost+found").mkdir()
    assert prune_copies(holder.config, holder.pool).failures == []
    for number in range(1, 5):
        holder.take(number)
    holder.bundles.rename(holder.place / "away")
    holder.bundles.mkdir()
    (failure,) = prune_copies(holder.config, holder.pool).failures
    assert "has no bundle of the snapshots below backup/kvm" in failure.line()
    assert len(holder.pool.names()) == 8


def test_a_copy_that_went_meanwhile_does_not_stop_the_prune(holder):
    for number in range(1, 5):
        holder.take(number)
    sizes = holder.pool.sizes
    first = f"{ROOT}/tank:web@snaporch_1_hourly"

    def went(names):
        if holder.pool.names().count(first):
            holder.pool.destroy_snapshots([first])
            raise PoolError(first, "dataset does not exist")
        return sizes(names)

    holder.pool.sizes = went
    assert "0002" in holder.deleted()


def test_once_a_day(holder):
    for number in range(1, 5):
        holder.take(number)
    assert prune_copies_daily(holder.config, holder.pool, lambda: True).decisions == []
    assert (
        len(prune_copies_daily(holder.config, holder.pool, lambda: False).of(PruneAction.DELETE))
        == 2
    )
    holder.take(5)
    assert prune_copies_daily(holder.config, holder.pool, lambda: False).decisions == []
    yesterday = time.time() - 90_000
    os.utime(holder.place / "schedule" / "pruned-copies", (yesterday, yesterday))
    assert prune_copies_daily(holder.config, holder.pool, lambda: False).of(PruneAction.DELETE)


def test_pulled_copies_are_pruned_by_the_options_of_their_source(holder):
    for number in range(1, 5):
        holder.take(number)
    source = {"host": "vm1", "dataset": ROOT, "bundles": str(holder.bundles), **holder.options}
    config = Config.model_validate(
        {"paths": holder.config.paths.model_dump(), "source": {"vm1": source}}
    )
    assert len(prune_copies(config, holder.pool).of(PruneAction.DELETE)) == 2
