"""libvirt's qemu hook, called as libvirt calls it, and the check that it is installed."""

import os
import subprocess
import time
from pathlib import Path
from xml.sax.saxutils import escape

import pytest
from fakes.domain_xml import DiskSpec, domain_xml

from snaporch import default_paths
from snaporch.data_files import shared_file
from snaporch.default_paths import HostPaths
from snaporch.hypervisor.start_hook_check import SOURCE, find_hook_problem
from snaporch.snapshot.plan import make_plan

UUID = "7f1c0d4e-4f7d-4a6e-9d0a-0d7c5a1b2c3d"
MARK = "/run/snaporch-hook"
FENCES = str(default_paths.FENCES)
OTHERS = ("start", "started", "stopped", "release", "migrate", "restore", "reconnect", "attach")


@pytest.fixture
def installed(tmp_path):
    """The hook, with its mark in a directory of the test."""
    path = tmp_path / "hook"
    text = shared_file(SOURCE).read_text()
    assert MARK in text
    assert FENCES in text
    (tmp_path / "fences").mkdir()
    text = text.replace(FENCES, str(tmp_path / "fences"))
    path.write_text(text.replace(MARK, str(tmp_path / "mark")))
    path.chmod(0o755)
    return path


@pytest.fixture
def call(installed):
    def run(path, operation="prepare", name="web"):
        xml = domain_xml(name, UUID, [DiskSpec("vda", "/tank/a.img"), DiskSpec("vdb", str(path))])
        xml = xml.replace('"', "'")  # as libvirt writes it
        return subprocess.run(
            [installed, name, operation, "begin", "-"],
            input=xml,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture
def overlay(world):
    plan = make_plan(world.with_defaults(), world.add_guest())
    return plan.facts.overlays[0].overlay


@pytest.mark.parametrize("name", ["web", 'a guest\'s "name"'])
def test_a_guest_on_an_overlay_of_a_run_is_not_started(call, overlay, name):
    done = call(escape(overlay), name=name)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert f"snaporch: {name} stays off" in done.stderr
    assert "run: snaporch recover" in done.stderr


@pytest.mark.parametrize("operation", OTHERS)
def test_other_operations_are_permitted_and_unchanged(call, overlay, operation):
    """For some operations libvirt takes the output of a hook as the definition."""
    done = call(overlay, operation)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_all_other_guests_are_started(call, world, overlay):
    aside = overlay.replace("/overlays/", "/overlays/quarantine/")
    for path in ("/tank/b.img", "/tank/20261121T093310Z/b.qcow2", aside, f"{overlay}.img"):
        done = call(path)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["web", 'a guest\'s <uuid>"name"</uuid>'])
@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("/nowhere")])
def test_a_guest_with_a_fence_is_not_started(call, tmp_path, name, make):
    make(tmp_path / "fences" / UUID)
    done = call("/tank/b.img", name=escape(name))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "is fenced" in done.stderr
    assert f"run: snaporch fence --remove {UUID}" in done.stderr
    assert call("/tank/b.img", "started", name=escape(name)).returncode == 0


def test_the_fence_of_another_guest_has_no_effect(call, tmp_path):
    (tmp_path / "fences" / UUID.replace("7", "8")).touch()
    (tmp_path / "fences" / f".{UUID}").touch()
    assert call("/tank/b.img").returncode == 0


def test_the_hook_writes_a_mark_and_works_if_it_cannot(call, tmp_path):
    call("/tank/b.img", "reconnect")
    assert (tmp_path / "mark").exists()
    (tmp_path / "mark").unlink()
    (tmp_path / "mark").mkdir()
    assert call("/tank/b.img").returncode == 0


# -- whether it is installed --------------------------------------------------------------------


@pytest.fixture
def find(tmp_path):
    """Return what is found of a hook in a directory."""
    places = {"place": tmp_path / "snaporch", "called": tmp_path / "called"}
    places["host"], places["packaged"] = HostPaths(run=tmp_path), tmp_path / "slice"
    places["place"].write_text(shared_file(SOURCE).read_text())
    places["place"].chmod(0o755)
    places["called"].touch()
    return lambda may_have_called=True: find_hook_problem(may_have_called=may_have_called, **places)


def test_a_hook_that_libvirt_calls_is_found(find):
    assert find() is None


def test_a_missing_hook_is_reported(find, tmp_path):
    (tmp_path / "snaporch").unlink()
    assert find().step == "snaporch install"


def test_a_hook_that_libvirt_would_not_call_is_reported(find, tmp_path):
    (tmp_path / "snaporch").chmod(0o644)
    assert find().step == "snaporch install"


def test_a_hook_of_another_version_is_reported(find, tmp_path):
    (tmp_path / "snaporch").write_text("#!/bin/sh\nexit 0\n")
    assert find().step == "snaporch install"


def test_a_hook_of_the_package_is_installed_by_the_package(find, tmp_path):
    (tmp_path / "slice").touch()
    command = "apt-get install --reinstall -o Dpkg::Options::=--force-confmiss snaporch"
    (tmp_path / "snaporch").write_text("#!/bin/sh\nexit 0\n")
    assert find().step == f"rm {tmp_path / 'snaporch'} && {command}"
    (tmp_path / "snaporch").unlink()
    assert find().step == command


def test_a_hook_that_libvirt_has_not_called_is_reported(find, tmp_path):
    (tmp_path / "called").unlink()
    assert "has not loaded" in find().reason
    assert find().step == "systemctl try-restart libvirtd"
    (tmp_path / "virtqemud.pid").touch()
    assert find().step == "systemctl try-restart virtqemud"
    assert find(may_have_called=False).step == "systemctl try-restart virtqemud"


@pytest.mark.parametrize("runs", [False, True])
def test_a_hook_that_is_newer_than_the_daemon_is_reported(find, tmp_path, runs):
    """Its mark may be that of an earlier daemon, before the hook was removed and installed."""
    hour_ago = time.time() - 3600
    (tmp_path / "libvirtd.pid").touch()
    os.utime(tmp_path / "libvirtd.pid", (hour_ago, hour_ago))
    assert find(may_have_called=runs) is None
    os.utime(tmp_path / "called", (hour_ago - 1, hour_ago - 1))
    assert "has not loaded" in find(may_have_called=runs).reason
    os.utime(tmp_path / "libvirtd.pid", (hour_ago + 7200, hour_ago + 7200))
    assert find(may_have_called=runs) is None
    (tmp_path / "called").unlink()
    assert (find(may_have_called=runs) is None) is not runs
