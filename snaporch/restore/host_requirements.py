"""Whether this host has the machine type, CPU, memory, networks and pools that a guest needs.

libvirt is asked about the machine type and the CPU by :mod:`snaporch.hypervisor.host_compat`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree

from snaporch.bundle.manifest import Manifest
from snaporch.context import Context
from snaporch.default_paths import HostPaths
from snaporch.errors import RefusedError
from snaporch.hypervisor import HostObject, domain_xml
from snaporch.model import Domain
from snaporch.zfs_names import quoted

_BY_HAND = "see docs/how-to/replication.md, 'Networks and storage pools'"


def check_machine(
    context: Context, thing: str, xml: str, domain: Domain | None, *, resumes: bool, cpu: str = ""
) -> None:
    """Refuse a machine type or CPU that this host does not have.

    Machine type and CPU of a guest that runs on this host are accepted without a comparison.

    Args:
        xml: the definition that is started.
        resumes: the guest is resumed from RAM, so ``--cold`` is an alternative.
        cpu: the CPU that the guest to be resumed saw, possibly on another host.

    Raises:
        RefusedError: with libvirt's reason.
    """
    running = domain.live_xml if domain is not None else None
    if not cpu and running is not None and _hardware(running) == _hardware(xml):
        return
    if reason := context.hypervisor.incompatibility(xml, cpu):
        step = "restore it where it was taken"
        if resumes:
            step = f"{step}, or boot it from its disks with --cold"
        raise RefusedError(thing, f"this host cannot run it: {reason}", step)


class MissingObjectError(RefusedError):
    """A network or a storage pool of libvirt is missing, or not active."""


def check_networks_and_pools(context: Context, thing: str, xml: str, *, resumes: bool) -> None:
    """Refuse a guest whose libvirt networks or storage pools are missing here, or not active.

    libvirt would not start it, and its disks would be rolled back by then.

    Args:
        xml: the definition that is started.
        resumes: the guest is resumed from RAM.

    Raises:
        MissingObjectError: with the network or pool.
        SnaporchError: libvirt cannot list them.
    """
    root = domain_xml.parse(xml)
    if networks := domain_xml.networks(root):
        here = context.hypervisor.defined_networks()
        _check_objects(thing, "network", networks, here, "net")
    if pools := domain_xml.needed_storage_pools(root, resumes=resumes):
        here = context.hypervisor.defined_storage_pools()
        _check_objects(thing, "storage pool", pools, here, "pool")


def _check_objects(
    thing: str, kind: str, names: Collection[str], here: Sequence[HostObject], verb: str
) -> None:
    active = {each.name: each.active for each in here}
    for name in sorted(names):
        start = start_command(verb, name)
        if name not in active:
            reason = f"needs the libvirt {kind} {quoted(name)}, which this host does not have"
            step = f"define it: virsh {verb}-define FILE, and {start}; {_BY_HAND}"
            raise MissingObjectError(thing, reason, step)
        if not active[name]:
            reason = f"needs the libvirt {kind} {quoted(name)}, which is not active"
            raise MissingObjectError(thing, reason, f"start it: {start}")


def start_command(verb: str, name: str) -> str:
    """The command that starts a network (``net``) or a storage pool (``pool``) of libvirt."""
    return f"virsh {verb}-start {shlex.quote(name)}"


def _hardware(xml: str) -> tuple[str, str]:
    """Return machine type and CPU, for comparison."""
    root = domain_xml.parse(xml)
    kind, cpu = root.find("os/type"), root.find("cpu")
    machine = (kind.get("machine") if kind is not None else None) or ""
    return machine, ElementTree.tostring(cpu, "unicode").strip() if cpu is not None else ""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The memory in bytes that a guest takes when it starts, and gives back before."""

    needed: int = 0
    freed: int = 0
    """What the guest has now, if it runs; it is stopped first."""
    huge: Mapping[int, int] = field(default_factory=dict)
    """Bytes in huge pages that it takes, by the size of a page in KiB; 0 is the default size."""
    huge_freed: Mapping[int, int] = field(default_factory=dict)


def check_memory(
    context: Context, thing: str, xml: str, manifest: Manifest | None, domain: Domain | None
) -> None:
    """Refuse a guest that needs more memory than the host has once the running guest is stopped.

    Args:
        context: of this host.
        thing: the subject of the error.
        xml: the definition that is started.
        manifest: the manifest with the size of the RAM image; ``None`` for a guest that boots.
        domain: the guest as it is now; ``None`` if it is not defined.

    Raises:
        RefusedError: with the memory that is needed and the memory that is free.
    """
    need = memory_need(context, thing, xml, manifest, domain)
    check_needs(thing, [need], context.resolver.host)


