"""Others act on a guest in the middle of a run: backup tools, administrators, libvirt's own.

The scenes are in ``faults/others.py``, what others do in ``acts.py``. ``FAULTS_SAMPLE`` chooses as
in ``test_faults.py``; without it four that change from day to day. ``faults/run --others`` makes a
page of the lines that they print.
"""

import shutil
import time
from contextlib import contextmanager
from difflib import unified_diff
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import SubElement

import pytest
from acts import DEEDS, Snapshot, beside, take_disks_at_any_time
from faults import matrix, others
from faults.oracle import assert_no_loss, assert_well, look
from faults.process import Run, snaporch_here
from faults.run_case import UNDECIDED
from guests.disks import Disk
from guests.guest import Guest
from support import (
    BUNDLES,
    JOURNAL,
    OVERLAYS,
    RUNTIME,
    assert_clean,
    assert_went_on,
    config,
    must,
    one_line_error,
    snaporch,
    snapshot,
    wait_for,
    zfs_snapshots,
)

from snaporch.model import Strategy

NAME = others.LARGE
_CHANNEL = ("channel", "source")
"""Of an agent: its path has the number that a domain has from its start."""
CASES = matrix.sample(others.cases(), matrix.wanted(), 4)


class Guests:
    """Made when they are needed; the lab has one processor, so one of them runs."""

    def __init__(self):
        self._made = {}

    def running(self, name=NAME):
        """One of them, which counts; what a test took is destroyed, for its names come again."""
        for other, guest in self._made.items():
            if other != name:
                guest.destroy()
        if name not in self._made:
            self._made[name] = make(name)
        guest = self._made[name]
        if guest.state() == "paused":
            must("virsh", "resume", name)
        if guest.state() == "shut off":
            guest.start()
        guest.wait_count()
        if guest.machine.agent:
            guest.wait_agent()
        for each in zfs_snapshots("@others"):
            must("zfs", "destroy", each)
        return guest

    def remove(self):
        for guest in self._made.values():
            guest.remove()
        self._made.clear()
        for directory in (OVERLAYS, JOURNAL, *BUNDLES.glob("*")):
            shutil.rmtree(directory, ignore_errors=True)
        for pipe in RUNTIME.glob("*.ram"):
            pipe.unlink()


def make(name):
    """A guest with UEFI is the large one: its firmware alone is more RAM than a pipe holds."""
    disks = [Disk("file", f"tank/{name}"), Disk("zvol", f"flash/{name}")]
    return Guest.create(
        name,
        disks=disks[:1] if name == others.TALKER else disks,
        kind="linux" if name == others.TALKER else "probe",
        firmware="uefi" if name == others.LARGE else "bios",
        mutate=take_disks_at_any_time,
    )


@pytest.fixture(scope="module")
def guests(report):
    report({"cases": len(others.cases())}, "ALL")
    report({str(rows): rows.why for rows in others.LEFT_OUT}, "LEFT-OUT")
    made = Guests()
    yield made
    made.remove()


@pytest.fixture
def guest(guests):
    return guests.running()


@contextmanager
def under_way(tmp_path, strategy, point, name=NAME):
    """A run that is stopped at a point."""
    way = strategy if strategy.level == "ram" else "auto"
    path = tmp_path / "snaporch.toml"
    path.write_text(f'[defaults]\nram_strategy = "{way}"\nfreeze_deadline = "5m"\n')
    words = ["--config", str(path), "snapshot", name, "--name", "others"]
    if strategy is not Strategy.OFF:
        words += ["--level", strategy.level.value]
    run = Run(*words, point=point)
    try:
        run.wait_stopped()
        yield run
    finally:
        run.kill()
        run.close()


def quiet(outcome):
    """The outcome without the progress lines."""
    lines = [line for line in outcome.err.splitlines() if line.startswith("snaporch:")]
    outcome.err = "\n".join(lines)
    return outcome


# -- the scenes ----------------------------------------------------------------------------------


@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_others_and_a_run_leave_each_other_alone(guests, tmp_path, case, report):
    began = time.monotonic()
    try:
        status, level = perform(case, guests, tmp_path)
    except BaseException as error:
        report({"case": str(case), "failed": f"{type(error).__name__}: {error}"})
        guests.remove()
        raise
    seconds = round(time.monotonic() - began, 2)
    report({"case": str(case), "seconds": seconds, "ended": status, "level": level})


def test_no_row_is_for_nothing():
    assert others.void() == []


