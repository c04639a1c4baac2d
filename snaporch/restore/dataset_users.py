"""Who uses a dataset, or a snapshot of it below ``.zfs``, at this moment."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from snaporch.command_log import LoggedCommand
from snaporch.errors import RefusedError
from snaporch.zfs import resolver, volume_users

_PROC = Path("/proc")
_NODES = ("devtmpfs", "tmpfs")
"""Where device nodes are; QEMU has some of its own."""


def check_not_in_use(thing: str, snapshots: Iterable[str]) -> None:
    """Unmount snapshots that somebody has looked into; ZFS destroys none that is in use.

    Raises:
        RefusedError: one is in use.
    """
    wanted = frozenset(snapshots)
    for mount in resolver.read_mounts() if wanted else ():
        if mount.filesystem != "zfs" or mount.source not in wanted:
            continue
        command = ["umount", "--", mount.mount_point]
        with LoggedCommand(*command) as log:
            done = subprocess.run(command, capture_output=True, check=False, text=True)
            log.exited(done.returncode)
        if done.returncode != 0 and mount in resolver.read_mounts():
            raise RefusedError(
                thing,
                f"{mount.source}, which has to be destroyed, is in use ({done.stderr.strip()})",
                f"end what reads {mount.mount_point}: fuser -vm {mount.mount_point}",
            )


def check_unused(thing: str, datasets: Iterable[str], uuid: str) -> None:
    """Refuse to roll back under anybody but the guest itself, under whatever name it runs.

    Raises:
        RefusedError: it names the process.
    """
    if user := next(processes_on(datasets, uuid), None):
        process, dataset = user
        raise RefusedError(
            thing, f"{dataset} is in use by process {process}", f"see: ps -fp {process}"
        )


def processes_on(
    datasets: Iterable[str], uuid: str, proc: Path = _PROC
) -> Iterator[tuple[str, str]]:
    """Processes that have something open on datasets, but for those of the guest itself.

    Mounts that a server or a program answers for are not asked: only device nodes are looked at.
    """
    wanted = frozenset(datasets)
    volumes: dict[int, str] = {}
    for dataset in wanted:
        with suppress(OSError):
            volumes |= dict.fromkeys(volume_users.numbers(dataset), dataset)
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if int(process.name) == os.getpid() or uuid.encode() in command:
                continue
            for dataset in _opened(process, wanted, volumes):
                yield process.name, dataset


def _opened(process: Path, wanted: frozenset[str], volumes: dict[int, str]) -> Iterator[str]:
    mounts = {each.number: each for each in resolver.read_mounts(process / "mountinfo")}
    for number in os.listdir(process / "fd"):
        with suppress(OSError):
            told = (process / "fdinfo" / number).read_text()
            found = re.search(r"^mnt_id:\s+(\d+)$", told, re.MULTILINE)
            mount = mounts.get(int(found[1])) if found else None
            if mount is None:
                continue
            if mount.filesystem == "zfs" and mount.source in wanted:
                yield mount.source
            elif volumes and mount.filesystem in _NODES:
                node = os.stat(process / "fd" / number).st_rdev
                if node in volumes:
                    yield volumes[node]
