#!/usr/bin/env -S python3 -P
"""The strategies ``overlay`` and ``manual`` side by side, on one guest in one lab run.

Run it with ``tests/lab/run``; what counts are the ratios, since the lab is slow at page faults.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))

from guests.disks import Disk
from guests.guest import Guest

ROUNDS = 10


def snapshot(name: str, settings: Path) -> tuple[float, float]:
    began = time.monotonic()
    command = ["snaporch", "snapshot", name, "--json", "--config", str(settings)]
    done = subprocess.run(command, capture_output=True, check=True, env=dict(os.environ))
    return json.loads(done.stdout)["pause_ms"], time.monotonic() - began


def main() -> None:
    guest = Guest.create("bench", disks=[Disk("file", "tank/bench"), Disk("zvol", "tank/bench-1")])
    figures: dict[str, list[tuple[float, float]]] = {"overlay": [], "manual": []}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(ROUNDS):
            for strategy, rounds in figures.items():
                settings = Path(directory) / f"{strategy}.toml"
                settings.write_text(f'[defaults]\nram_strategy = "{strategy}"\n')
                rounds.append(snapshot(guest.name, settings))
    print(f"{'strategy':10} {'pause ms: min':>14} {'median':>8} {'max':>8} {'run s: median':>14}")
    medians = {}
    for strategy, rounds in figures.items():
        pauses = sorted(pause for pause, _ in rounds)
        medians[strategy] = statistics.median(pauses)
        run = statistics.median(seconds for _, seconds in rounds)
        shown = (pauses[0], medians[strategy], pauses[-1])
        print(f"{strategy:10} {shown[0]:14.0f} {shown[1]:8.0f} {shown[2]:8.0f} {run:14.1f}")
    print(f"pause, overlay / manual: {medians['overlay'] / medians['manual']:.2f}")


if __name__ == "__main__":
    main()