def perform(case, guests, tmp_path):
    """Act on the guest of a run, and check everything; the exit status and level of the run."""
    guest, deed = guests.running(others.guest_for(case)), DEEDS[case.act]()
    deed.get_ready(guest)
    if case.strategy is Strategy.OFF:
        guest.destroy()
    state, mark = guest.state(), guest.mark()
    if state == "running":
        guest.wait_count()
    definitions = defined(guest)
    with under_way(tmp_path, case.strategy, case.point, name=guest.name) as run:
        before = look(guest, mark)
        deed.do(guest)
        run.go_on()
        deed.meanwhile(run)
        outcome = run.wait()
    assert "Traceback" not in outcome.err, outcome.err
    assert outcome.status in others.statuses(case), outcome
    if outcome.status:
        assert len(quiet(outcome).err.splitlines()) == 1, outcome
    if outcome.status == 5 and deed.refusals:
        assert any(text in outcome.err for text in deed.refusals), outcome
    if outcome.status != 9:
        assert_nothing_of_ours(guest)
    if UNDECIDED in outcome.err:
        recovered(guest, "--take", "overlay")
    deed.undo(guest)
    booted = deed.reboots
    if outcome.status == 9:
        booted |= recovered(guest)
    if case.strategy is Strategy.OFF:
        guest.destroy()
    assert_well(guest, state)
    changed = list(unified_diff(definitions, defined(guest), n=0, lineterm=""))
    assert not changed, "\n".join(changed)
    if state == "running":
        assert_has_all(guest, before, booted=booted)
    level = reached(guest, case, outcome)
    deed.put_away(guest)
    return outcome.status, level


def assert_has_all(guest, before, *, booted):
    """All that the guest had written is there, whether it was booted again or not."""
    if not booted:
        assert_no_loss(guest, before)
        return
    found = min(guest.cold_boots_since(before.mark)[0].values())
    assert found >= before.counts[0], f"LOSS: reported {before.counts[0]}, found {found}"
    assert not guest.bad_since(before.mark)


def assert_nothing_of_ours(guest):
    """Nothing is left to do for a guardian or a person."""
    assert list(JOURNAL.glob("*")) == []
    for inactive in (False, True):
        for source in guest.sources(inactive=inactive).values():
            assert not source.startswith(str(OVERLAYS))


def recovered(guest, *options):
    """Wait until the guardian or a person has recovered the guest, maybe at the second try.

    Returns whether it had to be shut off: AppArmor may deny a guest on overlays its bases.
    """

    def recover():
        outcome = snaporch_here("recover", "--wait", "60s", guest.name, *options)
        well = outcome.status == 0 and not list(JOURNAL.glob("*"))
        return "well" if well else "denied" if "AppArmor denies" in outcome.err else ""

    if wait_for(recover, "the guest to be recovered") == "well":
        return False
    guest.destroy()
    recovered(guest)
    guest.start()
    return True


def defined(guest):
    """The lines of both definitions, without what libvirt numbers, labels and orders again."""
    return [line for inactive in (False, True) for line in plain(guest.xml(inactive=inactive))]


def plain(xml):
    root = ElementTree.fromstring(xml)
    root.attrib.pop("id", None)
    for parent in root.iter():
        parent.attrib.pop("index", None)
        for child in list(parent):
            changes = child.tag in ("alias", "seclabel") or (parent.tag, child.tag) == _CHANNEL
            if changes or (child.tag == "backingStore" and not len(child)):
                parent.remove(child)
    devices = root.find("devices")
    devices[:] = sorted(devices, key=ElementTree.tostring)
    text = ElementTree.canonicalize(ElementTree.tostring(root, encoding="unicode"), strip_text=True)
    return text.replace("><", ">\n<").splitlines()


def reached(guest, case, outcome):
    """The level of the run's snapshot, after checking that it is true; empty without one."""
    names = zfs_snapshots("@others")
    if not names:
        assert outcome.status != 0, outcome
        assert "@others was kept" not in outcome.err, outcome
        return ""
    assert outcome.status != 5, outcome
    assert len(names) >= len(guest.datasets())
    (level,) = set(must("zfs", "get", "-H", "-o", "value", "snaporch:level", *names).split())
    assert level == case.strategy.level or outcome.status != 0, outcome
    if level in ("ram", "paused", "off"):
        guest.snapshot_count("others")
    if level == "ram":
        options = [] if matrix.in_eight(case) else ["--checksums"]
        verified = snaporch_here("verify", f"{guest.name}@others", *options)
        assert verified.status == 0, verified
    return level


# -- what is said, and what is done about it -----------------------------------------------------


