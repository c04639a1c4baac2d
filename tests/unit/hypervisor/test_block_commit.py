"""Commits step by step, against a scripted libvirt."""

import itertools
from types import SimpleNamespace

import libvirt
import pytest

from snaporch.hypervisor.apparmor import PROFILES
from snaporch.hypervisor.block_commit import commit_overlays
from snaporch.hypervisor.commit_timeouts import CommitTimeouts
from snaporch.hypervisor.interface import CommitStage, HypervisorError, OverlayDisk

SLOW = CommitTimeouts()
HASTY = CommitTimeouts(running=0, pause=5)
ACTIVE_ONE_LAYER = libvirt.VIR_DOMAIN_BLOCK_COMMIT_ACTIVE | libvirt.VIR_DOMAIN_BLOCK_COMMIT_SHALLOW
"""Without the second flag a commit would continue into the base's own base: a golden image."""
VDA = OverlayDisk("vda", "/tank/a.img", "file", "raw", "/overlays/vda.qcow2")
VDB = OverlayDisk("vdb", "/dev/zvol/tank/b", "block", "raw", "/overlays/vdb.qcow2")


class Disk:
    """A disk on its overlay, and the job on it."""

    def __init__(self, disk):
        self.disk = disk
        self.on_overlay = True
        self.job = None
        self.ready = False
        self.below = disk.base
        self.gone = False

    def xml(self):
        if self.gone:
            return ""
        kind, key = ("block", "dev") if self.disk.base_kind == "block" else ("file", "file")
        mirror = f"<mirror job='{self.job}' ready='{'yes' if self.ready else 'no'}'/>"
        target = f"<target dev='{self.disk.target}'/>{mirror if self.job else ''}"
        if not self.on_overlay:
            return f"<disk type='{kind}'><source {key}='{self.disk.base}'/>{target}</disk>"
        store = f"<backingStore type='{kind}'><source {key}='{self.below}'/></backingStore>"
        return f"<disk type='file'><source file='{self.disk.overlay}'/>{store}{target}</disk>"


class Guest:
    """libvirt's handle; ``step`` is called between two queries."""

    def __init__(self, *disks):
        self.disks = {disk.target: Disk(disk) for disk in disks}
        self.running = True
        self.log = []
        self.pivots_to_refuse = 0
        self.step = self.get_ready
        self.dismissed = 0
        self.asked = 0
        self.clock = 0.0
        self.copied = self.length = 0

    def get_ready(self):
        for disk in self.disks.values():
            disk.ready = disk.job is not None

    def UUIDString(self):  # noqa: N802 - libvirt's
        return "7f1c0d4e-4f7d-4a6e-9d0a-0d7c5a1b2c3d"

    def XMLDesc(self, flags):  # noqa: N802 - libvirt's
        assert flags == 0
        inside = "".join(disk.xml() for disk in self.disks.values())
        return f"<domain><devices>{inside}</devices></domain>"

    def state(self):
        return (libvirt.VIR_DOMAIN_RUNNING if self.running else libvirt.VIR_DOMAIN_PAUSED, 0)

    def suspend(self):
        self.log.append("suspend")
        self.running = False

    def resume(self):
        self.log.append("resume")
        self.running = True

    def blockCommit(self, target, base, top, bandwidth, flags):  # noqa: N802 - libvirt's
        assert (base, top, bandwidth, flags) == (None, None, 0, ACTIVE_ONE_LAYER)
        self.log.append(f"commit {target}")
        self.disks[target].job = "active-commit"

    def blockJobAbort(self, target, flags):  # noqa: N802 - libvirt's
        assert flags == libvirt.VIR_DOMAIN_BLOCK_JOB_ABORT_PIVOT
        self.log.append(f"pivot {target}")
        if self.pivots_to_refuse:
            self.pivots_to_refuse -= 1
            raise libvirt.libvirtError("block copy still active: not ready for pivot yet")
        disk = self.disks[target]
        if not disk.ready:
            raise libvirt.libvirtError("block copy still active: not ready for pivot yet")
        disk.job, disk.ready, disk.on_overlay = None, False, False

    def blockJobInfo(self, target, flags):  # noqa: N802 - libvirt's
        assert flags == 0
        self.asked += 1
        if self.dismissed:
            self.dismissed -= 1
            return {"type": 4}
        return {"type": 4, "cur": self.copied, "end": self.length} if self.disks[target].job else {}


def commit(guest, *disks, on_stage=lambda stage: None, patience=SLOW, profiles=PROFILES):
    def step(seconds):
        guest.clock += seconds
        guest.step()

    def report(stage):
        if stage is not CommitStage.WAITING:
            guest.log.append(stage.value)
        on_stage(stage)

    events = SimpleNamespace(wait=step)
    failed = commit_overlays(
        guest, events, disks, report, patience, clock=lambda: guest.clock, profiles=profiles
    )
    for error in failed.values():
        raise error


