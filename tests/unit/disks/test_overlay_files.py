import errno
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from fakes.images import qcow2

from snaporch.disks import overlay_files
from snaporch.disks.image_layers import given_to
from snaporch.disks.qemu_img import OverlayError
from snaporch.disks.qemu_img import qemu_img as qemu_img_command
from snaporch.errors import UnavailableError
from snaporch.hypervisor import OverlayDisk
from snaporch.model import Owner

OWNER = Owner(os.getuid(), os.getgid())


def disk(directory, target="vda"):
    return OverlayDisk(target, "/base.img", "file", "raw", str(directory / f"{target}.qcow2"))


@pytest.fixture
def qemu_img(monkeypatch, tmp_path_factory):
    """Installs a qemu-img with the given answer."""
    programs = tmp_path_factory.mktemp("bin")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    def answers(code=0, out="", err=""):
        (programs / "out").write_text(out)
        (programs / "err").write_text(err)
        program = programs / "qemu-img"
        program.write_text(f"#!/bin/sh\ncat {programs}/out\ncat {programs}/err >&2\nexit {code}\n")
        program.chmod(0o755)

    return answers


def test_the_emulators_user_can_pass_through_the_directory_and_do_nothing_else(tmp_path):
    overlay_files.make_directory(tmp_path / "overlays" / "run")
    for directory in (tmp_path / "overlays", tmp_path / "overlays" / "run"):
        assert directory.stat().st_mode & 0o777 == 0o711
        assert directory.stat().st_uid == os.getuid()


@pytest.mark.parametrize("plant", ["link", "dangling link", "file"])
def test_a_file_in_the_place_of_an_overlay_is_not_touched(qemu_img, tmp_path, plant):
    qemu_img()
    precious, place = tmp_path / "precious", tmp_path / "vda.qcow2"
    if plant != "dangling link":
        precious.write_text("not the guest's")
    if plant == "file":
        place.write_text("another user's")
    else:
        place.symlink_to(precious)
    with pytest.raises(FileExistsError):
        overlay_files.make_overlay(disk(tmp_path), 1 << 20, OWNER)
    assert os.path.lexists(place)
    assert precious.exists() == (plant != "dangling link")
    if precious.exists():
        assert precious.read_text() == "not the guest's"


def test_an_overlay_that_cannot_be_made_is_not_left(qemu_img, tmp_path):
    qemu_img(1, err="No space left on device")
    with pytest.raises(OverlayError):
        overlay_files.make_overlay(disk(tmp_path), 1 << 20, None)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_made_is_reported_with_the_next_step(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match="run snaporch as root"):
        overlay_files.make_directory(tmp_path / "file" / "run")


