"""A guest comes back to an empty host with its network, its storage pool and its card on them."""

import re
import shutil
from pathlib import Path

import pytest
from faults.machine import restart_libvirtd
from guests.disks import destroy
from other_machine import copy, create, datasets, other_machine, take, uuid_of
from support import (
    BUNDLES,
    JOURNAL,
    accepting,
    assert_clean,
    assert_restored,
    must,
    one_line_error,
    run,
    snaporch,
)

POOL, BRIDGE = "snaporch-pool", "virbr77"
KINDS = {
    "isolated": ("", "isolated, bridge virbr77, 10.77.0.1/24"),
    "nat": ("<forward mode='nat'/>", "NAT, bridge virbr77, 10.77.0.1/24"),
}
"""What of a definition makes the kind, and how the question shows it."""
CARD = "<interface type='network'><source network='{}'/><model type='virtio'/></interface>"
DVD = f"""<disk type='volume' device='cdrom'><source pool='{POOL}' volume='x.iso'/>
<target dev='sda' bus='sata'/><readonly/></disk>"""


@pytest.fixture(scope="module", autouse=True)
def nftables():
    """The lab's kernel has no iptables; libvirt would choose these."""
    Path("/etc/libvirt/network.conf").write_text('firewall_backend = "nftables"\n')
    restart_libvirtd()


@pytest.fixture(scope="module", autouse=True)
def other(nftables, tmp_path_factory):
    with other_machine(tmp_path_factory.mktemp("there")) as made:
        yield made


def define_network(name, place, address="10.77.0.1", bridge=BRIDGE):
    """Define and start a network of libvirt."""
    text = f"""<network><name>{name}</name>{KINDS[name][0]}<bridge name='{bridge}'/>
    <ip address='{address}' prefix='24'/></network>"""
    (place / "network.xml").write_text(text)
    must("virsh", "net-define", str(place / "network.xml"))
    must("virsh", "net-start", name)
    must("virsh", "net-autostart", name)


def remove_network(name):
    run("virsh", "net-destroy", name)
    run("virsh", "net-undefine", name)


def remove_pool():
    run("virsh", "pool-destroy", POOL)
    run("virsh", "pool-undefine", POOL)


@pytest.fixture(params=list(KINDS))
def network(request, tmp_path):
    try:
        define_network(request.param, tmp_path)
        yield request.param
    finally:
        remove_network(request.param)


@pytest.fixture
def guest(network, other, tmp_path):
    """A guest that runs with a card on the network, and names a volume of a storage pool."""
    made = create("plain")
    try:
        must("virsh", "pool-define-as", POOL, "dir", "--target", "/tank/plain")
        must("virsh", "pool-start", POOL)
        made.destroy()
        add_device(made, CARD.format(network), tmp_path)
        made.start()
        add_device(made, DVD, tmp_path)  # from its next start: AppArmor permits no volume
        yield made
    finally:
        made.remove()
        remove_pool()
        for dataset in datasets(made):
            run("zfs", "destroy", "-r", copy(dataset))
        shutil.rmtree(other.bundles / uuid_of(made), ignore_errors=True)


def add_device(guest, device, place):
    """Define a guest with one more device."""
    text = must("virsh", "dumpxml", "--inactive", "--security-info", guest.name)
    (place / "definition.xml").write_text(text.replace("</devices>", f"{device}</devices>"))
    must("virsh", "define", str(place / "definition.xml"))


def lose(guest, network):
    """Destroy all that this host has of a guest and its surroundings."""
    guest.destroy()
    must("virsh", "undefine", "--nvram", guest.name)
    remove_network(network)
    remove_pool()
    for dataset in datasets(guest):
        destroy(dataset)
    shutil.rmtree(BUNDLES / uuid_of(guest))


def is_on(guest, bridge):
    """Whether the card of a running guest is on a bridge of the host."""
    card = must("virsh", "domiflist", guest.name).split()
    return any(path.name in card for path in Path(f"/sys/class/net/{bridge}/brif").iterdir())


def bridge_of(network):
    return must("virsh", "net-info", network).rpartition("Bridge:")[2].strip()


@pytest.fixture
def own_bridge():
    """Makes a bridge of this host, without libvirt."""
    made = []

    def make(name):
        must("ip", "link", "add", name, "type", "bridge")
        made.append(name)

    yield make
    for name in made:
        run("ip", "link", "delete", name)


WORDS = ("--from", "offsite", "--yes", "--quiet", *accepting("plain"))
with_nat = pytest.mark.parametrize("network", ["nat"], indirect=True)


