"""A host that lost its power in a run: what libvirt starts at boot, by hand, and what it does not.

Power is lost as libvirt sees it: no QEMU, no libvirtd, and nothing of theirs in /run. Definitions,
disks and journals stay; so does the file that AppArmor's profile of the guest was made of.
"""

import os
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
from faults.oracle import assert_no_loss, look
from faults.process import Run
from guests.disks import Disk
from guests.guest import Guest
from support import (
    CONFIG,
    OVERLAYS,
    assert_clean,
    assert_confined,
    must,
    one_line_error,
    run,
    snaporch,
    snapshot,
    wait_for,
)

SERIAL = Path("/var/log/snaporch-guests/booted.serial")
HOOK = Path("/etc/libvirt/hooks/qemu.d/snaporch")
CALLED = Path("/run/snaporch-hook")
LIBVIRTD = ("libvirtd.service", "libvirtd.socket", "libvirtd-ro.socket", "libvirtd-admin.socket")
ON_OVERLAYS = "before:release"
ABOUT_TO_PIVOT = "past:pivoting"
UNDECIDED = "either may be the newer"
_BESIDE_THE_COUNTS = 32 << 10
"""A probe counts in the first KiB of a disk, and a cluster is of 64."""


@pytest.fixture(scope="module")
def guest():
    CONFIG.parent.mkdir(exist_ok=True)
    disks = [Disk("file", "tank/booted"), Disk("zvol", "flash/booted")]
    made = Guest.create("booted", disks=disks)
    assert snaporch("install").status == 0
    CONFIG.write_text('[defaults]\nram_strategy = "overlay"\n')
    must("systemctl", "daemon-reload")
    must("virsh", "autostart", made.name)
    yield made
    made.remove()
    must("snaporch", "uninstall")
    CONFIG.unlink()


@pytest.fixture
def running(guest):
    if guest.state() == "shut off":
        guest.start()
    guest.wait_count()
    return guest


def end(pid_file):
    """SIGKILL, and wait until there is no such process."""
    process = os.pidfd_open(int(pid_file.read_text()))
    signal.pidfd_send_signal(process, signal.SIGKILL)
    os.close(process)


def lose_power(guest, point):
    """In a snapshot at ``point``; what the guest had reported."""
    mark = guest.mark()
    guest.wait_count()
    under_way = Run("snapshot", guest.name, "--quiet", point=point, guarded=False)
    try:
        under_way.wait_stopped()
        before = look(guest, mark)
    finally:
        under_way.kill()
        under_way.close()
    cut_off(guest)
    return before


def cut_off(guest):
    uuid = must("virsh", "domuuid", guest.name).strip()
    must("systemctl", "stop", *LIBVIRTD)
    state = Path("/run/libvirt/qemu")
    end(state / f"{guest.name}.pid")
    process = f"libvirt-{uuid}"
    wait_for(lambda: process not in must("ps", "-eo", "label"), "the end of QEMU")
    for path in [*state.glob("*.xml"), *state.glob("*.pid"), state / "autostarted", CALLED]:
        path.unlink(missing_ok=True)
    must("apparmor_parser", "--remove", f"/etc/apparmor.d/libvirt/{process}")
    for path in [*(image.path for image in guest.images), *OVERLAYS.glob("*/*"), SERIAL]:
        forget_owner(path)


def forget_owner(path):
    """Whose a file was before a guest had it: libvirt does, of what it noted before a boot."""
    for name in os.listxattr(path):
        if name.startswith("trusted.libvirt.security."):
            os.removexattr(path, name)


def boot():
    """As far as libvirtd goes: it answers when it has started what it starts."""
    must("systemctl", "start", *reversed(LIBVIRTD))
    must("virsh", "list")


def write_after_the_pivot(guest):
    """To the base, and in a cluster that the overlay has too: now the two differ."""
    base = next(image for image in guest.images if not image.is_block)
    with base.path.open("r+b") as stream:
        stream.seek(_BESIDE_THE_COUNTS)
        stream.write(b"later")


def is_on_overlays(guest):
    return all(name.startswith(str(OVERLAYS)) for name in guest.sources(inactive=True).values())


def assert_refuses_to_start(guest):
    outcome = run("virsh", "start", guest.name)
    assert outcome.status == 1, outcome
    assert "run: snaporch recover" in outcome.err, outcome.err
    assert guest.state() == "shut off"


