"""Keep clones that resume from RAM apart from guests with the same MAC addresses.

New MAC addresses are given by :mod:`snaporch.hypervisor.clone_xml`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from snaporch import default_paths
from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.hypervisor import domain_xml
from snaporch.hypervisor.clone_xml import ISOLATED, NO_NETWORK
from snaporch.locks import domain_lock


def check_network(context: Context, thing: str, xml: str, network: str, *, resumed: bool) -> None:
    """Refuse a network that does not exist, or that a clone resumed from RAM must not be on.

    Args:
        thing: the name for error messages.
        xml: the XML that the clone starts from.
        network: ``none``, ``isolated``, or a libvirt network.
        resumed: the clone resumes from RAM, and so has the original's addresses.

    Raises:
        NotFoundError: there is no such network.
        RefusedError: the network is not isolated, or a guest on it has the same MAC address.
    """
    if network in (NO_NETWORK, ISOLATED):
        return
    isolated = context.hypervisor.network_is_isolated(network)
    if not resumed:
        return
    if not isolated:
        raise RefusedError(
            thing,
            f"the network {network} is not isolated, and the clone has the original's addresses in "
            "its RAM",
            "use --network isolated, or a network without <forward>",
        )
    _check_addresses(context, thing, xml, network)


def _check_addresses(context: Context, thing: str, xml: str, network: str) -> None:
    cards = domain_xml.parse(xml).findall("devices/interface/mac")
    own = {mac.get("address", "").lower() for mac in cards}
    for domain in context.hypervisor.domains():
        if domain.live_xml is None:
            continue
        taken = own & domain_xml.mac_addresses(domain_xml.parse(domain.live_xml), network)
        if taken:
            raise RefusedError(
                thing,
                f"{domain.name} is on the network {network} with the same MAC address "
                f"{min(taken)}, which the clone has in its RAM",
                "use --network isolated, or another network without <forward>",
            )


@contextmanager
def address_lock(context: Context, thing: str, xml: str, network: str, wait: int) -> Iterator[None]:
    """Keep clones with the same addresses from starting on a network at the same time.

    Args:
        wait: seconds to wait while another clone loads its RAM.

    Raises:
        BusyError: another clone has been loading its RAM for too long.
        RefusedError: a guest on the network has the same MAC address now.
    """
    if network in (NO_NETWORK, ISOLATED):
        yield
        return
    key, interrupt = f"network-{network}", context.interrupt
    with domain_lock(default_paths.LOCKS, network, key, "clone", wait=wait, interrupt=interrupt):
        _check_addresses(context, thing, xml, network)
        yield
