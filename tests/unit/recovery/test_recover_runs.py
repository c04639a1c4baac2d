import os
import re
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from xml.etree.ElementTree import fromstring, tostring

import pytest
from fakes.domain_xml import DiskSpec
from fakes.hooks import failing, failing_once
from fakes.hypervisor import Agent
from fakes.images import qcow2

from snaporch import command_log, default_paths
from snaporch.bundle.manifest import Part, Role
from snaporch.bundle.save_image import read_header
from snaporch.disks.qemu_img import OverlayError
from snaporch.errors import AttentionError, ExitCode, UnavailableError
from snaporch.hypervisor import HypervisorError, Pause
from snaporch.hypervisor.domain_xml import disk_element, parse
from snaporch.journal import Journal, Note, Step, append_note, read_journals
from snaporch.locks import domain_lock
from snaporch.model import DomainState, Level
from snaporch.recovery.decision import UserDecision
from snaporch.recovery.hold_socket import address
from snaporch.recovery.overlay_removal import remove_unused
from snaporch.recovery.recover_runs import preview, recover, recover_leftovers, recover_run
from snaporch.recovery.release_guest import is_ours_to_resume
from snaporch.snapshot.bundle_parts import build_manifest
from snaporch.snapshot.plan import make_plan
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.snapshotter import initial_properties
from snaporch.waiting_times import LibvirtTimes
from snaporch.zfs import PoolError


class Killed:
    """A run that was killed at a point that the test chooses."""

    def __init__(self, world, level=None, settings=None, **guest):
        self.world = world
        self.domain = world.add_guest(**guest)
        self.guest = world.guest(self.domain.name)
        context = world.with_defaults(**(settings or {}))
        self.facts = make_plan(context, self.domain, SnapshotRequest("s1", level)).facts
        Journal(world.paths.journal, self.facts).close(settled=False)
        self.bundle = world.context.store.create(self.domain.uuid, self.facts.run)

    def made_overlays(self):
        directory = Path(self.facts.overlay_dir)
        directory.mkdir(parents=True)
        for disk in self.facts.overlays:
            Path(disk.overlay).touch()
        return self

    def switched(self, *targets, live=True, inactive=True):
        """The guest writes to overlays."""
        self.made_overlays()
        for disk in self.facts.overlays:
            if targets and disk.target not in targets:
                continue
            self.world.write_overlay(disk.overlay)
            if live:
                self.guest.live = self.guest.live.replace(f'"{disk.base}"', f'"{disk.overlay}"')
            if inactive:
                self.guest.inactive = self.guest.inactive.replace(
                    f'"{disk.base}"', f'"{disk.overlay}"'
                )
        return self

    def took_snapshots(self, *datasets):
        for dataset in datasets or self.facts.datasets:
            self.world.pool.snapshot([f"{dataset}@s1"], {"snaporch:run": self.facts.run})
        return self

    def settle(self, *notes, keep_snapshots=False, alive=False, take=None):
        options = {"keep_snapshots": keep_snapshots, "alive": alive, "take": take}
        return [str(each) for each in recover_run(self.world.context, self.facts, notes, **options)]

    def recover(self):
        return [str(each) for each in recover(self.world.context, self.facts.uuid)]

    def foreseen(self):
        return [str(each) for each in preview(self.world.context, self.facts.uuid)]

    def overlay(self, target="vda"):
        return Path(next(d.overlay for d in self.facts.overlays if d.target == target))

    def quarantined(self, target="vda"):
        return self.world.paths.overlays / "quarantine" / self.facts.run / f"{target}.qcow2"


def assert_settled(world):
    assert world.on_bases()
    assert [name for name in world.leftovers() if not name.startswith("journal")] == []


TWO = {"vda": "tank/web", "vdb": "flash/web"}


# -- by observation -----------------------------------------------------------------------------


def test_a_guest_on_its_bases_needs_nothing(world):
    run = Killed(world)
    assert run.settle() == []
    assert_settled(world)
    assert "hypervisor.commit" not in world.hooks.acts()


@pytest.mark.parametrize(
    ("found", "then"),
    [
        (40, 300),
        (300, 300),
        (2500, 300),  # the run allowed a larger rest
    ],
)
def test_the_emulator_gets_its_own_downtime_limit_back(world, found, then):
    run = Killed(world, settings={"downtime_limit": "40ms"})
    run.guest.downtime_limit = found
    run.settle()
    assert run.guest.downtime_limit == then


@pytest.mark.parametrize(
    ("found", "then"),
    [
        ("1000 10000", "max 100000"),
        ("max 100000", "max 100000"),
        ("30000 100000", "30000 100000"),  # the admin has set it since
    ],
)
def test_vcpus_that_the_run_slowed_down_get_their_cpu_time_back(world, found, then):
    run = Killed(world)
    run.guest.vcpu_quotas = {"/machine/vcpu0": found}
    run.settle()
    assert run.guest.vcpu_quotas == {"/machine/vcpu0": then}


@pytest.mark.parametrize(
    ("level", "settings"),
    [("paused", {"downtime_limit": "40ms"}), ("ram", {"downtime_limit": "0ms"})],
)
def test_a_limit_that_was_never_set_is_left_alone(world, level, settings):
    run = Killed(world, level, settings)
    run.guest.downtime_limit = 40
    run.settle()
    assert run.guest.downtime_limit == 40


def test_a_file_of_ram_is_removed(world):
    run = Killed(world)
    run.bundle.raw_ram.touch()
    run.settle()
    assert_settled(world)


def test_overlays_that_were_never_used_are_removed(world):
    Killed(world).made_overlays().settle()
    assert_settled(world)


def test_a_guest_on_overlays_is_committed(world):
    run = Killed(world, disks=TWO).switched()
    assert run.settle() == ["committed vda, vdb"]
    assert_settled(world)


def test_only_the_disks_that_are_on_overlays_are_committed(world):
    run = Killed(world, disks=TWO).switched("vdb")
    assert run.settle() == ["committed vdb"]
    assert_settled(world)


def test_a_wrong_inactive_definition_alone_is_fixed_without_a_commit(world):
    run = Killed(world).switched(live=False)
    assert run.settle() == []
    assert_settled(world)
    assert "hypervisor.commit" not in world.hooks.acts()


def test_a_guest_paused_by_the_snapshot_runs_again_before_its_overlays_are_committed(world):
    run = Killed(world).switched()
    run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "snapshot"
    assert run.settle()[0] == "resumed the guest"
    assert run.guest.state is DomainState.RUNNING
    acts = world.hooks.acts()
    assert acts.index("hypervisor.resume") < acts.index("hypervisor.commit")


def test_a_guest_that_its_user_paused_stays_paused(world):
    run = Killed(world).switched()
    run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "user"
    run.settle()
    assert run.guest.state is DomainState.PAUSED
    assert_settled(world)


def test_a_guest_that_was_paused_before_stays_paused(world):
    run = Killed(world, state=DomainState.PAUSED)
    run.guest.paused_reason = "migration"
    run.settle()
    assert run.guest.state is DomainState.PAUSED


def test_a_snapshot_job_of_ours_is_aborted_first(world):
    run = Killed(world)
    run.guest.job = "snapshot"
    run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "migration"
    run.settle(Note.SAVING)
    assert world.hooks.acts()[:2] == ["hypervisor.abort_job", "hypervisor.resume"]
    assert_settled(world)


def test_a_job_of_ours_that_does_not_end_needs_attention(world):
    world.libvirt_times = LibvirtTimes(job=0)
    run = Killed(world)
    world.hooks.at["hypervisor.busy_with"] = lambda: setattr(run.guest, "job", "snapshot")
    run.guest.vcpu_quotas = {"/machine/vcpu0": "1000 10000"}
    with pytest.raises(AttentionError, match="libvirt still saves its RAM"):
        run.settle(Note.SAVING)
    assert run.guest.vcpu_quotas == {"/machine/vcpu0": "max 100000"}  # first of all