def test_a_disk_is_committed_and_pivoted_when_it_is_ready():
    guest = Guest(VDA)
    commit(guest, VDA)
    assert guest.log == ["commit vda", "pivoting", "pivot vda"]


def test_all_disks_are_committed_at_the_same_time():
    guest = Guest(VDA, VDB)
    commit(guest, VDA, VDB)
    assert guest.log == ["commit vda", "commit vdb", "pivoting", "pivot vda", "pivot vdb"]


def test_a_disk_on_its_base_is_left_alone():
    guest = Guest(VDA, VDB)
    guest.disks["vda"].on_overlay = False
    commit(guest, VDA, VDB)
    assert guest.log == ["commit vdb", "pivoting", "pivot vdb"]


def test_a_job_that_is_there_is_joined():
    guest = Guest(VDA)
    guest.disks["vda"].job = "active-commit"
    commit(guest, VDA)
    assert guest.log == ["pivoting", "pivot vda"]


def test_a_pivot_that_comes_too_early_is_asked_for_again():
    guest = Guest(VDA)
    guest.pivots_to_refuse = 2
    commit(guest, VDA)
    assert guest.log == ["commit vda", "pivoting", "pivot vda", "pivot vda", "pivot vda"]


def test_it_is_not_over_before_the_job_is():
    guest = Guest(VDA)
    guest.disks["vda"].on_overlay = False
    guest.dismissed = 2
    commit(guest, VDA)
    assert guest.dismissed == 0


def test_a_job_that_ends_without_reaching_the_base_is_begun_again_but_not_for_ever():
    guest = Guest(VDA)

    def vanish():
        guest.disks["vda"].job = None

    guest.step = vanish
    with pytest.raises(HypervisorError, match="ended 3 times without reaching the base"):
        commit(guest, VDA)
    assert guest.log == ["commit vda"] * 3


def test_a_foreign_job_is_not_touched():
    guest = Guest(VDA)
    guest.disks["vda"].job = "copy"
    with pytest.raises(HypervisorError, match=r"another program's block job \(copy\)"):
        commit(guest, VDA)
    assert guest.log == []


@pytest.mark.parametrize("job", ["copy", "active-commit"])
def test_a_foreign_job_on_a_disk_on_its_base_is_not_touched(job):
    """Another program may commit the base itself into another image, for any time."""
    guest = Guest(VDA)
    guest.disks["vda"].on_overlay = False
    guest.disks["vda"].job = job
    with pytest.raises(HypervisorError, match=rf"another program's block job \({job}\)"):
        commit(guest, VDA)
    assert guest.log == []


def test_an_overlay_over_something_else_is_not_committed():
    guest = Guest(VDA)
    guest.disks["vda"].below = "/elsewhere.img"
    with pytest.raises(HypervisorError, match=r"lies on /elsewhere\.img"):
        commit(guest, VDA)
    assert guest.log == []


def test_a_disk_on_neither_image_is_not_touched():
    guest = Guest(VDA)
    other = OverlayDisk("vda", "/tank/a.img", "file", "raw", "/overlays/other.qcow2")
    with pytest.raises(HypervisorError, match="neither on its overlay"):
        commit(guest, other)
    assert guest.log == []


def test_a_disk_that_was_unplugged_is_an_error():
    guest = Guest(VDA)
    guest.disks["vda"].gone = True
    with pytest.raises(HypervisorError, match="unplugged during the commit"):
        commit(guest, VDA)


def test_libvirts_reason_is_reported():
    guest = Guest(VDA)

    def fail(*_):
        raise libvirt.libvirtError("Requested operation is not valid")

    guest.blockCommit = fail
    with pytest.raises(HypervisorError, match="vda: blockcommit: "):
        commit(guest, VDA)


def test_a_job_lost_by_a_killed_libvirtd_is_reported_and_left_alone():
    guest = Guest(VDA)
    guest.dismissed = 1  # libvirtd has lost the mirror, and the job is still there

    def fail(*_):
        raise libvirt.libvirtError("disk 'vda' already in active block job")

    guest.blockCommit = fail
    with pytest.raises(HypervisorError, match="its overlay is whole, and is committed when"):
        commit(guest, VDA)
    assert guest.log == []


