"""A guest that was failed over comes back: only when it has ended there, and only what is new."""

import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fakes.hooks import failing
from fakes.rebuild_source import FakeLocal, FakeSource
from fakes.replica import FakeReplica

from snaporch.bundle.store import copy_name
from snaporch.catalog.records import ENDED, all_records, by_dataset
from snaporch.config import Config
from snaporch.context import Clock
from snaporch.errors import RefusedError
from snaporch.failover.fence_by_hand import make_fence, missing_disks
from snaporch.fence import Fence
from snaporch.hypervisor import HypervisorError
from snaporch.model import DomainState
from snaporch.rebuild.bring_back import bring_back
from snaporch.rebuild.fenced_guest import doubt
from snaporch.rebuild.fetch_bundle import runs_to_fetch
from snaporch.rebuild.local_checks import remaining
from snaporch.rebuild.plan_guest import plan_guest
from snaporch.rebuild.rebuild_guest import rebuild_guest
from snaporch.rebuild.surroundings import plan_surroundings
from snaporch.replication.interface import ReplicaError
from snaporch.replication.replicate import replicate
from snaporch.restore.start_bar import has_bar
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.zfs import PREFIX

DATASETS = ("flash/web", "tank/web")


class Return:
    """This host has a fenced guest with s1; the replica has s1 and s2, its last one there."""

    def __init__(self, world):
        self.world = world
        self.history = False
        world.pool.create("tank"), world.pool.create("flash")
        self.uuid = world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"}).uuid
        self.context = world.context
        nas = {"host": "nas", "dataset": "backup/kvm", "bundles": "/backup/nas"}
        document = self.context.config.model_dump() | {"replica": {"nas": nas}}
        self.context.config = Config.model_validate(document)
        self.replica = FakeReplica(world.pool, world.root / "there")
        self.replica.create()
        self.source = FakeSource(world.pool, self.replica, world.hooks)
        self.local = FakeLocal(world.pool, world.hooks)
        self.first = self.take("s1")
        self.last = self.take("s2")
        self.world.pool.set_properties([f"{each}@s2" for each in DATASETS], {PREFIX + ENDED: "yes"})
        replicate(self.context, self.records(), "nas", self.replica)
        world.hypervisor.destroy(self.uuid)
        self.go_back()
        at = self.first.created + (self.last.created - self.first.created) / 2
        world.fences.put(Fence(self.uuid, "web", at.isoformat(), self.first.run, "s1"))

    def take(self, name):
        domain = self.world.hypervisor.domain("web")
        return take_snapshot(self.context, domain, SnapshotRequest(name))

    def records(self):
        return all_records(self.context.store, self.world.pool.snapshots())

    def go_back(self):
        """This host has what it had before s2."""
        for dataset in DATASETS:
            taken = self.world.pool.take_out(dataset)
            self.source._lost[dataset] = taken
            self.world.pool.put_in(taken, dataset, "s1", "", {})
            self.local.inherited[dataset] = ""
            marks = {PREFIX + k: v for k, v in self._marks(dataset).items()}
            self.world.pool.set_properties([f"{dataset}@s1"], marks)

    def _marks(self, dataset):
        (first, *_) = self.replica.snapshots([dataset])
        return {k: v for k, v in first.properties.items() if k != "copy"}

    @property
    def fence(self):
        return self.world.fences.find(self.uuid)

    def copies(self):
        return by_dataset(self.source.snapshots())

    def plan(self, words="web"):
        return plan_guest(
            self.context, self.source, self.local, self.copies(), words, history=self.history
        )


@pytest.fixture
def back(world):
    return Return(world)


def test_only_what_is_new_comes(back):
    plan = back.plan()
    assert [(each.dataset, each.base) for each in plan.incoming] == [
        ("flash/web", "s1"),
        ("tank/web", "s1"),
    ]
    back.world.hooks.log.clear()
    bring_back(back.context, back.source, back.local, plan, [])
    received = [line for line in back.world.hooks.log if line.startswith("source.receive")]
    assert received == ["source.receive flash:web@s2 s1", "source.receive tank:web@s2 s1"]
    again = back.plan()
    assert [remaining(e, back.local.state(e.dataset), "nas") for e in again.incoming] == [[], []]
    own = back.world.pool.snapshots(["tank/web"])
    assert [each.properties.get("copy") for each in own] == [None, "nas"]


