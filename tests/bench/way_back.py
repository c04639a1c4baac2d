#!/usr/bin/env -S python3 -P
"""The way back: how long a guest is away until it counts again, by each way, and each part of it.

Run it with ``tests/lab/run``; what counts are the ratios to ``virsh restore`` of a raw image,
since the lab is slow at page faults. ``--sizes`` are MiB of memory that the guest fills; above 512
the lab needs more memory than it has by itself (``--mem``).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from commands import run
from guests.disks import Disk
from guests.guest import Guest

NAME, CLONE = "back", "second"
RIVAL = "virsh restore"
IMAGE = Path("/var/tmp/way-back.save")
DATASET = "tank/back"
POLL = 0.01
FILL_SECONDS = 900
PARTS = {
    "checking the bundle": "checksum",
    "decompressing": "plain",
    "rebuilding": "plain",
    "saving what": "safety",
    "stopping": "stop",
    "rolling back": "rollback",
    "resuming": "resume",
}
"""The beginning of a step that snaporch reports, and the part that begins with it."""


@dataclass(frozen=True)
class Times:
    """Seconds."""

    command: float
    outage: float = 0.0
    """From the last count before the guest was away to the first count after."""
    parts: dict[str, float] = field(default_factory=dict)


class Steps:
    """Reads what commands report, and notes when each part begins."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, float]] = []
        self.said = ""

    def read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self.said += line
            for words, part in PARTS.items():
                if f"  {words}" in line:
                    self.begun.append((part, time.monotonic()))

    def parts(self, end: float) -> dict[str, float]:
        found: dict[str, float] = {}
        for (part, begin), (_, then) in pairwise([*self.begun, ("", end)]):
            found[part] = found.get(part, 0.0) + then - begin
        return found


def measured(guest: Guest, *commands: tuple[str, ...]) -> Times:
    """Run the commands one after the other; watch when the guest counts.

    The guest is away from the last count before the longest gap to the first count after it.
    """
    seen: list[float] = []
    steps = Steps()
    mark, begun = guest.mark(), time.monotonic()
    done = threading.Event()
    ended: list[float] = []

    def work() -> None:
        for command in commands:
            with subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            ) as process:
                steps.read(process)
            if process.returncode:
                print(steps.said, file=sys.stderr, flush=True)
                os._exit(1)
        ended.append(time.monotonic())
        done.set()

    threading.Thread(target=work, daemon=True).start()
    known = 0
    while not done.is_set() or not seen or seen[-1] < ended[0]:
        counts = len(guest.counts_since(mark))
        if counts > known:
            known = counts
            seen.append(time.monotonic())
        time.sleep(POLL)
    gaps = [(after - before, after) for before, after in zip([begun, *seen], seen, strict=False)]
    outage, back = max(gaps)
    return Times(ended[0] - begun, outage, steps.parts(back))


def virsh(guest: Guest) -> Times:
    """What one does by hand: destroy, roll back, ``virsh restore`` of a raw image."""
    return measured(
        guest,
        ("virsh", "destroy", NAME),
        ("zfs", "rollback", f"{DATASET}@saved"),
        ("virsh", "restore", "--running", str(IMAGE)),
    )


def restore(*options: str) -> Callable[[Guest, int], Times]:
    def take(guest: Guest, turn: int) -> Times:
        return measured(guest, ("snaporch", "restore", f"{NAME}@ram{turn}", "--yes", *options))

    return take


def clone(_guest: Guest, turn: int) -> Times:
    """``clone --running``: until the clone counts, and not until the command ends."""
    begun = time.monotonic()
    with subprocess.Popen(
        ("snaporch", "clone", f"{NAME}@ram{turn}", CLONE, "--running", "--quiet")
    ) as process:
        while process.poll() is None:
            time.sleep(POLL)
    made = time.monotonic()
    second = Guest.existing(CLONE)
    second.wait_count()
    times = Times(made - begun, time.monotonic() - begun)
    run("snaporch", "clone", "--delete", CLONE)
    return times


def timed(*command: str) -> Times:
    begun = time.monotonic()
    run(*command)
    return Times(time.monotonic() - begun)


def ram_of(turn: int) -> str:
    listed = json.loads(run("snaporch", "show", f"{NAME}@ram{turn}", "--json"))
    return str(Path(listed["bundle"]) / "ram.save")


WAYS: dict[str, Callable[[Guest, int], Times]] = {
    "snaporch restore": restore(),
    "… --no-safety": restore("--no-safety"),
    "clone --running": clone,
    "verify": lambda _guest, turn: timed("snaporch", "verify", f"{NAME}@ram{turn}"),
    "… --checksums": lambda _guest, turn: timed(
        "snaporch", "verify", "--checksums", f"{NAME}@ram{turn}"
    ),
    "sha256sum": lambda _guest, turn: timed("sha256sum", ram_of(turn)),
}


def prepare(guest: Guest, turn: int) -> Times:
    """Measure the rival, by an image that ``virsh save`` made, and take a snapshot."""
    run("virsh", "save", NAME, str(IMAGE), "--image-format", "raw")
    run("zfs", "snapshot", f"{DATASET}@saved")
    run("virsh", "restore", "--running", str(IMAGE))
    guest.wait_count()
    figure = virsh(guest)  # before the snapshot, which the rollback would destroy
    run("zfs", "destroy", f"{DATASET}@saved")
    IMAGE.unlink()
    run("snaporch", "snapshot", NAME, "--name", f"ram{turn}")
    return figure


def measure(size: int, rounds: int, ways: list[str]) -> None:
    options = f"dirty_mib={size} dirty_rate=200 noise=40"
    memory = 128 + size + size // 10
    guest = Guest.create(
        NAME, [Disk("file", DATASET)], kind="linux", memory_mib=memory, command_line=options
    )
    guest.wait_filled(FILL_SECONDS)
    figures: dict[str, list[Times]] = {RIVAL: [], **{way: [] for way in ways}}
    for turn in range(rounds):
        figures[RIVAL].append(prepare(guest, turn))
        for way in ways:
            figures[way].append(WAYS[way](guest, turn))
            guest.wait_count()
        report(size, figures)
    guest.remove()


def report(size: int, figures: dict[str, list[Times]]) -> None:
    """Print the medians so far."""
    rival = statistics.median(each.outage for each in figures[RIVAL])
    for way, rounds in figures.items():
        command, outage = (
            statistics.median(getattr(each, name) for each in rounds)
            for name in ("command", "outage")
        )
        parts = ", ".join(
            f"{part} {statistics.median(each.parts.get(part, 0.0) for each in rounds):.1f}"
            for part in dict.fromkeys(PARTS.values())
            if any(part in each.parts for each in rounds)
        )
        away = f"{outage:9.1f}{outage / rival:8.2f}" if outage else f"{'':17}"
        text = f"{size:5} MiB  {len(rounds)} {way:18}{command:9.1f}{away}  {parts}"
        print(text.rstrip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="64,256", help="MiB that the guest fills")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS), help="to measure, beside virsh restore")
    given = parser.parse_args()
    print(f"{'':9}  {'way':20}{'command s':>9}{'outage s':>9}{'ratio':>8}  parts, s")
    for size in given.sizes.split(","):
        measure(int(size), given.rounds, given.ways.split(","))


if __name__ == "__main__":
    main()
