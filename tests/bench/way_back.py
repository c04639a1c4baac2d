#!/usr/bin/env -S python3 -P
"""The way back: how long a guest is away until it counts again, by each way.

Run it with ``tests/lab/run``; what counts are the ratios to ``virsh restore`` of a raw image,
since the lab is slow at page faults. ``--sizes`` are MiB of memory that the guest fills.
"""

import argparse
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))

from guests.disks import Disk
from guests.guest import Guest

IMAGE = Path("/var/tmp/way-back.save")
DATASET = "tank/back"
POLL = 0.01


@dataclass(frozen=True)
class Times:
    """Seconds."""

    command: float
    first_count: float
    """From the start of the command to the first count after the guest was away."""
    outage: float
    """From the last count before to the first count after."""


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stdout}{done.stderr}")


def measured(guest: Guest, *commands: tuple[str, ...]) -> Times:
    """Run the commands one after the other; watch when the guest counts.

    The guest is away from the last count before the longest gap to the first count after it.
    """
    seen: list[float] = []
    mark, begun = guest.mark(), time.monotonic()
    known = 0
    ended = None
    waiting = list(commands)
    process = subprocess.Popen(waiting.pop(0), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while ended is None or not seen or seen[-1] < ended:
        counts = len(guest.counts_since(mark))
        now = time.monotonic() - begun
        if counts > known:
            known = counts
            seen.append(now)
        if ended is None and process.poll() is not None:
            if process.returncode:
                sys.exit(process.stderr.read().decode() if process.stderr else "failed")
            if waiting:
                process = subprocess.Popen(
                    waiting.pop(0), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
                )
            else:
                ended = now
        time.sleep(POLL)
    gaps = [(after - before, after) for before, after in zip([0.0, *seen], seen, strict=False)]
    outage, back = max(gaps)
    return Times(ended, back, outage)


def virsh(guest: Guest) -> Times:
    """What one does by hand: destroy, roll back, ``virsh restore`` of a raw image."""
    return measured(
        guest,
        ("virsh", "destroy", guest.name),
        ("zfs", "rollback", f"{DATASET}@saved"),
        ("virsh", "restore", "--running", str(IMAGE)),
    )


def restore(guest: Guest, turn: int, *options: str) -> Times:
    command = ("snaporch", "restore", f"{guest.name}@ram{turn}", "--yes", "--quiet", *options)
    return measured(guest, command)


def prepare(guest: Guest) -> None:
    """An image that ``virsh save`` made, and the disk of that instant."""
    run("virsh", "save", guest.name, str(IMAGE))
    run("zfs", "snapshot", f"{DATASET}@saved")
    run("virsh", "restore", "--running", str(IMAGE))
    guest.wait_count()


def measure(size: int, rounds: int) -> None:
    options = f"dirty_mib={size} dirty_rate=200 noise=40"
    guest = Guest.create("back", [Disk("file", DATASET)], kind="linux", command_line=options)
    ways = ("virsh restore", "snaporch restore", "… --no-safety")
    figures: dict[str, list[Times]] = {way: [] for way in ways}
    for turn in range(rounds):
        prepare(guest)
        figures["virsh restore"].append(virsh(guest))
        run("zfs", "destroy", f"{DATASET}@saved")
        IMAGE.unlink()
        run("snaporch", "snapshot", guest.name, "--name", f"ram{turn}")
        figures["snaporch restore"].append(restore(guest, turn))
        figures["… --no-safety"].append(restore(guest, turn, "--no-safety"))
    report(size, figures)
    guest.remove()


def report(size: int, figures: dict[str, list[Times]]) -> None:
    rival = figures["virsh restore"]
    for way, rounds in figures.items():
        command, back, outage = (
            statistics.median(getattr(each, field) for each in rounds)
            for field in ("command", "first_count", "outage")
        )
        ratio = outage / statistics.median(each.outage for each in rival)
        print(
            f"{size:5} MiB  {way:20}{command:9.1f}{back:9.1f}{outage:9.1f}{ratio:8.2f}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="256,1024", help="MiB that the guest fills")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(f"{'':9}  {'way':20}{'command s':>9}{'count s':>9}{'outage s':>9}{'ratio':>8}")
    for size in given.sizes.split(","):
        measure(int(size), given.rounds)


if __name__ == "__main__":
    main()