def assert_booted_with(guest, mark, before):
    """It found at its start all it had reported."""
    guest.wait_count()
    (cold,) = guest.cold_boots_since(mark)
    assert all(cold[disk] >= had for disk, had in enumerate(before.counts)), (cold, before)


@contextmanager
def unguarded():
    """libvirt without the hook: it is moved to a path that libvirt does not read."""
    aside = HOOK.parents[1] / "aside"
    HOOK.rename(aside)
    try:
        yield
    finally:
        aside.rename(HOOK)


@pytest.mark.daily(1, "long")
def test_the_hook_is_seen_and_called(running):
    assert_confined(running)
    assert CALLED.exists()
    assert "unguarded-start" not in snaporch("check", "--json").out
    with unguarded():
        assert "unguarded-start" in snaporch("check", "--json").out
        outcome = snaporch("snapshot", running.name)
        assert f"{HOOK} does not exist; run: snaporch install" in outcome.err
    CALLED.unlink()
    outcome = snaporch("snapshot", running.name)
    assert f"libvirt has not loaded {HOOK} yet" in outcome.err
    must("systemctl", "restart", "libvirtd")
    must("virsh", "list")
    outcome = snaporch("snapshot", running.name)
    assert (outcome.status, "overlays:" in outcome.err) == (0, False), outcome.err
    assert_clean(running)


def test_libvirt_starts_it_at_boot_only_when_it_was_recovered(running):
    before = lose_power(running, ON_OVERLAYS)
    mark = running.mark()
    boot()
    assert running.state() == "shut off"
    assert is_on_overlays(running)
    assert_refuses_to_start(running)
    outcome = run("systemctl", "start", "snaporch-recover.service")
    assert outcome.status == 0, run("journalctl", "-u", "snaporch-recover").out
    assert_clean(running)
    assert_booted_with(running, mark, before)
    snapshot(running)


def test_one_that_is_undecided_is_not_started_by_hand_either(running):
    before = lose_power(running, ABOUT_TO_PIVOT)
    write_after_the_pivot(running)
    boot()
    for _ in range(2):
        assert_refuses_to_start(running)
        one_line_error(snaporch("recover", "--quiet"), 9, UNDECIDED)
    assert snaporch("recover", running.name, "--take", "overlay").status == 0
    assert_clean(running, "shut off")
    assert_no_loss(running, before)


def test_ram_that_libvirt_saved_in_the_window_is_resumed_on_the_bases(running):
    mark = running.mark()
    under_way = Run("snapshot", running.name, "--quiet", point=ON_OVERLAYS, guarded=False)
    try:
        under_way.wait_stopped()
        must("virsh", "managedsave", running.name)
    finally:
        under_way.kill()
        under_way.close()
    assert_refuses_to_start(running)
    outcome = snaporch("recover")
    assert outcome.status == 0, outcome.err
    running.start(wait=False)
    running.wait_count()
    assert_clean(running)
    assert not running.cold_boots_since(mark)
    assert not running.bad_since(mark)


def test_without_the_hook_apparmor_is_named_and_the_way_out_works(running):
    with unguarded():
        before = lose_power(running, ON_OVERLAYS)
        mark = running.mark()
        boot()
        assert running.state() == "running"
        assert is_on_overlays(running)
        assert_booted_with(running, mark, before)
        before = look(running, mark)
        words = ("AppArmor denies", "shut it off, recover it, then start it")
        one_line_error(snaporch("recover", "--quiet"), 9, *words)
        running.destroy()
        assert snaporch("recover").status == 0
        assert_clean(running, "shut off")
        assert_no_loss(running, before)
        running.start()
    snapshot(running)
    assert_clean(running)


@pytest.mark.daily(1, "long")
def test_without_the_hook_one_that_is_undecided_is_not_committed_while_it_runs(running):
    with unguarded():
        lose_power(running, ABOUT_TO_PIVOT)
        write_after_the_pivot(running)
        boot()
        assert running.state() == "running"
        one_line_error(snaporch("recover", "--quiet"), 9, UNDECIDED, "shut it off")
        running.destroy()
        assert snaporch("recover", running.name, "--take", "overlay").status == 0
    assert_clean(running, "shut off")
