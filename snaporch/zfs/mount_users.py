"""Find the programs whose mounts prevent a snapshot or a file system from being destroyed.

To destroy a snapshot, ZFS unmounts its own mounts below ``.zfs/snapshot``, and copies of them that
follow this host's mounts. A copy in a private mount namespace stays as long as the namespace: that
of an emulator until its guest is shut off.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from snaporch.zfs.resolver import Mount, read_mounts

_PROC = Path("/proc")
_AUTOMOUNTS = "/.zfs/snapshot/"
_GUEST = re.compile(r"guest=((?:[^,]|,,)*)")


@dataclass(frozen=True, slots=True)
class BlockingMount:
    """A mount that ZFS does not unmount by itself."""

    name: str
    """The mounted dataset or snapshot."""
    program: str
    """The program that has it mounted, as text for people."""
    uuid: str | None = None
    """The domain's UUID, if the program is an emulator."""


def blocking_mounts(
    names: Collection[str] | None = None, proc: Path = _PROC
) -> list[BlockingMount]:
    """Mounts that prevent datasets and snapshots from being destroyed.

    Args:
        names: datasets and snapshots to check; all snapshots if ``None``.
    """
    own = _namespace(proc / "self")
    found = set()
    for process in _one_of_each_namespace(proc):
        with suppress(OSError):  # the process has ended
            for mount in read_mounts(process / "mountinfo"):
                matches = "@" in mount.source if names is None else mount.source in names
                if mount.filesystem != "zfs" or not matches:
                    continue
                if _namespace(process) != own and not mount.follows:
                    found.add(_held_by(process, mount))
                elif _namespace(process) == own and _mounted_by_hand(mount):
                    found.add(BlockingMount(mount.source, f"this host, at {mount.mount_point}"))
    return sorted(found, key=lambda each: (each.name, each.program))


def _mounted_by_hand(mount: Mount) -> bool:
    """Whether ZFS cannot unmount it: a snapshot that is mounted outside of ``.zfs/snapshot``."""
    return "@" in mount.source and _AUTOMOUNTS not in mount.mount_point


def _one_of_each_namespace(proc: Path) -> Iterator[Path]:
    """One process of each mount namespace, preferably an emulator."""
    found: dict[int, Path] = {}
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):
            number = _namespace(process)
            if number not in found or _domain(process) is not None:
                found[number] = process
    yield from found.values()


def _namespace(process: Path) -> int:
    return os.stat(process / "ns" / "mnt").st_ino


def _held_by(process: Path, mount: Mount) -> BlockingMount:
    domain = _domain(process)
    if domain is not None:
        name, uuid = domain
        return BlockingMount(mount.source, f"the guest {name}", uuid)
    command = (process / "comm").read_text("utf-8", "replace").strip()
    return BlockingMount(mount.source, f"{command} (process {process.name})")


def _domain(process: Path) -> tuple[str, str] | None:
    """Name and UUID that libvirt gave to an emulator: ``-name guest=NAME,… -uuid UUID``."""
    words = (process / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    given = dict(pairwise(words))
    match = _GUEST.match(given.get("-name", ""))
    if match is None or "-uuid" not in given:
        return None
    return match[1].replace(",,", ","), given["-uuid"]
