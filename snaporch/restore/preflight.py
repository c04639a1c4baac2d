"""Whether the guest of a snapshot can run on this host now, before anything is touched."""

from __future__ import annotations

import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree

from snaporch.bundle.manifest import DiskEntry, Manifest, Part, Role
from snaporch.catalog.records import as_named_now, check_names, renamed
from snaporch.context import Context
from snaporch.disks.backing_chain import FileState, is_same
from snaporch.errors import RefusedError
from snaporch.hypervisor import domain_xml
from snaporch.model import DatasetKind, Domain, PoolSnapshot
from snaporch.zfs import resolver, volume_users

_MEMINFO = Path("/proc/meminfo")
_ARCSTATS = Path("/proc/spl/kstat/zfs/arcstats")
_BLOCK_DEVICES = Path("/sys/dev/block")
_LEAVE = "restore with --disks-only, which leaves it as it is"
_HUGE_PAGES = Path("/sys/kernel/mm/hugepages")
_SEE_ZVOL = "see `ls -l /dev/zvol`"
_EXTRACT = "copy the image that lies on it with `snaporch extract`"


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


def check_datasets(context: Context, thing: str, manifest: Manifest) -> None:
    """Refuse a guest whose disks it could not read or write: a rollback can, its start needs it.

    Raises:
        RefusedError: a file system is not mounted, a volume has no device node, or one of them was
            made read-only.
    """
    existing = {dataset.name: dataset.kind for dataset in context.pool.datasets()}
    for disk in manifest.disks:
        kind = existing.get(disk.dataset or "")
        place = Path(disk.source or "")
        if kind is DatasetKind.FILESYSTEM:
            try:
                place = resolver.mount_point_of(disk.dataset or "")
            except resolver.NotOnZfsError as error:
                reason = f"{disk.dataset} is not mounted"
                raise RefusedError(thing, reason, f"zfs mount -l {disk.dataset}") from error
        if kind is DatasetKind.VOLUME and disk.source and not Path(disk.source).exists():
            raise RefusedError(
                thing,
                f"the volume {disk.dataset} is not at {disk.source}",
                f"is its key loaded? see `zfs get keystatus {disk.dataset}`",
            )
        if kind is not None and is_read_only(place):
            raise RefusedError(
                thing,
                f"{disk.dataset} is read-only, so that the guest could not be started on it",
                f"zfs set readonly=off {disk.dataset}, or use --disks-only",
            )


def is_read_only(path: Path) -> bool:
    """Whether nothing can be written to a device, or to the file system of a path.

    Raises:
        OSError: it cannot be looked at.
    """
    status = path.stat()
    if stat.S_ISBLK(status.st_mode):
        major, minor = os.major(status.st_rdev), os.minor(status.st_rdev)
        return (_BLOCK_DEVICES / f"{major}:{minor}" / "ro").read_text().strip() == "1"
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def check_places(thing: str, manifest: Manifest) -> None:
    """Refuse to roll back a dataset that the path of its disk does not lead to any more.

    Something else would be discarded than what the guest uses, and the guest go on with a disk that
    nobody has taken back.

    Raises:
        RefusedError: a disk's path leads to another dataset, file or partition than it did.
    """
    for disk in [*manifest.disks, *beneath_inside(manifest)]:
        if disk.dataset is None or disk.left_out or disk.source is None:
            continue
        found, expected = _leads_to(disk), disk.dataset
        if disk.inside is not None:
            expected += f" {disk.inside}"
        if found is not None and found not in (expected, disk.dataset):
            raise RefusedError(
                thing,
                f"{disk.target} ({disk.source}) was {expected}, and leads to {found} now",
                "put path and dataset back as they were, or use `snaporch extract`",
            )


def check_named(thing: str, manifest: Manifest, domain: Domain) -> None:
    """Refuse to roll back for a guest that stays defined as it is, with other disks.

    Raises:
        RefusedError: a disk of the snapshot is none of the domain's.
    """
    boots = domain.inactive_xml if domain.active else None  # a guest that runs may be another
    disks = domain.disks if boots is None else domain_xml.disks(domain_xml.parse(boots))
    named = {disk.source for disk in disks}
    for disk in manifest.disks:
        if disk.dataset is not None and not disk.left_out and disk.source not in named:
            raise RefusedError(
                thing,
                f"the definition that stays does not name {disk.source}",
                "define it as it was",
            )


