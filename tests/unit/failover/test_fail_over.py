"""A guest is failed over: it runs here, or it has ended here and the replica has all of it."""

import errno
import json
import os
import shutil
import signal
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fakes.hooks import KilledError, failing, failing_once
from fakes.images import qcow2
from fakes.replica import FakeReplica

from snaporch.catalog.records import ENDED, all_records
from snaporch.config import Config
from snaporch.errors import (
    AttentionError,
    BusyError,
    InterruptedRunError,
    RefusedError,
    SnaporchError,
    UnavailableError,
)
from snaporch.failover.delete_first import first_runs
from snaporch.failover.fail_over import fail_over
from snaporch.failover.fence_by_hand import remove_fence
from snaporch.failover.refusal import FailoverFacts, refusal
from snaporch.fence import Fence, Fences
from snaporch.hypervisor import HypervisorError, StartHookProblem
from snaporch.journal import FORMAT, release_mark
from snaporch.model import DatasetKind, DomainState, Level, PoolSnapshot
from snaporch.recovery.recover_domains import RecoverRequest, recover_domain
from snaporch.recovery.recover_runs import recover_leftovers
from snaporch.recovery.result import Effect
from snaporch.replication.interface import ReplicaError
from snaporch.schedule.policy_assignment import assign
from snaporch.snapshot.run import take_snapshot
from snaporch.zfs import PREFIX, REBUILD_PROPERTY

LATE = r"tank/web \(\d+ bytes\) was written to after it"
MARK = {PREFIX + ENDED: "yes"}


class Pair:
    """A host with a guest, and the replica ``nas``."""

    def __init__(self, world):
        self.world = world
        world.pool.create("tank"), world.pool.create("flash")
        world.pool.snapshotted = self.snapshotted
        self.domain = world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"})
        self.context = world.context
        nas = {"host": "nas", "dataset": "backup/kvm", "bundles": "/backup/nas"}
        dr = {"host": "dr", "dataset": "backup/kvm", "bundles": "/backup/dr"}
        document = self.context.config.model_dump() | {"replica": {"nas": nas, "dr": dr}}
        self.context.config = Config.model_validate(document)
        self.replica = FakeReplica(world.pool, world.root / "there", world.hooks)
        self.asked = 0

    def snapshotted(self, dataset, snapshot):
        """A snapshot of a file system has its files, with their times."""
        root = self.world.root / "zfs" / dataset
        there = self.world.snapshot_files(dataset, snapshot)
        there.mkdir(parents=True)
        for each in root.iterdir():
            if each.is_file():
                shutil.copy2(each, there)

    def write(self):
        """The guest writes to its first disk."""
        self.world.pool.write("tank/web", b"after the last instant")
        image = self.world.image("tank/web", "web-vda.img")
        image.write_bytes(b"after the last instant")

    def roll_back(self, name):
        """``zfs rollback`` of its first disk."""
        self.world.pool.rollback(f"tank/web@{name}")
        there = self.world.snapshot_files("tank/web", name) / "web-vda.img"
        shutil.copy2(there, self.world.image("tank/web", "web-vda.img"))

    def confirm(self, _domain):
        self.asked += 1

    def move(self, to="nas", accepted=()):
        return fail_over(self.context, "web", to, lambda *_: self.replica, self.confirm, accepted)

    def move_and_be_killed(self, act):
        """Begin a failover, and kill it and its guardian where it is about to do this."""
        self.world.hooks.at[act] = self.world.hooks.kill
        with pytest.raises(KilledError):
            self.move()
        self.world.hooks.killed = False
        self.world.hooks.at.clear()
        self.world.kill_guardians()

    @property
    def guest(self):
        return self.world.guest()

    @property
    def fence(self):
        return self.context.fences.find(self.domain.uuid)

    def runs(self):
        return self.world.is_as_it_was() and self.fence is None

    def has_ended(self):
        return self.guest.state is DomainState.OFF and self.fence is not None

    def marked_as_ended(self):
        snapshots = self.world.pool.snapshots()
        return [e.full_name for e in snapshots if e.properties.get(ENDED) == "yes"]

    def last(self):
        return all_records(self.context.store, self.world.pool.snapshots())[-1]


@pytest.fixture
def pair(world):
    return Pair(world)


def test_the_replica_has_the_last_instant_and_the_guest_stays_off(pair):
    done = pair.move()
    assert pair.has_ended()
    assert pair.world.leftovers() == []
    assert (done.record, done.record.level, done.record.replicated) == (
        pair.last(),
        Level.RAM,
        ("nas",),
    )
    assert done.command == f"snaporch rebuild --from nas web@{done.record.snapshot}"
    assert (pair.fence.run, pair.fence.domain) == (done.record.run, "web")
    copies = pair.replica.snapshots(["tank/web", "flash/web"])
    ended = {each.name for each in copies if each.properties.get(ENDED) == "yes"}
    assert ended == {done.record.snapshot}
    # here it has no mark that another replica could get
    assert not pair.marked_as_ended()