def memory_need(
    context: Context, thing: str, xml: str | None, manifest: Manifest | None, domain: Domain | None
) -> MemoryNeed:
    """Return the memory that a guest needs.

    A resumed guest needs the pages in its RAM image at once. A guest that boots may use as much as
    its definition says. Huge pages are counted separately: QEMU takes all of them when it starts.

    Args:
        context: of this host.
        thing: the subject of the error.
        xml: the definition that is started; ``None`` if the guest is left off.
        manifest: see :func:`check_memory`.
        domain: see :func:`check_memory`.

    Raises:
        RefusedError: the definition has no possible numbers.
    """
    try:
        huge = domain_xml.huge_memory(domain_xml.parse(xml)) if xml is not None else {}
        memory = _memory(xml) if xml is not None else 0
    except ValueError as error:
        reason = "has a definition whose memory or NUMA nodes are no possible numbers"
        raise RefusedError(thing, reason, "correct the definition") from error
    needed = max(0, memory - sum(huge.values()))
    if manifest is not None and manifest.ram_bytes is not None and not huge:
        needed = min(needed, manifest.ram_bytes) or manifest.ram_bytes
    running = domain.live_xml if domain is not None else None
    going = domain_xml.huge_memory(domain_xml.parse(running)) if running is not None else {}
    freed = 0
    if domain is not None and domain.active:
        freed = max(0, context.hypervisor.ram_in_use(domain.uuid) - sum(going.values()))
    return MemoryNeed(needed, freed, huge, going)


def check_needs(thing: str, needs: Sequence[MemoryNeed], host: HostPaths) -> None:
    """Refuse guests that together need more memory than the host has once they are all stopped.

    Args:
        thing: the subject of the error.
        needs: of each guest.
        host: has the figures of the kernel.

    Raises:
        RefusedError: with the memory that is needed and the memory that is free.
    """
    _check_huge_pages(thing, needs, host)
    needed = sum(need.needed for need in needs)
    free = available_memory(host) + sum(need.freed for need in needs)
    if needed > free:
        raise RefusedError(
            thing,
            f"needs {needed >> 20} MiB of memory, {free >> 20} MiB are available",
            "stop other guests, or use --disks-only",
        )


def _check_huge_pages(thing: str, needs: Sequence[MemoryNeed], host: HostPaths) -> None:
    """Refuse if too few huge pages are free; those of the guests that are stopped count as free."""
    default = _default_huge_page(host)
    going = _by_real_size([need.huge_freed for need in needs], default)
    for size, needed in _by_real_size([need.huge for need in needs], default).items():
        pages = -(-needed // (size << 10))
        free = free_huge_pages(size, host) + going.get(size, 0) // (size << 10)
        if pages > free:
            raise RefusedError(
                thing,
                f"needs {pages} huge pages of {size} KiB, {free} are available",
                "stop other guests, raise nr_hugepages, or use --disks-only",
            )


def _default_huge_page(host: HostPaths) -> int:
    """Return the kernel's default size of huge pages in KiB; 0 without huge pages."""
    found = re.search(r"^Hugepagesize:\s+(\d+) kB$", _meminfo(host), re.MULTILINE)
    return int(found[1]) if found else 0


def _meminfo(host: HostPaths) -> str:
    return (host.proc / "meminfo").read_text()


def _by_real_size(of_guests: Sequence[Mapping[int, int]], default: int) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for size, amount in (pair for memory in of_guests for pair in memory.items()):
        if real := size or default:
            sizes[real] = sizes.get(real, 0) + amount
    return sizes


def free_huge_pages(size: int, host: HostPaths) -> int:
    """Return the number of available huge pages of ``size`` KiB.

    These are free pages without a reservation, and surplus pages that the kernel may still make.
    See the kernel's admin-guide/mm/hugetlbpage.
    """
    place = host.sys / "kernel" / "mm" / "hugepages" / f"hugepages-{size}kB"

    def figure(name: str) -> int:
        try:
            return int((place / name).read_text())
        except OSError:
            return 0

    more = max(0, figure("nr_overcommit_hugepages") - figure("surplus_hugepages"))
    return figure("free_hugepages") - figure("resv_hugepages") + more


def _memory(xml: str) -> int:
    """Return the memory in bytes that the guest starts with."""
    root = domain_xml.parse(xml)
    for path in ("currentMemory", "memory"):
        element = root.find(path)
        if element is not None and (element.text or "").strip():
            return domain_xml.amount(element.text, element.get("unit"))
    return 0


def total_memory(host: HostPaths) -> int:
    """Return the bytes of memory that the kernel has, used or not, with all huge pages."""
    found = re.search(r"^MemTotal:\s+(\d+) kB$", _meminfo(host), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def available_memory(host: HostPaths) -> int:
    """Return the bytes that are available without swapping: MemAvailable (proc(5)) plus the ARC.

    The kernel does not count ZFS's ARC as available, though it shrinks to its ``c_min``.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _meminfo(host), re.MULTILINE)
    available = int(found[1]) << 10 if found else 0
    try:
        lines = (host.proc / "spl" / "kstat" / "zfs" / "arcstats").read_text().splitlines()
    except OSError:
        return available
    arc = {fields[0]: fields[2] for line in lines if len(fields := line.split()) == 3}  # noqa: PLR2004
    return available + max(0, int(arc.get("size", "0")) - int(arc.get("c_min", "0")))
