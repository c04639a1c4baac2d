#!/usr/bin/env -S python3 -P
"""What records of each size cost a disk that is written 4 KiB at random, and 128 KiB in sequence.

Run it with ``tests/lab/run``; it writes directly to a volume and to a file, without a guest. It
prints a line of JSON for each measurement, which ``storage_report.py`` makes a page of. Bytes are
those that reached the device of the pool, and hold for other machines too. Seconds are the lab's.
"""

import json
import mmap
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

POOL, DEVICE = "records", Path("/dev/lab/disk2").resolve()
AREA, SMALL, LARGE = 128 << 20, 4 << 10, 128 << 10
WRITES, GROUPS = 512, 4
"""Random writes in a transaction group, as of a guest with a hundred a second; and groups."""
ROUNDS = 3
KIB_OF_FILES, KIB_OF_VOLUMES = (4, 8, 16, 32, 64, 128), (4, 8, 16, 32, 64)
NOISE = {"noise": SMALL, "half": SMALL // 2}
"""How much of each 4 KiB cannot be compressed; the rest is zeros."""
SECTOR = 512


def run(*words: str) -> str:
    return subprocess.run(words, capture_output=True, check=True, text=True).stdout


def counters() -> tuple[int, int]:
    """Bytes that were read from the pool's device and written to it (the kernel's stat.rst)."""
    figures = (Path("/sys/class/block") / DEVICE.name / "stat").read_text().split()
    return int(figures[2]) * SECTOR, int(figures[6]) * SECTOR


def page_cache() -> int:
    """Bytes of files and devices in the kernel's page cache, in which ZFS's own cache is not."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    figures = {name: int(rest.split()[0]) << 10 for name, rest in (x.split(":") for x in lines)}
    return figures["Buffers"] + figures["Cached"]


class Target:
    """A file or a volume of ``AREA`` bytes, filled."""

    def __init__(self, kind: str, kib: int, data: str, settings: tuple[str, ...]) -> None:
        self.data = data
        words = [word for setting in settings for word in ("-o", setting)]
        if kind == "volume":
            sizes = ["-b", f"{kib}K", "-V", str(AREA)]
            self.path = Path(f"/dev/zvol/{POOL}/disk")
        else:
            sizes = ["-o", f"recordsize={kib}K"]
            self.path = Path(f"/{POOL}/disk/image")
        run("zfs", "create", *sizes, *words, f"{POOL}/disk")
        run("udevadm", "settle")
        self.flags = os.O_RDWR | (os.O_DIRECT if kind == "volume" else os.O_CREAT)
        self.buffer = mmap.mmap(-1, LARGE)  # O_DIRECT needs whole pages

    def _fresh(self, size: int) -> memoryview:
        noise = NOISE[self.data]
        for start in range(0, size, SMALL):
            self.buffer[start : start + noise] = os.urandom(noise)
        return memoryview(self.buffer)[:size]

    def sequential(self) -> int:
        """Write all of it in pieces of 128 KiB; returns the bytes."""
        descriptor = os.open(self.path, self.flags, 0o600)
        for place in range(0, AREA, LARGE):
            os.pwrite(descriptor, self._fresh(LARGE), place)
        run("zpool", "sync", POOL)  # first: the close of a volume flushes it by the intent log
        os.close(descriptor)
        return AREA

    def at_random(self) -> int:
        """Write 4 KiB at random places, and sync after each group; returns the bytes."""
        descriptor = os.open(self.path, self.flags)
        places = random.Random(18)
        for _ in range(GROUPS):
            for _ in range(WRITES):
                place = places.randrange(AREA // SMALL) * SMALL
                os.pwrite(descriptor, self._fresh(SMALL), place)
            run("zpool", "sync", POOL)
        os.close(descriptor)
        return WRITES * GROUPS * SMALL


@contextmanager
def target(kind: str, kib: int, data: str, settings: tuple[str, ...] = ()) -> Iterator[Target]:
    run("zpool", "create", "-f", "-o", "ashift=12", "-O", "compression=lz4", POOL, str(DEVICE))
    try:
        made = Target(kind, kib, data, settings)
        made.sequential()
        yield made
    finally:
        run("zpool", "destroy", POOL)
        with suppress(subprocess.CalledProcessError):  # room in the lab's memory
            run("blkdiscard", "-f", str(DEVICE))


def cool() -> None:
    """Empty ZFS's cache of the pool."""
    run("zpool", "export", POOL)
    run("zpool", "import", "-d", str(DEVICE), POOL)
    run("udevadm", "settle")


def measure(write: Any, **labels: object) -> None:
    cached = page_cache()
    read, written = counters()
    began = time.monotonic()
    payload = write()
    seconds = time.monotonic() - began
    now_read, now_written = counters()
    row = {
        "read": (now_read - read) / payload,
        "written": (now_written - written) / payload,
        "mib_per_second": payload / 2**20 / seconds,
        "page_cache": (page_cache() - cached) / payload,
    }
    print(json.dumps(labels | {key: round(value, 2) for key, value in row.items()}), flush=True)


def sizes() -> None:
    cases = [("file", kib) for kib in KIB_OF_FILES] + [("volume", kib) for kib in KIB_OF_VOLUMES]
    for data in NOISE:
        for kind, kib in cases:
            with target(kind, kib, data) as disk:
                labels = {"kind": kind, "kib": kib, "data": data}
                for _ in range(ROUNDS):
                    cool()
                    measure(disk.at_random, **labels, work="random")
                measure(disk.sequential, **labels, work="sequential")


def settings() -> None:
    """Other settings of a volume whose records are in ZFS's cache, if it keeps data."""
    flush = os.O_DSYNC
    for kib, setting, more, work in (
        (16, "primarycache=all", 0, "random"),
        (16, "primarycache=metadata", 0, "random"),
        (16, "logbias=latency", flush, "random, each flushed"),
        (16, "logbias=throughput", flush, "random, each flushed"),
        (64, "logbias=latency", flush, "random, each flushed"),
        (64, "logbias=throughput", flush, "random, each flushed"),
    ):
        with target("volume", kib, "noise", (setting,)) as disk:
            disk.flags |= more
            for _ in range(ROUNDS):
                measure(disk.at_random, kib=kib, setting=setting, work=work)
    for setting, direct in (("cache=none", os.O_DIRECT), ("cache=writeback", 0)):
        with target("volume", 16, "noise") as disk:
            disk.flags = os.O_RDWR | direct
            emulator = os.open(disk.path, os.O_RDONLY)  # the last close empties the page cache
            measure(disk.sequential, kib=16, setting=setting, work="sequential")
            os.close(emulator)


def main() -> None:
    version = Path("/sys/module/zfs/version").read_text().strip()
    versions = {"OpenZFS": version, "Linux": platform.release()}
    print(json.dumps({"versions": versions, "date": time.strftime("%Y-%m-%d")}), flush=True)
    random.seed(18)
    if sys.argv[1:] != ["settings"]:
        sizes()
    settings()


if __name__ == "__main__":
    main()
