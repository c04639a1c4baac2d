#!/usr/bin/env -S python3 -P
"""The strategies ``overlay``, ``manual`` and ``auto`` side by side, on one guest after the other.

Run it with ``tests/lab/run``, which confines guests by AppArmor; ``tests/lab/run --unconfined``
does not. What counts are the ratios, since the lab is slow at page faults and system calls.

``events`` is the pause by libvirt's events, ``seen`` the longest time without a count of the guest.
The guest counts every 55 ms, and ``nothing`` shows how regularly. ``beyond`` is what ``events`` has
beyond QEMU's downtime, and ``goal`` the share of runs within 100 ms, or the downtime and 30 ms. The
other columns are the parts that snaporch reports. All times are milliseconds; a run is in seconds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "native"))

from guests.disks import Disk
from guests.guest import Guest, connect
from guests.pauses import watch
from measure import listening, start_event_loop

LOOK_EVERY = 0.01
NOTHING_SECONDS = 2.0
GOAL_MS, GOAL_BEYOND_MS = 100.0, 30.0
STRATEGIES = ("overlay", "manual", "auto")
PARTS = ("downtime_ms", "switch_ms", "snapshot_ms", "resume_ms")
GUESTS = {
    "1 disk": [Disk("file", "tank/one")],
    "2 disks": [Disk("file", "tank/two"), Disk("zvol", "tank/two-1")],
    "4 disks": [
        Disk("file", "tank/many"),
        *(Disk("zvol", f"tank/many-{number}") for number in (1, 2, 3)),
    ],
    "2 disks, 2 pools": [Disk("file", "tank/both"), Disk("zvol", "flash/both")],
    "4 disks, 2 pools": [
        Disk("file", "tank/four"),
        Disk("zvol", "tank/four-1"),
        Disk("file", "flash/four"),
        Disk("zvol", "flash/four-1"),
    ],
}


@dataclass
class Figures:
    """Of one round, in milliseconds."""

    events: float = 0.0
    seen: float = 0.0
    run: float = 0.0
    """Seconds."""
    parts: dict[str, float | None] = field(default_factory=dict)

    @property
    def beyond(self) -> float:
        return self.events - (self.parts.get("downtime_ms") or 0.0)

    @property
    def met(self) -> bool:
        return self.events <= GOAL_MS or self.beyond <= GOAL_BEYOND_MS


@contextmanager
def measured(guest: Guest) -> Iterator[Figures]:
    found = Figures()
    with listening(connect()) as events, watch(guest, LOOK_EVERY) as seen:
        began = time.monotonic()
        yield found
        found.run = time.monotonic() - began
    found.events, found.seen = events.longest_ms(), seen.longest_ms()


def snapshot(guest: Guest, settings: Path) -> Figures:
    command = ["snaporch", "snapshot", guest.name, "--json", "--config", str(settings)]
    with measured(guest) as found:
        done = subprocess.run(command, capture_output=True, check=True)
    found.parts = json.loads(done.stdout)["pause_parts"]
    return found


def nothing(guest: Guest) -> Figures:
    with measured(guest) as found:
        time.sleep(NOTHING_SECONDS)
    return found


def measure(label: str, disks: list[Disk], rounds: int) -> None:
    guest = Guest.create("bench", disks=disks)
    figures: dict[str, list[Figures]] = {way: [] for way in ("nothing", *STRATEGIES)}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(rounds):
            figures["nothing"].append(nothing(guest))
            for strategy in STRATEGIES:
                settings = Path(directory) / f"{strategy}.toml"
                settings.write_text(f'[defaults]\nram_strategy = "{strategy}"\n')
                figures[strategy].append(snapshot(guest, settings))
    guest.remove()
    for way, rows in figures.items():
        print(f"{label:17}{way:8}" + line(rows), flush=True)
    pauses = {way: statistics.median(row.events for row in figures[way]) for way in STRATEGIES}
    print(f"{label:17}overlay / manual: {pauses['overlay'] / pauses['manual']:.2f}", flush=True)


def line(rows: list[Figures]) -> str:
    events, seen = ([getattr(row, name) for row in rows] for name in ("events", "seen"))
    cells = [statistics.median(events), max(events), statistics.median(seen), max(seen)]
    text = "".join(f"{ms:8.0f}" for ms in cells)
    text += f"{statistics.median(row.beyond for row in rows):8.0f}"
    text += f"{sum(row.met for row in rows):4}/{len(rows)}"
    for part in PARTS:
        values = [value for row in rows if (value := row.parts.get(part)) is not None]
        text += f"{statistics.median(values):9.0f}" if values else f"{'-':>9}"
    return text + f"{statistics.median(row.run for row in rows):7.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default="", help="guests whose label begins so, such as '4'")
    given = parser.parse_args()
    rounds = given.rounds
    start_event_loop()
    confined = Path("/sys/kernel/security/apparmor/profiles").exists()
    print(f"AppArmor: {'on' if confined else 'off'}; {rounds} rounds, medians and most")
    heads = "".join(f"{head:>8}" for head in ("events", "most", "seen", "most", "beyond"))
    parts = "".join(f"{part.removesuffix('_ms'):>9}" for part in PARTS)
    print(f"{'guest':17}{'':8}{heads}  goal{parts}  run s", flush=True)
    for label, disks in GUESTS.items():
        if label.startswith(given.only):
            measure(label, disks, rounds)


if __name__ == "__main__":
    main()
