"""What a guest needs that this host lacks, before a byte moves.

What prevents a rebuild is decided by :mod:`snaporch.rebuild.local_checks`.

The definition comes from a replica. So libvirt is asked about its machine type and CPU only with an
emulator that libvirt has found by itself: libvirt runs the emulator that it is asked about.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import PurePosixPath
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from snaporch.context import Context
from snaporch.errors import InterruptedRunError, RefusedError, SnaporchError
from snaporch.hypervisor import domain_xml
from snaporch.hypervisor.domain_xml import needed_storage_pools, networks
from snaporch.known_faults import Component, parse_release
from snaporch.model import DatasetKind, Level
from snaporch.rebuild.missing_storage_pools import Created, is_on_created
from snaporch.rebuild.plan import RebuildPlan
from snaporch.rebuild.replica_source import Source
from snaporch.rebuild.surroundings import Surroundings
from snaporch.restore.host_requirements import check_memory, start_command
from snaporch.zfs_names import quoted


def find_missing(
    context: Context,
    source: Source,
    plan: RebuildPlan,
    surroundings: Surroundings,
    definitions: Sequence[str],
    *,
    restores: bool,
    cold: bool,
) -> list[str]:
    """What this host lacks, one line each; empty if nothing is known to be missing.

    Args:
        context: of this host.
        source: the replica.
        plan: what comes back.
        surroundings: what of its surroundings comes back.
        definitions: of the guest; the one that it ran with first.
        restores: the guest is restored, and not only its data.
        cold: it boots from its disks.
    """
    found = _room(context, source, plan, surroundings)
    if not restores:
        return found
    found += surroundings.absent
    roots = [domain_xml.parse(each) for each in definitions]
    known = context.hypervisor.emulators()
    found_emulators = [each for root in roots for each in root.iterfind("devices/emulator")]
    for each in found_emulators:  # such as /usr/bin/kvm, a link to one; libvirt gets its target
        if each.text and each.text not in known and (real := os.path.realpath(each.text)) in known:
            each.text = real
    unknown = sorted({each.text for each in found_emulators if each.text} - known)
    found += (
        f"libvirt has found no emulator {quoted(each)}: machine type and CPU were not compared"
        for each in unknown
    )
    interfaces = set().union(*map(domain_xml.host_interfaces, roots))
    found += (
        f"there is no network interface {quoted(each)}"
        for each in sorted(interfaces - _interfaces(context))
    )
    if plan.manifest.level is Level.OFF:
        return found
    resumes = plan.manifest.level is Level.RAM and not cold
    cpu = plan.manifest.versions.cpu if resumes else ""
    xml = ElementTree.tostring(roots[0], encoding="unicode") if roots else ""
    started = roots[:1] if resumes else roots[-1:]
    found += [
        each for root in started for each in _not_active(context, plan, root, resumes=resumes)
    ]
    if xml and not unknown and (reason := context.hypervisor.incompatibility(xml, cpu)):
        found.append(f"it cannot run here: {reason}; see --cold and --no-restore")
    if xml:
        found += _memory(context, plan, xml, resumes=resumes)
    if resumes:
        found += _older(context, plan)
    return found


def _interfaces(context: Context) -> set[str]:
    return {path.name for path in (context.resolver.host.sys / "class" / "net").glob("*")}


def _not_active(context: Context, plan: RebuildPlan, root: Element, *, resumes: bool) -> list[str]:
    """Networks and storage pools that are here, and without which the restore is refused.

    Those that are missing are in the plan of what comes. A pool on what comes starts only later.
    """
    kinds = (
        ("network", "net", networks(root), context.hypervisor.defined_networks),
        (
            "storage pool",
            "pool",
            needed_storage_pools(root, resumes=resumes),
            context.hypervisor.defined_storage_pools,
        ),
    )
    present = {each.name for each in context.pool.datasets()}
    incoming = [each.dataset for each in plan.incoming]
    above = {str(each) for name in incoming for each in PurePosixPath(name).parents}
    mountpoints = [e.mountpoint for e in plan.incoming if e.kind is DatasetKind.FILESYSTEM]
    created = Created(mountpoints, {*incoming, *(above - present - {"."})})
    found = []
    for kind, verb, names, listed in kinds:
        try:
            here = [each for each in listed() if each.name in names] if names else []
        except InterruptedRunError:
            raise
        except SnaporchError as error:
            found.append(f"its {kind}s cannot be looked for: {error.line()}")
            continue
        found += [
            f"the {kind} {quoted(each.name)} is not active: {start_command(verb, each.name)}"
            for each in here
            if not each.active and (kind == "network" or not is_on_created(each.xml, created))
        ]
    return found


def _memory(context: Context, plan: RebuildPlan, xml: str, *, resumes: bool) -> list[str]:
    try:
        check_memory(context, plan.thing, xml, plan.manifest if resumes else None, None)
    except RefusedError as error:
        return [f"it {error.reason}"]
    return []


def _older(context: Context, plan: RebuildPlan) -> list[str]:
    """Programs that are older here than where the RAM was saved."""
    here = context.hypervisor.releases()
    there = plan.manifest.versions
    pairs = (
        ("libvirt", there.libvirt, here.get(Component.LIBVIRT, "")),
        ("QEMU", there.emulator, here.get(Component.QEMU, "")),
    )
    found = []
    for name, then, now in pairs:
        older, newer = parse_release(now), parse_release(then)
        if older and newer and older < newer:
            found.append(f"{name} is {now}, and its RAM was saved by {quoted(then)}")
    return found


def _room(
    context: Context, source: Source, plan: RebuildPlan, surroundings: Surroundings
) -> list[str]:
    """Pools with less room than the data that comes and the reservations need."""
    present: Collection[str] = {each.name for each in context.pool.datasets()}
    coming = [each for each in plan.incoming if each.dataset not in present]
    sizes = source.sizes([each.snapshots[-1] for each in coming])
    needed: dict[str, int] = {}
    for each in coming:
        settings = surroundings.settings.get(each.dataset)
        data = sizes.get(each.snapshots[-1].full_name, 0)
        pool = each.dataset.partition("/")[0]
        if settings:  # what a snapshot refers to does not count as refreservation (zfsprops(7))
            whole = data + settings.reserved("refreservation")
            size = max(whole, settings.reserved("reservation"))
        else:
            size = data
        needed[pool] = needed.get(pool, 0) + size
    lines = []
    for pool, size in sorted(needed.items()):
        free = context.pool.available(pool)
        if size > free:
            figures = f"{free >> 20} MiB free, and about {size >> 20} MiB come or are reserved"
            lines.append(f"pool {pool} has {figures}")
    return lines