def test_what_the_other_host_refuses_is_refused_before_anything_is_copied(pair):
    log = "<serial type='file'><source path='/var/log/a b'/></serial>"
    pair.guest.live = pair.guest.live.replace("</devices>", f"{log}</devices>")
    with pytest.raises(
        RefusedError, match=r"definition goes to another host.*/var/log/a b"
    ) as raised:
        pair.move()
    assert raised.value.step.endswith(": --accept '/var/log/a b'")
    assert pair.runs()
    assert (pair.asked, pair.world.hooks.acts()) == (0, [])
    done = pair.move(accepted=["/var/log/a b"])
    assert done.command.endswith(f" web@{done.record.snapshot} --accept '/var/log/a b'")
    assert pair.has_ended()


def test_an_image_whose_header_leads_out_is_found_before_anything_is_sent(pair):
    """A guest that is off: its definition does not name what its image is over."""
    pair.world.hypervisor.guests[pair.domain.uuid].inactive = pair.domain.inactive_xml.replace(
        "type='raw'", "type='qcow2'"
    ).replace('type="raw"', 'type="qcow2"')
    pair.guest.live, pair.guest.state = None, DomainState.OFF
    image = pair.world.image("tank/web", "web-vda.img")
    template = pair.world.root / "template.qcow2"
    template.write_bytes(qcow2())
    image.write_bytes(qcow2(str(template), "qcow2"))
    pair.world.image("flash/web", "web-vdb.img").write_bytes(qcow2())
    with pytest.raises(RefusedError) as raised:
        pair.move()
    assert "it goes to another host" in raised.value.reason
    assert "which is not in the snapshot" in raised.value.reason
    assert raised.value.step.endswith(f"--accept {template}")
    assert pair.replica.names() == []
    assert pair.fence is None


def test_the_guest_is_paused_from_its_snapshot_to_its_end(pair):
    pair.move()
    acts = pair.world.hooks.acts()
    assert "hypervisor.resume" not in acts
    assert acts.index("hypervisor.destroy") > max(
        number for number, act in enumerate(acts) if act == "pool.snapshot"
    )


def test_the_fence_exists_before_the_guest_ends(pair):
    seen = []
    pair.world.hooks.at["hypervisor.destroy"] = lambda: seen.append(pair.fence)
    pair.move()
    assert [each.run for each in seen] == [pair.last().run]


def test_nothing_waits_at_low_priority(pair):
    pair.move()
    assert pair.world.lowered == []


@pytest.mark.parametrize(
    "place", ["hypervisor.capture", "capture.writing", "pool.snapshot", "pool.set_properties"]
)
def test_a_failure_before_the_fence_leaves_the_guest_running(pair, place):
    taken = []

    def second():
        taken.append(place)
        if place.startswith("pool") and "hypervisor.capture" not in pair.world.hooks.acts():
            return
        raise HypervisorError("web", "out of order")

    pair.world.hooks.at[place] = second
    with pytest.raises(SnaporchError):
        pair.move()
    pair.world.hooks.at.clear()
    assert taken
    assert pair.guest.state is DomainState.RUNNING
    assert pair.fence is None
    pair.move()
    assert pair.has_ended()


def test_a_replica_out_of_reach_stops_it_before_the_guest_is_paused(pair):
    pair.world.hooks.at["replica.send"] = failing(ReplicaError("nas", "no route to host"))
    with pytest.raises(ReplicaError):
        pair.move()
    assert pair.runs()
    assert "hypervisor.capture" not in pair.world.hooks.acts()


def test_the_guardians_release_prevents_the_fence(pair):
    """It marks the release first, and then looks for the note: one of both sees the other."""

    def release():
        (journal,) = pair.world.paths.journal.glob("*.jsonl")
        release_mark(journal).touch()

    pair.world.heard.at["sealing the bundle"] = release
    with pytest.raises(SnaporchError, match="did not stay paused"):
        pair.move()
    assert pair.runs()


def test_a_guest_that_the_admin_resumes_is_not_fenced(pair):
    pair.world.heard.at["sealing the bundle"] = lambda: pair.world.hypervisor.resume(
        pair.domain.uuid
    )
    with pytest.raises(SnaporchError, match="did not stay paused"):
        pair.move()
    assert pair.runs()


