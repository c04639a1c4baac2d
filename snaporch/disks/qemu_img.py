"""qemu-img on images that an emulator owns: on open files only, as the emulator's user only.

An image is opened once, without following a link, and looked at; qemu-img gets that very file as
``/proc/self/fd/N``, and every layer of it spelled out, so that no name inside an image is followed.
What the image says is compared with the journal before.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from snaporch.command_log import LoggedCommand
from snaporch.errors import SnaporchError
from snaporch.hypervisor import BackingImage, OverlayDisk
from snaporch.hypervisor.qcow2 import HeaderError, Qcow2Header, read_qcow2
from snaporch.model import Owner

_SECTOR = 512
_WRITTEN = 2
"""The overlay and its base, of the layers of a disk."""
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_KEEP = (
    "nothing was changed; do not let qemu-img follow what the image names: see docs/recovery.md, "
    '"By hand"'
)
_CONFINED = ("--clear-groups", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all")


class OverlayError(SnaporchError):
    """An overlay cannot be made, read or committed."""


class Layers:
    """The open images of one disk: its overlay, its base, and what lies below that."""

    def __init__(self, overlay: int, lower: Sequence[tuple[BackingImage, int]]) -> None:
        self._overlay = overlay
        self._lower = lower

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What qemu-img has to be given."""
        return (self._overlay, *(descriptor for _, descriptor in self._lower))

    @property
    def overlay(self) -> str:
        """The overlay over all that lies below."""
        return _spelled(_node("qcow2", "file", self._overlay, self._below(0)))

    @property
    def alone(self) -> str:
        """The overlay over nothing: what is in it, and what is not."""
        return _spelled(_node("qcow2", "file", self._overlay, None))

    @property
    def base(self) -> str:
        """The base over what lies below it."""
        below = self._below(0)
        assert below is not None
        return _spelled(below)

    def _below(self, level: int) -> dict[str, Any] | None:
        if level == len(self._lower):
            return None
        image, descriptor = self._lower[level]
        return _node(image.format, image.kind, descriptor, self._below(level + 1))


def _node(form: str, kind: str, descriptor: int, below: dict[str, Any] | None) -> dict[str, Any]:
    driver = "host_device" if kind == "block" else "file"
    node = {"driver": form, "file": {"driver": driver, "filename": _place(descriptor)}}
    return node | ({"backing": below} if form == "qcow2" else {})


