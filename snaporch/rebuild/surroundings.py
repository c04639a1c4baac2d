"""What surrounds a guest, as it comes back: settings, networks, storage pools, autostart.

All of it is optional. What this host refuses, or a replica must not choose, is left out and named;
the guest comes back all the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from snaporch.bundle.manifest import HostObjectEntry, Manifest, SurroundingsEntry
from snaporch.bundle.store import copy_name
from snaporch.context import Context
from snaporch.errors import InterruptedRunError, SnaporchError
from snaporch.hypervisor import domain_xml
from snaporch.model import DatasetKind
from snaporch.rebuild.dataset_settings import RESERVED, Settings, allowed_settings
from snaporch.rebuild.host_object_xml import NotAllowedError
from snaporch.rebuild.local_datasets import Local
from snaporch.rebuild.missing_networks import AllowedNetwork, HostNetworks, allowed_network
from snaporch.rebuild.missing_storage_pools import AllowedPool, Created, allowed_pool
from snaporch.rebuild.plan import Copies, Incoming, RebuildPlan
from snaporch.zfs import PoolError
from snaporch.zfs_names import quoted

BY_HAND = "see docs/how-to/replication.md, 'Networks and storage pools'"
_NONE = Settings({}, ())


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What of a guest's surroundings comes back."""

    settings: Mapping[str, Settings] = field(default_factory=dict)
    """By dataset."""
    encryption_roots: Mapping[str, str] = field(default_factory=dict)
    networks: tuple[tuple[AllowedNetwork, bool], ...] = ()
    """Those that are not here, each with whether libvirt starts it at boot."""
    pools: tuple[tuple[AllowedPool, bool], ...] = ()
    starts_at_boot: bool = False
    refused: tuple[str, ...] = ()
    """What does not come back, with the reason and what to do by hand."""
    absent: tuple[str, ...] = ()
    """Those of :attr:`refused` that are networks and storage pools, which the guest needs."""

    def lines(self) -> list[str]:
        """What is set and defined on this host, for a reader."""
        found = []
        for dataset, each in self.settings.items():
            if each.allowed:
                pairs = ", ".join(f"{key}={value}" for key, value in each.allowed.items())
                found.append(f"properties of {dataset}: {pairs}")
        for dataset, root in self.encryption_roots.items():
            found.append(f"dataset {dataset} had the encryption root {root}")
        kinds = (("network", self.networks), ("storage pool", self.pools))
        for kind, objects in kinds:
            for made, at_boot in objects:
                when = ", starts at boot" if at_boot else ""
                found.append(f"{kind} {made.name}: {made.description}{when}")
        return [*found, *(["starts at boot"] if self.starts_at_boot else [])]

    def as_json(self) -> dict[str, object]:
        """The surroundings as JSON."""
        return {
            "properties": {name: dict(each.allowed) for name, each in self.settings.items()},
            "networks": {made.name: made.description for made, _ in self.networks},
            "storage_pools": {made.name: made.description for made, _ in self.pools},
            "starts_at_boot": self.starts_at_boot,
        }


def plan_surroundings(
    context: Context, local: Local, plan: RebuildPlan, copies: Copies, definitions: Sequence[str]
) -> Surroundings:
    """Decide what of a guest's surroundings comes back.

    Args:
        context: libvirt and the pools of this host.
        local: the datasets and networks of this host.
        plan: what comes back.
        copies: all snapshots of the replica's copies.
        definitions: of the guest; other networks and pools than they name do not come.
    """
    facts = plan.manifest.surroundings or SurroundingsEntry()
    refused: list[str] = []
    absent: list[str] = []
    own = {each.dataset: each for each in plan.incoming if not each.is_pages}
    settings: dict[str, Settings] = {}
    roots: dict[str, str] = {}
    for entry in facts.datasets:
        if entry.dataset not in own or entry.dataset in settings:
            continue
        settings[entry.dataset] = allowed_settings(own[entry.dataset].kind, entry.properties)
        refused += (
            f"property of {entry.dataset} not set: {each}; see zfsprops(7), and zfs set"
            for each in settings[entry.dataset].refused
        )
        if entry.encryption_root:
            roots[entry.dataset] = quoted(entry.encryption_root)
    settings = _without_large_reservations(context, settings, refused)
    roots_of_xml = [domain_xml.parse(each) for each in definitions if each]
    networks = _missing_networks(
        context, local, facts, set().union(*map(domain_xml.networks, roots_of_xml)), absent
    )
    pools = _missing_pools(
        context, plan, copies, set().union(*map(domain_xml.storage_pools, roots_of_xml)), absent
    )
    at_boot = bool(facts.starts_at_boot)
    everything = (*refused, *absent)
    return Surroundings(settings, roots, networks, pools, at_boot, everything, tuple(absent))


