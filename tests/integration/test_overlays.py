"""Real qemu-img on real images."""

import json
import os
import stat
import struct
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import hostile

from snaporch.disks import overlay_files
from snaporch.disks.qemu_img import OverlayError
from snaporch.hypervisor import BackingImage, OverlayDisk
from snaporch.model import Owner

MIB = 1 << 20
OWNER = Owner(64055, 64055) if os.getuid() == 0 else Owner(os.getuid(), os.getgid())
"""The emulator's user; another than root's wherever it can be."""


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
    overlay_files.make_overlay(disk, 8 * MIB, OWNER)
    return disk.overlay


def test_an_overlay_is_private_empty_and_as_large_as_its_disk(disk, overlay):
    status = os.stat(overlay)
    assert status.st_mode & 0o777 == 0o600
    assert Owner(status.st_uid, status.st_gid) == OWNER
    assert virtual_size(overlay) == 8 * MIB
    assert status.st_blocks * 512 < MIB


def test_the_guest_sees_its_base_through_the_overlay(disk, overlay):
    qemu_io(overlay, "read -q -P 0x11 0 1M")
    qemu_io(overlay, "read -q -P 0 1M 1M")


def test_making_an_overlay_does_not_open_the_base(disk):
    os.unlink(disk.base)
    overlay_files.make_overlay(disk, 8 * MIB, OWNER)
    assert os.path.exists(disk.overlay)


def test_an_untouched_overlay_holds_no_writes(disk, overlay):
    assert not overlay_files.holds_writes(disk, OWNER)
    qemu_io(overlay, "read -q 0 8M")
    assert not overlay_files.holds_writes(disk, OWNER)


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
    assert overlay_files.holds_writes(disk, OWNER)


def test_writes_come_into_the_base(disk, overlay):
    qemu_io(overlay, "write -q -P 0x22 2M 1M")
    overlay_files.commit_offline(disk, OWNER)
    qemu_io(disk.base, "read -q -P 0x11 0 1M", disk.base_format)
    qemu_io(disk.base, "read -q -P 0x22 2M 1M", disk.base_format)
    overlay_files.commit_offline(disk, OWNER)  # a second commit is no error


@pytest.mark.parametrize("disk", ["qcow2"], indirect=True)  # qemu-io does not lock raw images
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
            overlay_files.commit_offline(disk, OWNER)
        emulator.stdin.close()
    assert overlay_files.holds_writes(disk, OWNER)


def test_a_file_that_is_not_an_overlay_is_an_error(disk, tmp_path):
    (tmp_path / "text").write_text("no image")
    broken = OverlayDisk("vda", disk.base, "file", "raw", str(tmp_path / "text"))
    with pytest.raises(OverlayError):
        overlay_files.commit_offline(broken, OWNER)
    with pytest.raises(OverlayError):
        overlay_files.holds_writes(replace(disk, overlay=str(tmp_path / "absent")), OWNER)


def test_an_overlay_of_another_size_may_hold_writes_beyond_its_end(disk, overlay):
    qemu_io(overlay, "write -q -P 0x22 1M 64k")
    Path(overlay).write_bytes(hostile.forged("size-less", Path(overlay).read_bytes(), Path("/x")))
    with pytest.raises(OverlayError, match=f"has 512 bytes, but its base has {8 << 20}"):
        overlay_files.holds_writes(disk, OWNER)


def test_an_overlay_that_holds_what_its_base_holds(disk, overlay):
    assert overlay_files.holds_what_base_holds(disk, OWNER)
    qemu_io(overlay, "write -q -P 0x22 0 64k")
    assert not overlay_files.holds_what_base_holds(disk, OWNER)
    qemu_io(overlay, "write -q -P 0x11 0 64k")
    assert overlay_files.holds_writes(disk, OWNER)
    assert overlay_files.holds_what_base_holds(disk, OWNER)