def test_a_guest_that_was_resumed_and_paused_again_is_not_ended(pair):
    def write():
        if pair.guest.state is DomainState.PAUSED:
            pair.world.hypervisor.resume(pair.domain.uuid)
            pair.world.pool.write("tank/web", b"after the last instant")
            pair.world.hypervisor.suspend(pair.domain.uuid)

    pair.world.heard.at["sealing the bundle"] = write
    with pytest.raises(SnaporchError, match="did not stay paused"):
        pair.move()
    assert pair.fence is None
    assert pair.guest.live is not None
    assert pair.world.pool.written_since(f"tank/web@{pair.last().snapshot}")


def resume_when_fenced(pair):
    """Have the admin resume the guest as soon as its fence exists."""

    def resume():
        if pair.fence is not None and pair.guest.state is DomainState.PAUSED:
            pair.world.hypervisor.resume(pair.domain.uuid)
            pair.world.pool.write("tank/web", b"after the last instant")

    pair.world.hooks.at["hypervisor.paused_by"] = resume


def test_a_guest_that_is_resumed_while_it_is_fenced_is_not_ended(pair):
    resume_when_fenced(pair)
    with pytest.raises(SnaporchError, match="did not stay paused"):
        pair.move()
    assert pair.runs()
    assert pair.world.pool.written_since(f"tank/web@{pair.last().snapshot}")


def test_a_recovery_does_not_end_a_fenced_guest_that_runs(pair):
    pair.move_and_be_killed("hypervisor.destroy")
    resume_when_fenced(pair)
    recover_leftovers(pair.context)
    assert any("was resumed: it was not ended" in each for each in pair.world.heard.notes)
    assert pair.guest.state is DomainState.RUNNING
    with pytest.raises(AttentionError, match="has not ended") as raised:
        pair.move()
    assert raised.value.step == f"run: snaporch recover {pair.domain.uuid}"


def test_a_fenced_guest_that_no_recovery_would_end_is_named_with_what_does(pair):
    uuid = pair.domain.uuid
    pair.context.fences.put(Fence(uuid, "web", "2026-01-01T00:00:00+00:00", "run", "s1", "nas"))
    keep = f"snaporch fence --remove {uuid}"
    for more in ("", f" && virsh resume {uuid}"):
        with pytest.raises(AttentionError, match="its QEMU has not ended") as raised:
            pair.move()
        end = f"to end it: virsh destroy {uuid}; then run this command again"
        assert raised.value.step == f"{end}; to keep it here: {keep}{more}"
        pair.world.hypervisor.suspend(uuid)


def test_a_run_whose_guest_another_command_fenced_releases_it(pair):
    pair.world.hooks.at["pool.snapshot"] = pair.world.hooks.kill
    with pytest.raises(KilledError):
        take_snapshot(pair.context, pair.domain)
    pair.world.hooks.killed = False
    pair.world.hooks.at.clear()
    pair.world.kill_guardians()
    pair.context.fences.put(Fence(pair.domain.uuid, "web", "2026-01-01T00:00:00+00:00"))
    recover_leftovers(pair.context)
    assert pair.guest.state is DomainState.RUNNING


def test_the_recovery_at_boot_does_not_start_it(pair):
    pair.move_and_be_killed("hypervisor.destroy")
    pair.world.hypervisor.destroy(pair.domain.uuid)  # power loss
    pair.world.hypervisor.start_at_boot(pair.domain.uuid)
    request = RecoverRequest(autostart=True)
    done = [each.effect for each in recover_domain(pair.context, pair.domain.uuid, "web", request)]
    assert Effect.RECOVERED in done
    assert not {Effect.STARTED, Effect.STILL_OFF} & set(done)
    assert pair.has_ended()


def test_a_signal_before_the_fence_leaves_the_guest_running(pair):
    def stop():
        if "hypervisor.capture" in pair.world.hooks.acts():
            pair.context.interrupt.signum = signal.SIGTERM

    pair.world.heard.at["sealing the bundle"] = stop
    with pytest.raises(InterruptedRunError):
        pair.move()
    assert pair.guest.state is DomainState.RUNNING
    assert pair.fence is None


def test_a_guest_that_cannot_be_ended_at_once_is_ended_by_the_recovery(pair):
    pair.world.hooks.at["hypervisor.destroy"] = failing_once(HypervisorError("web", "busy"))
    done = pair.move()
    assert pair.has_ended()
    assert done.record.replicated == ("nas",)