def _without_large_reservations(
    context: Context, settings: Mapping[str, Settings], refused: list[str]
) -> dict[str, Settings]:
    """Leave out reservations of over half of a pool's free room: other guests need it, too."""
    found, left = {}, {}
    for dataset, each in settings.items():
        allowed = dict(each.allowed)
        for key in (key for key in RESERVED if each.reserved(key)):
            pool, size = dataset.partition("/")[0], each.reserved(key)
            if pool not in left:
                left[pool] = _half_of_the_room(context, pool)
            if size <= left[pool]:
                left[pool] -= size
                continue
            del allowed[key]
            reason = f"{key}={size} is over half of the free room of {pool}"
            refused.append(f"property of {dataset} not set: {reason}; see zfs set")
        found[dataset] = each._replace(allowed=allowed)
    return found


def _half_of_the_room(context: Context, pool: str) -> int:
    try:
        return context.pool.available(pool) // 2
    except PoolError:
        return 0


def _missing_networks(
    context: Context, local: Local, facts: SurroundingsEntry, named: set[str], refused: list[str]
) -> tuple[tuple[AllowedNetwork, bool], ...]:
    if not named:
        return ()
    try:
        here = context.hypervisor.defined_networks()
        missing = _missing("network", facts.networks, named - {e.name for e in here}, refused)
        host = local.networks(here) if missing else HostNetworks((), (), ())
    except InterruptedRunError:
        raise
    except SnaporchError as error:
        refused.append(f"no network is defined: {error.line()}")
        return ()
    found: list[tuple[AllowedNetwork, bool]] = []
    for each in missing:
        taken = [(f"network {made.name}", subnet) for made, _ in found for subnet in made.subnets]
        try:
            others = host._replace(reached=[*host.reached, *taken])
            found.append((allowed_network(each.name, each.xml, others), each.starts_at_boot))
        except NotAllowedError as error:
            refused.append(_not_defined(error))
    return tuple(found)


def _missing_pools(
    context: Context, plan: RebuildPlan, copies: Copies, named: set[str], refused: list[str]
) -> tuple[tuple[AllowedPool, bool], ...]:
    facts = plan.manifest.surroundings or SurroundingsEntry()
    if not named:
        return ()
    try:
        here = {each.name for each in context.hypervisor.defined_storage_pools()}
        present = {each.name for each in context.pool.datasets()}
    except InterruptedRunError:
        raise
    except SnaporchError as error:
        refused.append(f"no storage pool is defined: {error.line()}")
        return ()
    created = what_is_created(plan.incoming, copies, present)
    found: list[tuple[AllowedPool, bool]] = []
    for each in _missing("storage pool", facts.storage_pools, named - here, refused):
        try:
            found.append((allowed_pool(each.name, each.xml, created), each.starts_at_boot))
        except NotAllowedError as error:
            refused.append(_not_defined(error))
    return tuple(found)


def _missing(
    kind: str, entries: Sequence[HostObjectEntry], names: set[str], refused: list[str]
) -> list[HostObjectEntry]:
    """Those entries that the host lacks; a name without an entry is noted."""
    known = {each.name: each for each in entries}
    for name in sorted(names - known.keys()):
        reason = "is not on this host, and its definition is not in the bundle"
        refused.append(f"{kind} {quoted(name)}: {reason}; define it by hand")
    return [known[name] for name in sorted(names & known.keys())]


def _not_defined(error: NotAllowedError) -> str:
    return f"{error.thing}: {error.reason}, so it is not defined; by hand: {BY_HAND}"