def rebuild(back, *, restores=True):
    plan = back.plan()
    surroundings = plan_surroundings(back.context, back.local, plan, back.copies(), [])
    runs = runs_to_fetch(back.source, back.copies(), plan, history=back.history)
    return rebuild_guest(
        back.context,
        back.source,
        back.local,
        plan,
        surroundings,
        runs,
        {},
        plan_again=back.plan,
        cold=False,
        restores=restores,
    )


def test_its_fence_is_there_until_its_data_is(back):
    seen = []
    back.world.hooks.at["source.receive"] = lambda: seen.append(back.fence)
    back.world.hooks.at["source.fetch"] = lambda: seen.append(back.fence)
    back.world.hooks.at["local.mount"] = lambda: seen.append(back.fence)
    rebuilt = rebuild(back)
    assert None not in seen
    assert back.fence is None
    assert rebuilt.restored is not None
    assert back.world.guest().state is DomainState.RUNNING


def test_its_fence_is_there_until_the_bar_of_its_restore_is(back):
    """At no moment can anything but the restore start it."""
    seen = []

    def look():
        barred = has_bar(back.world.paths.journal, back.world.hypervisor.domain("web"))
        seen.append((back.fence is not None, barred))

    back.world.hooks.at["hypervisor.define"] = look
    back.world.hooks.at["pool.rollback"] = look
    back.world.hooks.at["hypervisor.restore"] = look
    rebuild(back)
    assert (False, False) not in seen
    assert (False, True) in seen
    assert back.fence is None


def test_a_restore_that_is_refused_leaves_the_fence(back):
    back.world.hooks.at["pool.rollback"] = back.world.hooks.at["hypervisor.define"] = failing(
        HypervisorError("web", "out of order")
    )
    rebuilt = rebuild(back)
    assert rebuilt.failures
    assert back.fence is not None


def test_a_guest_that_runs_again_there_meanwhile_does_not_come_back(back):
    """The replica is asked again directly before the fence is removed."""

    def cancel():
        for dataset in DATASETS:
            first, last = back.replica.snapshots([dataset])
            marks = {k: v for k, v in last.properties.items() if k != ENDED}
            back.replica.put([first, replace(last, properties=marks)])
        back.world.hooks.at.pop("local.mount")

    back.world.hooks.at["local.mount"] = cancel
    rebuilt = rebuild(back)
    assert "is not its last snapshot there" in str(rebuilt.failures[0])
    assert back.fence is not None
    assert back.world.guest().state is DomainState.OFF


def test_what_came_back_has_no_mark_of_its_end(back):
    back.world.pool.set_properties(["tank/web@s1"], {PREFIX + ENDED: "yes"})
    rebuild(back)
    assert not any(ENDED in each.properties for each in back.world.pool.snapshots(DATASETS))


def test_what_this_host_had_when_it_was_fenced_by_hand_is_no_proof(back):
    """Whatever the clock was: it may have had no time from the network yet."""
    rebuild(back)
    back.world.hypervisor.destroy(back.uuid)
    made = make_fence(back.context, "web")
    back.world.fences.put(replace(made, at="2001-01-01T00:00:00+00:00"))
    with pytest.raises(RefusedError, match="@s2 is not newer here than @s2"):
        back.plan()


def renamed(back, *datasets):
    """As the page says: ``zfs rename``, and nothing is mounted there."""
    for each in datasets:
        back.world.pool.take_out(each)
        back.local.inherited[each] = ""


@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize("datasets", [DATASETS, DATASETS[1:]])
def test_its_fence_is_lifted_too_where_all_of_it_comes(back, datasets, history):
    """The restore has taken its safety snapshot by then, and there is nothing before it."""
    back.history = history
    renamed(back, *datasets)
    rebuilt = rebuild(back)
    assert (rebuilt.failures, back.fence) == ([], None)
    assert back.world.guest().state is DomainState.RUNNING


def test_a_snapshot_of_another_program_does_not_keep_the_fence_when_all_is_here(back):
    renamed(back, *DATASETS)
    rebuild(back, restores=False)
    [back.world.pool.snapshot([f"{each}@autosnap"], {}) for each in DATASETS]
    assert [remaining(e, back.local.state(e.dataset), "nas") for e in back.plan().incoming] == [
        [],
        [],
    ]