@pytest.mark.parametrize(
    ("level", "notes", "job"),
    [
        ("paused", [Note.SUSPENDED], "backup"),
        ("paused", [Note.SUSPENDED, Note.SAVING], "snapshot"),  # a strategy that saves no RAM
        ("ram", [Note.SUSPENDED, Note.SAVING], "backup"),
        ("ram", [Note.SUSPENDED], "snapshot"),  # a strategy that saves RAM
        ("ram", [Note.SUSPENDED, Note.SAVING], "snapshot revert"),
    ],
)
def test_a_guest_is_resumed_though_another_program_has_a_job_on_it(world, level, notes, job):
    run = Killed(world, level)
    run.guest.job = job
    run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "user"
    run.settle(*notes)
    assert run.guest.state is DomainState.RUNNING
    assert (run.guest.job, world.hooks.acts().count("hypervisor.abort_job")) == (job, 0)


def test_a_job_of_another_emulator_is_not_ours(world):
    run = Killed(world)
    run.guest.boot += 1
    run.guest.job = "snapshot"
    run.settle(Note.SAVING)
    assert run.guest.job == "snapshot"


def test_resuming_a_guest_that_cannot_run_yet_is_retried(world):
    """A program that reads an image may hold its lock."""
    world.libvirt_times = LibvirtTimes(resume=60, first_pause=0.001)
    run, locked = Killed(world), iter([True, True, True])
    run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "snapshot"

    def resume():
        if next(locked, False):
            raise HypervisorError("web", 'resume: Failed to get "write" lock')

    world.hooks.at["hypervisor.resume"] = resume
    assert run.settle() == ["resumed the guest"]
    assert world.hooks.acts().count("hypervisor.resume") == 4


def test_a_guest_that_cannot_be_resumed_needs_attention_and_is_not_noted_as_released(world):
    run = Killed(world, "paused")
    run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "user"
    world.hooks.at["hypervisor.resume"] = failing(HypervisorError("web", "resume: no"))
    with pytest.raises(AttentionError, match="resume: no"):
        run.settle(Note.SUSPENDED)
    (journal,) = read_journals(world.paths.journal)
    assert Note.RELEASED not in journal.notes


def test_a_release_is_noted_before_the_disks_are_recovered(world):
    """Another recovery must not thaw or resume a guest that another program froze since."""
    run = Killed(world).switched()
    world.hooks.at["hypervisor.commit"] = failing(HypervisorError("web", "no"))
    with pytest.raises(AttentionError):
        run.settle()
    (journal,) = read_journals(world.paths.journal)
    assert Note.RELEASED in journal.notes
    assert not journal.held


def test_an_overlay_that_was_unlinked_under_a_running_guest_is_committed(world):
    """QEMU still has it open: its writes are not lost yet."""
    run = Killed(world).switched()
    run.overlay().unlink()
    assert run.settle() == ["committed vda"]
    assert_settled(world)


def test_an_overlay_of_a_guest_that_was_restarted_onto_it_is_committed(world):
    run = Killed(world).switched()
    run.guest.boot += 1
    assert run.settle() == ["committed vda"]
    assert_settled(world)


def restarted_on_its_base(run):
    run.guest.boot += 1


def moved_elsewhere(run):
    disk = run.facts.overlays[0]
    for kind in ("live", "inactive"):
        setattr(run.guest, kind, getattr(run.guest, kind).replace(disk.base, "/elsewhere.img"))


def off_on_its_base(run):
    run.guest.live, run.guest.state = None, DomainState.OFF


def gone(run):
    del run.world.hypervisor.guests[run.facts.uuid]


UNUSED = [restarted_on_its_base, moved_elsewhere, off_on_its_base, gone]


@pytest.mark.parametrize("happened", UNUSED)
def test_an_overlay_that_no_guest_uses_is_quarantined_and_named(world, happened):
    run = Killed(world).switched(live=False, inactive=False)
    happened(run)
    (text,) = run.settle()
    assert str(run.quarantined()) in text
    assert run.quarantined().read_bytes() == b"the guest's last writes"
    assert not Path(run.facts.overlay_dir).exists()
    assert Path(run.facts.overlays[0].base).read_bytes() == b""


@pytest.mark.parametrize("happened", UNUSED)
@pytest.mark.parametrize("state", ["empty", "committed", "noted"])
def test_overlays_without_writes_of_their_own_are_removed(world, happened, state):
    run = Killed(world).switched(live=False, inactive=False)
    if state == "empty":
        run.overlay().write_bytes(b"")
    if state == "committed":
        Path(run.facts.overlays[0].base).write_bytes(run.overlay().read_bytes())
    happened(run)
    assert run.settle(*([Note.COMMITTED] if state == "noted" else [])) == []
    assert [name for name in world.leftovers() if not name.startswith("journal")] == []


@pytest.mark.parametrize(
    "error",
    [OverlayError("qemu-img map", "Image is corrupt"), OSError(5, "I/O error"), ValueError("{")],
)
def test_an_overlay_that_cannot_be_read_counts_as_written(world, error):
    run = Killed(world).switched(live=False, inactive=False)
    restarted_on_its_base(run)
    world.hooks.at["overlays.read"] = failing(error)
    run.settle()
    assert run.quarantined().exists()


def test_two_disks_may_need_different_actions(world):
    run = Killed(world, disks=TWO).switched("vda")
    world.write_overlay(run.overlay("vdb"))
    run.guest.boot += 1
    said = run.settle()
    assert said[0] == "committed vda"
    assert str(run.quarantined("vdb")) in said[1]
    assert world.on_bases()


def test_a_quarantined_overlay_stays_during_later_runs(world):
    run = Killed(world).switched(live=False, inactive=False)
    restarted_on_its_base(run)
    run.recover()
    assert run.recover() == []
    assert run.quarantined().exists()


# -- when the guest is off or missing -----------------------------------------------------------


def off(run):
    run.guest.live, run.guest.state = None, DomainState.OFF


def test_a_guest_that_is_off_is_committed_offline(world):
    run = Killed(world, disks=TWO).switched()
    off(run)
    assert run.settle() == ["committed vda, vdb while the guest is off"]
    assert Path(run.facts.overlays[0].base).read_bytes() != b""
    assert_settled(world)


def test_an_overlay_that_may_be_older_than_its_base_is_left_for_the_admin(world):
    """QEMU may have been on its base before libvirt could note that."""
    run = Killed(world, disks=TWO).switched()
    off(run)
    before = everything(world)
    with pytest.raises(AttentionError, match="vda, vdb was being switched") as caught:
        run.settle(Note.PIVOTING, Note.RELEASED)
    assert "Undecided" in caught.value.line()
    assert caught.value.step.startswith("compare both")
    assert everything(world) == before


def test_the_admin_chooses_the_overlay(world):
    run = Killed(world).switched()
    off(run)
    written = run.overlay().read_bytes()
    assert run.settle(Note.PIVOTING, take=UserDecision.OVERLAY) == [
        "committed vda while the guest is off"
    ]
    assert Path(run.facts.overlays[0].base).read_bytes() == written
    assert_settled(world)


def test_a_choice_without_an_undecided_disk_is_reported(world):
    run = Killed(world).switched()
    said = run.settle(take=UserDecision.OVERLAY)
    assert said[0] == "no disk was undecided, so --take had no effect"
    assert_settled(world)


def test_the_admin_decides_at_recovery(world):
    run = Killed(world).switched()
    off(run)
    (journal,) = world.paths.journal.glob("*.jsonl")
    append_note(journal, Note.PIVOTING)
    recover(world.context, run.facts.uuid, UserDecision.OVERLAY)
    assert_settled(world)


@pytest.mark.parametrize(("happened", "reported"), [(off, True), (None, False), (gone, False)])
def test_it_is_reported_that_the_hook_may_have_refused_a_start(world, happened, reported):
    run = Killed(world)
    run.guest.autostart = True
    if happened:
        happened(run)
    assert any("refused to start it" in text for text in run.recover()) == reported


def test_the_admin_chooses_the_base(world):
    run = Killed(world).switched()
    off(run)
    before = Path(run.facts.overlays[0].base).read_bytes()
    (said,) = run.settle(Note.PIVOTING, take=UserDecision.BASE)
    assert said.startswith(f"quarantined {run.quarantined()}")
    assert Path(run.facts.overlays[0].base).read_bytes() == before
    assert run.facts.overlays[0].overlay not in run.guest.inactive