def test_a_committed_overlay_holds_what_its_base_holds(disk, overlay):
    """A block commit copies; it leaves the overlay as it was."""
    qemu_io(overlay, "write -q -P 0x22 1M 64k")
    qemu_io(disk.base, "write -q -P 0x22 1M 64k", disk.base_format)
    assert overlay_files.holds_writes(disk, OWNER)
    assert overlay_files.holds_what_base_holds(disk, OWNER)


def test_zeros_that_were_written_over_something_are_a_difference(disk, overlay):
    qemu_io(overlay, "write -q -z 0 64k")
    assert not overlay_files.holds_what_base_holds(disk, OWNER)


def test_images_that_cannot_be_compared_are_not_the_same(disk, overlay):
    Path(overlay).write_bytes(b"no qcow2")
    assert not overlay_files.holds_what_base_holds(disk, OWNER)
    os.unlink(overlay)
    assert not overlay_files.holds_what_base_holds(disk, OWNER)


def test_an_overlay_without_its_base_is_not_the_same(disk, overlay):
    os.unlink(disk.base)
    assert not overlay_files.holds_what_base_holds(disk, OWNER)


def test_a_quarantined_overlay_still_holds_the_writes(disk, overlay, tmp_path):
    qemu_io(overlay, "write -q -P 0x22 0 64k")
    kept = overlay_files.quarantine(disk, tmp_path / "quarantine" / "run")
    assert not os.path.exists(overlay)
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    qemu_io(kept, "read -q -P 0x22 0 64k")
    qemu_io(kept, "read -q -P 0x11 64k 64k")


# -- what an emulator may have made of its overlay ----------------------------------------------


@pytest.fixture
def precious(tmp_path):
    """A file of root's that does not belong to the guest, as large as its disk."""
    path = tmp_path / "precious"
    path.write_bytes(b"p" * 8 * MIB)
    path.chmod(0o600)
    return path


def rewritten(*options):
    """The emulator rewrites the header by qemu-img's own means."""

    def forge(overlay, precious):
        words = [option.format(precious=precious) for option in options]
        subprocess.run(["qemu-img", *words, overlay], check=True, capture_output=True)

    return forge