@pytest.mark.parametrize("place", ["capture.writing", "pool.snapshot", "hypervisor.destroy"])
def test_what_is_killed_is_in_one_of_two_states(pair, place):
    def kill():
        if place != "pool.snapshot" or "hypervisor.capture" in pair.world.hooks.acts():
            pair.world.hooks.kill()

    pair.world.hooks.at[place] = kill
    with pytest.raises(KilledError):
        pair.move()
    pair.world.hooks.killed = False
    pair.world.hooks.at.clear()
    pair.world.kill_guardians()
    recover_leftovers(pair.context)
    assert pair.has_ended() if place == "hypervisor.destroy" else pair.runs()
    asked = pair.asked
    pair.move()
    assert pair.has_ended()
    assert pair.asked == asked + (place != "hypervisor.destroy")
    assert pair.world.leftovers() == []


def test_a_replica_that_is_lost_meanwhile_gets_it_by_the_same_command(pair):
    lost = failing_once(ReplicaError("nas", "no route to host"))
    pair.world.hooks.at["hypervisor.destroy"] = lambda: pair.world.hooks.at.update(
        {"replica.send": lost}
    )
    with pytest.raises(ReplicaError):
        pair.move()
    assert pair.has_ended()
    assert pair.move().record.replicated == ("nas",)
    assert pair.asked == 1


@pytest.mark.parametrize("of_others", [False, True])
def test_only_what_libvirt_changes_of_its_images_is_discarded(pair, of_others):
    """Otherwise no increment could be received into the datasets later."""

    def label():
        pair.world.pool.write("tank/web", b"with another owner")
        if of_others:
            (pair.world.root / "zfs/tank/web/notes.txt").write_text("of another program")

    pair.world.hooks.at["hypervisor.destroy"] = label
    name = pair.move().record.snapshot
    assert bool(pair.world.pool.written_since(f"tank/web@{name}")) == of_others
    noted = any("other files in it have changed" in each for each in pair.world.heard.notes)
    assert noted == of_others


def test_what_zfs_has_yet_to_count_is_discarded_too(pair):
    """It counts what is written only when that is in the pool, seconds later."""
    name = pair.move().record.snapshot
    assert f"pool.rollback tank/web@{name}" in pair.world.hooks.log


def test_no_second_replica_gets_it(pair):
    pair.world.hooks.at["hypervisor.destroy"] = lambda: pair.world.hooks.at.update(
        {"replica.send": failing_once(ReplicaError("nas", "no route to host"))}
    )
    with pytest.raises(ReplicaError):
        pair.move()
    with pytest.raises(RefusedError, match="is being failed over to nas") as refused:
        pair.move(to="dr")
    renamed = "if that replica was renamed, have it named nas again before"
    assert refused.value.step == f"run: snaporch failover {pair.domain.uuid} --to nas; {renamed}"
    assert pair.fence.delivered == ""
    pair.move()
    assert pair.fence.delivered


@pytest.mark.parametrize("to", ["nas", "dr"])
def test_one_that_may_run_there_is_not_resumed_a_second_time(pair, to):
    pair.move()
    with pytest.raises(RefusedError, match=r"was failed over to nas on .*may run there"):
        pair.move(to=to)


def test_the_fence_is_on_stable_storage_before_the_replica_has_it(pair, monkeypatch):
    """The data of a fence whose directory was not written may be lost with the power."""
    sync, failing_now = os.fsync, []

    def fsync(descriptor):
        directory = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if failing_now and directory == pair.context.fences.directory:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    pair.world.heard.at["sealing the bundle"] = lambda: failing_now.append(True)
    with pytest.raises(UnavailableError):
        pair.move()
    assert pair.has_ended()
    assert pair.replica.names()
    assert pair.last().snapshot not in {e.partition("@")[2] for e in pair.replica.names()}
    failing_now.clear()
    assert pair.move().record.replicated == ("nas",)


def test_a_fence_is_not_removed_while_the_replica_gets_the_guest(pair):
    refused = []

    def remove():
        if pair.fence is not None:
            with pytest.raises(BusyError) as error:
                remove_fence(pair.context, pair.fence)
            refused.append(error.value)

    pair.world.hooks.at["replica.send"] = remove
    pair.move()
    assert refused
    assert pair.has_ended()


def test_a_guest_without_its_fence_is_not_handed_over(pair):
    def lose():
        if pair.fence is not None:
            pair.context.fences.remove(pair.domain.uuid)

    pair.world.hooks.at["replica.send"] = lose
    with pytest.raises(AttentionError, match="its fence was removed"):
        pair.move()
    assert not pair.marked_as_ended()