def test_older_snapshots_that_a_killed_rebuild_has_not_marked_are_marked(back):
    back.history = True
    renamed(back, *DATASETS)
    rebuild(back, restores=False)
    there = back.world.pool.snapshots(["tank/web"])
    assert [each.name for each in there if "run" in each.properties] == ["s1", "s2"]
    marks = [PREFIX + key for key in there[0].properties]
    back.world.pool.clear_properties(["tank/web@s1"], marks)
    (_, own) = back.plan().incoming
    assert [each.name for each in own.snapshots] == ["s1", "s2"]
    rebuild(back)
    assert "run" in back.world.pool.snapshots(["tank/web"])[0].properties


@pytest.mark.parametrize("history", [False, True])
def test_what_was_here_is_no_proof_where_its_datasets_were_renamed_and_the_clock_is_behind(
    back, history
):
    """It ended there and came back, ran on, and its host was lost; its copy runs there."""
    rebuild(back)
    back.world.hypervisor.destroy(back.uuid)
    [back.world.pool.snapshot([f"{each}@s3"], {}) for each in DATASETS]
    behind = Clock(now=lambda: datetime(2001, 1, 1, tzinfo=UTC))
    made = make_fence(replace(back.context, clock=behind), "web")
    last = max(each.created for each in back.world.pool.snapshots(DATASETS))
    assert made.moment == last + timedelta(seconds=1)
    renamed(back, *DATASETS)
    back.history = history
    with pytest.raises(RefusedError, match="is older than its fence"):
        back.plan()


def test_a_fence_knows_the_snapshots_of_datasets_that_are_not_here(back):
    back.context.fences.remove(back.uuid)
    renamed(back, *DATASETS)
    behind = Clock(now=lambda: datetime(2001, 1, 1, tzinfo=UTC))
    made = make_fence(replace(back.context, clock=behind), "web")
    assert made.guids == ""
    assert made.moment == back.last.created  # of its bundle
    domain = back.world.hypervisor.domain("web")
    assert missing_disks(back.context, domain) == []
    for disk in domain.disks:
        Path(disk.source).unlink()
    assert missing_disks(back.context, domain) == [each.source for each in domain.disks]
    assert not any("is not here" in each for each in back.world.heard.notes)
    back.context.fences.remove(back.uuid)
    make_fence(back.context, "web")
    again = f"snaporch fence --remove {back.uuid} && snaporch fence {back.uuid}"
    assert back.world.heard.notes[-1].endswith(f"once it is here run: {again}")


def test_without_a_restore_its_fence_stays(back):
    rebuild(back, restores=False)
    assert back.fence is not None
    assert back.world.guest().state is DomainState.OFF
    rebuild(back)
    assert back.fence is None
    assert back.world.guest().state is DomainState.RUNNING


def test_a_guest_that_may_run_there_does_not_come_back(back):
    for dataset in DATASETS:
        first, last = back.replica.snapshots([dataset])
        marks = {k: v for k, v in last.properties.items() if k != ENDED}
        back.replica.put([first, replace(last, properties=marks)])
    with pytest.raises(RefusedError, match="is not its last snapshot there"):
        back.plan()
    with pytest.raises(RefusedError, match="is not its last snapshot there"):
        back.plan("web@s1")


def test_what_was_written_here_since_is_not_lost(back):
    back.world.pool.write("tank/web", b"new")
    (back.world.root / "zfs/tank/web/new").touch()
    back.world.snapshot_files("tank/web", "s1").mkdir(parents=True, exist_ok=True)
    with pytest.raises(RefusedError, match="has been modified since") as raised:
        rebuild(back)
    assert back.fence is not None
    assert back.world.pool.read("tank/web") == b"new"
    # flash/web would come first: both stay as they were
    assert "source.receive" not in back.world.hooks.acts()
    assert {e.name for e in back.world.pool.snapshots([*DATASETS])} == {"s1"}
    assert "zfs rollback -r tank/web@s1" in raised.value.step
    away = "zfs set canmount=noauto tank/web; zfs unmount tank/web; zfs rename tank/web"
    assert f"{away} tank/web-before" in raised.value.step


