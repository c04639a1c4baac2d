from types import SimpleNamespace

import pytest
from fakes.hooks import failing
from fakes.rebuild_source import FakeSource

from snaporch.hypervisor import HostObject, HypervisorError
from snaporch.known_faults import Component
from snaporch.model import DatasetKind, Level, PoolSnapshot, moment_at
from snaporch.rebuild.dataset_settings import Settings
from snaporch.rebuild.host_report import find_missing
from snaporch.rebuild.plan import Incoming
from snaporch.rebuild.surroundings import Surroundings

EMULATOR = "<emulator>/usr/bin/qemu-system-x86_64</emulator>"


def xml_of(*devices, machine="pc-q35-9.2", memory="16384"):
    return (
        f"<domain type='kvm'><memory>{memory}</memory><os><type machine='{machine}'>hvm</type></os>"
        f"<devices>{''.join(devices)}</devices></domain>"
    )


@pytest.fixture
def missing(world):
    """Asks what this host lacks for a guest."""
    world.pool.create("tank")
    (world.root / "sys" / "class" / "net" / "br0").mkdir(parents=True)
    source = FakeSource(world.pool, None, world.hooks)

    def ask(
        *xmls,
        level=Level.RAM,
        cpu="",
        settings=None,
        size=1 << 20,
        dataset="tank/web",
        mountpoint="",
        **how,
    ):
        source.bytes_of_a_snapshot = size
        versions = SimpleNamespace(cpu=cpu, libvirt="12.1.0", emulator="11.0.2")
        taken = PoolSnapshot("tank:web", "s1", 1, 1, moment_at(0))
        kind = DatasetKind.FILESYSTEM if mountpoint else DatasetKind.VOLUME
        part = Incoming(dataset, "tank:web", (taken,), mountpoint, False, kind, False)
        manifest = SimpleNamespace(level=level, versions=versions, ram_bytes=1 << 24)
        plan = SimpleNamespace(manifest=manifest, incoming=(part,), thing="web@s1")
        found = Surroundings(settings={"tank/web": Settings(settings or {}, ())})
        options = {"restores": True, "cold": False} | how
        return find_missing(world.context, source, plan, found, xmls, **options)

    return ask


def test_a_host_that_has_all_lacks_nothing(missing):
    card = "<interface type='bridge'><source bridge='br0'/></interface>"
    assert missing(xml_of(EMULATOR, card), xml_of(card)) == []
    assert missing() == []


@pytest.mark.parametrize("place", [0, 1])
def test_an_emulator_that_libvirt_has_not_found_is_not_asked_about(missing, world, place):
    world.hypervisor.machines = set()
    xmls = [xml_of(EMULATOR), xml_of(EMULATOR)]
    xmls[place] = xml_of("<emulator>/tank/web/evil</emulator>")
    (line,) = missing(*xmls)
    assert line.startswith("libvirt has found no emulator '/tank/web/evil'")


def test_a_link_to_an_emulator_that_libvirt_has_found_is_known(missing, world, tmp_path):
    real, link, other = (tmp_path / name for name in ("qemu", "kvm", "evil"))
    real.touch()
    link.symlink_to(real)
    other.symlink_to(tmp_path / "else")
    asked = []
    world.hypervisor.emulator_paths = {str(real)}
    world.hypervisor.incompatibility = lambda xml, _cpu: asked.append(xml) or ""
    assert missing(xml_of(f"<emulator>{link}</emulator>")) == []
    assert [f"<emulator>{real}</emulator>" in xml for xml in asked] == [True]
    assert "has found no emulator" in missing(xml_of(f"<emulator>{other}</emulator>"))[0]
    assert len(asked) == 1


@pytest.mark.parametrize(
    "card",
    [
        "<interface type='bridge'><source bridge='br7'/></interface>",
        "<interface type='direct'><source dev='br7'/></interface>",
    ],
)
def test_interfaces_that_are_not_here_are_named(missing, card):
    assert missing(xml_of(card)) == ["there is no network interface 'br7'"]
    assert missing(xml_of(card), level=Level.OFF) == ["there is no network interface 'br7'"]
    assert missing(xml_of(card), restores=False) == []


NETWORK = "<interface type='network'><source network='lan'/></interface>"
VOLUME = "<disk type='volume'><source pool='vms' volume='x'/></disk>"


def have(world, objects, name, xml="<network/>", *, active=False):
    objects[name] = HostObject(name, xml, starts_at_boot=True, active=active)


