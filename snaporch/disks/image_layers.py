"""The open images of a disk: each is checked before qemu-img may read or write it.

An overlay is refused here if it names another backing file than the journal, has more than one
name, or another size than its base. An image is opened once; an overlay is opened without following
a link. qemu-img (:mod:`snaporch.disks.qemu_img`) gets the open file as ``/proc/self/fd/N`` with
every layer spelled out, so it follows no name inside an image. Headers are read by
:mod:`snaporch.hypervisor.qcow2`.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from snaporch.disks.qemu_img import OverlayError
from snaporch.hypervisor import BackingImage, OverlayDisk
from snaporch.hypervisor.qcow2 import HeaderError, Qcow2Header, read_qcow2
from snaporch.model import Owner

_SECTOR = 512
_WRITABLE_LAYERS = 2
"""How many layers qemu-img writes to: the overlay and its base."""
COMMITTED_OFFLINE = ("raw", "qcow2")
"""Formats of base images into which qemu-img commits an overlay without libvirt."""
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_KEPT = (
    "nothing was changed; never let qemu-img follow the names in the image: see "
    'docs/how-to/recovery.md, "By hand"'
)


class Layers:
    """The open images of one disk: its overlay, its base, and what lies below that."""

    def __init__(self, overlay: int, lower: Sequence[tuple[BackingImage, int]]) -> None:
        self._overlay = overlay
        self._lower = lower

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The file descriptors to pass to qemu-img."""
        return (self._overlay, *(descriptor for _, descriptor in self._lower))

    @property
    def overlay(self) -> str:
        """The overlay with all layers below it, as qemu-img's argument."""
        return _json_argument(_node("qcow2", "file", self._overlay, self._below(0)))

    @property
    def alone(self) -> str:
        """The overlay alone, without backing file."""
        return _json_argument(_node("qcow2", "file", self._overlay, None))

    @property
    def base(self) -> str:
        """The base with all layers below it."""
        below = self._below(0)
        assert below is not None
        return _json_argument(below)

    def _below(self, level: int) -> dict[str, Any] | None:
        if level == len(self._lower):
            return None
        image, descriptor = self._lower[level]
        return _node(image.format, image.kind, descriptor, self._below(level + 1))


def _node(form: str, kind: str, descriptor: int, below: dict[str, Any] | None) -> dict[str, Any]:
    driver = "host_device" if kind == "block" else "file"
    node = {"driver": form, "file": {"driver": driver, "filename": _fd_path(descriptor)}}
    return node | ({"backing": below} if form == "qcow2" else {})


def _fd_path(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _json_argument(node: dict[str, Any]) -> str:
    return f"json:{json.dumps(node)}"


@contextmanager
def open_overlay(disk: OverlayDisk) -> Iterator[Layers]:
    """Open an overlay to read it alone; the layers below it are not read.

    Raises:
        OverlayError: it is no regular file with one name, its header differs from the journal, or
            its size from its base's.
    """
    with ExitStack() as stack:
        overlay = _open_overlay(stack, disk)
        base = BackingImage(disk.base, disk.base_kind, disk.base_format)
        header = _header(overlay, disk.overlay)
        _check_header(disk.overlay, header, base, strict=True)
        if base.format in COMMITTED_OFFLINE:
            _check_size(disk.overlay, header, base, _open(stack, base.path, base.kind))
        yield Layers(overlay, ())


@contextmanager
def open_layers(disk: OverlayDisk) -> Iterator[Layers]:
    """Open an overlay and all layers below it, and check each against the journal.

    Raises:
        OverlayError: a layer differs from the journal, or cannot be opened.
    """
    with ExitStack() as stack:
        overlay = _open_overlay(stack, disk)
        chain = (BackingImage(disk.base, disk.base_kind, disk.base_format), *disk.below)
        lower = [(image, _open(stack, image.path, image.kind)) for image in chain]
        header = _header(overlay, disk.overlay)
        _check_header(disk.overlay, header, chain[0], strict=True)
        for index, (image, descriptor) in enumerate(lower):
            below = chain[index + 1] if index + 1 < len(chain) else None
            if image.format == "qcow2":
                _check_header(image.path, _header(descriptor, image.path), below, strict=False)
            elif image.format != "raw" or below is not None:
                raise OverlayError(
                    image.path, f"is a {image.format} image, which only libvirt commits into", _KEPT
                )
        _check_size(disk.overlay, header, *lower[0])
        yield Layers(overlay, lower)


def _open_overlay(stack: ExitStack, disk: OverlayDisk) -> int:
    descriptor = _open(stack, disk.overlay, "file", os.O_NOFOLLOW)
    if os.fstat(descriptor).st_nlink != 1:
        raise OverlayError(disk.overlay, "has more than one name, or none", _KEPT)
    return descriptor


def _open(stack: ExitStack, path: str, kind: str, flags: int = 0) -> int:
    try:
        descriptor = os.open(path, _OPEN | flags)
    except OSError as error:
        raise OverlayError(path, f"cannot be opened ({error.strerror})", _KEPT) from error
    stack.callback(os.close, descriptor)
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISBLK(mode) if kind == "block" else stat.S_ISREG(mode)):
        raise OverlayError(path, f"is no {'device' if kind == 'block' else 'regular file'}", _KEPT)
    return descriptor


