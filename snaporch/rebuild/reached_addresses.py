"""The networks that this host reaches: what a network from a replica must not take over."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

from snaporch.default_paths import HostPaths
from snaporch.errors import UnavailableError
from snaporch.hypervisor import HostObject
from snaporch.rebuild.missing_networks import HostNetworks, IPNetwork, subnets_of
from snaporch.remote_host import Host

_RESOLVERS = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))
"""The second one has the servers that systemd-resolved asks; the first one may name only itself."""
_COMMANDS = tuple(
    ("ip", "-j", version, *words)
    for version in ("-4", "-6")
    for words in (("route", "show", "table", "all"), ("address", "show"))
)


def read_host_networks(
    machine: Host,
    host: HostPaths,
    networks: Sequence[HostObject],
    resolvers: Sequence[Path] = _RESOLVERS,
) -> HostNetworks:
    """Read routes, gateways, addresses, name servers and interfaces of this host.

    Args:
        machine: runs ``ip``.
        host: has the directory of the kernel's interfaces.
        networks: those that libvirt has, also those that are not active.
        resolvers: resolv.conf(5); those that do not exist are left out.

    Raises:
        SnaporchError: they cannot be read.
    """
    reached: list[tuple[str, IPNetwork]] = []
    for command in _COMMANDS:
        try:
            rows = json.loads(machine.run(*command) or "[]")
            reached += (("the host's", each) for row in rows for each in _networks(row))
        except (ValueError, TypeError, AttributeError) as error:
            step = f"see: {' '.join(command)}"
            raise UnavailableError("ip", f"its output cannot be read ({error})", step) from error
    servers = {each: None for resolver in resolvers for each in _name_servers(resolver)}
    reached += (("the name server", each) for each in servers)
    for each in networks:
        reached += ((f"network {each.name}", subnet) for subnet in subnets_of(each.xml))
    interfaces = sorted(path.name for path in (host.sys / "class" / "net").glob("*"))
    bridges = [each for each in interfaces if (host.sys / "class/net" / each / "bridge").is_dir()]
    return HostNetworks(reached, interfaces, bridges)


def _networks(row: dict[str, Any]) -> Iterator[IPNetwork]:
    """The networks in a route or an interface as ``ip -j`` prints it.

    Of a default route that is its gateways; what else is behind it is not known.
    """
    for each in (row, *row.get("nexthops", ())):
        gateway = each.get("gateway") or each.get("via", {}).get("host")
        if gateway:
            yield ip_interface(gateway).network
    if row.get("dst", "default") != "default":
        yield ip_interface(row["dst"]).network
    for each in row.get("addr_info", ()):
        if "local" in each:
            yield ip_interface(f"{each['local']}/{each['prefixlen']}").network


def _name_servers(resolver: Path) -> Iterator[IPNetwork]:
    try:
        lines = resolver.read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        words = line.split()
        if words[:1] == ["nameserver"] and len(words) > 1:
            try:
                yield ip_interface(words[1].partition("%")[0]).network
            except ValueError:
                continue