@pytest.mark.daily(2, "single")
@pytest.mark.timeout(300)
def test_a_member_of_a_group_that_waits_for_another(guest, tmp_path):
    """The other's RAM does not come to an end before a backup tool has begun with this one."""
    other = Guest.create("waiting", disks=[Disk("file", "tank/waiting")])
    tool = Path("/tank/waiting/tool.qcow2")
    try:
        settings = tmp_path / "snaporch.toml"
        settings.write_text(
            f'[group.pair]\ndomains = ["{NAME}", "waiting"]\n[domain.waiting]\nlevel = "paused"\n'
        )
        words = ("--config", str(settings), "snapshot", "--group", "pair", "--name", "others")
        run = Run(*words, point="during:ram")
        try:
            run.wait_stopped()
            disk = ("--disk-only", "--no-metadata", "--diskspec", f"vda,file={tool}")
            must("virsh", "snapshot-create-as", "waiting", *disk)
            run.go_on()
            outcome = run.wait()
        finally:
            run.kill()
            run.close()
        said = outcome.err
        assert f"waiting: its disk vda is on {tool}" in said
        assert "none of its domains was snapshotted" in said
        assert outcome.status == 5
        assert zfs_snapshots("@others") == []
        must("virsh", "blockcommit", "waiting", "vda", "--active", "--pivot", "--wait")
        for each in (guest, other):
            each.wait_count()
            assert_clean(each)
    finally:
        other.remove()


@pytest.mark.daily(2, "single")
@pytest.mark.timeout(200)
@pytest.mark.parametrize("strategy", [Strategy.OVERLAY, Strategy.MANUAL])
def test_suspended_while_its_ram_is_saved(guest, tmp_path, strategy):
    mark = guest.mark()
    with under_way(tmp_path, strategy, "during:ram") as run:
        must("virsh", "suspend", NAME)
        run.go_on()
        outcome = run.wait()
    assert outcome.status == 0, outcome.err
    assert "it stays suspended" in outcome.err
    assert_clean(guest, "paused")
    must("virsh", "resume", NAME)
    guest.wait_count()
    guest.assert_undisturbed(mark)


@pytest.mark.daily(2, "single")
@pytest.mark.timeout(200)
@pytest.mark.parametrize("strategy", [Strategy.OVERLAY, Strategy.MANUAL])
def test_its_job_aborted(guest, tmp_path, strategy):
    with under_way(tmp_path, strategy, "during:ram") as run:
        must("virsh", "domjobabort", NAME)
        run.go_on()
        outcome = run.wait()
    assert "repeating with a file" not in outcome.err
    one_line_error(quiet(outcome), 8, "canceled by client")
    assert zfs_snapshots("@others") == []
    assert_clean(guest)
    guest.wait_count()


@pytest.mark.daily(2, "single")
@pytest.mark.timeout(200)
def test_its_ram_saved_by_libvirt_while_it_is_on_overlays(guest, tmp_path):
    with under_way(tmp_path, Strategy.OVERLAY, "after:pool-snapshot") as run:
        must("virsh", "managedsave", NAME)
        run.go_on()
        one_line_error(quiet(run.wait()), 8, "QEMU ended meanwhile", "crash-consistent")
    assert_clean(guest, "shut off")
    mark = guest.mark()
    must("virsh", "start", NAME)
    assert_went_on(guest, mark)


@pytest.mark.daily(2, "single")
@pytest.mark.timeout(300)
def test_a_backup_over_an_overlay(guest, tmp_path):
    """The commands that the error names bring the guest back, when it is off."""
    with under_way(tmp_path, Strategy.OVERLAY, "after:pool-snapshot") as run:
        overlay = guest.sources()["vda"]
        Snapshot().do(guest)
        run.go_on()
        outcome = quiet(run.wait())
    way_back = f"virsh blockcommit {NAME} vda --base {overlay} --active --pivot --wait"
    one_line_error(outcome, 9, way_back, "snaporch recover")
    assert "<mirror" not in guest.xml()
    one_line_error(quiet(snaporch("recover", NAME)), 9, way_back)
    must(*way_back.split())
    beside(guest, "tool.qcow2").unlink()
    assert recovered(guest)
    assert_clean(guest)
    guest.wait_count()


@pytest.mark.daily(2, "single")
def test_a_disk_that_others_may_have_too(tmp_path):
    def share(domain):
        SubElement(domain.find("devices/disk"), "shareable")

    both = Guest.create("both", disks=[Disk("file", "tank/both")], mutate=share)
    try:
        with config(tmp_path, '[defaults]\nram_strategy = "overlay"\n') as env:
            outcome = quiet(snaporch("snapshot", "both", env=env))
            one_line_error(outcome, 5, "vda is shareable", "manual")
        assert snapshot(both)["level"] == "ram"
        assert_clean(both)
    finally:
        both.remove()
