"""Real qemu-img on real images."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from snaporch.hypervisor import OverlayDisk
from snaporch.model import Owner
from snaporch.run import overlays
from snaporch.run.overlays import OverlayError

MIB = 1 << 20


def qemu_io(path, command, form="qcow2"):
    words = ["qemu-io", "-f", form, "-c", command, str(path)]
    done = subprocess.run(words, capture_output=True, check=True, text=True)
    assert "failed" not in done.stdout, done.stdout


def virtual_size(path):
    words = ["qemu-img", "info", "--output=json", str(path)]
    done = subprocess.run(words, capture_output=True, check=True, text=True)
    return json.loads(done.stdout)["virtual-size"]


@pytest.fixture(params=["raw", "qcow2"])
def disk(request, tmp_path):
    """A disk of 8 MiB whose first MiB the guest wrote, and an overlay to be."""
    base = tmp_path / f"base, one.{request.param}"
    subprocess.run(["qemu-img", "create", "-q", "-f", request.param, base, "8M"], check=True)
    qemu_io(base, "write -q -P 0x11 0 1M", request.param)
    overlay = tmp_path / "overlays" / "vda.qcow2"
    overlay.parent.mkdir()
    return OverlayDisk("vda", str(base), "file", request.param, str(overlay))


@pytest.fixture
def overlay(disk):
    overlays.make_overlay(disk, 8 * MIB, Owner(os.getuid(), os.getgid()))
    return disk.overlay


def test_an_overlay_is_private_empty_and_as_large_as_its_disk(disk, overlay):
    status = os.stat(overlay)
    assert status.st_mode & 0o777 == 0o600
    assert (status.st_uid, status.st_gid) == (os.getuid(), os.getgid())
    assert virtual_size(overlay) == 8 * MIB
    assert status.st_blocks * 512 < MIB


def test_the_guest_sees_its_base_through_the_overlay(disk, overlay):
    qemu_io(overlay, "read -q -P 0x11 0 1M")
    qemu_io(overlay, "read -q -P 0 1M 1M")


def test_making_an_overlay_does_not_open_the_base(disk):
    os.unlink(disk.base)
    overlays.make_overlay(disk, 8 * MIB, None)
    assert os.path.exists(disk.overlay)


def test_an_untouched_overlay_holds_no_writes(disk, overlay):
    assert not overlays.holds_writes(overlay)
    qemu_io(overlay, "read -q 0 8M")
    assert not overlays.holds_writes(overlay)


@pytest.mark.parametrize(
    "write",
    [
        "write -q -P 0x22 0 512",
        "write -q -P 0x22 8388096 512",
        "write -q -z 0 64k",
        "discard 0 64k",
    ],
)
def test_any_write_is_seen(disk, overlay, write):
    qemu_io(overlay, write)
    assert overlays.holds_writes(overlay)


def test_writes_come_into_the_base(disk, overlay):
    qemu_io(overlay, "write -q -P 0x22 2M 1M")
    overlays.commit_offline(disk)
    qemu_io(disk.base, "read -q -P 0x11 0 1M", disk.base_format)
    qemu_io(disk.base, "read -q -P 0x22 2M 1M", disk.base_format)
    overlays.commit_offline(disk)  # again is fine


@pytest.mark.parametrize("disk", ["qcow2"], indirect=True)  # of a raw one, qemu-io shares writes
def test_a_base_that_is_in_use_is_not_committed_into(disk, overlay):
    qemu_io(overlay, "write -q -P 0x22 2M 1M")
    with subprocess.Popen(
        ["qemu-io", "-f", disk.base_format, disk.base],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as emulator:
        emulator.stdin.write("length\n")
        emulator.stdin.flush()
        assert "8 MiB" in emulator.stdout.readline()  # it has the image open, and locked
        with pytest.raises(OverlayError, match=r"qemu-img commit: .*lock"):
            overlays.commit_offline(disk)
        emulator.stdin.close()
    assert overlays.holds_writes(overlay)


def test_what_is_no_overlay_is_an_error(disk, tmp_path):
    (tmp_path / "text").write_text("no image")
    broken = OverlayDisk("vda", disk.base, "file", "raw", str(tmp_path / "text"))
    with pytest.raises(OverlayError):
        overlays.commit_offline(broken)
    with pytest.raises(OverlayError):
        overlays.holds_writes(tmp_path / "absent")


def test_an_overlay_that_holds_what_its_base_holds(disk, overlay):
    assert overlays.holds_what_base_holds(disk)
    qemu_io(overlay, "write -q -P 0x22 0 64k")
    assert not overlays.holds_what_base_holds(disk)
    qemu_io(overlay, "write -q -P 0x11 0 64k")
    assert overlays.holds_writes(overlay)
    assert overlays.holds_what_base_holds(disk)


def test_a_committed_overlay_holds_what_its_base_holds(disk, overlay):
    """A block commit copies; it leaves the overlay as it was."""
    qemu_io(overlay, "write -q -P 0x22 1M 64k")
    qemu_io(disk.base, "write -q -P 0x22 1M 64k", disk.base_format)
    assert overlays.holds_writes(overlay)
    assert overlays.holds_what_base_holds(disk)


def test_zeros_that_were_written_over_something_are_a_difference(disk, overlay):
    qemu_io(overlay, "write -q -z 0 64k")
    assert not overlays.holds_what_base_holds(disk)


def test_what_cannot_be_compared_is_not_the_same(disk, overlay):
    Path(overlay).write_bytes(b"no qcow2")
    assert not overlays.holds_what_base_holds(disk)
    os.unlink(overlay)
    assert not overlays.holds_what_base_holds(disk)


def test_without_its_base_nothing_is_the_same(disk, overlay):
    os.unlink(disk.base)
    assert not overlays.holds_what_base_holds(disk)


def test_an_overlay_that_was_set_aside_still_holds_the_writes(disk, overlay, tmp_path):
    qemu_io(overlay, "write -q -P 0x22 0 64k")
    kept = overlays.quarantine(disk, tmp_path / "quarantine" / "run")
    assert not os.path.exists(overlay)
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    qemu_io(kept, "read -q -P 0x22 0 64k")
    qemu_io(kept, "read -q -P 0x11 64k 64k")