def _header(descriptor: int, path: str) -> Qcow2Header:
    try:
        return read_qcow2(descriptor)
    except (HeaderError, OSError) as error:
        raise OverlayError(path, str(error), _KEPT) from error


def _check_self_contained(path: str, header: Qcow2Header) -> None:
    if header.data_file is not None or header.encrypted:
        kind = "encryption" if header.encrypted else "an external data file"
        raise OverlayError(path, f"has {kind}", _KEPT)


def _check_header(
    path: str, header: Qcow2Header, below: BackingImage | None, *, strict: bool
) -> None:
    """Check the backing file that a header names.

    Args:
        below: the expected backing file.
        strict: for a run's overlay, whose header must have exactly this name and format.
    """
    _check_self_contained(path, header)
    named = header.backing
    if named is not None and not strict:  # as QEMU and libvirt read a relative name
        named = os.path.normpath(os.path.join(os.path.dirname(path), named))
    expected = below.path if below else None
    if expected is not None and not strict:
        expected = os.path.normpath(expected)
    if named != expected:
        raise OverlayError(path, f"names {named} as its backing file; expected {expected}", _KEPT)
    stated = header.backing_format
    if below and (strict or stated is not None) and stated != below.format:
        raise OverlayError(path, f"names the format {stated}; expected {below.format}", _KEPT)


def _check_size(path: str, header: Qcow2Header, base: BackingImage, descriptor: int) -> None:
    """Check that the guest sees as many bytes as on the base: none may lie beyond the end."""
    size = _size(base, descriptor)
    if header.size != size:
        raise OverlayError(path, f"has {header.size} bytes, but its base has {size}", _KEPT)


def _size(image: BackingImage, descriptor: int) -> int:
    """The size of the disk that the guest sees, in bytes."""
    if image.format == "qcow2":
        return _header(descriptor, image.path).size
    size = os.lseek(descriptor, 0, os.SEEK_END)
    return -(-size // _SECTOR) * _SECTOR


@contextmanager
def given_to(layers: Layers, owner: Owner | None) -> Iterator[None]:
    """Give the images to the emulator's user in the block, as libvirt does while a guest runs.

    Layers below the base are only read, and their file system may refuse to change the owner.
    """
    if owner is None or os.geteuid() != 0:
        yield
        return
    with ExitStack() as stack:
        for index, descriptor in enumerate(layers.descriptors):
            status = os.fstat(descriptor)
            if (status.st_uid, status.st_gid) == (owner.uid, owner.gid):
                continue
            try:
                os.fchown(descriptor, owner.uid, owner.gid)
            except OSError:
                if index < _WRITABLE_LAYERS:
                    raise
                continue
            stack.callback(os.fchown, descriptor, status.st_uid, status.st_gid)
        yield