@pytest.mark.daily(1)
def test_it_comes_back_with_its_network_and_pool(guest, network):
    last = take(guest)
    must("snaporch", "replicate", guest.name)
    expected, mark = guest.snapshot_count(last["snapshot"]), guest.mark()
    lose(guest, network)
    assert not Path(f"/sys/class/net/{BRIDGE}").exists()
    outcome = snaporch("rebuild", guest.name, *WORDS, "--json")
    assert outcome.status == 0, outcome.err
    (document,) = outcome.json
    assert (document["resumed"], document["notes"]) == (True, [])
    assert document["networks"] == {network: KINDS[network][1]}
    assert_restored(guest, mark, expected)
    assert_clean(guest)
    information = must("virsh", "net-info", network)
    assert information.count("yes") == 3, information  # active, persistent, autostart
    assert Path(f"/sys/class/net/{BRIDGE}").exists()
    assert "10.77.0.1/24" in must("ip", "-4", "addr", "show", BRIDGE)
    assert is_on(guest, BRIDGE)
    assert must("virsh", "pool-info", POOL).count("running") == 1


@pytest.mark.daily(1, "long")
@with_nat
def test_a_network_that_overlaps_what_this_host_reaches_waits_for_the_admin(
    guest, network, own_bridge
):
    """The data comes back, nothing of this host changes, and the same command finishes it."""
    last = take(guest)
    must("snaporch", "replicate", guest.name)
    expected, mark = guest.snapshot_count(last["snapshot"]), guest.mark()
    lose(guest, network)
    own_bridge("br0")
    must("ip", "addr", "add", "10.77.0.129/24", "dev", "br0")
    shown = snaporch("rebuild", guest.name, "--from", "offsite", "--dry-run", "--json")
    assert shown.status == 5, shown.err
    assert any("10.77.0.0/24" in each for each in shown.json[0]["notes"]), shown.json
    outcome = snaporch("rebuild", guest.name, *WORDS)
    assert outcome.status == 5, outcome.err
    note, error = outcome.err.splitlines()
    assert "has 10.77.0.0/24, which overlaps the host's 10.77.0." in note
    assert f"needs the libvirt network '{network}', which this host does not have" in error
    assert run("virsh", "domstate", guest.name).status != 0
    assert network not in must("virsh", "net-list", "--all", "--name").split()
    assert "10.77.0.129/24" in must("ip", "-4", "addr", "show", "br0")
    assert run("zfs", "list", datasets(guest)[0]).status == 0
    assert list(JOURNAL.glob("*")) == []  # nothing is half done

    must("ip", "addr", "del", "10.77.0.129/24", "dev", "br0")
    own_bridge(BRIDGE)  # then libvirt chooses another one
    outcome = snaporch("rebuild", guest.name, *WORDS, "--json")
    assert (outcome.status, outcome.json[0]["notes"]) == (0, []), outcome.err
    assert_restored(guest, mark, expected)
    assert bridge_of(network) != BRIDGE
    assert is_on(guest, bridge_of(network))
    assert not is_on(guest, BRIDGE)


@pytest.mark.daily(1, "long")
@with_nat
def test_a_network_and_a_pool_of_the_same_names_stay_as_they_are(guest, network, tmp_path):
    last = take(guest)
    must("snaporch", "replicate", guest.name)
    expected, mark = guest.snapshot_count(last["snapshot"]), guest.mark()
    lose(guest, network)
    define_network(network, tmp_path, "10.78.0.1", "virbr78")
    must("virsh", "pool-define-as", POOL, "dir", "--target", str(tmp_path))
    must("virsh", "pool-start", POOL)
    must("virsh", "net-destroy", network)
    words = (*WORDS, "--accept", f"{tmp_path}/x.iso")  # where its volume is in the pool of here
    outcome = snaporch("rebuild", guest.name, *words)
    one_line_error(outcome, 5, f"virsh net-start {network}")
    assert run("virsh", "domstate", guest.name).status != 0
    must("virsh", "net-start", network)
    before = [must("virsh", "net-dumpxml", network), must("virsh", "pool-dumpxml", POOL)]
    outcome = snaporch("rebuild", guest.name, *words, "--json")
    assert (outcome.status, outcome.json[0]["networks"]) == (0, {}), outcome.err
    assert_restored(guest, mark, expected)
    after = [must("virsh", "net-dumpxml", network), must("virsh", "pool-dumpxml", POOL)]
    assert [_plain(each) for each in after] == [_plain(each) for each in before]
    assert is_on(guest, "virbr78")


def _plain(xml):
    """A definition without what libvirt counts in it."""
    return re.sub(r" connections='\d+'|<(allocation|available).*", "", xml)