def _place(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _spelled(node: dict[str, Any]) -> str:
    return f"json:{json.dumps(node)}"


@contextmanager
def open_overlay(disk: OverlayDisk) -> Iterator[Layers]:
    """An overlay by itself: what lies below it is not opened.

    Raises:
        OverlayError: it is not a file of its own, or not what the journal says.
    """
    with ExitStack() as stack:
        overlay = _open_overlay(stack, disk)
        base = BackingImage(disk.base, disk.base_kind, disk.base_format)
        _check_header(disk.overlay, _header(overlay, disk.overlay), base, strict=True)
        yield Layers(overlay, ())


@contextmanager
def open_layers(disk: OverlayDisk) -> Iterator[Layers]:
    """An overlay and all that lies below it, each seen to be what the journal says.

    Raises:
        OverlayError: one is not, or cannot be opened.
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
                    image.path, f"is a {image.format} image, which only libvirt commits into", _KEEP
                )
        size = _size(lower[0][0], lower[0][1])
        if header.size != size:
            raise OverlayError(
                disk.overlay, f"is of {header.size} bytes, and its base of {size}", _KEEP
            )
        yield Layers(overlay, lower)


def _open_overlay(stack: ExitStack, disk: OverlayDisk) -> int:
    descriptor = _open(stack, disk.overlay, "file", os.O_NOFOLLOW)
    if os.fstat(descriptor).st_nlink != 1:
        raise OverlayError(disk.overlay, "has more than one name, or none", _KEEP)
    return descriptor


def _open(stack: ExitStack, path: str, kind: str, flags: int = 0) -> int:
    try:
        descriptor = os.open(path, _OPEN | flags)
    except OSError as error:
        raise OverlayError(path, f"cannot be opened ({error.strerror})", _KEEP) from error
    stack.callback(os.close, descriptor)
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISBLK(mode) if kind == "block" else stat.S_ISREG(mode)):
        raise OverlayError(path, f"is no {'device' if kind == 'block' else 'regular file'}", _KEEP)
    return descriptor


def _header(descriptor: int, path: str) -> Qcow2Header:
    try:
        return read_qcow2(descriptor)
    except (HeaderError, OSError) as error:
        raise OverlayError(path, str(error), _KEEP) from error


def _check_self_contained(path: str, header: Qcow2Header) -> None:
    if header.data_file is not None or header.encrypted:
        kind = "encryption" if header.encrypted else "an external data file"
        raise OverlayError(path, f"has {kind}", _KEEP)


def _check_header(
    path: str, header: Qcow2Header, below: BackingImage | None, *, strict: bool
) -> None:
    """``strict`` for an overlay of ours, of which the name and the format are known exactly."""
    _check_self_contained(path, header)
    named = header.backing
    if named is not None and not strict:  # as QEMU and libvirt read a relative name
        named = os.path.normpath(os.path.join(os.path.dirname(path), named))
    wanted = below.path if below else None
    if wanted is not None and not strict:
        wanted = os.path.normpath(wanted)
    if named != wanted:
        raise OverlayError(path, f"names {named} as its backing file, and not {wanted}", _KEEP)
    stated = header.backing_format
    if below and (strict or stated is not None) and stated != below.format:
        raise OverlayError(path, f"names the format {stated}, and not {below.format}", _KEEP)


def _size(image: BackingImage, descriptor: int) -> int:
    """Of the disk that a guest sees, in bytes."""
    if image.format == "qcow2":
        return _header(descriptor, image.path).size
    size = os.lseek(descriptor, 0, os.SEEK_END)
    return -(-size // _SECTOR) * _SECTOR


@contextmanager
def lent(layers: Layers, owner: Owner | None) -> Iterator[None]:
    """Give the images to the emulator's user for a while, as libvirt does while a guest runs.

    What lies below the base is only read, and may be where nobody can give it away.
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
                if index < _WRITTEN:
                    raise
                continue
            stack.callback(os.fchown, descriptor, status.st_uid, status.st_gid)
        yield


def qemu_img(
    *arguments: str,
    owner: Owner | None,
    descriptors: Sequence[int] = (),
    good: Sequence[int] = (0,),
) -> tuple[int, str]:
    """Run qemu-img as ``owner``, with nothing but what it is given; its exit code and output.

    Args:
        good: exit codes that are answers.

    Raises:
        OverlayError: it is not installed, or failed.
    """
    confine: list[str] = []
    # one that is no root's has nothing to give away; without a label, libvirt's QEMU is root's too
    if owner is not None and os.geteuid() == 0:
        confine = ["setpriv", "--reuid", str(owner.uid), "--regid", str(owner.gid), *_CONFINED]
    with LoggedCommand("qemu-img", *arguments) as log:
        done = _run([*confine, "qemu-img", *arguments], descriptors)
        log.exited(done.returncode)
    if done.returncode not in good:
        reason = done.stderr.strip() or "failed"
        raise OverlayError(f"qemu-img {arguments[0]}", reason)
    return done.returncode, done.stdout


def _run(command: Sequence[str], descriptors: Sequence[int]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            process_group=0,  # a terminal's Ctrl-C is for us, not for what we are finishing
            pass_fds=descriptors,
            cwd="/",
            text=True,
            errors="replace",
        )
    except FileNotFoundError as error:
        reason, step = "is not installed", "apt install qemu-utils util-linux"
        raise OverlayError(str(error.filename or "qemu-img"), reason, step) from error
