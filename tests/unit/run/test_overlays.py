import os
import subprocess

import pytest

from snaporch.errors import UnavailableError
from snaporch.hypervisor import OverlayDisk
from snaporch.model import Owner
from snaporch.run import overlays
from snaporch.run.overlays import OverlayError

OWNER = Owner(os.getuid(), os.getgid())


def disk(directory, target="vda"):
    return OverlayDisk(target, "/base.img", "file", "raw", str(directory / f"{target}.qcow2"))


@pytest.fixture
def qemu_img(monkeypatch):
    """qemu-img that answers as told."""

    def answers(code=0, out="", err=""):
        monkeypatch.setattr(
            overlays.subprocess,
            "run",
            lambda words, **_: subprocess.CompletedProcess(words, code, out, err),
        )

    return answers


def test_the_directory_is_the_emulators_and_nobody_elses(tmp_path):
    overlays.make_directory(tmp_path / "overlays" / "run", OWNER)
    assert (tmp_path / "overlays").stat().st_mode & 0o777 == 0o711
    assert (tmp_path / "overlays" / "run").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "overlays" / "run").stat().st_uid == OWNER.uid


def test_a_directory_that_cannot_be_made_says_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match="run snaporch as root"):
        overlays.make_directory(tmp_path / "file" / "run", None)


def test_removing_takes_overlays_and_directory(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    disks = [disk(directory), disk(directory, "vdb")]
    (directory / "vda.qcow2").touch()
    overlays.remove(directory, disks)
    assert not directory.exists()
    overlays.remove(directory, disks)


def test_a_foreign_file_is_never_removed(tmp_path):
    (tmp_path / "foreign").touch()
    with pytest.raises(OSError, match="not empty"):
        overlays.remove(tmp_path, [])
    assert (tmp_path / "foreign").exists()


def test_a_host_without_qemu_img(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OverlayError, match="apt install qemu-utils"):
        overlays.make_overlay(disk(tmp_path), 1 << 20, None)


def test_what_qemu_img_says_is_told_on_one_line(qemu_img, tmp_path):
    qemu_img(1, err="qemu-img: Could not write\nNo space left on device\n")
    with pytest.raises(OverlayError) as caught:
        overlays.make_overlay(disk(tmp_path), 1 << 20, None)
    assert str(caught.value).startswith("qemu-img create: ")
    assert "No space left on device" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("regions", "written"),
    [
        ("[]", False),
        ('[{"depth": 1, "present": true}]', False),
        ('[{"depth": 0, "present": false}]', False),
        ('[{"depth": 1}, {"depth": 0}]', True),
        ('[{"depth": 0, "present": true, "zero": true}]', True),
    ],
)
def test_writes_are_what_lies_in_the_top_image(qemu_img, tmp_path, regions, written):
    qemu_img(out=regions)
    assert overlays.holds_writes(tmp_path / "vda.qcow2") is written
