"""The files beneath a guest's disks: backing files, and data files of images.

libvirt's definition names them where it spells out the chain; otherwise image headers do. An
emulator may have written the headers: they are read with bounds, and the files that they name are
only read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePosixPath
from xml.etree.ElementTree import Element

from snaporch.bundle.firmware_files import open_without_atime
from snaporch.bundle.manifest import BackingFileEntry
from snaporch.errors import RefusedError
from snaporch.hypervisor import domain_xml
from snaporch.hypervisor.qcow2 import (
    MAX_CHAIN,
    PROTOCOL,
    HeaderError,
    Qcow2Header,
    is_qcow2,
    read_qcow2,
)
from snaporch.model import Dataset, Disk, Domain, GroupRun
from snaporch.zfs.resolver import NotOnZfsError, Resolver

_UNREAD = ("qcow", "qed", "vmdk")
"""Formats whose headers may name other files; snaporch does not read these headers."""
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_INSPECT = "see `virsh dumpxml` and `qemu-img info -U`"


@dataclass(frozen=True, slots=True)
class FileState:
    """Identifies an unchanged file; without its ctime, as libvirt changes owners and labels."""

    bytes: int
    inode: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str) -> FileState:
        """The state of a file now.

        Raises:
            OSError: stat(2) failed.
        """
        return cls.from_stat(os.stat(path))

    @classmethod
    def from_stat(cls, status: os.stat_result) -> FileState:
        """The state from a result of stat(2)."""
        return cls(status.st_size, status.st_ino, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class BackingFile:
    """A file or device beneath a disk."""

    target: str
    path: str
    """The path by which the image above names it, made absolute; links are not resolved."""
    dataset: Dataset | None
    """Its dataset, if that is snapshotted with the disk."""
    state: FileState | None
    """Its state now, if it is a readable file that is not snapshotted."""
    data: bool = False
    """Whether it is a data file: it holds the data of an image, and is no image itself."""
    format: str = "raw"

    @property
    def is_unknown(self) -> bool:
        """Whether a later change of it could not be detected."""
        return self.dataset is None and self.state is None


class _Kind(Enum):
    BACKING = "a backing file"
    DATA = "the data of the disk's own image, which the guest writes"
    DATA_BELOW = "the data of a backing file"


@dataclass(frozen=True, slots=True)
class _Image:
    path: str
    format: str
    element: Element | None
    """The ``<disk>`` or ``<backingStore>`` that names it; ``None`` if only a header does."""
    resolver: Resolver


def is_same(noted: BackingFileEntry, now: FileState) -> bool:
    """Whether a file that was not snapshotted is unchanged."""
    return FileState(noted.bytes or 0, noted.inode or 0, noted.mtime_ns or 0) == now


def find_beneath(
    resolver: Resolver,
    domain: Domain,
    disks: Iterable[Disk],
    datasets: Collection[Dataset],
    domains: Callable[[], Iterable[Domain]],
) -> tuple[BackingFile, ...]:
    """Find all files beneath some disks of a domain.

    Args:
        datasets: the datasets that are snapshotted.
        domains: lists all domains; called only if a file is not snapshotted.

    Raises:
        RefusedError: a file beneath a disk could change without being snapshotted.
    """
    root = domain_xml.parse(domain.live_xml or domain.inactive_xml or "")
    found: list[BackingFile] = []
    for disk in disks:
        thing = f"{domain.name}: {disk.target} ({disk.source})"
        top = _top(resolver, root, disk)
        try:
            for image, kind in _walk(thing, top):
                found.append(_backing_file(thing, disk.target, image, datasets, domains, kind))
        except HeaderError as error:
            raise RefusedError(thing, str(error), _INSPECT) from error
        except OSError as error:
            reason = f"{error.filename}, which lies beneath it: {error.strerror}"
            raise RefusedError(thing, reason, _INSPECT) from error
    return tuple(found)


def is_beneath(resolver: Resolver, domain: Domain, disk: Disk, path: str) -> bool:
    """Whether a file lies beneath a disk, as the definition or a header names it.

    Raises:
        RefusedError, HeaderError, OSError: the chain cannot be followed to its end.
    """
    root = domain_xml.parse(domain.live_xml or domain.inactive_xml or "")
    top = _top(resolver, root, disk)
    return any(found.path == path for found, _ in _walk(disk.target, top))


def _top(resolver: Resolver, root: Element, disk: Disk) -> _Image:
    element = domain_xml.disk_element(root, disk.target)
    return _Image(disk.source or "", disk.format, element, resolver)


def _walk(thing: str, image: _Image) -> Iterator[tuple[_Image, _Kind]]:
    """The files beneath an image, the nearest first."""
    for depth in range(MAX_CHAIN):
        if depth and _is_opaque(image):
            return
        header = _header(image)
        if (data := _data_file(thing, image, header)) is not None:
            inner = _Image(data, "raw", None, image.resolver)
            yield inner, _Kind.DATA_BELOW if depth else _Kind.DATA
        below = _below(thing, image, header)
        if below is None:
            return
        yield below, _Kind.BACKING
        image = below
    raise RefusedError(thing, f"its backing chain has more than {MAX_CHAIN} images", _INSPECT)


def _backing_file(
    thing: str,
    target: str,
    image: _Image,
    datasets: Collection[Dataset],
    domains: Callable[[], Iterable[Domain]],
    kind: _Kind,
) -> BackingFile:
    path, data, state = image.path, kind is not _Kind.BACKING, None
    resolver = image.resolver
    try:
        real = resolver.real_path(path)
    except NotOnZfsError as error:  # on NFS or FUSE: not accessed
        real, where = path, error.reason
    else:
        dataset = _dataset_of(resolver, real)
        if dataset in datasets and not _is_opaque(image):
            return BackingFile(target, path, dataset, None, data, image.format)
        where = f"in {dataset.name}" if dataset is not None else "not on ZFS"
        state = _state(image, real)
    if kind is _Kind.DATA:
        raise RefusedError(
            thing,
            f"its data is in {path}, which is {where} and would not be snapshotted with it",
            "move it to the dataset of its image",
        )
    for domain in domains():
        if domain.active and real in written_by(resolver, domain):
            raise RefusedError(
                thing,
                f"{path}, which lies beneath it, is {where}, and {domain.name} writes to it",
                "give each guest an image of its own",
            )
    return BackingFile(target, path, None, state, data, image.format)


def _state(image: _Image, real: str) -> FileState | None:
    """The state of a regular file, unless its header may name files that snaporch does not read."""
    status = os.stat(real)
    if not stat.S_ISREG(status.st_mode) or _is_opaque(image):
        return None
    return FileState.from_stat(status)


def _dataset_of(resolver: Resolver, path: str) -> Dataset | None:
    with suppress(NotOnZfsError):
        return resolver.resolve(path)
    return None


def _is_remote(image: _Image) -> bool:
    """Whether an image is on NFS or FUSE, so that a server or a program would have to answer."""
    try:
        image.resolver.real_path(image.path)
    except NotOnZfsError:
        return True
    return False


def _is_opaque(image: _Image) -> bool:
    """Whether the files beneath an image are unknown: not in the definition, header not read."""
    spelled = image.element is not None and image.element.find("backingStore") is not None
    if image.format == "vmdk":
        return True  # no definition names its extents
    return not spelled and (image.format in _UNREAD or _is_remote(image))


def _header(image: _Image) -> Qcow2Header | None:
    """The header; ``None`` for an image that names no other, or that the definition spells out."""
    if _is_opaque(image):
        raise HeaderError(
            f"{image.path} is a {image.format} image, which may name files that snaporch does not "
            "read"
        )
    if image.format != "qcow2" or _is_remote(image):
        return None
    if image.element is not None and image.element.find("source/slices") is not None:
        if image.element.find("backingStore") is None:
            raise HeaderError(f"{image.path} is a slice, whose header snaporch does not read")
        return None
    with _opened(image) as descriptor:
        try:
            return read_qcow2(descriptor)
        except HeaderError as error:
            raise HeaderError(f"{image.path} {error}") from error


@contextmanager
def _opened(image: _Image) -> Iterator[int]:
    """Open a file or block device for reading; anything else is refused before it is opened."""
    path = image.path
    try:
        place = os.open(image.resolver.real_path(path), os.O_PATH | os.O_CLOEXEC)
    except NotOnZfsError as error:
        raise HeaderError(f"{path} is {error.reason}") from error
    try:
        mode = os.fstat(place).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
            raise HeaderError(f"{path} is neither a file nor a block device")
        descriptor = open_without_atime(f"/proc/self/fd/{place}", _OPEN)
    finally:
        os.close(place)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _data_file(thing: str, image: _Image, header: Qcow2Header | None) -> str | None:
    store = image.element.find("source/dataStore") if image.element is not None else None
    if store is not None:
        path = domain_xml.source_path(store, store.get("type", "file"))
        if path is None:
            raise RefusedError(thing, f"the data of {image.path} is not in a local file", _INSPECT)
        return path
    if header is None or header.data_file is None:
        return None
    return _named(image, header.data_file, "data")


def _below(thing: str, image: _Image, header: Qcow2Header | None) -> _Image | None:
    store = image.element.find("backingStore") if image.element is not None else None
    if store is not None:
        if store.find("source") is None:
            return None  # an empty <backingStore/> ends the chain
        path = domain_xml.source_path(store, store.get("type", "file"))
        if path is None:
            raise RefusedError(
                thing,
                f"the backing file of {image.path} is not on this host and may change",
                "copy it into the image (virsh blockpull), or see exclude_disks",
            )
        return _Image(path, _format(store), store, image.resolver)
    if header is None or header.backing is None:
        return None
    path = _named(image, header.backing, "backing file")
    below = _Image(path, header.backing_format or "raw", None, image.resolver)
    if header.backing_format is None:
        with _opened(below) as descriptor:
            if is_qcow2(descriptor):
                raise HeaderError(f"{image.path} does not say which format its backing file has")
    return below


def _format(store: Element) -> str:
    element = store.find("format")
    return (element.get("type") if element is not None else None) or "raw"


def _named(image: _Image, name: str, what: str) -> str:
    """The path that a name in a header means to QEMU and libvirt."""
    if not name or PROTOCOL.match(name):
        raise HeaderError(f"{image.path} names {name or 'nothing'} as its {what}, which is no path")
    return str(PurePosixPath(image.path).parent / name)


def written_by(resolver: Resolver, domain: Domain) -> set[str]:
    """The real paths of the files and devices that a domain writes to."""
    found = set()
    for disk in domain.disks:
        if disk.source and not disk.readonly and disk.device in ("disk", "lun"):
            real = disk.source  # the name itself, where the path cannot be resolved
            with suppress(OSError, NotOnZfsError):
                real = resolver.real_path(disk.source)
            found.add(real)
    return found


def shared_disk_warnings(
    resolver: Resolver,
    domain: Domain,
    disks: Iterable[Disk],
    domains: Callable[[], Iterable[Domain]],
    group: GroupRun | None,
) -> Iterator[str]:
    """Warn of shared disks to which other, running guests write during the snapshot.

    Args:
        domains: lists all domains; called only if a disk is shareable.
        group: the consistency group of the snapshot: its members are frozen, too.

    Yields: a warning for each such disk.
    """
    root = domain_xml.parse(domain.live_xml or domain.inactive_xml or "")
    shared = {
        resolver.real_path(disk.source): disk.target
        for disk in disks
        if disk.source and domain_xml.is_shareable(root, disk.target)
    }
    still = {domain.uuid, *(uuid for uuid, _ in (group.members if group else ()))}
    for other in domains() if shared else ():
        if other.active and other.uuid not in still:
            for path in sorted(written_by(resolver, other) & shared.keys()):
                yield (
                    f"{other.name} writes to {shared[path]}, too, and is not frozen: only a "
                    "snapshot of both as a group is consistent"
                )
