"""Datasets, paths and volumes of the disks that would be rolled back."""

import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import manifests
from fakes.claimed_volume import ClaimedVolume

from snaporch.default_paths import HostPaths
from snaporch.errors import RefusedError, SnaporchError
from snaporch.model import DatasetKind
from snaporch.restore import disk_checks
from snaporch.restore.bundle_checks import check_bundle
from snaporch.restore.run import restore
from snaporch.zfs.resolver import Resolver

from .plans import plan, refusal


def test_a_dataset_that_is_not_mounted_is_refused(story, world):
    """As without its key: a rollback would work, and the guest could not be started."""
    world.resolver.mount_points.update(dict.fromkeys(story.datasets))
    said = refusal(world)
    assert "is not mounted; zfs mount -l " in said
    assert plan(world, disks_only=True, also_roll_back=True)


def test_a_volume_without_a_device_node_is_refused(story, world):
    for name in story.datasets:
        world.pool._datasets[name].kind = DatasetKind.VOLUME
    assert plan(world)
    (world.root / "zfs/tank/web/web-vda.img").unlink()
    assert "the volume tank/web is not at" in refusal(world, cold=True)


@pytest.fixture
def read_only(monkeypatch):
    """Makes the file system of a directory seem read-only."""
    places, ask = set(), os.statvfs

    def answer(path):
        found = ask(path)
        flag = os.ST_RDONLY if any(Path(path).is_relative_to(place) for place in places) else 0
        return SimpleNamespace(f_flag=found.f_flag | flag)

    monkeypatch.setattr(os, "statvfs", answer)
    return places


@pytest.mark.parametrize("how", [{}, {"cold": True}])
def test_a_dataset_that_was_made_read_only_is_refused(story, world, read_only, how):
    """A rollback would work, and the guest could not be started after it."""
    assert plan(world, **how)
    read_only.add(world.root / "zfs/flash/web")
    said = refusal(world, **how)
    assert "flash/web is read-only" in said
    assert "zfs set readonly=off flash/web, or use --disks-only" in said
    assert plan(world, disks_only=True)


@pytest.mark.parametrize("value", ["0", "1"])
def test_whether_a_device_is_read_only_is_read_from_the_kernel(tmp_path, value):
    place = tmp_path / "dev/block/230:16"
    place.mkdir(parents=True)
    (place / "ro").write_text(f"{value}\n")
    status = SimpleNamespace(st_mode=stat.S_IFBLK, st_rdev=os.makedev(230, 16))
    resolver = Resolver(HostPaths(sys=tmp_path), stat=lambda _path: status)
    assert disk_checks.is_read_only(Path("/dev/zd16"), resolver) is (value == "1")


# -- targets of paths --------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"cold": True}, {"disks_only": True}])
def test_a_path_that_leads_to_another_dataset_now(story, world, how):
    """Rolling back the dataset that the guest no longer uses would restore nothing."""
    image = Path(story.domain.disks[0].source)
    image.unlink()
    image.symlink_to(world.image("flash/moved", "web.img"))
    said = refusal(world, **how)
    assert "was tank/web web-vda.img, and leads to flash/moved web.img now" in said


@pytest.mark.parametrize("how", [{}, {"disks_only": True}])
def test_a_link_that_leads_to_another_file_of_the_dataset_now(story, world, how):
    image = Path(story.domain.disks[0].source)
    image.rename(image.with_name("old.img"))
    image.symlink_to("old.img")
    assert "leads to tank/web old.img now" in refusal(world, **how)


def test_a_path_that_is_not_on_zfs_now(story, world):
    image = Path(story.domain.disks[0].source)
    image.unlink()
    image.symlink_to(world.root / "elsewhere.img")
    (world.root / "elsewhere.img").touch()
    assert "not on ZFS" in refusal(world, disks_only=True)


def test_an_image_that_was_deleted_since_comes_back(story, world):
    Path(story.domain.disks[0].source).unlink()
    assert plan(world)


def test_a_path_to_nothing_that_would_be_elsewhere(story, world):
    image = Path(story.domain.disks[0].source)
    image.unlink()
    image.symlink_to(world.root / "gone.img")
    assert "gone.img now" in refusal(world)


