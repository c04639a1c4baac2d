"""Whether this host has the machine type, the CPU and the memory that a guest needs."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from snaporch.bundle.manifest import Manifest
from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.hypervisor import domain_xml
from snaporch.model import Domain

_MEMINFO = Path("/proc/meminfo")
_ARCSTATS = Path("/proc/spl/kstat/zfs/arcstats")
_HUGE_PAGES = Path("/sys/kernel/mm/hugepages")


def check_machine(
    context: Context, thing: str, xml: str, domain: Domain | None, *, resumes: bool, cpu: str = ""
) -> None:
    """Refuse a machine type or CPU that this host does not have.

    What runs at this moment fits, whatever a comparison of its CPU says.

    Args:
        cpu: what the guest to be resumed saw of its host's CPU, which may have been another's.

    Raises:
        RefusedError: as libvirt says.
    """
    running = domain.live_xml if domain is not None else None
    if not cpu and running is not None and _hardware(running) == _hardware(xml):
        return
    if reason := context.hypervisor.misfit(xml, cpu):
        step = "restore it where it was taken"
        if resumes:
            step = f"{step}, or boot it from its disks with --cold"
        raise RefusedError(thing, f"this host cannot run it: {reason}", step)


def _hardware(xml: str) -> tuple[str, str]:
    """Machine type and CPU, to be compared."""
    root = domain_xml.parse(xml)
    kind, cpu = root.find("os/type"), root.find("cpu")
    machine = (kind.get("machine") if kind is not None else None) or ""
    return machine, ElementTree.tostring(cpu, "unicode").strip() if cpu is not None else ""


def check_memory(
    context: Context, thing: str, xml: str, manifest: Manifest | None, domain: Domain | None
) -> None:
    """Refuse a guest that needs more memory than the host can give when it is stopped.

    A resumed guest needs the pages in its RAM image at once; one that boots may have what its
    definition says. Huge pages are set apart: QEMU takes them all when it starts.

    Raises:
        RefusedError: with both figures.
    """
    huge = domain_xml.huge_memory(domain_xml.parse(xml))
    running = domain.live_xml if domain is not None else None
    freed = domain_xml.huge_memory(domain_xml.parse(running)) if running is not None else {}
    _check_huge_pages(thing, huge, freed)
    needed = max(0, _memory(xml) - sum(huge.values()))
    if manifest is not None and manifest.ram_bytes is not None and not huge:
        needed = min(needed, manifest.ram_bytes) or manifest.ram_bytes
    free = available_memory()
    if domain is not None and domain.active:
        free += max(0, context.hypervisor.ram_in_use(domain.uuid) - sum(freed.values()))
    if needed > free:
        raise RefusedError(
            thing,
            f"needs {needed >> 20} MiB of memory, {free >> 20} MiB can be had",
            "stop other guests, or use --disks-only",
        )


def _check_huge_pages(thing: str, huge: dict[int, int], freed: dict[int, int]) -> None:
    """``freed`` are those of the guest that is stopped."""
    for size, needed in _by_real_size(huge).items():
        pages = -(-needed // (size << 10))
        free = free_huge_pages(size) + _by_real_size(freed).get(size, 0) // (size << 10)
        if pages > free:
            raise RefusedError(
                thing,
                f"needs {pages} huge pages of {size} KiB, {free} can be had",
                "stop other guests, raise nr_hugepages, or use --disks-only",
            )


def _by_real_size(memory: dict[int, int]) -> dict[int, int]:
    found = re.search(r"^Hugepagesize:\s+(\d+) kB$", _MEMINFO.read_text(), re.MULTILINE)
    default = int(found[1]) if found else 0
    sizes: dict[int, int] = {}
    for size, amount in memory.items():
        if real := size or default:
            sizes[real] = sizes.get(real, 0) + amount
    return sizes


def free_huge_pages(size: int) -> int:
    """Pages of ``size`` KiB that can be had: free and promised to nobody, or made when asked for.

    See the kernel's admin-guide/mm/hugetlbpage.
    """
    place = _HUGE_PAGES / f"hugepages-{size}kB"

    def figure(name: str) -> int:
        try:
            return int((place / name).read_text())
        except OSError:
            return 0

    more = max(0, figure("nr_overcommit_hugepages") - figure("surplus_hugepages"))
    return figure("free_hugepages") - figure("resv_hugepages") + more


def _memory(xml: str) -> int:
    """What the guest has when it starts, in bytes; libvirt writes it in KiB."""
    root = domain_xml.parse(xml)
    text = domain_xml.text(root, "currentMemory") or domain_xml.text(root, "memory")
    return int(text or 0) << 10


def available_memory() -> int:
    """Bytes the host can give without swapping: MemAvailable (proc(5)), and what ZFS would cede.

    The kernel does not count the ARC as available; it shrinks to its ``c_min``.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _MEMINFO.read_text(), re.MULTILINE)
    available = int(found[1]) << 10 if found else 0
    try:
        lines = _ARCSTATS.read_text().splitlines()
    except OSError:
        return available
    arc = {fields[0]: fields[2] for line in lines if len(fields := line.split()) == 3}  # noqa: PLR2004
    return available + max(0, int(arc.get("size", "0")) - int(arc.get("c_min", "0")))
