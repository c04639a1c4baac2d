import os

import pytest
from fakes import images
from fakes.domain_xml import DiskSpec

from snaporch.check.disk_facts import RecordFacts
from snaporch.check.gather_disks import gather_disks, gather_records
from snaporch.hypervisor import DiskWrites
from snaporch.model import DatasetKind, DomainState
from snaporch.zfs.parity import ParityGroup

K = 1024


@pytest.fixture
def gather(world):
    def run(*busy):
        found = gather_disks(world.context, world.hypervisor.domains(), busy)
        return {f"{each.guest} {each.target}": each for each in found}

    return run


def test_what_libvirt_has_counted(world, gather):
    world.add_guest()
    world.guest().writes["vda"] = DiskWrites(7, 28 * K)
    found = gather()["web vda"]
    assert (found.dataset, found.writes, found.format) == ("tank/web", DiskWrites(7, 28 * K), "raw")
    assert (found.cache, found.discards, found.cluster) == ("writeback", False, 0)


@pytest.mark.parametrize(
    ("spec", "cache", "discards"),
    [
        ({}, "writeback", False),
        ({"cache": "default"}, "writeback", False),
        ({"cache": "none", "discard": "unmap"}, "none", True),
    ],
)
def test_how_the_disk_is_defined(world, gather, spec, cache, discards):
    disk = DiskSpec("vdb", str(world.image("tank/db", "db.img")), **spec)
    world.add_guest(more=(disk,))
    found = gather()["web vdb"]
    assert (found.cache, found.discards) == (cache, discards)


def test_guests_that_are_off_or_busy(world, gather):
    world.add_guest("off", state=DomainState.OFF)
    world.add_guest("saved")
    world.guest("saved").writes["vda"] = DiskWrites(7, 28 * K)
    world.guest("saved").job = "save"
    assert {each.writes for each in gather().values()} == {DiskWrites()}
    assert set(gather("saved")) == {"off vda"}


def test_a_guest_that_has_ended_since_it_was_listed(world):
    domain = world.add_guest()
    world.hypervisor.destroy(domain.uuid)
    world.hypervisor.undefine(domain.uuid)
    (found,) = gather_disks(world.context, [domain], ())
    assert found.writes == DiskWrites()


def test_an_image_that_is_gone(world, gather):
    os.unlink(world.add_guest().disk("vda").source)
    assert gather() == {}


def test_the_cluster_of_an_image_is_read_without_following_a_link(world, gather):
    """The emulator owns the image."""
    image = world.image("tank/db", "db.qcow2")
    world.add_guest(more=(DiskSpec("vdb", str(image), format="qcow2"),))
    image.write_bytes(images.qcow2())
    assert gather()["web vdb"].cluster == 64 * K
    image.write_bytes(b"no image")
    assert gather()["web vdb"].cluster == 0
    other = image.with_name("other")
    other.write_bytes(images.qcow2())
    image.unlink()
    image.symlink_to(other)
    assert gather()["web vdb"].cluster == 0
    image.unlink()
    os.mkfifo(image)
    assert gather()["web vdb"].cluster == 0


def test_the_records_of_a_file_system(world, gather):
    world.add_guest()
    world.pool.sector = 512
    properties = {"recordsize": "16384", "compression": "zle", "primarycache": "metadata"}
    more = {"logbias": "throughput", "sync": "disabled"}
    world.pool.set_properties(["tank/web"], properties | more)
    world.pool.groups = (ParityGroup(2, 4),)
    found = gather_records(world.context, gather().values())
    expected = RecordFacts(
        size=16 * K,
        is_volume=False,
        sector=512,
        compressed=False,
        primary_cache="metadata",
        log_bias="throughput",
        groups=(ParityGroup(2, 4),),
        sync="disabled",
        available=1 << 40,
    )
    assert found == {"tank/web": expected}


@pytest.mark.parametrize(
    ("reserved", "unreserved"), [(0, (32 << 20) - 100), (8 << 20, 24 << 20), (33 << 20, 0)]
)
def test_what_a_volume_has_not_reserved(world, gather, reserved, unreserved):
    world.image("tank/web", "web-vda.img")
    world.pool.create("tank/web", DatasetKind.VOLUME)
    world.pool.write("tank/web", bytes(100))
    world.pool.reserve("tank/web", reserved, room=1)
    world.add_guest()
    (found,) = gather_records(world.context, gather().values()).values()
    assert (found.is_volume, found.size, found.unreserved) == (True, 16 * K, unreserved)


def test_no_disks_need_no_records(world):
    assert gather_records(world.context, ()) == {}