def test_an_overlay_equal_to_its_base_needs_no_admin(world):
    run = Killed(world).switched()
    off(run)
    disk = run.facts.overlays[0]
    Path(disk.base).write_bytes(Path(disk.overlay).read_bytes())
    run.settle(Note.PIVOTING)
    assert_settled(world)


def test_a_commit_of_which_one_disk_failed_leaves_no_pivot_in_doubt(world):
    """A disk still on its overlay was not being switched, whatever ends its emulator later."""
    run = Killed(world, disks=TWO).switched()
    tool = world.image("tank/web", "tool.img")

    def move():
        run.guest.live = run.guest.live.replace(str(run.overlay()), str(tool))

    world.hooks.at["hypervisor.commit"] = move
    with pytest.raises(AttentionError, match="neither on its overlay nor on its base"):
        run.settle()
    (journal,) = read_journals(world.paths.journal)
    assert Note.PIVOTING not in journal.notes
    assert run.guest.sources()[0]["vdb"] == run.facts.overlays[1].base


def test_a_commit_that_recovery_does_is_noted(world):
    run = Killed(world).switched()
    run.guest.writes_fast = True
    world.hooks.at["commit.suspended"] = failing_once(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run.recover()
    assert read_journals(world.paths.journal)[0].notes == {Note.SUSPENDED}
    run.recover()
    assert run.guest.state is DomainState.RUNNING
    assert world.leftovers() == []


def test_a_commit_that_is_over_is_noted(world):
    run = Killed(world).switched()
    world.hooks.at["hypervisor.rebase_inactive"] = failing(HypervisorError("web", "no"))
    with pytest.raises(AttentionError):
        run.settle()
    assert Note.COMMITTED in read_journals(world.paths.journal)[0].notes


def test_a_full_disk_does_not_keep_a_guest_on_its_overlays(world, fill_disk):
    run = Killed(world).switched()
    fill_disk()
    assert run.settle() == ["committed vda"]
    assert_settled(world)


def test_a_guest_is_not_suspended_when_that_cannot_be_noted(world, fill_disk):
    run = Killed(world).switched()
    run.guest.writes_fast = True
    fill_disk()
    suspended = []
    world.hooks.at["commit.suspended"] = lambda: suspended.append("by the commit")
    with pytest.raises(AttentionError, match="No space left"):
        run.settle()
    assert suspended == []
    assert run.guest.state is DomainState.RUNNING
    assert run.overlay().exists()


def test_a_running_guest_is_committed_though_that_cannot_be_noted(world, fill_disk):
    """The disk becomes full meanwhile: only a suspend that cannot be noted is not begun."""
    run = Killed(world).switched()
    run.guest.writes_fast = True
    world.hooks.at["commit.suspended"] = fill_disk
    assert run.settle() == ["committed vda"]
    assert_settled(world)


def test_a_commit_waits_for_a_guest_as_long_as_it_is_set(world):
    run = Killed(world, settings={"commit_patience": "7s"}).switched()
    run.settle()
    assert [timeouts.running for timeouts in world.hypervisor.commit_timeouts] == [7]


def test_a_guest_that_its_full_overlay_paused_runs_again_after_the_commit(world):
    """If it were resumed before the commit, it would be paused again at once."""
    run = Killed(world).switched()

    def fill_up():
        run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "ioerror"

    world.hooks.at["hypervisor.commit"] = fill_up
    assert run.settle() == ["committed vda", "resumed the guest"]
    assert run.guest.state is DomainState.RUNNING


def test_the_ram_pipe_is_read_while_the_guest_is_released(world):
    """libvirt may wait for a reader, and answers nothing about the domain meanwhile."""
    run = Killed(world).switched()
    run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "snapshot"
    pipe = Path(run.facts.ram_pipe)
    pipe.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(pipe)

    def open_for_writing():
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))  # ENXIO: there is no reader

    def find():
        if not opened:
            open_for_writing()

    def resume():
        open_for_writing()
        opened.append("while it is resumed")

    opened = []
    world.hooks.at["hypervisor.find"] = find
    world.hooks.at["hypervisor.resume"] = resume
    assert run.settle() == ["resumed the guest", "committed vda"]
    assert opened
    assert not pipe.exists()


def test_a_guest_started_on_a_possibly_stale_overlay_has_to_be_shut_off_first(world):
    run = Killed(world).switched()
    run.guest.boot += 1
    with pytest.raises(AttentionError) as caught:
        run.settle(Note.PIVOTING)
    assert "either may be the newer" in caught.value.reason
    assert caught.value.step.startswith("shut it off, ")
    assert run.overlay().exists()
    assert "hypervisor.commit" not in world.hooks.acts()


def saved_by_libvirt(run):
    """``virsh managedsave``."""
    world, uuid = run.world, run.facts.uuid
    image = world.root / "managed.save"
    world.hypervisor.save(uuid, image)
    run.guest.managed_save = True
    world.hypervisor.managed_saves[uuid] = image
    return lambda: str(run.overlay()).encode() in image.read_bytes()


def test_ram_that_libvirt_saved_on_overlays_names_the_bases_after_the_commit(world):
    run = Killed(world).switched()
    names_overlay = saved_by_libvirt(run)
    assert names_overlay()
    assert run.settle() == [
        "committed vda while the guest is off",
        "pointed the RAM that libvirt saved at the base images",
    ]
    assert not names_overlay()
    acts = world.hooks.acts()
    order = ["overlays.commit_offline", "hypervisor.rebase_managed_save"]
    assert sorted(order, key=acts.index) == order
    assert_settled(world)


@pytest.mark.parametrize("written", [True, False])
def test_images_that_saved_ram_names_count_and_not_the_definition(world, written):
    """A start resumes that RAM, and an overlay that was removed or quarantined would be missing."""
    run = Killed(world).switched(inactive=False)
    if not written:
        run.overlay().write_bytes(b"")
    names_overlay = saved_by_libvirt(run)
    assert ("committed vda while the guest is off" in run.settle()) == written
    assert not names_overlay()
    assert_settled(world)


def test_no_overlay_that_saved_ram_needs_is_quarantined(world):
    run = Killed(world).switched()
    names_overlay = saved_by_libvirt(run)
    with pytest.raises(
        AttentionError, match=r"RAM that libvirt saved.*virsh managedsave-remove web"
    ):
        run.settle(Note.PIVOTING, take=UserDecision.BASE)
    assert names_overlay()
    assert run.overlay().exists()


def test_offline_commits_come_before_the_definition_is_fixed(world):
    run = Killed(world).switched()
    off(run)
    run.settle()
    acts = world.hooks.acts()
    assert acts.index("overlays.commit_offline") < acts.index("hypervisor.rebase_inactive")


def test_an_overlay_that_is_missing_needs_attention_and_nothing_is_removed(world):
    run = Killed(world, disks=TWO).switched().took_snapshots()
    off(run)
    run.overlay("vdb").unlink()
    before = run.guest.inactive
    with pytest.raises(AttentionError) as caught:
        run.settle()
    assert str(run.overlay("vdb")) in str(caught.value)
    assert "the guest's last writes are in it" in str(caught.value)
    assert run.overlay("vda").exists()
    assert run.guest.inactive == before
    assert "overlays.commit_offline" not in world.hooks.acts()
    assert world.pool.names() == ["flash/web@s1", "tank/web@s1"]
    assert len(read_journals(world.paths.journal)) == 1


def test_after_a_missing_overlay_is_put_back_recovery_succeeds(world):
    run = Killed(world).switched()
    off(run)
    away = run.overlay().rename(world.root / "away")
    with pytest.raises(AttentionError):
        run.recover()
    away.rename(run.overlay())
    assert run.recover()[0] == "committed vda while the guest is off"
    assert world.leftovers() == []


def test_an_empty_overlay_of_a_guest_that_is_off_is_removed(world):
    run = Killed(world).switched()
    off(run)
    run.overlay().write_bytes(b"")
    assert run.settle() == []
    assert_settled(world)
    assert "overlays.commit_offline" not in world.hooks.acts()


