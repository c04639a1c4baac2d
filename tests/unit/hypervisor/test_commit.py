"""Commits step by step, against a libvirt that does as told."""

from types import SimpleNamespace

import libvirt
import pytest

from snaporch.hypervisor.commit import commit_overlays
from snaporch.hypervisor.protocol import HypervisorError, OverlayDisk

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
    """libvirt's handle; ``step`` is what happens between two looks."""

    def __init__(self, *disks):
        self.disks = {disk.target: Disk(disk) for disk in disks}
        self.running = True
        self.log = []
        self.pivots_to_refuse = 0
        self.step = self.get_ready
        self.dismissed = 0

    def get_ready(self):
        for disk in self.disks.values():
            disk.ready = disk.job is not None

    def XMLDesc(self, flags):  # noqa: N802 - libvirt's
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
        self.log.append(f"commit {target}")
        self.disks[target].job = "active-commit"

    def blockJobAbort(self, target, flags):  # noqa: N802 - libvirt's
        assert flags == libvirt.VIR_DOMAIN_BLOCK_JOB_ABORT_PIVOT
        self.log.append(f"pivot {target}")
        if self.pivots_to_refuse:
            self.pivots_to_refuse -= 1
            raise libvirt.libvirtError("block copy still active: not ready for pivot yet")
        disk = self.disks[target]
        disk.job, disk.ready, disk.on_overlay = None, False, False

    def blockJobInfo(self, target, flags):  # noqa: N802 - libvirt's
        if self.dismissed:
            self.dismissed -= 1
            return {"type": 4}
        return {}


def commit(guest, *disks, tick=lambda: None, patience=60.0):
    events = SimpleNamespace(wait=lambda seconds: guest.step())
    commit_overlays(guest, events, disks, tick, patience)


def test_commit_ready_pivot():
    guest = Guest(VDA)
    commit(guest, VDA)
    assert guest.log == ["commit vda", "pivot vda"]


def test_all_disks_side_by_side():
    guest = Guest(VDA, VDB)
    commit(guest, VDA, VDB)
    assert guest.log == ["commit vda", "commit vdb", "pivot vda", "pivot vdb"]


def test_a_disk_on_its_base_is_left_alone():
    guest = Guest(VDA, VDB)
    guest.disks["vda"].on_overlay = False
    commit(guest, VDA, VDB)
    assert guest.log == ["commit vdb", "pivot vdb"]


def test_a_job_that_is_there_is_joined():
    guest = Guest(VDA)
    guest.disks["vda"].job = "active-commit"
    commit(guest, VDA)
    assert guest.log == ["pivot vda"]


def test_a_pivot_that_comes_too_early_is_asked_for_again():
    guest = Guest(VDA)
    guest.pivots_to_refuse = 2
    commit(guest, VDA)
    assert guest.log == ["commit vda", "pivot vda", "pivot vda", "pivot vda"]


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
    with pytest.raises(HypervisorError, match=r"a foreign block job \(copy\)"):
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


def test_libvirts_reason_is_told():
    guest = Guest(VDA)

    def fail(*_):
        raise libvirt.libvirtError("Requested operation is not valid")

    guest.blockCommit = fail
    with pytest.raises(HypervisorError, match="vda: blockcommit: "):
        commit(guest, VDA)


# -- a guest that writes faster -----------------------------------------------------------------


def only_ready_while_still(guest):
    """The guest writes faster than the job copies."""

    def step():
        for disk in guest.disks.values():
            disk.ready = disk.job is not None and not guest.running

    guest.step = step


def test_when_patience_is_over_it_stands_still_until_the_commit_has_caught_up():
    guest = Guest(VDA)
    only_ready_while_still(guest)
    commit(guest, VDA, patience=0)
    assert guest.log == ["commit vda", "suspend", "pivot vda", "resume"]
    assert guest.running


def test_a_guest_that_does_not_run_is_left_so():
    guest = Guest(VDA)
    guest.running = False
    only_ready_while_still(guest)
    commit(guest, VDA, patience=0)
    assert guest.log == ["commit vda", "pivot vda"]
    assert not guest.running


def test_a_commit_that_fails_while_the_guest_stands_still_lets_it_go():
    guest = Guest(VDA)
    only_ready_while_still(guest)

    def tick():
        if not guest.running:
            raise HypervisorError("vda", "the job failed")

    with pytest.raises(HypervisorError, match="the job failed"):
        commit(guest, VDA, tick=tick, patience=0)
    assert guest.log == ["commit vda", "suspend", "resume"]


def test_it_is_suspended_only_once():
    guest = Guest(VDA)
    looks = []

    def step():
        looks.append(guest.running)
        guest.disks["vda"].ready = len(looks) > 4

    guest.step = step
    commit(guest, VDA, patience=0)
    assert guest.log.count("suspend") == guest.log.count("resume") == 1