def test_a_fence_that_changed_since_it_was_shown_is_not_removed(pair):
    """While the admin was asked, its failover ended: it may run there."""
    pair.world.hooks.at["hypervisor.destroy"] = lambda: pair.world.hooks.at.update(
        {"replica.send": failing_once(ReplicaError("nas", "no route to host"))}
    )
    with pytest.raises(ReplicaError):
        pair.move()
    shown = pair.fence
    pair.move()
    with pytest.raises(RefusedError, match="its fence has changed since it was shown"):
        remove_fence(pair.context, shown)
    assert pair.fence.delivered


def test_what_is_killed_while_it_copies_leaves_no_mark_that_another_replica_gets(pair):
    pair.world.hooks.at["hypervisor.destroy"] = lambda: pair.world.hooks.at.update(
        {"replica.received": pair.world.hooks.kill}
    )
    with pytest.raises(KilledError):
        pair.move()
    pair.world.hooks.killed = False
    assert not pair.marked_as_ended()


def test_a_replica_that_is_lost_before_the_mark_gets_it_by_the_same_command(pair):
    def lose():
        if pair.fence is not None:
            ended = pair.replica.snapshots(["tank/web"])[-1]
            if "run" in ended.properties and pair.last().replicated:
                pair.world.hooks.at.pop("replica.mark")
                raise ReplicaError("nas", "no route to host")

    pair.world.hooks.at["replica.mark"] = lose
    with pytest.raises(ReplicaError):
        pair.move()
    assert (pair.has_ended(), pair.fence.delivered) == (True, "")
    pair.move()
    assert pair.replica.snapshots(["tank/web"])[-1].properties[ENDED] == "yes"


def test_a_failover_that_did_not_reach_its_replica_leaves_no_mark(pair):
    pair.world.hooks.at["hypervisor.destroy"] = lambda: pair.world.hooks.at.update(
        {"replica.send": failing_once(ReplicaError("nas", "no route to host"))}
    )
    with pytest.raises(ReplicaError):
        pair.move()
    assert not pair.marked_as_ended()


def test_a_removed_fence_withdraws_the_proof_of_its_end(pair):
    pair.world.hooks.at["hypervisor.destroy"] = lambda: pair.world.hooks.at.update(
        {"replica.send": pair.world.hooks.kill}
    )
    with pytest.raises(KilledError):
        pair.move()
    pair.world.hooks.killed = False
    pair.world.hooks.at.clear()
    pair.world.pool.set_properties([pair.last().full_name.replace("web@", "tank/web@")], MARK)
    remove_fence(pair.context, pair.fence)
    assert pair.fence is None
    assert not pair.marked_as_ended()


# -- the snapshot before the last one --------------------------------------------------------------


def test_only_its_last_snapshot_is_left_of_it(pair):
    take_snapshot(pair.context, pair.domain)
    pair.move_and_be_killed("hypervisor.capture")
    recover_leftovers(pair.context)
    before = all_records(pair.context.store, pair.world.pool.snapshots())
    assert [each.level for each in before] == [Level.RAM, Level.CRASH]
    done = pair.move()
    after = all_records(pair.context.store, pair.world.pool.snapshots())
    assert [each.run for each in after] == [before[0].run, done.record.run]
    assert pair.context.store.references() == sorted(f"{e.uuid}/{e.run}" for e in after)


def test_one_that_is_needed_stays_and_that_is_a_note(pair):
    def hold():
        (first,) = pair.world.pool.snapshots(["tank/web"])
        pair.world.pool.hold([first.full_name], "mine")

    pair.world.hooks.at["hypervisor.capture"] = hold
    pair.move()
    assert pair.has_ended()
    assert len(pair.world.pool.snapshots(["tank/web"])) == 2
    assert "was not deleted: tank/web@" in pair.world.heard.notes[-1]
    assert "is held (mine)" in pair.world.heard.notes[-1]


def test_a_first_snapshot_is_found_by_its_mark():
    def snapshot(uuid="u", run="r", **more):
        marks = {"uuid": uuid, "run": run, ENDED: "no", **more}
        return PoolSnapshot("tank/web", "s", 1, 1, datetime(2026, 1, 1, tzinfo=UTC), marks)

    assert first_runs([snapshot(), snapshot(), snapshot(run="s")], "u") == ["r", "s"]
    others = [snapshot(uuid="v"), snapshot(copy="nas"), snapshot(**{ENDED: "yes"})]
    assert first_runs(others, "u") == []


# -- between the last look at its pause, and its end ----------------------------------------------


