"""systemd stops what it stops when the host shuts down, in its order, in the middle of a run."""

from pathlib import Path

import pytest
from faults.process import Run
from guests.disks import Disk
from guests.guest import Guest
from support import JOURNAL, assert_clean, config, must, one_line_error, run, snaporch, wait_for

pytestmark = pytest.mark.timeout(300)
UNIT = Path("/run/systemd/system/libvirt-guests.service")
SAVES = """
[Unit]
After=libvirtd.service
[Service]
Type=oneshot
RemainAfterExit=yes
TimeoutStopSec=0
ExecStart=/bin/true
ExecStop=/usr/bin/virsh managedsave halted
"""
"""libvirt-guests as it is after ON_SHUTDOWN=suspend, for one guest."""


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("halted", disks=[Disk("file", "tank/halted"), Disk("zvol", "flash/halted")])
    UNIT.unlink()  # the lab masks it
    UNIT.write_text(SAVES)
    must("systemctl", "daemon-reload")
    yield made
    made.remove()


def show(unit, name):
    return must("systemctl", "show", "-P", name, unit).strip()


@pytest.fixture
def overlays(tmp_path):
    """An environment in which a run takes overlays."""
    with config(tmp_path, '[defaults]\nram_strategy = "overlay"\n') as environment:
        yield environment


def test_uninstall_waits_for_recovery_and_leaves_nothing(guest, overlays):
    place = Path("/etc/systemd/system")
    assert snaporch("install").status == 0
    must("systemctl", "daemon-reload")
    must("systemctl", "enable", "--now", "snaporch-recover", "snaporch")
    words = ("snapshot", guest.name, "--quiet")
    under_way = Run(*words, point="before:release", guarded=False, env=overlays)
    try:
        under_way.wait_stopped()
        one_line_error(snaporch("uninstall"), 5, "its guest may be on overlays", "snaporch recover")
    finally:
        under_way.kill()
        under_way.close()
    one_line_error(snaporch("uninstall"), 5, "its guest may be on overlays", "snaporch recover")
    assert show("snaporch", "ActiveState") == "active"
    assert snaporch("recover").status == 0
    outcome = snaporch("uninstall")
    assert outcome.status == 0, outcome.err
    assert show("snaporch", "ActiveState") == "inactive"
    assert [path for path in place.rglob("snaporch*") if not path.name.endswith(".d")] == []
    assert_clean(guest)


@pytest.mark.parametrize("end", ["SIGCONT", "SIGKILL"])
def test_libvirt_guests_saves_a_guest_that_is_back_on_its_bases(guest, end, overlays):
    """Whether the run, started by hand, goes on or is killed: its guardian is waited for."""
    must("systemctl", "start", "libvirt-guests")
    mark = guest.mark()
    guest.wait_count()
    under_way = Run("snapshot", guest.name, "--quiet", point="before:release", env=overlays)
    try:
        under_way.wait_stopped()
        (journal,) = JOURNAL.glob("*.jsonl")
        guardian = f"snaporch-guardian-{journal.stem}.service"
        assert show(guardian, "KillMode") == "mixed"
        must("systemctl", "stop", "--no-block", guardian, "libvirt-guests")
        wait_for(lambda: show(guardian, "ActiveState") == "deactivating", "SIGTERM")
        assert show("libvirt-guests", "ActiveState") == "active"
        assert guest.state() == "running"
        if end == "SIGCONT":
            under_way.go_on()
            assert under_way.wait().status == 0, under_way.outcome()
        else:
            under_way.kill()
    finally:
        under_way.kill()
        under_way.close()
    wait_for(lambda: show("libvirt-guests", "ActiveState") != "active", "libvirt-guests", 200)
    wait_for(lambda: show("libvirt-guests", "Job") in ("", "0"), "its end", 200)
    assert show("libvirt-guests", "Result") == "success", run("journalctl", "-n", "99").out
    assert_clean(guest, "shut off")
    guest.start(wait=False)
    guest.wait_count()
    assert not guest.cold_boots_since(mark)
    assert not guest.bad_since(mark)
    assert snaporch("recover").status == 0
