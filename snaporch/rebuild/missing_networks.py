"""A network that this host lacks: whether a rebuild defines it, from what is on the replica.

Those are isolated networks, those with NAT, and bridges of the host. What the host reaches already
is read by ``reached_addresses.py``.

The definition comes from a replica. So the network is built from values that were checked, and its
addresses must be private and not overlap anything that this host reaches: otherwise a replica could
take over the host's connections to other machines.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_interface, ip_network
from typing import NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring

from snaporch.errors import SnaporchError
from snaporch.rebuild.host_object_xml import Allowed, NotAllowedError, read_definition
from snaporch.zfs_names import quoted

IPNetwork = IPv4Network | IPv6Network
_PRIVATE: tuple[IPNetwork, ...] = tuple(
    map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"))
)
"""RFC 1918 and RFC 4193: not link-local, and not the carriers' (RFC 6598)."""
_SHORTEST = {4: 16, 6: 64}
"""The shortest prefix: a wider network would cover what is behind the host's default route."""
_LONGEST = {4: 30, 6: 126}
_ALLOWED: Allowed = {
    "": ("connections", "ipv6"),
    "name": (),
    "uuid": (),
    "forward": ("mode",),
    "forward/nat": (),
    "forward/nat/port": ("start", "end"),
    "bridge": ("name", "stp", "delay", "macTableManager"),
    "mac": ("address",),
    "domain": ("name", "localOnly"),
    "ip": ("address", "netmask", "prefix", "family"),
    "ip/dhcp": (),
    "ip/dhcp/range": ("start", "end"),
    "ip/dhcp/host": ("mac", "name", "ip"),
}
_OWN_BRIDGE = re.compile(r"virbr[0-9]{1,4}")
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")
_MAC = re.compile(r"[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}")
_MAX_HOSTS = 4096


class HostNetworks(NamedTuple):
    """What networks this host has."""

    reached: Sequence[tuple[str, IPNetwork]]
    """Its routes, addresses and name servers, and the networks that libvirt has, each with what it
    is; without the default routes."""
    interfaces: Collection[str]
    bridges: Collection[str]


class AllowedNetwork(NamedTuple):
    """A network that a rebuild may define."""

    name: str
    xml: str
    description: str
    """Its addresses and its way out, for the question to the admin."""
    subnets: tuple[IPNetwork, ...]


def allowed_network(name: str, xml: str, host: HostNetworks) -> AllowedNetwork:
    """Build the definition of a network from one that a replica has.

    Args:
        name: of the network.
        xml: its definition on the host that the guest comes from.
        host: the networks of this host.

    Raises:
        NotAllowedError: it has to be defined by hand.
    """
    thing = f"network {quoted(name)}"
    root = read_definition("network", name, xml, _ALLOWED)
    made = Element("network")
    SubElement(made, "name").text = name
    forward = root.find("forward")
    mode = "isolated" if forward is None else forward.get("mode", "nat")
    if mode == "bridge":
        return _bridged(thing, name, root, made, host.bridges)
    if mode not in ("isolated", "nat"):
        raise NotAllowedError(thing, f"forwards by {quoted(mode)}")
    words = [mode if mode == "isolated" else "NAT"]
    if forward is not None:
        SubElement(made, "forward", mode="nat")
    bridge = next((each.get("name", "") for each in root.iterfind("bridge")), "")
    if _OWN_BRIDGE.fullmatch(bridge) and bridge not in host.interfaces:
        SubElement(made, "bridge", name=bridge)
        words.append(f"bridge {bridge}")
    _copy_domain(thing, root, made)
    subnets: list[IPNetwork] = []
    for element in root.findall("ip"):
        subnet = _add_addresses(thing, element, made, words)
        _check_subnet(thing, subnet, [*host.reached, *(("itself", each) for each in subnets)])
        subnets.append(subnet)
    return AllowedNetwork(name, _text(made), ", ".join(words), tuple(subnets))


def _bridged(
    thing: str, name: str, root: Element, made: Element, bridges: Collection[str]
) -> AllowedNetwork:
    """A network that stands for a bridge of the host, which the guest could name itself."""
    bridge = root.find("bridge")
    wanted = bridge.get("name", "") if bridge is not None else ""
    if root.find("ip") is not None or wanted not in bridges:
        raise NotAllowedError(thing, f"is on the bridge {quoted(wanted)}, which this host lacks")
    SubElement(made, "forward", mode="bridge")
    SubElement(made, "bridge", name=wanted)
    return AllowedNetwork(name, _text(made), f"bridge {wanted} of this host", ())


def _copy_domain(thing: str, root: Element, made: Element) -> None:
    domain = root.find("domain")
    if domain is None:
        return
    wanted, local = domain.get("name", ""), domain.get("localOnly", "no")
    if _HOST_NAME.fullmatch(wanted) is None or local not in ("yes", "no"):
        raise NotAllowedError(thing, f"has the domain {quoted(wanted)}")
    SubElement(made, "domain", name=wanted, localOnly=local)


