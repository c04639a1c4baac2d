"""Distinguish a guest's own snapshots from copies of them, on the host that runs the guest.

What ``list`` leaves out is decided by :mod:`snaporch.catalog.local_replicas`.

A host can have copies because a replica is one of its pools, or because it is the replica of
another host. That host may go on sending after the guest was moved here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from snaporch.catalog.records import COPY
from snaporch.context import Context
from snaporch.model import Domain, PoolSnapshot
from snaporch.schedule.policy_assignment import datasets


def without_copies(
    context: Context, domains: Iterable[Domain], snapshots: Sequence[PoolSnapshot]
) -> Sequence[PoolSnapshot]:
    """The snapshots without the copies that no domain uses.

    What came back from a replica is in a dataset that a domain uses. Snapshots of pages of RAM name
    no domain, and stay.

    Args:
        context: the configuration, libvirt and ZFS.
        domains: the domains whose snapshots are wanted.
        snapshots: snapshots on this host.
    """
    copies = {each.dataset for each in snapshots if COPY in each.properties and _is_guests(each)}
    if copies:
        copies.difference_update(*(datasets(context, domain) for domain in domains))
    return [s for s in snapshots if not (s.dataset in copies and COPY in s.properties)]


def _is_guests(snapshot: PoolSnapshot) -> bool:
    return "uuid" in snapshot.properties


def came_back(snapshots: Iterable[PoolSnapshot]) -> dict[str, str]:
    """The snapshots that came back from a replica, and the reason to keep them.

    The replica kept them by its own rules, and this host may have deleted them before. So the
    policy's rules do not apply until the admin removes the mark.

    Args:
        snapshots: snapshots without the copies that the domain does not use.
    """
    return {
        each.full_name: "came back from a replica" for each in snapshots if COPY in each.properties
    }