def test_the_reason_of_a_refused_commit_is_reported_without_further_facts():
    guest = Guest(VDA)

    def refuse(*_asked):
        raise libvirt.libvirtError("refused" if not guest.asked else "gone")

    def ask(*_asked):
        guest.asked += 1
        refuse()

    guest.blockCommit, guest.blockJobInfo = refuse, ask
    with pytest.raises(HypervisorError, match="vda: blockcommit:"):
        commit(guest, VDA)
    assert guest.asked


@pytest.fixture
def profile(tmp_path):
    """libvirt's AppArmor profile of the guest, which denies nothing at first."""
    path = tmp_path / f"libvirt-{Guest().UUIDString()}.files"
    path.touch()
    return path


def test_a_base_that_apparmor_denies_is_reported_with_the_remedy(profile, tmp_path):
    guest = Guest(VDA)
    profile.write_text(f'  deny "{VDA.base}" w,\n')

    def fail(*_):
        raise libvirt.libvirtError("Could not open '/tank/a.img': Permission denied")

    guest.blockCommit = fail
    why = "AppArmor denies .* /tank/a.img, because libvirt wrote its profile while"
    way_out = f"{why} .*: shut it off, recover it, then start it"
    with pytest.raises(HypervisorError, match=way_out):
        commit(guest, VDA, profiles=tmp_path)


def test_no_disk_is_pivoted_before_all_are_ready():
    """From the first pivot to the last, it is unknown which image is the newer one."""
    guest = Guest(VDA, VDB)
    looks = []

    def step():
        looks.append(list(guest.log))
        guest.disks["vda"].ready = True
        guest.disks["vdb"].ready = len(looks) > 3

    guest.step = step
    commit(guest, VDA, VDB)
    assert guest.log == ["commit vda", "commit vdb", "pivoting", "pivot vda", "pivot vdb"]
    assert looks[:4] == [["commit vda", "commit vdb"]] * 4


def fails_to_start(guest):
    real = guest.blockCommit

    def fail(target, *more):
        if target == "vda":
            raise libvirt.libvirtError("Could not open '/tank/a.img'")
        real(target, *more)

    guest.blockCommit = fail


def is_lost(guest):
    guest.disks["vda"].disk = OverlayDisk("vda", "/x.img", "file", "raw", "/overlays/other.qcow2")


FAILURES = {
    "cannot be begun": fails_to_start,
    "is on neither image": is_lost,
    "was unplugged": lambda guest: setattr(guest.disks["vda"], "gone", True),
    "has another's job": lambda guest: setattr(guest.disks["vda"], "job", "copy"),
}


@pytest.mark.parametrize("fail", FAILURES.values(), ids=FAILURES)
def test_a_disk_that_fails_does_not_keep_the_others_from_their_bases(fail):
    """Their mirrors would continue, with each write of the guest done twice, until recovery."""
    guest = Guest(VDA, VDB)
    fail(guest)
    with pytest.raises(HypervisorError, match="vda"):
        commit(guest, VDA, VDB)
    assert not guest.disks["vdb"].on_overlay
    assert "pivot vda" not in guest.log


def test_where_apparmor_confines_the_guest_a_failed_disk_stops_the_others(profile, tmp_path):
    """A pivot makes libvirt write a profile that denies the remaining disk its base."""
    guest = Guest(VDA, VDB)
    is_lost(guest)
    with pytest.raises(HypervisorError, match="vda"):
        commit(guest, VDA, VDB, profiles=tmp_path)
    assert guest.disks["vdb"].on_overlay


def test_a_disk_detached_during_the_commit_does_not_stop_the_others():
    guest = Guest(VDA, VDB)

    def step():
        guest.disks["vda"].gone = True
        guest.disks["vdb"].ready = True

    guest.step = step
    with pytest.raises(HypervisorError, match="unplugged during the commit"):
        commit(guest, VDA, VDB)
    assert not guest.disks["vdb"].on_overlay


def test_from_the_first_pivot_on_a_disk_that_fails_ends_it_for_all():
    """It is unknown then which image is the newer one."""
    guest = Guest(VDA, VDB)
    guest.pivots_to_refuse = 2

    def step():
        guest.get_ready()
        guest.disks["vda"].gone = "pivoting" in guest.log

    guest.step = step
    with pytest.raises(HypervisorError, match="unplugged during the commit"):
        commit(guest, VDA, VDB)
    assert guest.disks["vdb"].on_overlay


# -- a guest that writes faster -----------------------------------------------------------------


def only_ready_while_still(guest, seconds=0.0):
    """The guest writes faster than the job copies; the job needs this long while it is paused."""
    stood = [0.0]

    def step():
        guest.copied += 1
        stood[0] = 0.0 if guest.running else stood[0] + 0.1
        for disk in guest.disks.values():
            disk.ready = disk.job is not None and not guest.running and stood[0] >= seconds

    guest.step = step


