"""The lab is confined as hosts are, and the tests detect what is left or denied in it."""

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import aftermath
import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import assert_confined, config, must, run, snaporch


@pytest.fixture(scope="module")
def guest():
    disks = [Disk("file", "tank/confined"), Disk("zvol", "flash/confined")]
    made = Guest.create("confined", disks=disks)
    yield made
    made.remove()


def emulator(guest):
    return Path("/proc") / Path(f"/run/libvirt/qemu/{guest.name}.pid").read_text().strip()


def profile_lines(guest):
    uuid = must("virsh", "domuuid", guest.name).strip()
    return Path(f"/etc/apparmor.d/libvirt/libvirt-{uuid}.files").read_text().splitlines()


def test_the_emulator_is_as_confined_as_on_a_host(guest):
    assert_confined(guest)


@pytest.mark.daily(1)
@pytest.mark.parametrize("capture", ["stream", "file"])
@pytest.mark.parametrize("way", ["overlay", "manual"])
def test_the_profile_stays_as_small_as_it_was(guest, tmp_path, way, capture):
    """`overlay` leaves no line. `manual` leaves one, the same each time, which libvirt repeats."""
    text = f'[defaults]\nram_strategy = "{way}"\nram_capture = "{capture}"\n'
    with config(tmp_path, text) as environment:
        first, *_, last = (profile_after(guest, env=environment) for _ in range(5))
    repeated = [] if way == "overlay" else first[-1:] * 4
    assert last == first + repeated
    assert way == "manual" or not [line for line in last if "snaporch/" in line]


@pytest.mark.parametrize("level", ["paused", "crash"])
def test_the_profile_does_not_change_without_ram(guest, level):
    before = profile_lines(guest)
    assert profile_after(guest, "--level", level) == before


def profile_after(guest, *options, env=None):
    """The lines after a snapshot."""
    outcome = snaporch("snapshot", guest.name, "--quiet", *options, env=env)
    assert outcome.status == 0, outcome.err
    return profile_lines(guest)


def test_a_snapshot_can_go_though_a_guest_was_started_while_it_was_mounted(guest):
    must("zfs", "snapshot", "tank/confined@looked-into")
    os.listdir("/tank/confined/.zfs/snapshot/looked-into")
    guest.destroy()
    guest.start()
    assert "@looked-into" in (emulator(guest) / "mountinfo").read_text()
    must("zfs", "destroy", "tank/confined@looked-into")
    assert "@looked-into" not in (emulator(guest) / "mountinfo").read_text()


@contextmanager
def an_orphan(tmp_path):
    gone = tmp_path / "pid"
    must("sh", "-c", f"sleep 1000 >/dev/null 2>&1 & echo $! >{gone}")
    yield "sleep: sleep 1000"
    must("kill", gone.read_text().strip())


@contextmanager
def a_mount(tmp_path):
    must("mount", "-t", "tmpfs", "tmpfs", str(tmp_path))
    yield f"mount {tmp_path} of tmpfs"
    must("umount", str(tmp_path))


@contextmanager
def a_loop_device(tmp_path):
    image = tmp_path / "image"
    image.write_bytes(bytes(1 << 20))
    device = must("losetup", "--show", "--find", str(image)).strip()
    yield f"loop device {Path(device).name}"
    must("losetup", "--detach", device)


@contextmanager
def a_volume(_tmp_path):
    must("zfs", "create", "-V", "1M", "tank/left")
    yield "volume tank/left, cloned from -"
    must("udevadm", "settle")
    must("zfs", "destroy", "tank/left")


@contextmanager
def a_held_clone(_tmp_path):
    must("zfs", "snapshot", "tank/confined@held")
    must("zfs", "hold", "tag", "tank/confined@held")
    must("zfs", "clone", "tank/confined@held", "tank/cloned")
    yield "filesystem tank/cloned, cloned from tank/confined@held"
    assert "held snapshot tank/confined@held tag" in aftermath.snapshot_listing()
    must("zfs", "destroy", "tank/cloned")
    must("zfs", "release", "tag", "tank/confined@held")
    must("zfs", "destroy", "tank/confined@held")


def apparmor(action, profile):
    subprocess.run(
        ["apparmor_parser", action], input=f"profile {profile} {{}}", text=True, check=True
    )


@contextmanager
def a_profile(_tmp_path):
    apparmor("--add", "left")
    yield "AppArmor profile left (enforce)"
    apparmor("--remove", "left")


@contextmanager
def a_file(_tmp_path):
    path = Path("/run/snaporch/left.ram")
    path.touch()
    yield f"file {path}"
    path.unlink()


@pytest.mark.parametrize(
    "left",
    [
        an_orphan,
        a_mount,
        a_loop_device,
        a_volume,
        a_held_clone,
        a_profile,
        a_file,
    ],
)
def test_what_is_left_is_seen(guest, tmp_path, left):
    before = aftermath.snapshot_listing()
    with left(tmp_path) as line:
        assert [each for each in aftermath.snapshot_listing() - before if each.endswith(line)]
    assert aftermath.left(before) == []


def test_what_is_denied_is_seen():
    apparmor("--add", "control")
    outcome = run("aa-exec", "--profile", "control", "cat", "/etc/hostname")
    apparmor("--remove", "control")
    assert outcome.status != 0
    assert [line for line in aftermath.denied({}) if 'profile="control"' in line]
    assert aftermath.denied() == []