def as_named_here(
    context: Context, thing: str, manifest: Manifest, snapshots: Iterable[PoolSnapshot]
) -> Manifest:
    """The manifest, with the names that its datasets have now; that some were renamed is told.

    Raises:
        RefusedError: the paths of the guest's disks do not lead there as they did, or the old name
            is another's; it says how a dataset gets its name back.
    """
    everything = list(snapshots)
    names = renamed(manifest, everything)
    if not names:
        return manifest
    now = as_named_now(manifest, everything)
    gone = {dataset.name for dataset in context.pool.datasets()}.isdisjoint(names)
    moved = [disk for disk in now.disks if disk.dataset in names.values() and not disk.left_out]
    if not gone or not all(map(_is_there, moved)):
        check_names(context.pool, thing, manifest, everything)
    for old, new in names.items():
        context.progress.note(thing, f"{old} was renamed, and is {new} now")
    return now


def _is_there(disk: DiskEntry) -> bool:
    """Whether its path leads to the very file or volume."""
    try:
        found = resolver.resolve(disk.source or "")
        inside = resolver.inside(disk.source or "", found)
        same = resolver.partition(disk.source or "") == disk.partition
    except (OSError, resolver.NotOnZfsError):
        return False
    return same and (found.name, inside) == (disk.dataset, disk.inside)


def check_holders(context: Context, thing: str, datasets: Iterable[str]) -> None:
    """Refuse to roll back a dataset beneath something of the host that uses it.

    A file system's files are only looked at as far as loop devices lie over them.

    Raises:
        RefusedError: something does.
    """
    kinds = {dataset.name: dataset.kind for dataset in context.pool.datasets()}
    over = {dataset: loop for loop, dataset in volume_users.loops()}
    for name in datasets:
        try:
            volume = kinds.get(name) is DatasetKind.VOLUME
            holder = (volume_users.holder_of(name) if volume else "") or over.get(name)
        except OSError as error:
            raise RefusedError(
                thing, f"the device of {name} cannot be opened ({error.strerror})", _SEE_ZVOL
            ) from error
        if holder:
            raise RefusedError(
                thing,
                f"{name} would be rolled back beneath this host, which uses it: {holder}",
                "unmount it, and see `lsblk`, `losetup`, `dmsetup ls --tree` and `vgchange -an`",
            )


def check_partitions(thing: str, manifest: Manifest) -> None:
    """Refuse to roll back a volume with partitions of which some are not the guest's.

    Raises:
        RefusedError: there are such.
    """
    own: dict[str, set[int]] = defaultdict(set)
    for disk in manifest.disks:
        if disk.dataset is not None and disk.partition is not None and not disk.left_out:
            own[disk.dataset].add(disk.partition)
    for name, numbers in own.items():
        if others := sorted(volume_users.partitions(name) - numbers):
            raise RefusedError(
                thing,
                f"{name} would be rolled back with partition {', '.join(map(str, others))} of it, "
                "which is not the guest's",
                "give the guest a volume of its own, or use --also-roll-back",
            )


def beneath_inside(manifest: Manifest) -> Iterator[DiskEntry]:
    """What lies beneath the disks and was snapshotted with them, as if it were a disk itself."""
    for disk in manifest.disks:
        for file in disk.beneath or ():
            yield DiskEntry(
                target=disk.target,
                source=file.path,
                format=disk.format,
                dataset=file.dataset,
                inside=file.inside,
            )


