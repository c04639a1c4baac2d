"""Guests that change RAM at a share of the speed at which it is saved, by each way of saving it.

All ways compress with one thread of zstd at the same level, a high one: so the guest can be faster
than the saving. Only ``virsh save`` compresses nothing. After ``--patience`` seconds the guest is
suspended, as by ``ram_time_budget``.

How much the guest changes is counted by the guest. Its vCPU can be slowed down only where root may
make control groups of version 1; those of version 2 are used in the lab (``test_slowed``).
"""

import argparse
import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "lab"))

import contestants
import host
import measure
from contestants import Contestant, Result, Site

PAGES_A_MIB = 256
REST_MIB = 96
"""For the guest's kernel."""
TURN = 0.01
"""The guest rests so many seconds after a hundredth of its rate."""
WROTE = re.compile(rb"WROTE (\d+)\r?\n")
CPU_GROUPS = Path("/sys/fs/cgroup/cpu")


class Row(NamedTuple):
    """One run."""

    pause: float
    """The longest one, by libvirt's events, in milliseconds."""
    total: float
    """Until the RAM is stored, in seconds."""
    changed: float
    """What the guest changed while it ran, in MiB a second."""
    saved: float
    """What QEMU saved, in MiB a second."""
    percent: int
    """The least CPU time that it was left."""


def script(level: int, patience: int) -> Contestant:
    """``script --live`` into a named pipe that zstd reads; it suspends the guest at last."""
    contestants.COMPRESSORS["zstd"] = ["zstd", "-q", "-T1", f"-{level}", "-c"]

    def take(site: Site) -> Iterator[Result | None]:
        virsh = ["virsh", "-q"]
        late = threading.Timer(patience, subprocess.run, [[*virsh, "suspend", site.domain]])
        late.start()
        try:
            yield from contestants.piped(site)
        finally:
            late.cancel()
            late.join()
            subprocess.run([*virsh, "resume", site.domain], check=False, capture_output=True)

    return take


def ways(level: int, patience: int) -> dict[str, Contestant]:
    more = f'compression_threads = 1\nram_time_budget = "{patience}s"\n'
    return {
        "snaporch": contestants.snaporch("manual", "stream", str(level), more),
        "snaporch, vcpu_floor = 100": contestants.snaporch(
            "manual", "stream", str(level), f"{more}vcpu_floor = 100\n"
        ),
        "script --live, pipe": script(level, patience),
        "virsh save": contestants.save_and_restore,
    }


def wrote(guest: Any) -> int:
    """How many pages the guest has rewritten, by its last word."""
    found = WROTE.findall(guest.machine.serial_log.read_bytes())
    return int(found[-1]) if found else 0


@contextlib.contextmanager
def group_of_vcpu() -> Iterator[Path]:
    """A control group for the vCPU."""
    group = CPU_GROUPS / f"snaporch-bench-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        sys.exit(f"bench: no control groups of version 1 to slow a vCPU down: {error}")
    try:
        yield group
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):  # its task may still be ending
                group.rmdir()
                break
            time.sleep(0.1)


def enter(group: Path) -> None:
    """Put the guest's vCPU into the group."""
    pid = Path("/run/libvirt/qemu/bench.pid").read_text().strip()
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().startswith("CPU "):
            (group / "tasks").write_text(task.name)


@contextlib.contextmanager
def running(mib: int, rate: int, scratch: Path) -> Iterator[Any]:
    """A guest that rewrites so many MiB; ``rate`` is its own option."""
    from guests import guest as guests
    from guests.disks import Disk

    guests.LOG_DIRECTORY = scratch / "logs"
    line = f"dirty_mib={mib} dirty_rate={rate} noise=40 interval_ms=20"
    disk = [Disk("plain", str(scratch / "disks"))]
    guest = guests.Guest.create(
        "bench", disk, kind="linux", memory_mib=mib + REST_MIB, command_line=line
    )
    try:
        while not wrote(guest):
            time.sleep(0.1)
        yield guest
    finally:
        guest.remove()


