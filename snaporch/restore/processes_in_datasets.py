"""Find the processes that use a dataset, and unmount its snapshots below ``.zfs``."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from snaporch.command_log import LoggedCommand
from snaporch.errors import RefusedError
from snaporch.zfs import volume_use_by_host
from snaporch.zfs.resolver import Resolver, read_mounts

_NODES = ("devtmpfs", "tmpfs")
"""File systems with device nodes; QEMU's mount namespace has a tmpfs with its own nodes."""


def check_not_in_use(resolver: Resolver, thing: str, snapshots: Iterable[str]) -> None:
    """Unmount snapshots below ``.zfs``; ZFS cannot destroy one that a process uses.

    Raises:
        RefusedError: a process uses one.
    """
    wanted = frozenset(snapshots)
    for mount in resolver.mounts() if wanted else ():
        if mount.filesystem != "zfs" or mount.source not in wanted:
            continue
        command = ["umount", "--", mount.mount_point]
        with LoggedCommand(*command) as log:
            done = subprocess.run(command, capture_output=True, check=False, text=True)
            log.exited(done.returncode)
        if done.returncode != 0 and mount in resolver.mounts():
            raise RefusedError(
                thing,
                f"{mount.source}, which has to be destroyed, is in use ({done.stderr.strip()})",
                f"end what reads {mount.mount_point}: fuser -vm {mount.mount_point}",
            )


def check_unused(resolver: Resolver, thing: str, datasets: Iterable[str], uuid: str) -> None:
    """Refuse to roll back datasets that a process other than the guest's own has open.

    The guest's processes are known by its UUID, so the name under which it runs does not matter.

    Raises:
        RefusedError: names the process.
    """
    if user := next(processes_on(resolver, datasets, uuid), None):
        process, dataset = user
        raise RefusedError(
            thing, f"{dataset} is in use by process {process}", f"see: ps -fp {process}"
        )


def processes_on(
    resolver: Resolver, datasets: Iterable[str], uuid: str
) -> Iterator[tuple[str, str]]:
    """Yield the processes that have a file or a device of the datasets open, each with the dataset.

    Processes with the guest's UUID in their command line are left out. Only files on device-node
    file systems are examined: on a network or FUSE mount the server may never answer.
    """
    wanted = frozenset(datasets)
    volumes: dict[int, str] = {}
    for dataset in wanted:
        with suppress(OSError):
            volumes |= dict.fromkeys(volume_use_by_host.numbers(dataset, resolver), dataset)
    for process in resolver.host.proc.glob("[0-9]*"):
        with suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if int(process.name) == os.getpid() or uuid.encode() in command:
                continue
            for dataset in _opened(process, wanted, volumes):
                yield process.name, dataset


def _opened(process: Path, wanted: frozenset[str], volumes: dict[int, str]) -> Iterator[str]:
    mounts = {each.number: each for each in read_mounts(process / "mountinfo")}
    for number in os.listdir(process / "fd"):
        with suppress(OSError):
            info = (process / "fdinfo" / number).read_text()
            found = re.search(r"^mnt_id:\s+(\d+)$", info, re.MULTILINE)
            mount = mounts.get(int(found[1])) if found else None
            if mount is None:
                continue
            if mount.filesystem == "zfs" and mount.source in wanted:
                yield mount.source
            elif volumes and mount.filesystem in _NODES:
                node = os.stat(process / "fd" / number).st_rdev
                if node in volumes:
                    yield volumes[node]