def test_removing_takes_overlays_and_directory(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    disks = [disk(directory), disk(directory, "vdb")]
    (directory / "vda.qcow2").touch()
    overlay_files.remove(directory, disks)
    assert not directory.exists()
    overlay_files.remove(directory, disks)


def test_a_foreign_file_is_never_removed(tmp_path):
    (tmp_path / "foreign").touch()
    with pytest.raises(OSError, match="not empty"):
        overlay_files.remove(tmp_path, [])
    assert (tmp_path / "foreign").exists()


def test_an_overlay_is_in_quarantine_on_stable_storage(tmp_path, to_disk):
    """What it holds is nowhere else, and its journal is deleted next."""
    overlay, place = disk(tmp_path), tmp_path / "quarantine" / "run"
    Path(overlay.overlay).write_bytes(b"the guest's last writes")
    assert overlay_files.quarantine(overlay, place) == place / "vda.qcow2"
    assert (place / "vda.qcow2").read_bytes() == b"the guest's last writes"
    assert to_disk == ["vda.qcow2 -> vda.qcow2", "run"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_qemu_img_runs_as_the_emulators_user_and_without_privileges(monkeypatch):
    with TemporaryDirectory() as programs:  # others can pass through, unlike pytest's
        os.chmod(programs, 0o755)
        program = Path(programs, "qemu-img")
        program.write_text("#!/bin/sh\nid -u; id -g; id -G\ncat /proc/self/status\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        _, said = qemu_img_command("map", owner=Owner(64055, 64056))
    user, group, groups, *status = said.splitlines()
    assert (user, group, groups) == ("64055", "64056", "64056")
    known = dict(line.split(":\t", 1) for line in status if ":\t" in line)
    assert known["NoNewPrivs"] == "1"
    assert {int(known[f"Cap{each}"], 16) for each in ("Prm", "Eff", "Bnd")} == {0}


def test_a_host_without_qemu_img(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OverlayError, match="apt install qemu-utils"):
        overlay_files.make_overlay(disk(tmp_path), 1 << 20, None)


def test_the_output_of_qemu_img_is_reported_on_one_line(qemu_img, tmp_path):
    qemu_img(1, err="qemu-img: Could not write\nNo space left on device\n")
    with pytest.raises(OverlayError) as caught:
        overlay_files.make_overlay(disk(tmp_path), 1 << 20, None)
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
def test_writes_are_the_data_of_the_top_image(qemu_img, tmp_path, regions, written):
    qemu_img(out=regions)
    base = tmp_path / "base.img"
    base.touch()
    os.truncate(base, 1 << 20)
    overlay = replace(disk(tmp_path), base=str(base))
    Path(overlay.overlay).write_bytes(qcow2(overlay.base, overlay.base_format))
    assert overlay_files.holds_writes(overlay, None) is written


def test_an_overlay_that_names_another_base_may_hold_writes(qemu_img, tmp_path):
    """Its header was changed, by the emulator or by a commit that believed it."""
    qemu_img(out="[]")
    overlay = disk(tmp_path)
    Path(overlay.overlay).write_bytes(qcow2("/root/victim", overlay.base_format))
    with pytest.raises(OverlayError, match="names /root/victim"):
        overlay_files.holds_writes(overlay, None)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_layer_below_the_base_may_refuse_a_new_owner(monkeypatch, tmp_path, kept):
    """A template on a read-only dataset, or on a server that knows no root."""
    given = []

    def give(descriptor, uid, gid):
        layer = int(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        if layer == kept:
            raise OSError(errno.EROFS, "Read-only file system")
        given.append(layer)

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "fchown", give)
    layers = []
    for layer in range(3):
        (tmp_path / str(layer)).touch()
        layers.append((tmp_path / str(layer)).open())
    lending = given_to(
        SimpleNamespace(descriptors=tuple(each.fileno() for each in layers)), Owner(7, 7)
    )
    with pytest.raises(OSError, match="Read-only") if kept < 2 else lending:
        lending.__enter__() if kept < 2 else None
    assert sorted(given) == [0, 0, 1, 1][: 2 * kept]
    for each in layers:
        each.close()


def test_the_processes_with_a_file_open_are_found_by_its_number(tmp_path):
    (tmp_path / "vda.qcow2").touch()
    (tmp_path / "vdb.qcow2").touch()
    with (tmp_path / "vda.qcow2").open():
        assert overlay_files.open_somewhere([tmp_path / "vda.qcow2"]) == os.getpid()
        assert overlay_files.open_somewhere([tmp_path / "vdb.qcow2"]) is None
    assert overlay_files.open_somewhere([tmp_path / "vda.qcow2"]) is None


def test_files_with_another_name_are_not_accessed(tmp_path, monkeypatch):
    """On a dead mount, stat(2) never returns."""
    overlay, other = tmp_path / "vda.qcow2", tmp_path / "other"
    overlay.touch()
    asked, real = [], os.stat

    def stat(path, **options):
        asked.append(os.path.realpath(path))
        return real(path, **options)

    with other.open("w"):
        monkeypatch.setattr(os, "stat", stat)
        assert overlay_files.open_somewhere([overlay]) is None
    assert str(other) not in asked