def measured(way: Contestant, guest: Any, site: Site) -> Row:
    """One run."""
    from guests.guest import connect

    assert site.vcpu_group
    enter(site.vcpu_group)
    before, began = wrote(guest), time.monotonic()
    with measure.listening(connect()) as events:
        (result,) = [each for each in way(site) if each]
        ran = time.monotonic() - began - sum(end - since for since, end in events.pauses)
    changed = (wrote(guest) - before) / PAGES_A_MIB / ran
    guest.wait_count()
    job = events.job
    saved = job.get("memory_processed", 0) / (1 << 20) / max(job.get("time_elapsed", 0), 1) * 1000
    percent = int(str(result.more.get("cpu_percent", 100)))
    return Row(events.longest_ms(), result.seconds, changed, saved, percent)


def speeds(mib: int, scratch: Path, site: Site, way: Contestant) -> tuple[float, float]:
    """MiB a second that the guest can change, and those of them that are saved."""
    with running(mib, 0, scratch) as guest:
        before, began = wrote(guest), time.monotonic()
        time.sleep(5)
        most = (wrote(guest) - before) / PAGES_A_MIB / (time.monotonic() - began)
    with running(mib, 1, scratch) as guest:
        saved = measured(way, guest, replace(site, disk=guest.images[0].path)).saved
    return most, saved


def option(wanted: float, most: float) -> int:
    """The guest's option for a rate: it rests for a turn after each hundredth, and needs time."""
    share = min(wanted / most, 0.99)
    return max(round(wanted * PAGES_A_MIB / (1 - share)), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=192, help="MiB that the guest rewrites")
    parser.add_argument("--shares", default="10,50,200", help="percent of the speed of saving")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--level", type=int, default=9, help="zstd's")
    parser.add_argument("--patience", type=int, default=60, help="seconds")
    given = parser.parse_args()
    host.ensure_packages()
    host.enter_namespace()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends guest and libvirtd too
    chosen = ways(given.level, given.patience)
    with (
        tempfile.TemporaryDirectory(prefix="snaporch-bench-", dir="/dev/shm") as place,
        host.own_libvirtd(Path(place) / "libvirt"),
        host.room_for_pipes(),
        group_of_vcpu() as group,
    ):
        Path(place).chmod(0o711)
        measure.start_event_loop()
        site = Site("bench", Path(place), Path(place), Path(place), given.mib, group)
        most, saved = speeds(given.mib, Path(place), site, chosen["snaporch"])
        print(f"RAM is saved at {saved:.1f} MiB/s; the guest can change {most:.1f}", flush=True)
        print(f"{'share':6}{'way':27}{'pause ms':>9}{'most':>7}{'total s':>8}", end="")
        print(f"{'changed':>9}{'saved':>7}{'CPU %':>6}", flush=True)
        for share in map(int, given.shares.split(",")):
            with running(given.mib, option(saved * share / 100, most), Path(place)) as guest:
                at = replace(site, disk=guest.images[0].path)
                rows: dict[str, list[Row]] = {name: [] for name in chosen}
                for _ in range(given.rounds):
                    for name, way in chosen.items():
                        rows[name].append(measured(way, guest, at))
                        print("raw", share, name, rows[name][-1], file=sys.stderr, flush=True)
            for name, found in rows.items():
                print(line(share, name, found), flush=True)


def line(share: int, name: str, rows: list[Row]) -> str:
    """A line of the table: medians."""
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    pause, total, changed, saved = medians[:4]
    most, percent = max(row.pause for row in rows), min(row.percent for row in rows)
    figures = f"{pause:9.0f}{most:7.0f}{total:8.1f}{changed:9.1f}{saved:7.1f}{percent:6}"
    return f"{share:4}% {name:27}{figures}"


if __name__ == "__main__":
    main()
