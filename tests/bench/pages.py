#!/usr/bin/env -S python3 -P
"""What a snapshot with RAM writes: whole images beside pages, of a guest that dirtied 10 %.

Run it with ``tests/lab/run``. Pages are written while RAM arrives, or from a whole image that was
written first, as after a run that did not know the end of the stream. The guest's disk, the bundle
store and the pages are in one pool, so that its snapshot in the pause waits for all of them.
``device`` is what reached the device of that pool, ``stored`` what the snapshot keeps; bytes hold
for other machines too. Seconds and pauses are those of the lab: only their ratios count.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from commands import run
from guests.disks import Disk
from guests.guest import Guest

POOL, DEVICE = "wear", Path("/dev/lab/disk2").resolve()
SECTOR, PAGE = 512, 4096
SHARE = 0.1
RATE = 200
"""Pages that the guest writes a second, one after the other."""
WAYS = ("image", "image first", "pages")


@dataclass(frozen=True)
class Figures:
    """Of one snapshot: MiB, seconds and milliseconds."""

    device: float
    stored: float
    seconds: float
    pause: float


def written() -> float:
    """MiB that were written to the pool's device (the kernel's stat.rst)."""
    run("zpool", "sync", POOL)
    figures = (Path("/sys/class/block") / DEVICE.name / "stat").read_text().split()
    return int(figures[6]) * SECTOR / 2**20


def snapshot(guest: Guest, settings: Path) -> Figures:
    before, began = written(), time.monotonic()
    found = json.loads(
        run("snaporch", "snapshot", guest.name, "--json", "--quiet", "--config", str(settings))
    )
    seconds = time.monotonic() - began
    stored = found["stored_bytes"] / 2**20
    return Figures(written() - before, stored, seconds, found["pause_ms"])


def measure(guest: Guest, size: int, place: Path, rounds: int) -> dict[str, list[Figures]]:
    settings = {}
    for way in ("image", "pages"):
        settings[way] = place / f"{way}.toml"
        settings[way].write_text(
            f'[paths]\nbundles = "/{POOL}/bundles"\n[ram_pages]\ndataset = "{POOL}/ram"\n'
            f'[defaults]\nram_store = "{way}"\n'
        )
    uuid = run("virsh", "domuuid", guest.name).strip()
    figures: dict[str, list[Figures]] = {way: [] for way in WAYS}
    figures["pages, first"] = [snapshot(guest, settings["pages"])]
    base = time.monotonic()
    for turn in range(rounds):
        for way in ("image first", "pages"):
            time.sleep(max(0.0, base + (size << 20) * SHARE / PAGE / RATE - time.monotonic()))
            if way == "image first":
                (Path("/") / POOL / "ram" / uuid / "image-first").touch()
            base = time.monotonic()
            figures[way].append(snapshot(guest, settings["pages"]))
        figures["image"].append(snapshot(guest, settings["image"]))
        print(f"round {turn}:", *(figures[way][-1] for way in WAYS), sep="\n  ", flush=True)
    return figures


def report(figures: dict[str, list[Figures]]) -> None:
    print(f"{'':14}{'device MiB':>11}{'stored MiB':>11}{'run s':>8}{'pause ms':>9}{'of image':>9}")
    fields = ("device", "stored", "seconds", "pause")
    rows = {
        way: [statistics.median(getattr(each, field) for each in rounds) for field in fields]
        for way, rounds in figures.items()
    }
    for way, (device, stored, seconds, pause) in rows.items():
        share = device / rows["image"][0]
        print(f"{way:14}{device:11.1f}{stored:11.1f}{seconds:8.1f}{pause:9.0f}{share:9.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=256, help="MiB that the guest fills")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    run("zpool", "create", "-f", "-o", "ashift=12", POOL, str(DEVICE))
    options = f"dirty_mib={given.size} dirty_rate={RATE} noise=40"
    guest = Guest.create("wear", [Disk("file", f"{POOL}/disk")], kind="linux", command_line=options)
    guest.wait_count(beyond=20)
    try:
        with tempfile.TemporaryDirectory() as place:
            report(measure(guest, given.size, Path(place), given.rounds))
    finally:
        guest.remove()
        run("zpool", "destroy", POOL)


if __name__ == "__main__":
    main()
