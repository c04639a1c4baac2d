"""Check, before a clone may run, that its emulator has only the clone's own files open.

This is the last safeguard. Whatever files a definition, a link or an image header has led the
emulator to, the kernel lists them.
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
from snaporch.zfs.resolver import NotOnZfsError

_TERMINAL_MAJORS = range(136, 144)
"""Major numbers of pseudo-terminals (the kernel's devices.txt)."""
_HARMLESS_DEVICES = re.compile(
    r"null|zero|full|random|urandom|tty|ptmx|kvm|sev|userfaultfd|udmabuf|tap\d+|dri/.*"
    r"|net/tun|vhost-(net|vsock)"
)
"""Character devices that hold no data."""
_LIBVIRT_FILES = re.compile(
    r"(/var/lib/libvirt/qemu/(domain-|ram/)|/run/libvirt/|/dev/(shm|hugepages)/).*"
    r"|/.*/libvirt/qemu/(log/)?[^/]*\.log"
)
"""Files that libvirt makes for each emulator: memory, keys, a log."""
_SYSFS = Path("/sys/dev/char")


def check_open_files(
    context: Context, thing: str, uuid: str, directory: Path, nodes: Iterable[Path]
) -> None:
    """Stop a clone whose emulator has a file open that is not the clone's.

    Args:
        thing: the name for error messages.
        uuid: the UUID of the clone.
        directory: all files below it are the clone's.
        nodes: the devices of the clone's volumes.

    Raises:
        SharedError: the emulator had such a file open, and was stopped.
        UnavailableError: the open files cannot be listed.
    """
    others = _written_by_others(context, uuid)
    volumes = {_identity(os.stat(node)) for node in nodes}
    for each in _open_files(context, uuid):
        own = not each.writable or _is_own(each, directory, volumes)
        if not own or not others.isdisjoint((_identity(each.status), each.path)):
            context.hypervisor.destroy(uuid)
            raise SharedError(
                thing,
                f"its emulator has {each.path} open, which is not the clone's, and was stopped "
                "before it ran",
                "see `virsh domblklist` of the original",
            )


def _open_files(context: Context, uuid: str) -> list[OpenFile]:
    """The emulator's open files; none if it has exited."""
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
        return True  # a socket, a pipe, an event file descriptor, or memory
    if _LIBVIRT_FILES.fullmatch(each.path):
        return True
    return Path(each.path).is_relative_to(directory) and _is_at_path(each)


def _is_at_path(each: OpenFile) -> bool:
    """Whether the path is this file here, too: the emulator has a mount namespace of its own."""
    with suppress(OSError):
        return os.path.samestat(os.stat(each.path, follow_symlinks=False), each.status)
    return False


def _is_harmless_device(device: int) -> bool:
    if os.major(device) in _TERMINAL_MAJORS:
        return True
    with suppress(OSError):
        text = (_SYSFS / f"{os.major(device)}:{os.minor(device)}" / "uevent").read_text()
        names = [line.partition("=")[2] for line in text.split() if line.startswith("DEVNAME=")]
        return any(_HARMLESS_DEVICES.fullmatch(name) for name in names)
    return False


def _written_by_others(context: Context, uuid: str) -> set[tuple[int, int] | str]:
    """Files that other domains write to; a clone must not even read them, since they change.

    A file is identified by its path if it is on a file system that may never answer.
    """
    found: set[tuple[int, int] | str] = set()
    resolver = context.resolver
    mounts = resolver.mounts()
    for domain in context.hypervisor.domains():
        if domain.uuid == uuid:
            continue
        for path in written_by(resolver, domain):
            try:
                found.add(_identity(os.stat(resolver.real_path(path, mounts))))
            except NotOnZfsError:
                found.add(path)
            except OSError:
                continue
    return found


def _identity(status: os.stat_result) -> tuple[int, int]:
    """Identify a file, or the device that a node stands for."""
    if stat.S_ISBLK(status.st_mode):
        return -1, status.st_rdev
    return status.st_dev, status.st_ino