def test_a_network_that_is_not_active_is_named(missing, world):
    """The restore would refuse it when all data has come."""
    have(world, world.hypervisor.network_objects, "lan")
    have(world, world.hypervisor.network_objects, "other")
    lan = "the network 'lan' is not active: virsh net-start lan"
    assert missing(xml_of(EMULATOR, NETWORK)) == [lan]
    assert missing(xml_of(EMULATOR, NETWORK), xml_of(EMULATOR), cold=True) == []
    assert missing(xml_of(EMULATOR), xml_of(EMULATOR, NETWORK), cold=True) == [lan]
    assert missing(xml_of(EMULATOR, NETWORK), level=Level.OFF) == []
    have(world, world.hypervisor.network_objects, "lan", active=True)
    assert missing(xml_of(EMULATOR, NETWORK)) == []


@pytest.mark.parametrize(
    ("pool", "is_named"),
    [
        ("<pool type='dir'><target><path>/isos</path></target></pool>", True),
        ("<pool type='dir'><target><path>/vms/web/x</path></target></pool>", False),
        ("<pool type='zfs'><source><name>tank</name></source></pool>", True),
        ("<pool type='zfs'><source><name>tank/new</name></source></pool>", False),
        ("<pool type='zfs'><source><name>tank/new/web</name></source></pool>", False),
        ("<pool type='zfs'><source><name>tank/newer</name></source></pool>", True),
        ("<pool", True),
    ],
)
def test_a_pool_that_is_not_active_is_named_unless_its_dataset_comes(
    missing, world, pool, is_named
):
    have(world, world.hypervisor.pool_objects, "vms", pool)
    said = "the storage pool 'vms' is not active: virsh pool-start vms"
    found = missing(xml_of(EMULATOR, VOLUME), dataset="tank/new/web", mountpoint="/vms/web")
    assert found == ([said] if is_named else [])


def test_a_libvirt_that_lists_no_networks_is_named(missing, world):
    world.hooks.at["hypervisor.defined_networks"] = failing(HypervisorError("lan", "no"))
    (line,) = missing(xml_of(EMULATOR, NETWORK))
    assert line.startswith("its networks cannot be looked for: lan: no")


def test_machine_type_and_cpu_are_compared(missing):
    assert "'old' is not supported" in missing(xml_of(machine="old"))[0]
    assert "'old' is not supported" in missing(xml_of(machine="old"), cold=True)[0]
    assert "CPU" in missing(xml_of(), cpu="<cpu>other</cpu>")[0]
    assert missing(xml_of(), cpu="<cpu>other</cpu>", cold=True) == []
    assert missing(xml_of(machine="old"), level=Level.OFF) == []


def test_memory_is_compared(missing, world):
    world.set_memory(1 << 20)
    assert missing(xml_of()) == ["it needs 16 MiB of memory, 1 MiB are available"]
    impossible = ["it has a definition whose memory or NUMA nodes are no possible numbers"]
    assert missing(xml_of(memory="x")) == impossible
    pages = "<hugepages><page size='2048' nodeset='0-9999999999'/></hugepages>"
    backing = f"<memoryBacking>{pages}</memoryBacking><os>"
    assert missing(xml_of().replace("<os>", backing)) == impossible


def test_programs_that_are_older_than_the_ram_are_named(missing, world):
    world.hypervisor.installed = {Component.LIBVIRT: "9.0.0", Component.QEMU: "11.0.2"}
    assert missing(xml_of()) == ["libvirt is 9.0.0, and its RAM was saved by '12.1.0'"]
    assert missing(xml_of(), cold=True) == []


def test_data_and_reservations_count_against_the_room(missing, world):
    world.pool.room = 1 << 30
    assert missing(xml_of(), size=1 << 29) == []
    full = ["pool tank has 1024 MiB free, and about 2048 MiB come or are reserved"]
    assert missing(xml_of(), size=2 << 30) == full
    reserved = {"refreservation": str(1 << 30)}
    assert missing(xml_of(), settings=reserved, size=1 << 30, restores=False) == full
    reserved = {"reservation": str(2 << 30)}
    assert missing(xml_of(), settings=reserved, size=1 << 30, restores=False) == full
    both = {"reservation": str(2 << 30), "refreservation": str(1 << 30)}
    assert missing(xml_of(), settings=both, size=1 << 30, restores=False) == full
    world.pool.create("tank/web")
    assert missing(xml_of(), size=2 << 30) == []
