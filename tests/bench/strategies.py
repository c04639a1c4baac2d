#!/usr/bin/env -S python3 -P
"""The strategies ``overlay`` and ``manual`` side by side, one guest after the other in one lab run.

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
GUESTS = {
    "1 disk": [Disk("file", "tank/one")],
    "2 disks": [Disk("file", "tank/two"), Disk("zvol", "tank/two-1")],
    "2 disks, 2 pools": [Disk("file", "tank/both"), Disk("zvol", "flash/both")],
    "4 disks, 2 pools": [
        Disk("file", "tank/four"),
        Disk("zvol", "tank/four-1"),
        Disk("file", "flash/four"),
        Disk("zvol", "flash/four-1"),
    ],
}


def snapshot(name: str, settings: Path) -> tuple[float, float]:
    began = time.monotonic()
    command = ["snaporch", "snapshot", name, "--json", "--config", str(settings)]
    done = subprocess.run(command, capture_output=True, check=True, env=dict(os.environ))
    return json.loads(done.stdout)["pause_ms"], time.monotonic() - began


def measure(label: str, disks: list[Disk]) -> None:
    guest = Guest.create("bench", disks=disks)
    figures: dict[str, list[tuple[float, float]]] = {"overlay": [], "manual": []}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(ROUNDS):
            for strategy, rounds in figures.items():
                settings = Path(directory) / f"{strategy}.toml"
                settings.write_text(f'[defaults]\nram_strategy = "{strategy}"\n')
                rounds.append(snapshot(guest.name, settings))
    medians = {}
    for strategy, rounds in figures.items():
        pauses = sorted(pause for pause, _ in rounds)
        medians[strategy] = statistics.median(pauses)
        run = statistics.median(seconds for _, seconds in rounds)
        shown = (pauses[0], medians[strategy], pauses[-1])
        print(f"{label:16}  {strategy:10}" + "".join(f"{ms:9.0f}" for ms in shown) + f"{run:11.1f}")
    ratio = medians["overlay"] / medians["manual"]
    print(f"{label:16}  pause, overlay / manual: {ratio:.2f}", flush=True)
    guest.remove()


def main() -> None:
    head = ("pause ms", "median", "most")
    print(f"{'guest':16}  {'strategy':10}" + "".join(f"{each:>9}" for each in head) + "      run s")
    for label, disks in GUESTS.items():
        measure(label, disks)


if __name__ == "__main__":
    main()