def test_an_offline_commit_that_fails_keeps_everything(world):
    run = Killed(world).switched().took_snapshots()
    off(run)
    locked = OverlayError("qemu-img commit", "Failed to get write lock")
    world.hooks.at["overlays.commit_offline"] = failing(locked)
    with pytest.raises(AttentionError, match=f"snaporch recover {run.facts.uuid}"):
        run.settle()
    assert Path(run.facts.overlays[0].overlay).exists()
    assert not world.on_bases()
    assert world.pool.names() == ["tank/web@s1"]


def test_a_domain_that_is_gone_with_empty_overlays_needs_nothing(world):
    run = Killed(world).made_overlays()
    del world.hypervisor.guests[run.facts.uuid]
    assert run.settle() == []
    assert [name for name in world.leftovers() if not name.startswith("journal")] == []


def test_the_last_writes_of_a_missing_domain_are_quarantined(world):
    run = Killed(world).switched()
    del world.hypervisor.guests[run.facts.uuid]
    (text,) = run.settle()
    assert str(run.quarantined()) in text
    assert run.quarantined().read_bytes() == b"the guest's last writes"
    assert not run.overlay().exists()


# -- releasing the guest ------------------------------------------------------------------------


@pytest.mark.parametrize("was", [DomainState.RUNNING, DomainState.PAUSED])
@pytest.mark.parametrize("reason", [None, "user", "snapshot", "migration", "save"])
@pytest.mark.parametrize("noted", [False, True])
def test_the_cause_of_a_pause(world, was, reason, noted):
    run = Killed(world, state=was)
    run.guest.paused_reason = reason
    notes = [Note.SUSPENDED] if noted else []
    ours = was is DomainState.RUNNING and reason is not None and (reason != "user" or noted)
    assert is_ours_to_resume(world.context, run.facts, notes) is ours


@pytest.mark.parametrize("reason", [None, "user", "snapshot", "migration", "save", "ioerror"])
def test_the_cause_of_a_pause_after_the_release(world, reason):
    """Then the run caused the pause only if an overlay of its own is full."""
    run = Killed(world)
    run.guest.paused_reason = reason
    ours = is_ours_to_resume(world.context, run.facts, [Note.RELEASED])
    assert ours is (reason == "ioerror")


def test_a_guest_that_the_run_suspended_runs_again(world):
    run = Killed(world, level="paused")
    run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "user"
    assert run.settle(Note.SUSPENDED) == ["resumed the guest"]
    assert run.guest.state is DomainState.RUNNING


def test_a_guest_suspended_only_after_its_release_runs_again(world):
    run = Killed(world, level="paused")
    journal = Journal.reopen(world.paths.journal / f"{run.facts.run}.jsonl")
    with journal.step(Step.FREEZE):
        journal.note(Note.SUSPENDED)
        journal.note(Note.RELEASED)
    journal.close(settled=False)
    run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "user"
    run.recover()
    assert run.guest.state is DomainState.RUNNING


def test_a_guest_is_thawed_if_the_agent_had_been_asked(world):
    run = Killed(world, level="quiesced", agent=Agent.ANSWERS)
    run.guest.frozen = True
    assert run.settle(Note.FREEZING) == ["thawed the guest"]
    assert not run.guest.frozen


def test_an_agent_that_was_not_asked_is_left_alone(world):
    """Another program may have frozen the guest."""
    run = Killed(world, level="quiesced", agent=Agent.ANSWERS)
    run.guest.frozen = True
    assert run.settle() == []
    assert run.guest.frozen


def test_an_agent_that_does_not_answer_keeps_everything(world):
    run = Killed(world, level="quiesced", agent=Agent.ANSWERS).took_snapshots()
    run.guest.agent = Agent.SILENT
    with pytest.raises(AttentionError, match=f"snaporch recover {run.facts.uuid}"):
        run.settle(Note.FREEZING)
    assert world.pool.names() == ["tank/web@s1"]


def test_a_frozen_guest_that_is_off_needs_no_agent(world):
    run = Killed(world, level="quiesced", agent=Agent.ANSWERS)
    off(run)
    assert run.settle(Note.FREEZING) == []


def test_a_frozen_guest_that_is_gone_needs_no_agent(world):
    run = Killed(world, level="quiesced", agent=Agent.ANSWERS)
    gone(run)
    assert run.settle(Note.FREEZING) == []


def test_a_restarted_guest_is_paused_by_its_user(world):
    """The pause of this run ended with the emulator that it was in."""
    run = Killed(world, level="paused")
    run.guest.boot += 1
    run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "user"
    run.settle(Note.SUSPENDED)
    assert run.guest.state is DomainState.PAUSED


def test_a_restarted_guest_is_not_frozen(world):
    """Its agent may not be up yet, when recovery runs at the host's boot."""
    run = Killed(world, level="quiesced", agent=Agent.ANSWERS)
    run.guest.boot += 1
    run.guest.agent = Agent.SILENT
    assert run.settle(Note.FREEZING) == []
    assert "hypervisor.thaw_file_systems" not in world.hooks.acts()


def test_ram_that_libvirt_saved_frozen_is_thawed_when_it_is_resumed(world):
    """As libvirt-guests saves it when the host shuts down in the middle of a run."""
    world.libvirt_times = LibvirtTimes(start=0)
    run = Killed(world, level="quiesced", agent=Agent.ANSWERS)
    run.guest.frozen = True
    saved_by_libvirt(run)
    then = f"when its agent answers: snaporch recover {run.facts.uuid}"
    with pytest.raises(AttentionError, match="saved its RAM while its file systems") as caught:
        run.settle(Note.FREEZING)
    assert caught.value.step == f"run: virsh start web, and {then}"
    (journal,) = read_journals(world.paths.journal)
    assert Note.RELEASED not in journal.notes
    world.hypervisor.start(run.facts.uuid, paused=True)
    with pytest.raises(AttentionError, match="restarted and is paused") as caught:
        run.settle(Note.FREEZING)
    assert caught.value.step == f"run: virsh resume web, and {then}"
    run.guest.frozen = True
    world.hypervisor.resume(
        run.facts.uuid
    )  # paused by its owner: libvirt forgets that it was restored
    run.guest.agent = Agent.SILENT  # the agent is not up yet: whether it is thawed is unknown
    with pytest.raises(AttentionError, match="perhaps from RAM that libvirt saved") as caught:
        run.settle(Note.FREEZING)
    assert caught.value.step == then
    (journal,) = read_journals(world.paths.journal)
    assert Note.RELEASED not in journal.notes
    run.guest.agent = Agent.DUMB
    assert run.settle(Note.FREEZING) == ["thawed the guest"]
    assert not run.guest.frozen


@pytest.mark.parametrize("passing", ["starting up", "migration"])
def test_a_guest_that_libvirt_is_starting_is_not_reported_as_paused(world, passing):
    """At the host's boot libvirt starts guests while they are recovered."""
    world.libvirt_times = LibvirtTimes(poll=0)
    run = Killed(world, level="quiesced", agent=Agent.ANSWERS)
    run.guest.boot += 1
    run.guest.state, run.guest.paused_reason = DomainState.PAUSED, passing
    looks = iter([False, True])

    def start():
        if next(looks):
            run.guest.state, run.guest.paused_reason = DomainState.RUNNING, None

    world.hooks.at["hypervisor.paused_by"] = start
    assert run.settle(Note.FREEZING) == []


def test_a_guest_that_its_owner_paused_since_is_not_reported_as_saved(world):
    run = Killed(world, level="quiesced", agent=Agent.ANSWERS)
    world.hypervisor.destroy(run.facts.uuid)
    world.hypervisor.start(run.facts.uuid, paused=True)
    with pytest.raises(AttentionError) as caught:
        run.settle(Note.FREEZING)
    assert "saved" not in caught.value.reason