def test_a_bundle_that_does_not_say_which_file_it_was(story, world):
    """A bundle of an older snaporch; its dataset is checked nevertheless."""
    path = Path(story.record.bundle) / "manifest.json"
    document = manifests.load(path)
    for disk in document["disks"]:
        disk.pop("inside", None)
    manifests.store(path, document)
    assert plan(world)
    image = Path(story.domain.disks[0].source)
    image.unlink()
    image.symlink_to(world.image("flash/moved", "web.img"))
    assert "leads to flash/moved web.img now" in refusal(world)


# -- a guest with other disks now --------------------------------------------------------------


@pytest.fixture
def moved(story, world):
    """The guest was moved to another dataset, and its old image still exists."""
    world.add_guest(disks={"vda": "tank/moved", "vdb": "flash/web"})
    world.hooks.log.clear()
    return story


@pytest.mark.parametrize("how", [{"cold": True}, {"disks_only": True}])
def test_a_guest_whose_present_definition_names_other_disks(moved, world, how):
    """An unused dataset would be rolled back, and the guest be booted from another one."""
    assert check_bundle(world.context, plan(world, **how))
    (Path(moved.record.bundle) / "domain.xml").write_text("<damaged/>")
    with pytest.raises(RefusedError, match=r"that is kept does not name .*web-vda[.]img"):
        check_bundle(world.context, plan(world, **how), despite_damage=True)
    world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"})
    assert check_bundle(world.context, plan(world, **how), despite_damage=True)


def test_a_guest_of_which_only_snapshots_are_left_and_that_has_other_disks(story, world):
    shutil.rmtree(story.record.bundle)
    assert plan(world, cold=True)
    world.add_guest(disks={"vda": "flash/web"})
    world.hooks.log.clear()
    assert "has snapshots of tank/web, where the guest has no disk now" in refusal(world, cold=True)


# -- volumes that others use ---------------------------------------------------------------------


@pytest.fixture
def volume(story, world, monkeypatch):
    """``tank/web`` as a volume whose device others can claim."""
    world.pool._datasets["tank/web"].kind = DatasetKind.VOLUME
    return ClaimedVolume(world, "tank/web", monkeypatch)


def test_a_volume_that_the_host_uses_is_not_rolled_back(volume, world):
    assert plan(world)
    volume.claim("dm-3")
    for how in ({}, {"cold": True}, {"disks_only": True}, {"also_roll_back": True}):
        assert "tank/web would be rolled back, and this host uses it: dm-3" in refusal(world, **how)


@pytest.mark.parametrize("dataset", ["tank/web", "flash/web"])
def test_a_dataset_beneath_a_loop_device_is_not_rolled_back(volume, world, dataset):
    """For example, an image that an admin mounted; no process has it open."""
    loop = world.resolver.host.sys / "block/loop7/loop"
    loop.mkdir(parents=True)
    (loop / "backing_file").write_text(f"{world.image(dataset, 'mounted.img')}\n")
    assert f"{dataset} would be rolled back, and this host uses it: loop7" in refusal(world)


def test_a_volume_that_the_host_uses_since_the_plan_is_not_rolled_back(volume, world):
    made = plan(world, cold=True)
    world.hooks.at["hypervisor.destroy"] = lambda: volume.claim("dm-9")
    before = world.pool.read("tank/web")
    with pytest.raises(SnaporchError, match="this host uses it: dm-9"):
        restore(world.context, made, safety=False)
    assert world.pool.read("tank/web") == before


def test_partitions_beside_the_guests_are_not_rolled_back_unasked(volume, story, world):
    volume.divide(1, 2, 3)
    assert plan(world)  # the guest has all of it
    world.resolver.partitions[story.domain.disks[0].source] = 2
    path = Path(story.record.bundle) / "manifest.json"
    manifest = manifests.load(path)
    manifest["disks"][0].pop("inside")
    manifest["disks"][0]["partition"] = 2
    manifests.store(path, manifest)
    assert "tank/web would be rolled back with partition 1, 3 of it" in refusal(world)
    assert plan(world, also_roll_back=True)
    volume.divide(2)
    assert plan(world)
