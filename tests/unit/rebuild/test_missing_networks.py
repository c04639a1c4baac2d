from ipaddress import ip_network
from xml.etree import ElementTree

import pytest

from snaporch.errors import SnaporchError
from snaporch.rebuild.host_object_xml import NotAllowedError
from snaporch.rebuild.missing_networks import HostNetworks, allowed_network, overlaps, subnets_of

REACHED = (
    ("the host's", "192.168.1.0/24"),
    ("the host's", "10.20.0.0/16"),
    ("the host's", "fd00:1::/48"),
    ("the name server", "172.16.9.9/32"),
    ("network old", "192.168.122.0/24"),
)
HOST = HostNetworks(
    [(what, ip_network(each)) for what, each in REACHED],
    ["lo", "eth0", "br0", "virbr0"],
    ["br0", "virbr0"],
)
IP = "<ip address='192.168.217.1' netmask='255.255.255.0'>{}</ip>"
NAT = "<forward mode='nat'><nat><port start='1024' end='65535'/></nat></forward>"
WHOLE = f"""<network connections='1'><name>lan</name>
<uuid>4b1d2f0e-0000-4000-8000-000000000001</uuid>{NAT}
<bridge name='virbr7' stp='on' delay='0'/><mac address='52:54:00:00:00:01'/>
<domain name='lan.example' localOnly='yes'/>
<ip address='192.168.217.1' netmask='255.255.255.0'><dhcp>
<range start='192.168.217.100' end='192.168.217.200'/>
<host mac='52:54:00:00:00:02' name='web' ip='192.168.217.2'/></dhcp></ip>
<ip family='ipv6' address='fd00:2::1' prefix='64'/></network>"""


def network(*parts, name="lan"):
    return f"<network><name>{name}</name>{''.join(parts)}</network>"


def refusal(xml, host=HOST):
    with pytest.raises(NotAllowedError) as raised:
        allowed_network("lan", xml, host)
    assert raised.value.reason.isprintable()
    return raised.value.reason


def test_a_network_with_nat_is_built_from_its_values():
    found = allowed_network("lan", WHOLE, HOST)
    root = ElementTree.fromstring(found.xml)
    assert [each.tag for each in root] == ["name", "forward", "bridge", "domain", "ip", "ip"]
    assert root.find("forward").attrib == {"mode": "nat"}
    assert root.find("ip/dhcp/host").attrib == {
        "mac": "52:54:00:00:00:02",
        "name": "web",
        "ip": "192.168.217.2",
    }
    assert found.description == (
        "NAT, bridge virbr7, 192.168.217.1/24, DHCP 192.168.217.100 to 192.168.217.200, "
        "fd00:2::1/64"
    )
    assert list(map(str, found.subnets)) == ["192.168.217.0/24", "fd00:2::/64"]


def test_an_isolated_network_stays_isolated():
    found = allowed_network("lan", network(IP.format("")), HOST)
    assert "forward" not in found.xml
    assert found.description == "isolated, 192.168.217.1/24"


@pytest.mark.parametrize("bridge", ["virbr0", "eth9", "docker0", "br0"])
def test_libvirt_names_the_bridge_if_the_name_is_taken_or_not_libvirts(bridge):
    found = allowed_network("lan", network(f"<bridge name='{bridge}'/>", IP.format("")), HOST)
    assert "bridge" not in found.xml


def test_a_bridge_of_this_host_is_allowed_and_named():
    xml = network("<forward mode='bridge'/><bridge name='br0'/>")
    found = allowed_network("lan", xml, HOST)
    assert found.description == "bridge br0 of this host"
    assert '<bridge name="br0" />' in found.xml
    assert "which this host lacks" in refusal(xml.replace("br0", "br1"))
    assert "which this host lacks" in refusal(xml.replace("br0", "eth0"))
    assert "which this host lacks" in refusal(xml.replace("</network>", f"{IP}</network>"))