def test_a_guest_resumed_from_saved_ram_is_thawed_as_well(world):
    run = Killed(world, level="quiesced", agent=Agent.ANSWERS)
    saved_by_libvirt(run)
    world.hypervisor.start(run.facts.uuid, paused=False)
    run.guest.frozen = True
    assert run.settle(Note.FREEZING) == ["thawed the guest"]
    assert not run.guest.frozen


def test_a_guest_whose_agent_reports_thawed_is_done(world):
    """A guest that was booted, paused and resumed since looks like one with loaded RAM."""
    run = Killed(world, level="quiesced", agent=Agent.ANSWERS)
    world.hypervisor.destroy(run.facts.uuid)
    world.hypervisor.start(run.facts.uuid, paused=True)
    world.hypervisor.resume(run.facts.uuid)
    assert run.settle(Note.FREEZING) == []
    assert "hypervisor.thaw_file_systems" not in world.hooks.acts()


def test_a_freeze_of_a_guest_booted_from_scratch_is_not_the_runs(world):
    run = Killed(world, level="quiesced", agent=Agent.ANSWERS)
    world.hypervisor.destroy(run.facts.uuid)
    world.hypervisor.start(run.facts.uuid, paused=False)
    run.guest.frozen = True
    run.settle(Note.FREEZING)
    assert run.guest.frozen


@pytest.mark.parametrize(("note", "runs"), [(Note.SUSPENDED, True), (Note.RELEASED, False)])
def test_ram_that_libvirt_saved_paused_runs_when_it_is_resumed(world, note, runs):
    run = Killed(world, level="paused")
    run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "user"
    saved_by_libvirt(run)
    run.settle(note)
    image = world.hypervisor.managed_save_path(run.facts.uuid)
    assert read_header(image).was_running == runs


@pytest.mark.parametrize("level", ["paused", "ram"])
def test_a_guest_that_libvirt_restored_paused_runs(world, level):
    """Its owner started it before the recovery; libvirt leaves it paused, as it was saved."""
    run = Killed(world, level=level)
    run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "user"
    saved_by_libvirt(run)
    world.hypervisor.start(run.facts.uuid, paused=False)
    assert run.guest.state is DomainState.PAUSED
    assert run.settle(Note.SUSPENDED) == ["resumed the guest, whose RAM libvirt had saved"]
    assert run.guest.state is DomainState.RUNNING
    (journal,) = read_journals(world.paths.journal)
    assert Note.RELEASED in journal.notes


@pytest.mark.parametrize("note", [Note.RELEASED, Note.HELD, Note.FREEZING])
def test_ram_of_a_guest_that_its_owner_paused_stays_paused_when_it_is_loaded(world, note):
    run = Killed(world, level="paused")
    run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "user"
    saved_by_libvirt(run)
    world.hypervisor.start(run.facts.uuid, paused=False)
    with suppress(AttentionError):
        run.settle(note)
    assert run.guest.state is DomainState.PAUSED


def test_a_guest_that_libvirt_is_starting_is_waited_for(world):
    world.libvirt_times = LibvirtTimes(poll=0)
    run = Killed(world, level="paused")
    run.guest.boot += 1
    run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "starting up"
    reasons = iter(["starting up", "starting up", "migration"])

    def go_on():
        run.guest.paused_reason = next(reasons)

    world.hooks.at["hypervisor.paused_by"] = go_on
    assert run.settle(Note.SUSPENDED) == ["resumed the guest, whose RAM libvirt had saved"]
    assert next(reasons, None) is None


def test_a_guest_that_libvirt_takes_long_to_start_is_checked_again(world):
    world.libvirt_times = LibvirtTimes(start=0)
    run = Killed(world, level="paused")
    run.guest.boot += 1
    run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "starting up"
    with pytest.raises(AttentionError, match="libvirt is starting it") as caught:
        run.settle(Note.SUSPENDED)
    assert caught.value.step == f"run: snaporch recover {run.facts.uuid}"
    (journal,) = read_journals(world.paths.journal)
    assert Note.RELEASED not in journal.notes


# -- libvirt that does not answer ---------------------------------------------------------------


def test_libvirt_may_be_away_for_a_while(world):
    world.libvirt_times = LibvirtTimes(poll=0)
    run = Killed(world).switched()
    away = iter([True] * 3)

    def find():
        if next(away, False):
            raise UnavailableError("qemu:///system", "libvirt does not answer")

    world.hooks.at["hypervisor.find"] = find
    assert run.settle() == ["committed vda"]
    assert_settled(world)


def test_if_libvirt_does_not_come_back_everything_is_kept(world):
    world.libvirt_times = LibvirtTimes(poll=0, reconnect=0)
    run = Killed(world).switched().took_snapshots()
    away = UnavailableError("qemu:///system", "libvirt does not answer")
    world.hooks.at["hypervisor.find"] = failing(away)
    with pytest.raises(AttentionError, match="libvirt does not answer"):
        run.recover()
    assert run.overlay().exists()
    assert world.pool.names() == ["tank/web@s1"]
    assert len(read_journals(world.paths.journal)) == 1


# -- nothing is removed that may still be needed ------------------------------------------------


def test_a_commit_that_fails_keeps_everything(world):
    run = Killed(world).switched().took_snapshots()
    world.hooks.at["hypervisor.commit"] = failing(HypervisorError("vda", "job failed"))
    with pytest.raises(AttentionError, match="job failed") as caught:
        run.settle()
    assert caught.value.exit_code == ExitCode.ATTENTION
    assert f"snaporch recover {run.facts.uuid}" in str(caught.value)
    assert Path(run.facts.overlays[0].overlay).exists()
    assert world.pool.names() == ["tank/web@s1"]


@pytest.mark.parametrize(("live", "inactive"), [(True, False), (False, True)])
def test_an_overlay_that_either_definition_names_is_not_removed(world, live, inactive):
    run = Killed(world).switched(live=live, inactive=inactive)
    with pytest.raises(AttentionError, match="still uses"):
        remove_unused(world.context, run.facts)
    assert Path(run.facts.overlays[0].overlay).exists()


def test_an_overlay_that_a_process_has_open_is_not_removed(world):
    run = Killed(world).made_overlays()
    program = Path("/proc/self/comm").read_text().strip()
    who = rf"{re.escape(program)} \(process {os.getpid()}\)"
    still_used = rf"{who} still uses .*; end that process \(ps -fp {os.getpid()}\), then run: "
    with (
        run.overlay().open("rb"),
        pytest.raises(AttentionError, match=still_used),
    ):
        remove_unused(world.context, run.facts)
    assert run.overlay().exists()
    remove_unused(world.context, run.facts)
    assert not run.overlay().exists()


@pytest.mark.parametrize("state", ["empty", "written"])
@pytest.mark.parametrize("user", ["a domain", "a process"])
def test_an_overlay_in_use_is_neither_removed_nor_quarantined(world, user, state):
    run = Killed(world).made_overlays()
    overlay = run.overlay()
    if state == "written":
        world.write_overlay(overlay)
    run.guest.boot += 1
    before = overlay.read_bytes()
    with overlay.open("rb") as opened:
        if user == "a domain":
            opened.close()
            world.add_guest("other", more=(DiskSpec("vdb", str(overlay), format="qcow2"),))
        with pytest.raises(AttentionError, match="still uses"):
            run.settle()
    assert overlay.read_bytes() == before
    assert not run.quarantined().exists()


def foreign_snapshot(run, *, spelled):
    """Another program put an image over the overlay; a definition may omit the chain."""
    tool = run.world.image("tank/web", "tool.qcow2")
    tool.write_bytes(qcow2(backing=str(run.overlay()), backing_format="qcow2"))
    chain = f"<backingStore type='file'><format type='qcow2'/><source file='{run.overlay()}'/>"
    for which in ("live", "inactive"):
        if (xml := getattr(run.guest, which)) is not None:
            root = parse(xml)
            disk = disk_element(root, "vda")
            disk.find("source").set("file", str(tool))
            disk.find("driver").set("type", "qcow2")
            if spelled:
                disk.append(fromstring(f"{chain}</backingStore>"))
            setattr(run.guest, which, tostring(root, encoding="unicode"))
    return tool


