#!/usr/bin/env -S python3 -P
"""A guest's writes before, during and after a snapshot, by each way to take one.

Run it with ``tests/lab/run``. A guest writes all the time; QEMU's own statistics say how much
and how late. What counts are the ratios to the time before, since the lab is slow.

virtnbdbackup is one of the ways if VIRTNBDBACKUP_HOST names what ``fetch-virtnbdbackup`` printed.
It copies the disk and no RAM, and takes no snapshot of ZFS.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from commands import run
from guests.disks import Disk
from guests.guest import Guest

DATASET = "tank/writes"
SCRATCH = Path("/var/tmp/writes")
UNPACKED = Path("/mnt/virtnbdbackup")
ALLOWED = Path("/etc/apparmor.d/local/abstractions/libvirt-qemu")
"""What AppArmor allows QEMU on this host."""
_STEPS = [round(10**5 * 1.15**step) for step in range(80)]
"""The bounds of the histogram in nanoseconds: 0.1 ms to 6 s, 15 % apart."""


def ask_qemu(guest: Guest, command: str, **arguments: object) -> Any:
    words = json.dumps({"execute": command, "arguments": arguments})
    return json.loads(run("virsh", "qemu-monitor-command", guest.name, words))["return"]


@dataclass(frozen=True)
class Counters:
    moment: float
    written: int
    bins: list[int]

    @classmethod
    def read(cls, guest: Guest) -> "Counters":
        (disk,) = (each for each in ask_qemu(guest, "query-blockstats") if each.get("qdev"))
        stats = disk["stats"]
        return cls(time.monotonic(), stats["wr_bytes"], stats["wr_latency_histogram"]["bins"])


@dataclass(frozen=True)
class Phase:
    """MiB a second, and milliseconds that 99 % of the writes did not exceed."""

    rate: float
    late: float

    @classmethod
    def between(cls, first: Counters, last: Counters) -> "Phase":
        bins = [now - then for then, now in zip(first.bins, last.bins, strict=True)]
        wanted, seen = sum(bins) * 0.99, 0
        late = _STEPS[-1]
        for number, count in enumerate(bins):
            seen += count
            if seen >= wanted:
                late = _STEPS[min(number, len(_STEPS) - 1)]
                break
        seconds = last.moment - first.moment
        return cls((last.written - first.written) / 2**20 / seconds, late / 1e6)


def nothing(_guest: Guest) -> None:
    time.sleep(5)


def zfs_alone(_guest: Guest) -> None:
    run("zfs", "snapshot", f"{DATASET}@plain")


def snaporch(strategy: str) -> Callable[[Guest], None]:
    def take(guest: Guest) -> None:
        settings = SCRATCH / f"{strategy}.toml"
        settings.write_text(f'[defaults]\nram_strategy = "{strategy}"\n')
        run("snaporch", "snapshot", guest.name, "--quiet", "--config", str(settings))

    return take


def script(guest: Guest) -> None:
    """What the usual script does: RAM and overlay by libvirt, ``zfs snapshot``, ``blockcommit``."""
    overlay, ram = SCRATCH / "overlay.qcow2", SCRATCH / "ram"
    run(
        *("virsh", "-q", "snapshot-create-as", guest.name, "script", "--atomic", "--no-metadata"),
        *("--live", "--memspec", f"file={ram},snapshot=external"),
        *("--diskspec", f"vda,snapshot=external,file={overlay}"),
    )
    run("zfs", "snapshot", f"{DATASET}@script")
    run("virsh", "-q", "blockcommit", guest.name, "vda", "--active", "--pivot")
    run("zstd", "-q", "-T0", "-1", "--rm", str(ram))
    overlay.unlink()
    Path(f"{ram}.zst").unlink()


def virtnbdbackup(guest: Guest) -> None:
    """A full copy of the disk, without a checkpoint, by Debian's program on the host's files."""
    target = SCRATCH / "virtnbdbackup"
    run(
        *("env", f"PYTHONPATH={UNPACKED}/usr/lib/python3/dist-packages"),
        f"LD_LIBRARY_PATH={UNPACKED}/usr/lib/x86_64-linux-gnu",
        *("python3", f"{UNPACKED}/usr/bin/virtnbdbackup"),
        *("-d", guest.name, "-l", "copy", "--raw", "-o", str(target)),
    )
    shutil.rmtree(target)


WAYS = {
    "no snapshot": nothing,
    "zfs snapshot": zfs_alone,
    "snaporch, manual": snaporch("manual"),
    "snaporch, overlay": snaporch("overlay"),
    "script --live": script,
}


def measure(guest: Guest, act: Callable[[Guest], None], seconds: float) -> list[Phase]:
    """The phases before, during and after."""
    moments = [Counters.read(guest)]
    time.sleep(seconds)
    moments.append(Counters.read(guest))
    act(guest)
    moments.append(Counters.read(guest))
    time.sleep(seconds)
    moments.append(Counters.read(guest))
    for snapshot in run("zfs", "list", "-Ho", "name", "-t", "snapshot", DATASET).split():
        run("zfs", "destroy", snapshot)
    run("snaporch", "prune")
    return [Phase.between(*pair) for pair in itertools.pairwise(moments)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="before, and after")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    ways = dict(WAYS)
    if unpacked := os.environ.get("VIRTNBDBACKUP_HOST"):
        UNPACKED.mkdir()
        run("mount", "-t", "hostfs", "-o", f"hostfs={unpacked}", "none", str(UNPACKED))
        ways["virtnbdbackup"] = virtnbdbackup
        ALLOWED.parent.mkdir(parents=True, exist_ok=True)
        with ALLOWED.open("a") as rules:  # as its README has it; the guest starts afterwards
            rules.write("/var/tmp/virtnbdbackup.* rw,\n")
    SCRATCH.mkdir(mode=0o711)
    guest = Guest.create("writes", [Disk("file", DATASET)], kind="busy")
    for disk in ask_qemu(guest, "query-block"):
        if disk.get("qdev"):
            ask_qemu(
                guest,
                "block-latency-histogram-set",
                **{"id": disk["qdev"], "boundaries-write": _STEPS},
            )
    figures: dict[str, list[list[Phase]]] = {way: [] for way in ways}
    for _ in range(given.rounds):
        for way, act in ways.items():
            figures[way].append(measure(guest, act, given.seconds))
    print(f"{'':18}{'before':>10}{'':>9}{'during':>10}{'':>9}{'after':>10}")
    for way, rounds in figures.items():
        rate, late = (
            [
                statistics.median(getattr(each[phase], field) for each in rounds)
                for phase in range(3)
            ]
            for field in ("rate", "late")
        )
        print(
            f"{way:18}{rate[0]:6.1f} MiB/s, {late[0]:5.1f} ms"
            f"  {rate[1] / rate[0]:5.2f}, {late[1] / late[0]:5.2f}"
            f"  {rate[2] / rate[0]:5.2f}, {late[2] / late[0]:5.2f}",
            flush=True,
        )
    guest.remove()


if __name__ == "__main__":
    main()
