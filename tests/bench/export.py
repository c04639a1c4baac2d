#!/usr/bin/env -S python3 -P
"""An export against compressors alone, of the same bytes.

Run it with ``tests/lab/run``. Half of a guest's disk is used, 40 % of that is noise; the rest is a
hole. Each compressor reads the used half from the same snapshot. What counts are the ratios.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from commands import run
from guests.disks import Disk
from guests.guest import Guest

DATASET, TARGET = "tank/export", Path("/var/tmp/export.out")
PAGE = 4096
COMPRESSORS = {
    "zstd -T0": ["zstd", "-q", "-T0", "-c"],
    "pigz": ["pigz", "-c"],
    "gzip": ["gzip", "-c"],
}


def fill(disk: Path, used: int) -> None:
    """Write pages behind the guest's own, 40 % of them noise, and a hole of the same size."""
    with disk.open("r+b") as stream:
        stream.seek(0, os.SEEK_END)
        for number in range(used // PAGE):
            stream.write(os.urandom(PAGE) if number % 5 < 2 else bytes([number % 251]) * PAGE)
        stream.flush()
        stream.truncate(os.fstat(stream.fileno()).st_size + used)
        os.fsync(stream.fileno())


def timed(*words: str, source: Path | None = None, size: int = 0) -> tuple[float, int]:
    """Seconds until the result is on the disk, and its bytes."""
    begun = time.monotonic()
    with TARGET.open("wb") as target:
        if source is None:
            done = subprocess.run(words, stdout=target, stderr=subprocess.PIPE, check=False)
        else:
            with subprocess.Popen(
                ["head", "-c", str(size), str(source)], stdout=subprocess.PIPE
            ) as reader:
                done = subprocess.run(words, stdin=reader.stdout, stdout=target, check=False)
        os.fsync(target.fileno())
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr}")
    return time.monotonic() - begun, TARGET.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="used bytes of the disk")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    guest = Guest.create("export", [Disk("file", DATASET)])
    guest.destroy()
    (disk,) = Path(f"/{DATASET}").glob("*")
    fill(disk, given.mib << 20)
    run("snaporch", "snapshot", guest.name, "--name", "s")
    source = Path(f"/{DATASET}/.zfs/snapshot/s/{disk.name}")
    used = source.stat().st_size - (given.mib << 20)
    figures: dict[str, list[tuple[float, int]]] = {}
    for _ in range(given.rounds):
        for name, words in COMPRESSORS.items():
            if shutil.which(words[0]):
                result = timed(*words, source=source, size=used)
                figures.setdefault(name, []).append(result)
        words = ("snaporch", "export", f"{guest.name}@s", "-")
        figures.setdefault("snaporch export", []).append(timed(*words))
    rival = statistics.median(seconds for seconds, _ in figures["zstd -T0"])
    print(f"{used >> 20} MiB used, {os.cpu_count()} processors")
    print(f"{'':18}{'seconds':>9}{'ratio':>8}{'MiB':>8}")
    for name, results in figures.items():
        seconds = statistics.median(each for each, _ in results)
        print(f"{name:18}{seconds:9.1f}{seconds / rival:8.2f}{results[-1][1] >> 20:8}", flush=True)
    guest.remove()


if __name__ == "__main__":
    main()