def what_is_created(incoming: Sequence[Incoming], copies: Copies, present: set[str]) -> Created:
    """The file systems that a rebuild creates: the guest's, and those above them.

    Their names are without those that a dataset of others is below, here or on the replica.

    Args:
        incoming: the guest's datasets.
        copies: all snapshots of the replica's copies.
        present: the datasets of this host.
    """
    own, mine = {each.copy for each in incoming}, {each.dataset for each in incoming}
    above = {
        "/".join(parts[:end])
        for each in incoming
        for parts in [each.dataset.split("/")]
        for end in range(2, len(parts))
    }
    made = {name for name in above - present if copy_name(name) not in copies}
    file_systems = [
        each for each in incoming if each.kind is DatasetKind.FILESYSTEM and not each.is_pages
    ]
    mountpoints = {each.mountpoint for each in file_systems if each.mountpoint}
    others = [copy for copy in copies if copy not in own]
    names = {
        name
        for name in made | {each.dataset for each in file_systems}
        if not any(copy.startswith(f"{copy_name(name)}:") for copy in others)
        and not any(each.startswith(f"{name}/") for each in present - mine)
    }
    return Created(mountpoints, names)


def apply_settings(context: Context, settings: Mapping[str, Settings]) -> list[str]:
    """Set the properties that a dataset does not have yet, each by itself.

    Returns:
        The properties that ZFS did not accept, with the reason.
    """
    left_out = []
    for dataset, each in settings.items():
        has = context.pool.local_properties(list(each.allowed), [dataset]).get(dataset, {})
        for key, value in each.allowed.items():
            if key not in has and (reason := _set(context, dataset, key, value)):
                left_out.append(f"property of {dataset} not set: {key}={value}: {reason}")
    return left_out


def _set(context: Context, dataset: str, key: str, value: str) -> str:
    """Set a property; why that failed, or empty."""
    # a volume's is also for its metadata, and as a number it may not exceed volsize (zfsprops(7))
    values = [value, "auto"] if key == "refreservation" and value not in ("0", "none") else [value]
    reason = ""
    for each in values:
        try:
            context.pool.set_properties([dataset], {key: each})
        except PoolError as error:
            reason = reason or error.reason
        else:
            return ""
    return reason


def define_objects(context: Context, surroundings: Surroundings) -> list[SnaporchError]:
    """Define and start the networks and storage pools; the guest's file systems are mounted.

    Returns:
        What failed.
    """
    failed: list[SnaporchError] = []
    for network, at_boot in surroundings.networks:
        context.progress.step(network.name, "defining the network")
        define = context.hypervisor.define_network
        attempt(failed, partial(define, network.xml, starts_at_boot=at_boot))
    for pool, at_boot in surroundings.pools:
        attempt(failed, partial(_define_pool, context, pool, starts_at_boot=at_boot))
    return failed


def _define_pool(context: Context, pool: AllowedPool, *, starts_at_boot: bool) -> None:
    context.progress.step(pool.name, "defining the storage pool")
    if pool.directory:
        check_directory(pool)
    context.hypervisor.define_storage_pool(pool.xml, starts_at_boot=starts_at_boot)


def check_directory(pool: AllowedPool) -> None:
    """Refuse a directory that leads out of the file system: the file system is the guest's.

    Raises:
        NotAllowedError: it is a link, or below one, or another file system is mounted there.
    """
    path, above = Path(pool.directory), Path(os.path.realpath(pool.mountpoint))
    try:
        direct = above / path.relative_to(pool.mountpoint)
        leads_there = os.path.realpath(path) == str(direct) and path.is_dir()
        same = leads_there and path.stat().st_dev == above.stat().st_dev
    except OSError:
        same = False
    if not same:
        reason = f"{path} is no directory of the guest's file system"
        raise NotAllowedError(f"storage pool {pool.name}", reason, BY_HAND)


def attempt(failed: list[SnaporchError], act: Callable[[], object]) -> None:
    """Do something, and add its failure to a list; a signal is raised."""
    try:
        act()
    except InterruptedRunError:
        raise
    except SnaporchError as error:
        failed.append(error)


def set_autostart(context: Context, manifest: Manifest) -> None:
    """Let libvirt start the guest at boot, if it did on the host that the guest comes from.

    Raises:
        SnaporchError: libvirt refused.
    """
    facts, uuid = manifest.surroundings, manifest.uuid
    if facts and facts.starts_at_boot and not context.hypervisor.starts_at_boot(uuid):
        context.hypervisor.start_at_boot(uuid)