def test_what_it_wrote_after_its_last_snapshot_is_never_left_behind(pair):
    """A program resumed it between the last look at its pause and its end."""
    pair.world.hooks.at["hypervisor.destroy"] = pair.write
    for _ in range(2):  # also when the same command is run again
        with pytest.raises(AttentionError, match=LATE) as raised:
            pair.move()
        assert f"snaporch fence --remove {pair.domain.uuid}" in raised.value.step
    assert pair.has_ended()
    assert pair.world.pool.read("tank/web") == b"after the last instant"
    name = pair.last().snapshot
    assert f"to discard it: zfs rollback tank/web@{name}; then" in raised.value.step
    assert name not in {each.partition("@")[2] for each in pair.replica.names()}
    assert not pair.marked_as_ended()
    pair.roll_back(name)  # as the error says
    assert pair.move().record.replicated == ("nas",)


def test_a_file_system_that_is_not_mounted_is_not_one_that_was_written_to(pair):
    """After a power loss its key may not be loaded yet."""
    pair.world.hooks.at["hypervisor.destroy"] = lambda: pair.world.hooks.at.update(
        {"replica.send": failing_once(ReplicaError("nas", "no route to host"))}
    )
    with pytest.raises(ReplicaError):
        pair.move()
    pair.world.resolver.mount_points["tank/web"] = None
    with pytest.raises(UnavailableError, match="tank/web: is not mounted") as raised:
        pair.move()
    assert raised.value.step == "run: zfs mount -l tank/web; then try again"
    pair.world.resolver.mount_points.clear()
    assert pair.move().record.replicated == ("nas",)


def test_a_file_system_that_cannot_be_examined_is_found_while_the_guest_runs(pair):
    """Else it would have ended, and be nowhere until an admin has removed files."""
    deep = pair.world.root / "zfs" / "tank" / "web" / Path(*["d"] * 102)
    deep.mkdir(parents=True)
    with pytest.raises(UnavailableError, match="tank/web: has more than the") as raised:
        pair.move()
    assert raised.value.step == "remove what is not the guest's"
    assert pair.runs()
    shutil.rmtree(pair.world.root / "zfs" / "tank" / "web" / "d")  # as the error says
    assert pair.move().record.replicated == ("nas",)


def test_what_it_wrote_to_a_disk_that_only_the_running_guest_had_is_found(pair):
    """After a kill the guest is off, and its definition does not have that disk."""
    pair.move_and_be_killed("hypervisor.destroy")
    pair.world.hooks.at["hypervisor.destroy"] = pair.write
    inactive = pair.guest.inactive
    pair.guest.inactive = inactive.replace("web-vda.img", "another.img")
    with pytest.raises(AttentionError, match=LATE):
        pair.move()


def test_what_a_recovery_ended_is_looked_at_too(pair):
    pair.move_and_be_killed("hypervisor.destroy")
    pair.world.hooks.at["hypervisor.destroy"] = pair.write
    with pytest.raises(AttentionError, match=LATE):
        pair.move()
    assert pair.has_ended()


# -- the replica, before the guest ends ------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 1])
def test_without_room_on_the_replica_it_runs_on(pair, place):
    pair.replica.room[place] = 1 << 20
    with pytest.raises(SnaporchError, match="1 MiB free, and its last snapshot needs 64 MiB"):
        pair.move()
    assert pair.runs()
    pair.replica.room[place] = 1 << 30
    pair.move()
    assert pair.has_ended()


def test_the_replica_is_asked_for_its_room_before_the_guest_is_paused(pair):
    """It may take minutes to answer, or never does."""
    seen = []
    pair.world.hooks.at["replica.free_bytes"] = lambda: seen.append(pair.guest.state)
    pair.move()
    assert seen == [DomainState.RUNNING]


def test_a_replica_that_refuses_the_mark_of_its_end_gets_it_before_it_is_paused(pair):
    def refuse():
        if pair.replica.names():
            copies = pair.replica.snapshots(["tank/web"])
            if all("run" in each.properties for each in copies):
                raise ReplicaError("nas", "'ended' is no mark of a copy")

    pair.world.hooks.at["replica.mark"] = refuse
    with pytest.raises(ReplicaError, match="is no mark"):
        pair.move()
    assert pair.runs()
    assert "hypervisor.capture" not in pair.world.hooks.acts()


def test_the_trial_of_the_mark_is_no_proof_of_an_end(pair):
    pair.move()
    first, last = pair.replica.snapshots(["tank/web"])
    assert (first.properties[ENDED], last.properties[ENDED]) == ("no", "yes")


# -- a guest that is off -------------------------------------------------------------------------


@pytest.fixture
def off(pair):
    pair.world.hypervisor.destroy(pair.domain.uuid)
    pair.world.hooks.log.clear()
    return pair