@pytest.mark.parametrize("spelled", [True, False])
@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("power", ["runs", "restarted", "off"])
def test_an_overlay_below_another_programs_image_stays(world, spelled, written, power):
    run = Killed(world).switched()
    if not written:
        run.overlay().write_bytes(b"")
    if power == "off":
        world.hypervisor.destroy(run.guest.uuid)
    if power == "restarted":
        run.guest.boot += 1
    tool = foreign_snapshot(run, spelled=spelled)
    with pytest.raises(AttentionError) as caught:
        run.settle()
    assert run.overlay().exists()
    assert f"vda is on {tool}, which another program put over" in caught.value.reason
    assert f"then run: snaporch recover {run.facts.uuid}" in caught.value.step
    command = f"virsh blockcommit web vda --base {run.overlay()} --active --pivot --wait"
    assert (command in caught.value.step) == (power == "runs")
    assert ("docs/how-to/recovery.md" in caught.value.step) == (power != "runs")
    assert ("shut it off" in caught.value.step) == (power == "restarted")


def test_a_guest_shut_off_during_recovery_keeps_its_writes(world):
    """Its overlays are committed, and not quarantined like those of a guest that left them."""
    run = Killed(world).switched()

    def shut_off():
        if run.guest.live is not None:
            world.hypervisor.destroy(run.guest.uuid)

    world.hooks.at["hypervisor.paused_by"] = shut_off  # called during the release
    run.settle()
    assert world.hooks.acts().count("overlays.commit_offline") == 1
    assert not run.quarantined().exists()
    assert world.on_bases()


@pytest.mark.parametrize("confined", [True, False])
def test_no_pivot_denies_another_programs_image_its_commit(world, confined):
    """From then on AppArmor would deny the guest all images below."""
    run = Killed(world, disks=TWO).switched()
    world.hypervisor.confined |= {run.guest.uuid} if confined else set()
    foreign_snapshot(run, spelled=True)
    with pytest.raises(AttentionError, match=r"vda is on .* another program put over"):
        run.settle()
    (second,) = [disk for disk in run.facts.overlays if disk.target == "vdb"]
    source = second.overlay if confined else second.base
    assert world.hypervisor.sources(run.facts.uuid)[0]["vdb"] == source


def test_a_guest_that_is_off_has_no_profile_to_check(world):
    """The other disk is committed although the first one needs an admin."""
    run = Killed(world, disks=TWO).switched()
    world.hypervisor.confined.add(run.guest.uuid)
    world.hypervisor.destroy(run.guest.uuid)
    foreign_snapshot(run, spelled=True)
    with pytest.raises(AttentionError, match=r"vda is on .* another program put over"):
        run.settle()
    assert world.hooks.acts().count("overlays.commit_offline") == 1


def test_a_guest_without_room_runs_again_despite_another_programs_image(world):
    run = Killed(world, disks=TWO).switched()
    world.hypervisor.confined.add(run.guest.uuid)
    foreign_snapshot(run, spelled=True)
    run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "ioerror"
    (second,) = [disk for disk in run.facts.overlays if disk.target == "vdb"]

    def resumed():
        if world.hypervisor.sources(run.guest.uuid)[0]["vdb"] == second.overlay:  # it is full
            run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "ioerror"

    world.hooks.at["hypervisor.resumed"] = resumed
    with pytest.raises(AttentionError, match=r"vda is on .* another program put over"):
        run.settle()
    assert run.guest.state is DomainState.RUNNING
    assert run.overlay().exists()


def test_an_overlay_is_found_in_a_definition_whatever_its_directory_is_called(world):
    """XML writes some characters as entities."""
    odd = world.root / "R&D <overlays> of 'web'"
    world.paths = world.paths.model_copy(update={"overlays": odd})
    run = Killed(world).made_overlays()
    used = DiskSpec("vdb", str(run.overlay()), format="qcow2")
    world.add_guest("other", more=(used,), state=DomainState.OFF)
    other = world.guest("other")
    other.inactive = as_libvirt_writes(other.inactive)
    with pytest.raises(AttentionError, match="the domain other still uses"):
        remove_unused(world.context, run.facts)
    assert run.overlay().exists()


def as_libvirt_writes(xml):
    """virBufferEscapeString: attributes in single quotes, and so ' in them is an entity."""
    assert '"' in xml
    return xml.replace("'", "&apos;").replace('"', "'")


def test_a_foreign_file_in_the_overlay_directory_stops_the_removal(world):
    run = Killed(world).made_overlays()
    (Path(run.facts.overlay_dir) / "foreign").touch()
    with pytest.raises(AttentionError):
        run.settle()
    assert (Path(run.facts.overlay_dir) / "foreign").exists()


# -- snapshots ----------------------------------------------------------------------------------


def test_snapshots_of_an_unfinished_run_are_destroyed_pool_by_pool(world):
    run = Killed(world, disks=TWO).took_snapshots()
    world.pool.snapshot(["tank/web@other"], {})
    assert run.settle() == ["destroyed flash/web@s1", "destroyed tank/web@s1"]
    assert world.pool.names() == ["tank/web@other"]


def test_a_snapshot_of_that_name_by_someone_else_stays(world):
    run = Killed(world)
    world.pool.snapshot(["tank/web@s1"], {"snaporch:run": "another"})
    assert run.settle() == []
    assert world.pool.names() == ["tank/web@s1"]


def test_snapshots_of_a_run_that_took_them_all_stay(world):
    run = Killed(world).took_snapshots()
    run.settle(keep_snapshots=True)
    assert world.pool.names() == ["tank/web@s1"]


# -- recovery -----------------------------------------------------------------------------------


def test_recovery_finishes_the_run_and_removes_its_journal(world):
    run = Killed(world).switched()
    said = run.recover()
    assert said == [
        "committed vda",
        f"recovered the run {run.facts.run}, which had been interrupted",
    ]
    assert_settled(world)
    assert world.leftovers() == []


def test_recovery_of_nothing_does_nothing(world):
    assert recover(world.context, world.add_guest().uuid) == []


def test_recovery_is_only_of_the_domain_whose_lock_is_held(world):
    Killed(world).switched()
    assert recover(world.context, "another uuid") == []
    assert not world.on_bases()
    assert len(read_journals(world.paths.journal)) == 1


@pytest.mark.parametrize(
    ("taken", "left"),
    [((), []), (("tank/web",), []), (tuple(TWO.values()), ["flash/web@s1", "tank/web@s1"])],
)
def test_recovery_keeps_snapshots_only_when_all_were_taken(world, taken, left):
    run = Killed(world, disks=TWO)
    if taken:
        run.took_snapshots(*sorted(taken))
    run.recover()
    assert sorted(world.pool.names()) == left


def test_recovery_that_fails_can_be_repeated(world):
    run = Killed(world).switched()
    world.hooks.at["hypervisor.commit"] = failing_once(HypervisorError("vda", "job failed"))
    with pytest.raises(AttentionError):
        run.recover()
    assert len(read_journals(world.paths.journal)) == 1
    run.recover()
    assert_settled(world)
    assert world.leftovers() == []


def test_recovery_trusts_the_observed_state_and_not_the_journals_steps(world):
    """A run killed in RELEASE may or may not have committed: the observed state counts."""
    run = Killed(world)
    journal = Journal(world.paths.journal / "again", run.facts)
    with journal.step(Step.FREEZE):
        pass
    journal.close(settled=False)
    assert run.settle() == []
    assert "hypervisor.commit" not in world.hooks.acts()


@pytest.mark.parametrize("level", ["paused", "quiesced", "ram"])
def test_a_guest_is_released_and_committed_before_any_pool_is_asked(world, level):
    run = Killed(world, level=level, agent=Agent.ANSWERS)
    run.switched()
    run.guest.frozen = level == "quiesced"
    run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "user"
    journal = Journal.reopen(world.paths.journal / f"{run.facts.run}.jsonl")
    journal.note(Note.FREEZING if level == "quiesced" else Note.SUSPENDED)
    if level == "quiesced":
        run.guest.state, run.guest.paused_reason = DomainState.RUNNING, None
    journal.close(settled=False)
    world.hooks.at["pool.snapshots"] = failing(PoolError("tank", "suspended"))
    with pytest.raises(PoolError):
        run.recover()
    assert run.guest.state is DomainState.RUNNING
    assert not run.guest.frozen
    assert world.on_bases()