@pytest.mark.parametrize("reason", ["no route to host", "has been modified"])
def test_another_error_of_the_transfer_never_proposes_a_rollback(back, reason):
    """A replica may write any error; only ZFS here knows whether the dataset was written to."""

    def fail():
        if reason == "no route to host":
            back.world.pool.write("flash/web", b"new")
        raise ReplicaError("nas", reason, "try again")

    back.world.hooks.at["source.receive"] = fail
    with pytest.raises(ReplicaError, match=reason) as raised:
        rebuild(back)
    assert raised.value.step == "try again"
    assert back.fence is not None


def test_access_times_and_owners_do_not_prevent_it(back):
    root = back.world.root / "zfs/tank/web"
    files = [each for each in root.iterdir() if each.name != ".zfs"]
    then = back.world.snapshot_files("tank/web", "s1")
    then.mkdir(parents=True)
    for each in files:
        shutil.copy2(each, then)
    back.world.pool.write("tank/web", b"with another owner")
    rebuild(back)
    assert back.fence is None
    assert back.world.guest().state is DomainState.RUNNING


def test_ram_that_libvirt_saved_here_prevents_it(back):
    back.world.guest().managed_save = True
    with pytest.raises(RefusedError, match="has RAM that libvirt saved") as raised:
        rebuild(back)
    assert raised.value.step.endswith(f"virsh managedsave-remove {back.uuid}")
    assert back.fence is not None


def test_newer_snapshots_here_are_not_lost(back):
    back.world.pool.snapshot(["tank/web@autosnap"], {})
    with pytest.raises(RefusedError, match="has newer snapshots than @s1") as raised:
        back.plan()
    assert "zfs rollback -r tank/web@s1" in raised.value.step


def test_a_dataset_that_has_nothing_in_common_is_not_touched(back):
    for dataset in DATASETS:
        back.replica.put(back.replica.snapshots([dataset])[1:])
    with pytest.raises(RefusedError, match="has no snapshot that the replica has"):
        back.plan()


def test_an_encrypted_dataset_comes_as_a_whole(back):
    back.source.ciphers = {copy_name(each) for each in DATASETS}
    with pytest.raises(RefusedError, match="openzfs#16351"):
        back.plan()
    for each in DATASETS:
        back.world.pool.take_out(each)
    assert [each.base for each in back.plan().incoming] == ["", ""]


@pytest.mark.parametrize("of_fence", ["s2", "s3"])
def test_what_this_host_had_at_its_fence_is_no_proof_whatever_the_clocks(back, of_fence):
    plan = back.plan()
    bring_back(back.context, back.source, back.local, plan, [])
    assert back.plan()
    for each in DATASETS:
        back.world.pool.snapshot([f"{each}@s3"], {})
    back.world.fences.put(replace(back.fence, snapshot=of_fence))
    with pytest.raises(RefusedError, match="@s2 is not newer here than"):
        back.plan()


def test_where_the_other_host_is_lost_all_of_it_comes_without_the_fence(back):
    for dataset in DATASETS:
        first, last = back.replica.snapshots([dataset])
        marks = {k: v for k, v in last.properties.items() if k != ENDED}
        back.replica.put([first, replace(last, properties=marks)])
        back.world.pool.take_out(dataset)
    with pytest.raises(RefusedError, match="is not its last snapshot there"):
        back.plan()
    back.world.fences.remove(back.uuid)
    rebuild(back)
    assert back.world.guest().state is DomainState.RUNNING


# -- what proves that it has ended -----------------------------------------------------------------


def test_the_last_snapshot_of_a_later_failover_is_a_proof(back):
    assert doubt(back.plan(), back.copies(), back.fence) == ""


def test_the_end_of_an_earlier_failover_is_no_proof(back):
    plan, fence = back.plan(), back.fence
    same = plan.manifest.created.isoformat()
    for at, run in ((same, fence.run), ("", fence.run), (fence.at, plan.manifest.run)):
        reason = doubt(plan, back.copies(), replace(fence, at=at, run=run))
        assert "is older than its fence" in reason


def test_a_snapshot_before_the_newest_one_is_no_proof(back):
    plan, copies = back.plan(), dict(back.copies())
    newest = copies["tank:web"][-1]
    copies["tank:web"] = [*copies["tank:web"], replace(newest, name="s3", guid=77)]
    assert "tank:web@s3 on the replica is newer" in doubt(plan, copies, back.fence)