def test_a_guest_that_is_off_is_moved_without_ram(off):
    done = off.move()
    assert off.has_ended()
    assert (done.record.level, done.record.replicated) == (Level.OFF, ("nas",))
    assert off.fence.run == done.record.run
    assert "hypervisor.destroy" not in off.world.hooks.acts()
    assert off.world.leftovers() == []
    (_, last) = off.replica.snapshots(["tank/web"])
    assert last.properties[ENDED] == "yes"


def test_one_that_is_started_meanwhile_is_not_fenced(off):
    def start():
        if off.fence is not None or "sealing the bundle" in off.world.heard.steps[-1:]:
            off.world.hypervisor.start(off.domain.uuid, paused=False)

    taken = []
    off.world.heard.at["sealing the bundle"] = lambda: (
        taken.append(1) or (len(taken) == 2 and start())
    )
    with pytest.raises(SnaporchError, match="was started or stopped meanwhile"):
        off.move()
    assert off.fence is None
    assert off.guest.state is DomainState.RUNNING


@pytest.mark.parametrize("to", [DomainState.RUNNING, DomainState.OFF])
def test_one_that_was_started_or_stopped_before_its_last_snapshot_goes_on_as_it_is(pair, to):
    """While the failover waited for its lock; the admin was asked about another state."""
    if to is DomainState.RUNNING:
        pair.world.hypervisor.destroy(pair.domain.uuid)

    def change():
        pair.world.hooks.at.pop("replica.free_bytes")
        if to is DomainState.RUNNING:
            pair.world.hypervisor.start(pair.domain.uuid, paused=False)
        else:
            pair.world.hypervisor.destroy(pair.domain.uuid)

    pair.world.hooks.at["replica.free_bytes"] = change
    with pytest.raises(SnaporchError, match="was started or stopped meanwhile"):
        pair.move()
    assert (pair.guest.state, pair.fence) == (to, None)
    pair.move()
    assert pair.has_ended()


def test_a_disk_that_was_attached_before_its_last_snapshot_prevents_its_end(pair):
    elsewhere = pair.world.root / "elsewhere.img"
    elsewhere.touch()

    def attach():
        image = str(pair.world.image("flash/web", "web-vdb.img"))
        guest = pair.guest
        guest.live, guest.inactive = (
            xml.replace(image, str(elsewhere)) for xml in (guest.live, guest.inactive)
        )

    pair.world.hooks.at["replica.free_bytes"] = attach
    with pytest.raises(SnaporchError, match="no snapshot has all of its disks: vdb"):
        pair.move()
    assert (pair.guest.state, pair.fence) == (DomainState.RUNNING, None)


def test_what_it_wrote_while_it_ran_for_a_moment_is_not_left_behind(off):
    taken = []
    off.world.heard.at["sealing the bundle"] = lambda: (
        taken.append(1) or (len(taken) == 2 and off.write())
    )
    with pytest.raises(AttentionError, match=LATE):
        off.move()
    assert off.world.pool.read("tank/web") == b"after the last instant"


def test_one_whose_restore_was_interrupted_is_refused(off):
    journal = off.world.paths.journal / "20260101T000000Z-00000000.jsonl"
    facts = {"uuid": off.domain.uuid, "domain": "web"}
    journal.parent.mkdir(parents=True, exist_ok=True)
    journal.write_text(json.dumps({"format": FORMAT, "kind": "restore", "facts": facts}) + "\n")
    with pytest.raises(RefusedError, match="a restore of it was interrupted"):
        off.move()
    assert off.fence is None


# -- a guest with a fence --------------------------------------------------------------------------


@pytest.fixture
def fenced(pair):
    pair.move()
    return pair


class RemovedFences(Fences):
    """Another process removes a fence when it has been looked at."""

    def find(self, uuid):
        found = super().find(uuid)
        self.remove(uuid)
        return found


def test_a_guest_whose_fence_is_removed_meanwhile_is_not_ended_again_unasked(fenced):
    fenced.asked = 0
    fenced.context.fences = RemovedFences(fenced.world.fences.directory)
    with pytest.raises(RefusedError, match="its fence was removed meanwhile"):
        fenced.move()
    assert (fenced.asked, len(fenced.world.pool.snapshots(["tank/web"]))) == (0, 1)


def test_no_snapshot_of_it_is_taken(fenced):
    with pytest.raises(RefusedError, match="is fenced: it was failed over"):
        take_snapshot(fenced.context, fenced.world.hypervisor.domain("web"))


def test_it_has_no_policy(fenced):
    domain = fenced.world.hypervisor.domain("web")
    assert assign(fenced.context, domain, {"tank/web": "hourly"}).policies == ()


def test_its_fence_counts_also_under_another_name(fenced):
    fenced.guest.name = "shop"
    with pytest.raises(RefusedError, match="is fenced"):
        take_snapshot(fenced.context, fenced.world.hypervisor.domain("shop"))