def with_data_file(overlay, precious):
    """Put the clusters into another file: by the feature bit, and the extension with its name."""
    with open(overlay, "r+b") as image:
        data = bytearray(image.read(1 << 16))
        struct.pack_into(">Q", data, 72, 1 << 2)
        offset, length = struct.unpack_from(">QI", data, 8)
        (begin,) = struct.unpack_from(">I", data, 100)
        name = str(precious).encode()
        backing = bytes(data[offset : offset + length])
        formed = bytes(data[begin : begin + 16])
        extension = struct.pack(">II", 0x44415441, len(name)) + name.ljust(-(-len(name) // 8) * 8)
        data[begin:4096] = (formed + extension).ljust(4096 - begin, b"\0")
        data[4096 : 4096 + length] = backing
        struct.pack_into(">Q", data, 8, 4096)
        image.seek(0)
        image.write(data)


def as_a_link(overlay, precious):
    """A link to a valid overlay."""
    elsewhere = precious.with_name("elsewhere.qcow2")
    os.rename(overlay, elsewhere)
    os.symlink(elsewhere, overlay)


def as_another_name(overlay, precious):
    os.link(overlay, precious.with_name("elsewhere.qcow2"))


def as_a_fifo(overlay, precious):
    os.unlink(overlay)
    os.mkfifo(overlay)


def as_a_giant(overlay, precious):
    with open(overlay, "r+b") as image:
        image.seek(24)
        image.write(struct.pack(">Q", 1 << 60))


HOSTILE = {
    "another backing file": rewritten(
        "rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", "{precious}"
    ),
    "another backing format": rewritten("rebase", "-u", "-f", "qcow2", "-F", "vmdk", "-b", "/x"),
    "no backing file": rewritten("rebase", "-u", "-f", "qcow2", "-b", ""),
    "data file": with_data_file,
    "link": as_a_link,
    "hard link": as_another_name,
    "fifo": as_a_fifo,
    "giant": as_a_giant,
}


@pytest.mark.parametrize("forge", HOSTILE.values(), ids=HOSTILE)
def test_an_overlay_that_its_emulator_rewrote_leads_to_no_other_file(
    disk, overlay, precious, forge
):
    qemu_io(overlay, "write -q -P 0x22 2M 1M")
    before = Path(disk.base).read_bytes(), precious.read_bytes(), os.lstat(disk.base)
    forge(overlay, precious)
    with pytest.raises(OverlayError, match="nothing was changed"):
        overlay_files.commit_offline(disk, OWNER)
    assert not overlay_files.holds_what_base_holds(disk, OWNER)
    with suppress(OverlayError):
        assert overlay_files.holds_writes(disk, OWNER)
    assert (Path(disk.base).read_bytes(), precious.read_bytes()) == before[:2]
    assert stat.S_IMODE(precious.stat().st_mode) == 0o600
    assert precious.stat().st_uid == os.getuid()
    assert Path(disk.base).stat().st_uid == before[2].st_uid


def test_images_belong_to_the_emulators_user_only_while_qemu_img_runs(disk, overlay, tmp_path):
    tmp_path.chmod(0o700)
    os.chmod(disk.base, 0o600)
    qemu_io(overlay, "write -q -P 0x22 2M 1M")
    os.chown(overlay, os.getuid(), os.getgid())  # as libvirt leaves it when its guest ends
    overlay_files.commit_offline(disk, OWNER)
    qemu_io(disk.base, "read -q -P 0x22 2M 1M", disk.base_format)
    assert {os.stat(path).st_uid for path in (disk.base, overlay)} == {os.getuid()}


def test_a_base_with_a_backing_chain_is_committed_into_as_journalled(tmp_path):
    golden, base = tmp_path / "golden.raw", tmp_path / "base.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "raw", golden, "8M"], check=True)
    qemu_io(golden, "write -q -P 0x33 0 8M", "raw")
    create = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", "golden.raw", base]
    subprocess.run(create, check=True, cwd=tmp_path)  # a relative name
    disk = OverlayDisk("vda", str(base), "file", "qcow2", str(tmp_path / "vda.qcow2"))
    overlay_files.make_overlay(disk, 8 * MIB, OWNER)
    qemu_io(disk.overlay, "write -q -P 0x22 2M 1M")
    with pytest.raises(OverlayError, match=r"golden\.raw as its backing file"):
        overlay_files.commit_offline(disk, OWNER)
    known = replace(disk, below=(BackingImage(str(golden), "file", "raw"),))
    assert not overlay_files.holds_what_base_holds(known, OWNER)
    overlay_files.commit_offline(known, OWNER)
    qemu_io(base, "read -q -P 0x33 0 2M")
    qemu_io(base, "read -q -P 0x22 2M 1M")
    qemu_io(golden, "read -q -P 0x33 0 8M", "raw")


@pytest.mark.parametrize("disk", ["raw"], indirect=True)
@pytest.mark.parametrize("name", hostile.HEADERS)
def test_a_forged_header_is_refused_and_touches_nothing(disk, overlay, tmp_path, name):
    canary = tmp_path / "canary"
    canary.write_bytes(hostile.MARKER * 1000)
    canary.chmod(0o600)
    qemu_io(overlay, "write -q -P 0x22 0 64k")
    Path(overlay).write_bytes(hostile.forged(name, Path(overlay).read_bytes(), canary))
    before = hostile.look([Path(disk.base), canary], [tmp_path])
    with suppress(OverlayError):
        overlay_files.holds_writes(disk, OWNER)
    assert not overlay_files.holds_what_base_holds(disk, OWNER)
    with pytest.raises(OverlayError):
        overlay_files.commit_offline(disk, OWNER)
    assert hostile.look([Path(disk.base), canary], [tmp_path]) == before