def test_a_pool_that_does_not_answer_keeps_the_journal(world):
    run = Killed(world).switched()
    world.hooks.at["pool.snapshots"] = failing(PoolError("zfs list", "I/O error"))
    with pytest.raises(PoolError):
        run.recover()
    assert len(read_journals(world.paths.journal)) == 1


# -- before another domain's command ------------------------------------------------------------


def test_results_for_other_domains_are_reported(world):
    run = Killed(world).switched()
    recover_leftovers(world.context)
    assert_settled(world)
    assert any("committed vda" in note for note in world.heard.notes)
    assert any(f"recovered the run {run.facts.run}" in note for note in world.heard.notes)


@pytest.mark.parametrize("swept", [recover_leftovers, lambda context: recover(context, "u")])
def test_a_journal_of_a_run_that_began_nothing_is_removed(world, swept):
    world.add_guest()
    world.paths.journal.mkdir(parents=True, exist_ok=True)
    torn = world.paths.journal / "20250101T000000Z-00.jsonl"
    torn.write_bytes(b"{")
    swept(world.context)
    assert not torn.exists()


def test_a_run_at_work_does_not_block_the_recovery_of_others(world):
    """A run that could not be recovered gets a guardian."""
    for name in ("one", "two"):
        Killed(world, name=name, disks={"vda": f"tank/{name}"})
    busy, free = (each.facts for each in read_journals(world.paths.journal))
    stuck = Killed(world, "paused")
    stuck.guest.state, stuck.guest.paused_reason = DomainState.PAUSED, "user"
    append_note(world.paths.journal / f"{stuck.facts.run}.jsonl", Note.SUSPENDED)
    world.hooks.at["hypervisor.resume"] = failing(HypervisorError("web", "resume: no"))
    at_work = {"wait": 0, "interrupt": world.context.interrupt}
    with domain_lock(default_paths.LOCKS, busy.domain, busy.uuid, "snapshot", **at_work):
        recover_leftovers(world.context)
    left = {each.facts.domain for each in read_journals(world.paths.journal)}
    assert left == {busy.domain, "web"}
    assert free.domain not in left
    assert not any("held by" in note for note in world.heard.notes)
    assert world.guarded_again == [stuck.facts]


def test_failures_for_other_domains_are_reported_and_end_nothing(world):
    run = Killed(world).switched()
    off(run)
    run.overlay().unlink()
    (world.paths.journal / "20250101T000000Z-00.jsonl").write_bytes(b'{"format": 99}\n')
    recover_leftovers(world.context)
    assert any(str(run.overlay()) in note for note in world.heard.notes)
    assert any("format 99" in note for note in world.heard.notes)


# -- foreseeing ---------------------------------------------------------------------------------


def everything(world):
    """All that a recovery could change."""
    files = {
        path: path.read_bytes() if path.is_file() else None
        for path in sorted(world.root.rglob("*"))
    }
    guests = {uuid: dict(vars(guest)) for uuid, guest in world.hypervisor.guests.items()}
    return files, guests, world.pool.names(), list(world.hooks.log)


@pytest.mark.parametrize(
    "happened", [None, off, restarted_on_its_base, gone], ids=["on overlay", "off", "new", "gone"]
)
def test_foreseeing_changes_nothing(world, happened):
    run = Killed(world, disks=TWO).switched().took_snapshots("tank/web")
    run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "snapshot"
    if happened:
        happened(run)
    before = everything(world)
    assert run.foreseen()
    assert everything(world) == before


def test_a_recovery_is_foreseen_step_by_step(world):
    run = Killed(world, disks=TWO).switched("vda")
    run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "snapshot"
    assert run.foreseen() == [
        f"vda: commit {run.overlay('vda')}",
        f"vdb: remove {run.overlay('vdb')}",
        "resume the guest",
        f"recover the run {run.facts.run}, which was interrupted",
    ]


def test_of_another_emulator_nothing_is_thawed(world):
    run = Killed(world)
    (journal,) = world.paths.journal.glob("*.jsonl")
    append_note(journal, Note.FREEZING)
    run.guest.boot += 1
    assert "thaw the guest" not in run.foreseen()


def test_file_systems_that_will_be_thawed_are_foreseen(world):
    run = Killed(world)
    (journal,) = world.paths.journal.glob("*.jsonl")
    append_note(journal, Note.FREEZING)
    assert "thaw the guest" in run.foreseen()
    append_note(journal, Note.RELEASED)
    assert "thaw the guest" not in run.foreseen()


@pytest.mark.parametrize(
    ("taken", "said"),
    [
        (["tank/web"], "destroy tank/web@s1"),
        (["tank/web", "flash/web"], "keep @s1 as crash"),
    ],
)
def test_the_removal_of_snapshots_is_foreseen(world, taken, said):
    run = Killed(world, disks=TWO).took_snapshots(*taken)
    assert said in run.foreseen()
    run.recover()
    assert sorted(world.pool.names()) == sorted(
        f"{dataset}@s1" for dataset in taken if len(taken) == 2
    )


@pytest.mark.parametrize(("sealed", "level"), [(True, "ram"), (False, "crash")])
def test_the_level_of_snapshots_is_foreseen(world, sealed, level):
    run = KilledHolder(world).sanoid_took("tank/web@hourly").marked("tank/web@hourly")
    if sealed:
        run.sealed()
    assert f"keep @hourly as {level}" in run.foreseen()


def test_a_bundle_that_has_lost_a_part_gives_no_level(world):
    run = KilledHolder(world).sanoid_took("tank/web@hourly").marked("tank/web@hourly")
    run.sealed(Part(name="ram.save", role=Role.RAM, bytes=1, sha256="0" * 64))
    assert "keep @hourly as crash" in run.foreseen()


def test_an_overlay_that_is_missing_is_foreseen(world):
    run = Killed(world).switched()
    off(run)
    run.overlay().unlink()
    assert run.foreseen()[0] == f"vda: attention {run.overlay()}"


def test_another_domains_runs_are_not_foreseen(world):
    Killed(world).switched()
    assert preview(world.context, "another uuid") == []


def test_a_torn_journal_stays_where_it_is_when_foreseen(world):
    run = Killed(world)
    torn = world.paths.journal / "20250101T000000Z-00.jsonl"
    torn.write_bytes(b"{")
    run.foreseen()
    assert torn.exists()


# -- snapshots that another program takes -------------------------------------------------------


class KilledHolder(Killed):
    """A killed process that held a guest for sanoid, which takes snapshots with its own names."""

    def __init__(self, world, **guest):
        super().__init__(world, **guest)
        for path in world.paths.journal.iterdir():
            path.unlink()
        world.context.store.discard_partial(self.facts.uuid, self.facts.run)
        plan = make_plan(world.context, self.domain, SnapshotRequest("hourly"), awaited=90)
        self.plan, self.facts = plan, plan.facts
        Journal(world.paths.journal, self.facts).close(settled=False)
        self.bundle = world.context.store.create(self.domain.uuid, self.facts.run)

    def sanoid_took(self, *names):
        for name in names:
            self.world.pool.snapshot([name], {})
        return self

    def marked(self, *names):
        properties = initial_properties(self.plan, self.bundle.reference)
        self.world.pool.set_properties(names, properties)
        return self

    def sealed(self, *parts):
        snapshots = self.world.pool.snapshots(self.facts.datasets)
        versions = self.world.hypervisor.versions(self.domain)
        now = datetime.now(UTC)
        manifest = build_manifest(
            self.world.resolver,
            self.plan,
            Level.RAM,
            list(parts),
            snapshots,
            versions,
            Pause(now, 1.0),
            now,
            now,
        )
        self.bundle.seal(manifest)
        return self


def test_snapshots_that_sanoid_took_are_not_destroyed(world):
    run = KilledHolder(world, disks=TWO).switched().sanoid_took("tank/web@hourly")
    assert "committed vda, vdb" in run.recover()
    assert_settled(world)
    assert world.pool.names() == ["tank/web@hourly"]
    assert "run" not in world.pool.snapshots()[0].properties