def test_one_that_was_fenced_by_hand_is_not_failed_over(pair):
    pair.context.fences.put(Fence(pair.domain.uuid, "web"))
    with pytest.raises(RefusedError, match="not by a failover"):
        pair.move()


@pytest.mark.parametrize("stage", ["transfer", "restore"])
def test_a_guest_that_is_half_rebuilt_does_not_lose_its_fence(fenced, stage):
    """Its datasets are of two instants."""
    name, pool = fenced.fence.snapshot, fenced.world.pool
    pool.set_properties(["tank/web"], {REBUILD_PROPERTY: stage})
    if stage == "restore":
        remove_fence(fenced.context, fenced.fence)
        assert fenced.fence is None
        return
    with pytest.raises(RefusedError, match="may be of two instants") as raised:
        remove_fence(fenced.context, fenced.fence)
    assert fenced.fence is not None
    rebuild = f"zfs inherit {REBUILD_PROPERTY} tank/web"
    back = f"zfs rollback -r tank/web@{name} && zfs set canmount=on tank/web && {rebuild}"
    assert raised.value.step.endswith(f"go back: {back}")


def test_a_volume_of_a_half_rebuilt_guest_appears_again(fenced):
    """``volmode`` can be inherited, ``canmount`` cannot."""
    pool, name = fenced.world.pool, fenced.fence.snapshot
    pool.create("flash/data", DatasetKind.VOLUME)
    pool.snapshot([f"flash/data@{name}"], {PREFIX + "uuid": fenced.domain.uuid})
    pool.set_properties(["flash/data"], {REBUILD_PROPERTY: "transfer"})
    with pytest.raises(RefusedError) as raised:
        remove_fence(fenced.context, fenced.fence)
    back = f"zfs rollback -r flash/data@{name} && zfs inherit volmode flash/data && "
    assert back in raised.value.step


# -- refusals --------------------------------------------------------------------------------------

FACTS = FailoverFacts(
    DomainState.RUNNING,
    uuid="u1",
    replica="nas",
    is_persistent=True,
    has_saved_ram=False,
    is_half_restored=False,
    group=None,
    members=(),
    left_out=(),
    shared_with=(),
    engine="zfs",
    hook_problem=None,
)


@pytest.mark.parametrize("state", [DomainState.RUNNING, DomainState.OFF])
def test_a_guest_on_zfs_is_failed_over(state):
    assert refusal(FACTS._replace(state=state)) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"state": DomainState.PAUSED}, "is paused"),
        ({"is_persistent": False}, "is not defined"),
        ({"group": "shop", "members": ("a", "b c")}, "is in the group shop"),
        ({"has_saved_ram": True}, "has saved its RAM"),
        ({"is_half_restored": True}, "a restore of it was interrupted"),
        ({"left_out": ("vdb: not on ZFS",)}, "vdb: not on ZFS"),
        ({"shared_with": ("mail",)}, "shares a dataset with mail"),
        ({"engine": "restic"}, "repository of restic"),
        ({"hook_problem": StartHookProblem("no hook", "snaporch install")}, "no hook"),
    ],
)
def test_what_cannot_be_failed_over_is_refused(change, reason):
    text, step = refusal(FACTS._replace(**change))
    assert reason in text
    assert step


def test_a_group_is_refused_with_the_commands_for_its_guests():
    _, step = refusal(FACTS._replace(group="shop", members=("a", "b c")))
    each = "snaporch failover a --to nas; snaporch failover 'b c' --to nas"
    assert step == f"take its guests out of [group.shop], then: {each}"


def test_a_guest_in_a_group_is_not_touched(pair):
    document = pair.context.config.model_dump() | {"group": {"shop": {"domains": ["web"]}}}
    pair.context = replace(pair.context, config=Config.model_validate(document))
    with pytest.raises(RefusedError, match="is in the group shop"):
        pair.move()
    assert pair.runs()


def test_without_the_hook_it_is_refused_untouched(pair):
    pair.world.hypervisor.why_unguarded = StartHookProblem("no hook", "snaporch install")
    with pytest.raises(RefusedError, match="no hook"):
        pair.move()
    assert pair.asked == 0
    assert pair.runs()
    assert pair.world.pool.names() == []


def test_settings_of_the_guest_do_not_weaken_its_last_snapshot(pair):
    sections = {"web": {"level": "crash", "ram_strategy": "overlay", "on_unavailable": "crash"}}
    document = pair.context.config.model_dump() | {"domain": sections}
    pair.context = replace(pair.context, config=Config.model_validate(document))
    assert pair.move().record.level is Level.RAM