@pytest.mark.parametrize(
    ("address", "prefix"),
    [
        ("192.168.1.2", "30"),  # inside a route
        ("192.168.0.1", "16"),  # around one
        ("10.20.30.1", "24"),
        ("172.16.9.1", "24"),  # around a name server
        ("192.168.122.65", "26"),  # of another network of libvirt
        ("169.254.7.1", "24"),
        ("100.64.0.1", "24"),
        ("8.8.8.1", "24"),
        ("127.0.0.1", "24"),
        ("224.0.0.1", "24"),
        ("0.0.0.0", "0"),
        ("10.0.0.1", "8"),  # whatever is behind the default route
        ("172.16.0.1", "12"),
        ("192.168.217.1", "31"),
        ("fd00:1:0:5::1", "64"),
        ("fe80::1", "64"),
        ("2001:db8::1", "64"),
        ("fd00:2::1", "48"),
        ("::ffff:192.168.1.1", "120"),
    ],
)
def test_addresses_that_are_not_free_private_ones_are_refused(address, prefix):
    reason = refusal(network(f"<ip address='{address}' prefix='{prefix}'/>"))
    assert "overlaps" in reason or "no private network" in reason


def test_two_networks_of_one_definition_do_not_overlap():
    assert "overlaps itself" in refusal(network(IP.format(""), IP.format("")))


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (["<forward mode='route'/>"], "forwards by 'route'"),
        (["<forward mode='hostdev'/>"], "forwards by 'hostdev'"),
        (["<forward mode='nat' dev='eth0'/>"], "the attribute 'dev'"),
        (["<route address='8.8.8.0' prefix='24' gateway='192.168.217.9'/>"], "has <route>"),
        (["<dns><forwarder addr='8.8.8.8'/></dns>"], "has <dns>"),
        ([IP.format("<tftp root='/etc'/>")], "has <ip/tftp>"),
        ([IP.format("<dhcp><bootp file='/etc/shadow'/></dhcp>")], "has <ip/dhcp/bootp>"),
        (["<virtualport type='openvswitch'/>"], "has <virtualport>"),
        (["<ip address='x'/>"], "the address 'x'"),
        (["<ip address='fd00::1%x, of this host only' prefix='64'/>"], "%x, of this host"),
        (
            ["<ip address='fd00::1' prefix='64'><dhcp><host ip='fd00::2%x'/></dhcp></ip>"],
            "fd00::2%x",
        ),
        (["<ip address='192.168.217.1'/>"], "no private network"),
        ([IP.format("<dhcp><range start='10.1.1.1' end='10.1.1.2'/></dhcp>")], "10.1.1.1"),
        ([IP.format("<dhcp><range start='x' end='y'/></dhcp>")], "the address 'x'"),
        ([IP.format("<dhcp><host name='a' ip='8.8.8.8'/></dhcp>")], "8.8.8.8"),
        ([IP.format("<dhcp><host name='a,b' ip='192.168.217.2'/></dhcp>")], "the host 'a,b'"),
        ([IP.format("<dhcp><host mac='x' ip='192.168.217.2'/></dhcp>")], "the host 'x'"),
        (["<domain name='a/../b'/>", IP.format("")], "the domain 'a/../b'"),
        (["<domain name='a' localOnly='x'/>", IP.format("")], "the domain 'a'"),
    ],
)
def test_anything_else_is_refused(parts, reason):
    assert reason in refusal(network(*parts))


def test_the_networks_of_a_definition_are_its_addresses_and_routes():
    xml = network(
        "<ip address='10.9.0.1' netmask='255.255.0.0'/><ip address='fd00:3::1' prefix='64'/>",
        "<route address='10.8.0.0' prefix='24' gateway='10.9.0.2'/>",
    )
    assert list(map(str, subnets_of(xml))) == ["10.9.0.0/16", "fd00:3::/64", "10.8.0.0/24"]
    assert subnets_of(network()) == []
    classes = ("10.5.0.1", "172.16.5.1", "192.168.5.1", "fd00:4::1", "239.0.0.1")
    bare = network(*(f"<ip address='{each}'/>" for each in classes))
    assert list(map(str, subnets_of(bare))) == [
        "10.0.0.0/8", "172.16.0.0/16", "192.168.5.0/24", "fd00:4::/64", "239.0.0.0/24"
    ]  # fmt: skip
    with pytest.raises(SnaporchError):
        subnets_of(network("<ip address='x'/>"))
    assert not overlaps(ip_network("10.0.0.0/8"), ip_network("fd00::/8"))