def check_beneath(
    thing: str, manifest: Manifest, step: str = _EXTRACT, *, unknown_too: bool = True
) -> None:
    """Refuse disks over a file that was not snapshotted with them, and is not what it was.

    Args:
        unknown_too: also what nobody can know again.

    Raises:
        RefusedError: it was written to, replaced, or is gone.
    """
    for disk in manifest.disks:
        for file in disk.beneath or ():
            if file.dataset is not None or (file.is_unknown and not unknown_too):
                continue
            changed, cause = "was changed since", None
            try:
                if file.is_unknown:
                    changed = "may have been changed since: nobody can tell"
                elif is_same(file, FileState.of(file.path)):
                    continue
            except OSError as error:
                changed, cause = f"cannot be looked at ({error.strerror})", error
            raise RefusedError(
                thing,
                f"{file.path}, which lies beneath {disk.target} and is not in the snapshot, "
                f"{changed}",
                f"put it back as it was, or {step}",
            ) from cause


def _leads_to(disk: DiskEntry) -> str | None:
    """The dataset and the file in it; the dataset alone if no more can be told of it.

    ``None`` if there is nothing at its path, nor could be: no device, nothing mounted.
    """
    assert disk.dataset is not None
    assert disk.source is not None
    real = disk.source
    try:
        real = resolver.real_path(disk.source)
        found = resolver.resolve(real)
        if found.name != disk.dataset:
            return f"{found.name} {resolver.inside(real, found) or ''}".strip()
        number = resolver.partition(real)
        if number != disk.partition and disk.partition is not None:
            return f"{found.name}, partition {number}"
        return _with(disk, resolver.inside(real, found))
    except FileNotFoundError:  # deleted since, and the rollback brings it back
        try:
            root = resolver.mount_point_of(disk.dataset)
        except resolver.NotOnZfsError:
            return None
        inside = os.path.relpath(real, root)
        return real if inside.startswith("..") else _with(disk, inside)
    except resolver.NotOnZfsError:
        return f"{real}, which is not on ZFS,"
    except OSError as error:
        return f"{real}, which cannot be read ({error.strerror}),"


def _with(disk: DiskEntry, inside: str | None) -> str:
    """With the file in it, where it was noted which that was."""
    return f"{disk.dataset} {inside}" if inside and disk.inside is not None else f"{disk.dataset}"


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


def unfit_files(
    context: Context, thing: str, uuid: str, parts: list[Part], xmls: list[str]
) -> dict[str, RefusedError]:
    """Why NVRAM or TPM state cannot be put back, by the name of the part.

    It is not the place in the definition, not a regular file, or another's.
    """
    roots = [domain_xml.parse(xml) for xml in xmls]
    stores = {domain_xml.nvram(root) for root in roots}
    states = [state for state in map(domain_xml.tpm_state, roots) if state is not None]
    found = {}
    for part in parts:
        place = Path(part.source or "")
        if part.role is Role.NVRAM:
            own = str(place) in stores
        elif part.role is Role.TPM:
            own = any(state.holds(place) for state in states)
        else:
            continue
        try:
            _check_place(context, thing, uuid, place)
            _check_own(thing, part, own=own)
        except RefusedError as error:
            found[part.name] = error
    return found


def _check_own(thing: str, part: Part, *, own: bool) -> None:
    if not own or not (part.source or "").startswith("/"):
        raise RefusedError(
            thing,
            f"its {part.role} belongs to {part.source}, which is not what its definition says",
            f"define it as it shall be, or {_LEAVE}",
        )


def _check_place(context: Context, thing: str, uuid: str, place: Path) -> None:
    try:
        if not stat.S_ISREG(place.lstat().st_mode):
            raise RefusedError(
                thing,
                f"{place} is not a regular file, and would be replaced",
                f"move it away, or {_LEAVE}",
            )
    except FileNotFoundError:
        pass
    if place.parent.is_dir() and is_read_only(place.parent):
        step = f"make it writable, or {_LEAVE}"
        raise RefusedError(
            thing, f"{place.parent} is read-only, and {place.name} has to go there", step
        )
    for other in context.hypervisor.domains():
        used = {other.nvram, *(disk.source for disk in other.disks)}
        state = other.tpm_state
        if other.uuid != uuid and (str(place) in used or (state and state.holds(place))):
            raise RefusedError(
                thing,
                f"{place} is used by the domain {other.name}",
                f"give {other.name} a file of its own, or {_LEAVE}",
            )