def test_a_marked_snapshot_without_a_bundle_stays_a_crash(world):
    names = ["tank/web@hourly", "tank/web@daily"]
    run = KilledHolder(world).sanoid_took(*names).marked(names[0])
    run.recover()
    assert world.pool.names() == names
    assert world.pool.snapshots()[0].properties["level"] == "crash"


def test_a_sealed_bundle_gives_all_its_snapshots_their_level(world):
    names = ["tank/web@hourly", "tank/web@daily", "flash/web@hourly", "flash/web@daily"]
    run = KilledHolder(world, disks=TWO).sanoid_took(*names).marked(*names).sealed()
    assert any("completed ram snapshot" in text for text in run.recover())
    assert {snapshot.properties["level"] for snapshot in world.pool.snapshots()} == {"ram"}
    assert {snapshot.properties["run"] for snapshot in world.pool.snapshots()} == {run.facts.run}


# -- a guest that is missing while its run is alive ---------------------------------------------


def test_the_last_writes_of_a_transient_guest_are_committed_into_its_base(world):
    run = Killed(world).switched()
    written = run.overlay().read_bytes()
    gone(run)
    world.add_guest("other")
    world.add_guest("idle", state=DomainState.OFF)
    assert run.settle(alive=True) == ["committed vda while the guest is off"]
    assert Path(run.facts.overlays[0].base).read_bytes() == written
    assert [name for name in world.leftovers() if not name.startswith("journal")] == []


def test_last_writes_are_quarantined_when_the_run_was_killed(world):
    """Another process may have used the base since."""
    run = Killed(world).switched()
    gone(run)
    assert f"vda: quarantine {run.overlay()}" in run.foreseen()
    recover_run(world.context, run.facts, ())
    assert run.quarantined().exists()


def test_commands_of_a_recovery_are_logged_with_the_run(world):
    run = Killed(world).switched()
    with command_log.fields(**dict.fromkeys(command_log.FIELD_NAMES, "")):
        recover_run(world.context, run.facts, ())
        assert command_log.current_fields() == {
            "DOMAIN": run.facts.domain,
            "RUN": run.facts.run,
            "SNAPSHOT": run.facts.snapshot,
            "STEP": "recover",
        }


def test_without_an_overlay_there_are_no_last_writes(world):
    run = Killed(world).switched()
    gone(run)
    run.overlay().unlink()
    assert run.settle(alive=True) == []
    assert not Path(run.facts.overlay_dir).exists()


def test_the_socket_that_a_run_left_is_removed(world):
    run = Killed(world)
    left = world.paths.runtime / f"{run.facts.uuid}{default_paths.HOLD_SOCKET_SUFFIX}"
    left.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server, address(left) as name:
        server.bind(name)
    run.settle()
    assert not left.exists()


@pytest.fixture
def linked(world):
    """A missing transient guest, whose base is a link; the link, and the file itself."""
    run = Killed(world).switched()
    gone(run)
    base = Path(run.facts.overlays[0].base)
    real = base.rename(base.with_name("R&D's.img"))
    base.symlink_to(real)
    return run, {"link": base, "file": real}


@pytest.mark.parametrize("name", ["link", "file"])
@pytest.mark.parametrize("definition", ["live", "inactive"])
def test_last_writes_are_quarantined_when_another_domain_has_the_base(
    world, linked, name, definition
):
    run, names = linked
    other = world.add_guest("other")
    guest = world.guest("other")
    written = str(names[name]).replace("&", "&amp;").replace("'", "&apos;")
    xml = getattr(guest, definition).replace(f'"{other.disks[0].source}"', f'"{written}"')
    setattr(guest, definition, xml)
    run.settle(alive=True)
    assert run.quarantined().exists()


def test_last_writes_are_quarantined_when_a_process_has_the_base(linked):
    run, names = linked
    with open(names["link"]):
        run.settle(alive=True)
    assert run.quarantined().exists()


def test_last_writes_are_left_alone_when_a_process_has_the_overlay(world):
    run = Killed(world).switched()
    gone(run)
    with open(run.overlay()), pytest.raises(AttentionError, match=r"\(process \d+\) still uses"):
        run.settle(alive=True)
    assert run.overlay().exists()
    assert "overlays.commit_offline" not in world.hooks.acts()


def test_last_writes_are_quarantined_when_their_base_is_missing(world):
    run = Killed(world).switched()
    gone(run)
    Path(run.facts.overlays[0].base).unlink()
    run.settle(alive=True)
    assert run.quarantined().exists()


def test_whole_disks_are_compared_only_for_a_pivot_in_doubt(world):
    compared = []
    world.hooks.at["overlays.compare"] = lambda: compared.append(True)
    run = Killed(world, disks=TWO).switched()
    off(run)
    run.settle()
    assert_settled(world)
    assert compared == []


@pytest.mark.parametrize("live", [True, False])
def test_overlays_in_use_or_left_by_a_pivot_are_not_read(world, live):
    run = Killed(world, disks=TWO).switched(live=live)
    world.hooks.at["overlays.read"] = lambda: pytest.fail("an overlay is read")
    run.settle()
    assert_settled(world)


@pytest.mark.parametrize("error", [HypervisorError, UnavailableError])
def test_a_libvirtd_that_comes_back_at_the_last_moment_is_asked(world, error):
    world.libvirt_times = LibvirtTimes(reconnect=0)
    run = Killed(world).switched()
    world.hooks.at["hypervisor.find"] = failing_once(error("libvirt", "is away"))
    assert run.settle() == ["committed vda"]


# -- a journal that lost notes --------------------------------------------------------------------


def paused_without_a_note(world, level=None, reason="user"):
    run = Killed(world, level)
    run.guest.state, run.guest.paused_reason = DomainState.PAUSED, reason
    with read_journals(world.paths.journal)[0].path.open("a") as stream:
        stream.write("not JSON\n")
    return run


@pytest.mark.parametrize(("level", "reason"), [("paused", "user"), ("ram", "user")])
def test_a_guest_that_stays_paused_is_reported_and_not_as_recovered(world, level, reason):
    run = paused_without_a_note(world, level, reason)
    assert any("leave the guest paused" in text for text in run.foreseen())
    for _ in range(2):  # the first recovery writes no note that ends the report
        with pytest.raises(AttentionError, match=r"paused.*virsh resume web.*snaporch recover"):
            run.recover()
    assert run.guest.state is DomainState.PAUSED
    world.hypervisor.resume(run.facts.uuid)
    assert run.recover()[-1].startswith("recovered the run")
    assert_settled(world)


def test_a_pause_beside_a_journal_without_damage_is_its_owners(world):
    run = Killed(world, "paused")
    run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "user"
    assert run.recover()[-1].startswith("recovered the run")
    assert run.guest.state is DomainState.PAUSED


def test_a_guest_that_its_owner_pauses_during_a_recovery_is_recovered(world):
    run = paused_without_a_note(world)
    world.hypervisor.resume(run.facts.uuid)

    def pause():
        run.guest.state, run.guest.paused_reason = DomainState.PAUSED, "user"

    world.hooks.at["pool.snapshots"] = pause  # the disks have been recovered
    assert run.recover()[-1].startswith("recovered the run")


def test_a_guest_paused_for_its_freeze_is_resumed_without_the_note(world):
    run = paused_without_a_note(world, "paused")
    (journal,) = read_journals(world.paths.journal)
    with Journal.reopen(journal.path).step(Step.FREEZE):
        pass
    assert run.recover()[0] == "resumed the guest"


@pytest.mark.parametrize("note", [Note.HELD, Note.RELEASED])
def test_a_pause_that_the_notes_explain_is_no_matter(world, note):
    run = paused_without_a_note(world)
    append_note(read_journals(world.paths.journal)[0].path, note)
    assert run.recover()[-1].startswith("recovered the run")


def test_a_run_that_pauses_no_guest_is_recovered_beside_a_pause(world):
    assert paused_without_a_note(world, "crash").recover()[-1].startswith("recovered the run")
