"""Clones of a snapshot's disks, with an overlay over each, for the appliance."""

import json
import os
import subprocess

import pytest

from snaporch.clone.find_clones import remove_unfinished
from snaporch.errors import RefusedError
from snaporch.extract.throw_away_disks import block_node, make_overlays, throw_away_disks
from snaporch.hypervisor.clone_xml import CloneDisk
from snaporch.restore.source import complete_source, find_records


@pytest.fixture
def source(story, world):
    """A snapshot of a guest with images."""
    return complete_source(world.context, find_records(world.context, "web@s1")[-1], roles=())


def datasets(world):
    return {each.name for each in world.pool.datasets()}


def test_the_clones_are_removed_again(world, source):
    before = datasets(world)
    with throw_away_disks(world.context, source, None) as (directory, overlays):
        assert len(overlays) == len(source.disks)
        made = datasets(world) - before
        assert all("-files-" in name for name in made)
        assert {name.split("-files-")[0] for name in made} == {d.dataset for d in source.disks}
        words = ["qemu-img", "info", "--output=json", str(overlays[0])]
        said = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
        assert said["full-backing-filename"].startswith('json:{"driver":"raw"')
        assert directory.stat().st_mode & 0o777 == 0o700
    assert datasets(world) == before
    assert list(world.paths.clones.iterdir()) == []


def test_the_clones_are_removed_after_an_error(world, source):
    before = datasets(world)
    with pytest.raises(ZeroDivisionError), throw_away_disks(world.context, source, None):
        raise ZeroDivisionError
    assert datasets(world) == before
    assert list(world.paths.clones.iterdir()) == []


def test_those_of_a_killed_process_are_removed_by_recover(world, source):
    before = datasets(world)
    child = os.fork()
    if child == 0:
        try:
            with throw_away_disks(world.context, source, None):
                os._exit(0)  # as if killed
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list(world.paths.clones.iterdir())) == 1
    remove_unfinished(world.context)
    assert datasets(world) == before
    assert list(world.paths.clones.iterdir()) == []


def test_qemu_follows_no_name_in_an_image(tmp_path):
    place = CloneDisk("/c/top", "file", "qcow2", CloneDisk("/c/base", "block", "raw"))
    assert block_node(place) == {
        "driver": "qcow2",
        "file": {"driver": "file", "filename": "/c/top"},
        "backing": {"driver": "raw", "file": {"driver": "host_device", "filename": "/c/base"}},
    }
    alone = block_node(CloneDisk("/c/top", "file", "qcow2"))
    assert alone["backing"] is None


def test_an_image_that_names_a_file_of_the_host_does_not_open_it(tmp_path):
    (tmp_path / "secret").write_bytes(b"s" * 512)
    image = tmp_path / "top.qcow2"
    words = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b"]
    subprocess.run([*words, str(tmp_path / "secret"), str(image), "512"], check=True)
    (overlay,) = make_overlays("x", [CloneDisk(str(image), "file", "qcow2")], tmp_path, None)
    words = ["qemu-io", "-f", "qcow2", "-r", "-c", "read -P 0 0 512", str(overlay)]
    done = subprocess.run(words, capture_output=True, check=True, text=True)
    assert "failed" not in done.stdout, done.stdout


def test_a_chain_that_no_header_can_name_is_refused(tmp_path):
    place = None
    for number in range(9):
        path = tmp_path / f"{number}-{'x' * 100}"
        place = CloneDisk(str(path), "file", "qcow2" if number else "raw", place)
    with pytest.raises(RefusedError, match="too long"):
        make_overlays("x", [place], tmp_path, None)