def test_after_the_time_limit_the_guest_is_suspended_until_the_commit_caught_up():
    guest = Guest(VDA)
    only_ready_while_still(guest)
    commit(guest, VDA, patience=HASTY)
    assert guest.log == [
        "commit vda",
        *("suspending", "suspend"),
        *("pivoting", "pivot vda"),
        *("resume", "resumed"),
    ]
    assert guest.running


def test_before_the_time_limit_the_guest_runs():
    guest = Guest(VDA)
    only_ready_while_still(guest)
    commit(guest, VDA, patience=CommitTimeouts(running=60))
    assert "suspend" in guest.log
    assert 60 <= guest.clock < 61


def test_each_suspension_is_longer_and_the_guest_runs_in_between():
    guest = Guest(VDA)
    only_ready_while_still(guest, seconds=18)
    changes = []
    suspend, resume = guest.suspend, guest.resume
    guest.suspend = lambda: (changes.append(guest.clock), suspend())
    guest.resume = lambda: (changes.append(guest.clock), resume())
    commit(guest, VDA, patience=HASTY)
    lengths = [round(b - a) for a, b in itertools.pairwise(changes)]
    assert lengths == [5, 5, 10, 10, 18]
    assert guest.running


def test_a_guest_that_does_not_run_is_not_resumed():
    guest = Guest(VDA)
    guest.running = False
    only_ready_while_still(guest)
    commit(guest, VDA, patience=HASTY)
    assert guest.log == ["commit vda", "pivoting", "pivot vda"]
    assert not guest.running


def test_a_failing_commit_resumes_a_suspended_guest():
    guest = Guest(VDA)
    only_ready_while_still(guest, seconds=1)

    def on_stage(stage):
        if not guest.running and stage is CommitStage.WAITING:
            raise HypervisorError("vda", "the job failed")

    with pytest.raises(HypervisorError, match="the job failed"):
        commit(guest, VDA, on_stage=on_stage, patience=HASTY)
    assert guest.log == ["commit vda", "suspending", "suspend", "resume", "resumed"]


def test_a_guest_that_cannot_be_resumed_is_reported():
    guest = Guest(VDA)
    only_ready_while_still(guest)

    def fail():
        raise libvirt.libvirtError("cannot resume")

    guest.resume = fail
    with pytest.raises(libvirt.libvirtError):
        commit(guest, VDA, patience=HASTY)
    assert "resumed" not in guest.log


def test_a_guest_that_another_program_resumed_is_no_error():
    guest = Guest(VDA)
    only_ready_while_still(guest)

    def resume():
        guest.running = True
        raise libvirt.libvirtError("domain is already running")

    guest.resume = resume
    commit(guest, VDA, patience=HASTY)
    assert guest.log[-1] == "resumed"


def test_a_guest_is_not_suspended_if_the_stage_cannot_be_reported():
    guest = Guest(VDA)

    def on_stage(stage):
        if stage is CommitStage.SUSPENDING:
            raise OSError("no space left for a note")

    with pytest.raises(OSError, match="no space"):
        commit(guest, VDA, on_stage=on_stage, patience=HASTY)
    assert guest.running
    assert "suspend" not in guest.log


def test_a_stalled_commit_fails():
    guest = Guest(VDA)
    guest.step = lambda: None
    with pytest.raises(HypervisorError, match="has not moved for 300 s"):
        commit(guest, VDA, patience=CommitTimeouts(running=float("inf")))
    assert 300 <= guest.clock < 400


def test_a_stalled_pivot_fails():
    guest = Guest(VDA)
    guest.pivots_to_refuse = 1 << 30
    with pytest.raises(HypervisorError, match="has not moved"):
        commit(guest, VDA, patience=CommitTimeouts(running=float("inf")))


def test_a_pivot_has_the_time_limit_of_the_copy():
    guest = Guest(VDA)
    guest.pivots_to_refuse = 1 << 30

    def step():
        guest.disks["vda"].ready = guest.clock > 200

    guest.step = step
    with pytest.raises(HypervisorError, match="has not moved"):
        commit(guest, VDA, patience=CommitTimeouts(running=float("inf")))
    assert 500 <= guest.clock < 600


@pytest.mark.parametrize("figure", ["copied", "length"])
def test_a_commit_that_progresses_is_waited_for(figure):
    """The job progresses, or the guest has written more."""
    guest = Guest(VDA)

    def step():
        setattr(guest, figure, getattr(guest, figure) + 1)
        guest.disks["vda"].ready = guest.clock > 3000

    guest.step = step
    commit(guest, VDA, patience=CommitTimeouts(running=float("inf")))
    assert guest.clock > 3000
    assert guest.asked < 200, "it looks now and then"
