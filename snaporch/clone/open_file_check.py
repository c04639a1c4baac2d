"""What the emulator of a clone has open is the clone's own: looked at before it may run.

The net below everything else: whatever a definition, a link or the header of an image has led the
emulator to, the kernel knows which files those are.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from snaporch.context import Context
from snaporch.disks.backing_chain import written_by
from snaporch.errors import UnavailableError
from snaporch.hypervisor import OpenFile
from snaporch.hypervisor.clone_xml import SharedError
from snaporch.zfs import resolver

_TERMINALS = range(136, 144)
"""Major numbers of pseudo-terminals (the kernel's devices.txt)."""
_DEVICES = re.compile(
    r"null|zero|full|random|urandom|tty|ptmx|kvm|sev|userfaultfd|udmabuf|tap\d+|dri/.*"
    r"|net/tun|vhost-(net|vsock)"
)
"""Character devices that hold no data of anybody's."""
_LIBVIRTS = re.compile(
    r"(/var/lib/libvirt/qemu/(domain-|ram/)|/run/libvirt/|/dev/(shm|hugepages)/).*"
    r"|/.*/libvirt/qemu/(log/)?[^/]*\.log"
)
"""What libvirt makes for each emulator: memory, keys, a log."""
_SYSFS = Path("/sys/dev/char")


def check_own_files(
    context: Context, thing: str, uuid: str, directory: Path, nodes: Iterable[Path]
) -> None:
    """Refuse to let a clone run that has something open which is not its own.

    Args:
        thing: whom to speak of.
        uuid: the clone's.
        directory: what lies below it is the clone's.
        nodes: the devices of its volumes.

    Raises:
        SharedError: it has; it was stopped.
        UnavailableError: it cannot be found out.
    """
    others = _written_by_others(context, uuid)
    volumes = {_identity(os.stat(node)) for node in nodes}
    for each in _opened(context, uuid):
        own = not each.writable or _is_own(each, directory, volumes)
        if not own or not others.isdisjoint((_identity(each.status), each.path)):
            context.hypervisor.destroy(uuid)
            raise SharedError(
                thing,
                f"its emulator has {each.path} open, which is not the clone's, and was stopped "
                "before it ran",
                "see `virsh domblklist` of the original",
            )


def _opened(context: Context, uuid: str) -> list[OpenFile]:
    """Nothing, if the emulator has ended meanwhile."""
    try:
        return context.hypervisor.open_files(uuid)
    except UnavailableError:
        domain = context.hypervisor.find(uuid)
        if domain is not None and domain.active:
            raise
        return []


def _is_own(each: OpenFile, directory: Path, volumes: set[tuple[int, int]]) -> bool:
    mode = each.status.st_mode
    if _identity(each.status) in volumes:
        return True
    if stat.S_ISBLK(mode):
        return False
    if stat.S_ISCHR(mode):
        return _is_harmless_device(each.status.st_rdev)
    if not stat.S_ISREG(mode) or not each.status.st_nlink:
        return True  # a socket, a pipe, an event; memory
    if _LIBVIRTS.fullmatch(each.path):
        return True
    return Path(each.path).is_relative_to(directory) and _is_seen_at(each)


def _is_seen_at(each: OpenFile) -> bool:
    """The emulator has a mount namespace of its own, in which a path may be another file's."""
    with suppress(OSError):
        return os.path.samestat(os.stat(each.path, follow_symlinks=False), each.status)
    return False


def _is_harmless_device(device: int) -> bool:
    if os.major(device) in _TERMINALS:
        return True
    with suppress(OSError):
        text = (_SYSFS / f"{os.major(device)}:{os.minor(device)}" / "uevent").read_text()
        names = [line.partition("=")[2] for line in text.split() if line.startswith("DEVNAME=")]
        return any(_DEVICES.fullmatch(name) for name in names)
    return False


def _written_by_others(context: Context, uuid: str) -> set[tuple[int, int] | str]:
    """What other domains write to must not even be read: it is of another time, and changes.

    By its path what is on a file system that may never answer.
    """
    found: set[tuple[int, int] | str] = set()
    mounts = resolver.read_mounts()
    for domain in context.hypervisor.domains():
        if domain.uuid == uuid:
            continue
        for path in written_by(domain):
            try:
                found.add(_identity(os.stat(resolver.real_path(path, mounts))))
            except resolver.NotOnZfsError:
                found.add(path)
            except OSError:
                continue
    return found


def _identity(status: os.stat_result) -> tuple[int, int]:
    """Of a file, or of the device that a node stands for."""
    if stat.S_ISBLK(status.st_mode):
        return -1, status.st_rdev
    return status.st_dev, status.st_ino