def _add_addresses(thing: str, element: Element, made: Element, words: list[str]) -> IPNetwork:
    """Copy one ``<ip>`` with its DHCP; returns its network."""
    address = element.get("address", "")
    length = element.get("prefix") or element.get("netmask") or ""
    try:
        interface = ip_interface(f"{address}/{length}" if length else address)
    except ValueError as error:
        raise NotAllowedError(thing, f"has the address {quoted(address)}") from error
    if "%" in address:  # a scope, which may be any text (RFC 4007)
        raise NotAllowedError(thing, f"has the address {quoted(address)}")
    subnet = interface.network
    family = {4: "ipv4", 6: "ipv6"}[subnet.version]
    given = {"address": str(interface.ip), "prefix": str(subnet.prefixlen), "family": family}
    copied = SubElement(made, "ip", given)
    words.append(str(interface))
    dhcp = element.find("dhcp")
    if dhcp is None:
        return subnet
    served = SubElement(copied, "dhcp")
    for each in dhcp.findall("range"):
        start, end = (_inside(thing, each.get(key, ""), subnet) for key in ("start", "end"))
        SubElement(served, "range", start=start, end=end)
        words.append(f"DHCP {start} to {end}")
    hosts = dhcp.findall("host")
    if len(hosts) > _MAX_HOSTS:
        raise NotAllowedError(thing, f"has over {_MAX_HOSTS} hosts")
    for each in hosts:
        mac, name, ip = (each.get(key) for key in ("mac", "name", "ip"))
        bad_mac = mac is not None and _MAC.fullmatch(mac) is None
        if bad_mac or (name is not None and _HOST_NAME.fullmatch(name) is None):
            raise NotAllowedError(thing, f"has the host {quoted(name or mac or '')}")
        values = {"mac": mac, "name": name, "ip": _inside(thing, ip or "", subnet)}
        SubElement(served, "host", {key: value for key, value in values.items() if value})
    return subnet


def _inside(thing: str, text: str, subnet: IPNetwork) -> str:
    """An address of a network.

    Raises:
        NotAllowedError: it is none.
    """
    try:
        address = ip_address(text)
    except ValueError as error:
        raise NotAllowedError(thing, f"has the address {quoted(text)}") from error
    if "%" in text or address not in subnet:
        raise NotAllowedError(thing, f"has {quoted(text)}, which is not in {subnet}")
    return str(address)


def _check_subnet(thing: str, subnet: IPNetwork, reached: Sequence[tuple[str, IPNetwork]]) -> None:
    """Refuse addresses that are not private, or that this host reaches elsewhere.

    Raises:
        NotAllowedError: with the overlap.
    """
    version = subnet.version
    private = any(
        overlaps(each, subnet) and each.prefixlen <= subnet.prefixlen for each in _PRIVATE
    )
    if not (private and _SHORTEST[version] <= subnet.prefixlen <= _LONGEST[version]):
        reason = f"has {subnet}, which is no private network of /{_SHORTEST[version]} or smaller"
        raise NotAllowedError(thing, reason)
    for what, other in reached:
        if overlaps(subnet, other):
            raise NotAllowedError(thing, f"has {subnet}, which overlaps {what} {other}")


def overlaps(one: IPNetwork, other: IPNetwork) -> bool:
    """Whether networks have an address in common."""
    if isinstance(one, IPv4Network) and isinstance(other, IPv4Network):
        return one.overlaps(other)
    if isinstance(one, IPv6Network) and isinstance(other, IPv6Network):
        return one.overlaps(other)
    return False


def subnets_of(xml: str) -> list[IPNetwork]:
    """The networks in a definition of this host's libvirt: of its addresses and routes.

    Raises:
        SnaporchError: it cannot be read.
    """
    try:
        root = fromstring(xml, forbid_dtd=True)
        found = [*root.iterfind("ip"), *root.iterfind("route")]
        return [
            ip_interface(f"{address}/{length}").network
            for each in found
            for address in [each.get("address", "")]
            for length in [each.get("prefix") or each.get("netmask") or _default_length(address)]
        ]
    except (ElementTree.ParseError, DefusedXmlException, ValueError) as error:
        raise SnaporchError("libvirt's networks", f"cannot be read: {error}") from error


def _default_length(address: str) -> int:
    """The prefix that libvirt gives an address without one: of its class (RFC 791), or /64."""
    parsed = ip_address(address)
    if isinstance(parsed, IPv6Address):
        return 64
    classes = ((8, 128), (16, 192), (24, 256))
    return next(length for length, end in classes if parsed.packed[0] < end)


def _text(element: Element) -> str:
    return ElementTree.tostring(element, encoding="unicode")
