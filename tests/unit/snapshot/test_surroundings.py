import threading

import pytest
from fakes.domain_xml import DiskSpec
from fakes.hooks import failing
from fakes.hypervisor import FakeGuest

from snaporch.catalog.records import all_records
from snaporch.errors import InterruptedRunError
from snaporch.hypervisor import HostObject, HypervisorError
from snaporch.snapshot.plan import make_plan
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.snapshot.surroundings import MAX_XML, read_surroundings

NETWORK = "<network><name>lan</name></network>"
POOL = "<pool type='dir'><name>vms</name></pool>"
CARD = "<interface type='network'><source network='lan'/></interface>"
DISK = "<disk type='volume'><source pool='vms' volume='x'/><target dev='vdx'/></disk>"


@pytest.fixture
def guest(world) -> FakeGuest:
    """A guest that names a network and a storage pool, and starts at boot."""
    world.add_guest(disks={"vda": "tank/web"})
    found = world.guest()
    found.inactive = found.inactive.replace("</devices>", f"{CARD}{DISK}</devices>")
    found.live = found.live.replace("</devices>", f"{CARD}</devices>")
    found.autostart = True
    hypervisor = world.hypervisor
    hypervisor.network_objects["lan"] = HostObject("lan", NETWORK, True)
    hypervisor.network_objects["other"] = HostObject("other", "<network/>", True)
    hypervisor.pool_objects["vms"] = HostObject("vms", POOL, False)
    world.pool.set_properties(["tank/web"], {"recordsize": "16384", "compression": "zstd"})
    return found


def plan_of(world):
    return make_plan(world.context, world.hypervisor.domain("web"), SnapshotRequest("s1"))


def test_a_bundle_has_what_surrounds_the_guest(world, guest):
    record = take_snapshot(
        world.context, world.hypervisor.domain("web"), SnapshotRequest("s1", level="crash")
    )
    assert world.heard.notes == [] or all("rebuild" not in note for note in world.heard.notes)
    manifest = world.context.store.manifest(f"{guest.uuid}/{record.run}")
    entry = manifest.surroundings
    assert entry.starts_at_boot
    (dataset,) = entry.datasets
    assert (dataset.dataset, dataset.encryption_root) == ("tank/web", None)
    assert dataset.properties == {"recordsize": "16384", "compression": "zstd"}
    (network,), (pool,) = entry.networks, entry.storage_pools
    assert (network.name, network.xml, network.starts_at_boot) == ("lan", NETWORK, True)
    assert (pool.name, pool.xml, pool.starts_at_boot) == ("vms", POOL, False)


@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("pool.local_properties", "the properties of its datasets"),
        ("hypervisor.defined_networks", "its networks"),
        ("hypervisor.defined_storage_pools", "its storage pools"),
    ],
)
@pytest.mark.parametrize(
    "error", [HypervisorError("libvirt", "is broken"), ValueError("is broken")], ids=type
)
def test_a_fact_that_cannot_be_read_costs_nothing_but_itself(world, guest, place, what, error):
    world.hooks.at[place] = failing(error)
    take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s1"))
    (record,) = all_records(world.context.store, world.pool.snapshots())
    assert (str(record.level), str(record.state)) == ("ram", "complete")
    (note,) = [each for each in world.heard.notes if "rebuild" in each]
    assert note.startswith(f"not saved for a rebuild: {what}: ")
    assert note.endswith("is broken")
    entry = world.context.store.manifest(f"{guest.uuid}/{record.run}").surroundings
    known = (entry.datasets, entry.networks, entry.storage_pools)
    assert [bool(each) for each in known].count(False) == 1
    assert entry.starts_at_boot


def test_a_fact_that_does_not_come_is_left_out_at_the_deadline(world, guest):
    plan, end = plan_of(world), threading.Event()
    world.hooks.at["hypervisor.defined_networks"] = end.wait
    try:
        found = read_surroundings(world.context, plan, 0.2)
    finally:
        end.set()
    assert found.datasets
    assert found.networks == found.storage_pools == ()
    late = [each.split(": ")[1:] for each in world.heard.notes if "rebuild" in each]
    assert late == [["its networks", "takes over 0.2 s"], ["its storage pools", "takes over 0.2 s"]]


def test_a_signal_ends_the_reading(world, guest):
    plan, end = plan_of(world), threading.Event()
    world.hooks.at["hypervisor.defined_networks"] = end.wait
    world.context.interrupt.signum = 15
    try:
        with pytest.raises(InterruptedRunError):
            read_surroundings(world.context, plan)
    finally:
        end.set()


@pytest.mark.parametrize(
    "break_it",
    [
        lambda world: world.pool.set_properties(["tank/web"], {"compression": "\udcff"}),
        lambda world: world.hypervisor.network_objects.update(
            lan=HostObject("lan", "x" * (MAX_XML + 1), False)
        ),
        lambda world: world.hypervisor.network_objects.update(
            lan=HostObject("lan", "\udcff", False)
        ),
    ],
    ids=["no text", "too large", "no text of a network"],
)
def test_what_a_bundle_cannot_have_is_left_out(world, guest, break_it):
    break_it(world)
    take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s1"))
    (record,) = all_records(world.context.store, world.pool.snapshots())
    assert (str(record.level), str(record.state)) == ("ram", "complete")
    assert len([each for each in world.heard.notes if "rebuild" in each]) == 1


def test_libvirt_is_not_asked_for_what_the_guest_does_not_name(world):
    world.add_guest(more=(DiskSpec("vdb", "/elsewhere", readonly=True),))
    error = failing(HypervisorError("libvirt", "was asked"))
    world.hooks.at["hypervisor.defined_networks"] = error
    world.hooks.at["hypervisor.defined_storage_pools"] = error
    found = read_surroundings(world.context, plan_of(world))
    assert found.networks == found.storage_pools == ()
    assert not any("rebuild" in each for each in world.heard.notes)
