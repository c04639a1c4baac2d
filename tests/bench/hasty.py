#!/usr/bin/env -S python3 -P
"""Guests that change RAM at a share of the speed at which it is saved, by each way of saving it.

Run it with ``tests/lab/run``; what counts are the ratios, since the lab is slow at page faults. All
ways compress by zstd at the same level, a high one: so the guest can be faster than the saving.
Only ``virsh save`` compresses nothing.

The last line of each share is what ``--dry-run`` measured and forecast after the others. After
``--patience`` seconds the guest is suspended, as by ``ram_time_budget``.
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
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "native"))

from commands import run
from guests.disks import Disk
from guests.guest import Guest, connect
from measure import listening, start_event_loop

LEVEL = 15
SHARES = "10,50,200"
PAGES_A_MIB = 256
FILL_SECONDS = 900
PLACE = Path("/var/lib/libvirt/images")
SETTINGS = Path("/tmp/hasty.toml")


class Figures(NamedTuple):
    pause: float
    """The longest one, by libvirt's events, in milliseconds."""
    total: float
    """Until the RAM is stored, in seconds."""


def settings(**more: object) -> None:
    chosen = {"compression": "zstd", "compression_level": LEVEL} | more
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in chosen.items())
    SETTINGS.write_text(f"[defaults]\n{lines}")


def snaporch(guest: Guest, *options: str) -> str:
    return run("snaporch", "snapshot", guest.name, "--json", "--config", str(SETTINGS), *options)


def forecast(guest: Guest) -> dict[str, float]:
    return json.loads(snaporch(guest, "--dry-run"))["ram"]


def by_brake(guest: Guest, patience: int) -> None:
    settings(ram_time_budget=f"{patience}s")
    snaporch(guest)


def by_suspension(guest: Guest, patience: int) -> None:
    settings(ram_time_budget=f"{patience}s", vcpu_floor=100)
    snaporch(guest)


def by_script(guest: Guest, patience: int) -> None:
    """``--live`` into a named pipe that zstd reads; the pipe is held open until libvirt is done."""
    pipe, packed, overlay = (PLACE / f"hasty.{end}" for end in ("pipe", "zst", "qcow2"))
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDWR)
    with pipe.open("rb") as source, packed.open("wb") as target:
        packing = subprocess.Popen(["zstd", "-q", f"-{LEVEL}", "-c"], stdin=source, stdout=target)
    late = threading.Timer(patience, lambda: run("virsh", "suspend", guest.name))
    late.start()
    try:
        run(
            *("virsh", "snapshot-create-as", guest.name, "hasty", "--atomic", "--no-metadata"),
            *("--live", "--memspec", f"file={pipe},snapshot=external"),
            *("--diskspec", f"vda,snapshot=external,file={overlay}"),
        )
    finally:
        late.cancel()
        os.close(held)
    packing.wait()
    if guest.state() == "paused":
        run("virsh", "resume", guest.name)
    run("virsh", "blockcommit", guest.name, "vda", "--active", "--pivot")
    for path in (pipe, packed, overlay):
        path.unlink()


def by_save(guest: Guest, _patience: int) -> None:
    image = PLACE / "hasty.save"
    run("virsh", "save", guest.name, str(image))
    run("virsh", "restore", str(image))
    image.unlink()


WAYS: dict[str, Callable[[Guest, int], None]] = {
    "snaporch": by_brake,
    "snaporch, vcpu_floor = 100": by_suspension,
    "script --live, pipe": by_script,
    "virsh save": by_save,
}


def measured(way: Callable[[Guest, int], None], guest: Guest, patience: int) -> Figures:
    with listening(connect()) as events:
        began = time.monotonic()
        way(guest, patience)
        total = time.monotonic() - began
        guest.wait_count()
    return Figures(events.longest_ms(), total)


def make(mib: int, rate: int) -> Guest:
    line = f"dirty_mib={mib} dirty_rate={rate} noise=90 interval_ms=20"
    made = Guest.create("hasty", [Disk("file", "tank/hasty")], kind="linux", command_line=line)
    made.wait_filled(FILL_SECONDS)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=48, help="MiB that the guest rewrites")
    parser.add_argument("--shares", default=SHARES, help="percent of the speed of saving")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=int, default=120, help="seconds")
    given = parser.parse_args()
    start_event_loop()
    settings()
    guest = make(given.mib, 1)
    snaporch(guest)
    speed = forecast(guest)["saved_mib"]
    guest.remove()
    print(f"RAM is saved at {speed:.1f} MiB/s", flush=True)
    print(f"{'share':8}{'way':28}{'pause ms':>10}{'most':>9}{'total s':>9}")
    for share in map(int, given.shares.split(",")):
        guest = make(given.mib, max(round(speed * PAGES_A_MIB * share / 100), 1))
        figures: dict[str, list[Figures]] = {name: [] for name in WAYS}
        for _ in range(given.rounds):
            for name, way in WAYS.items():
                figures[name].append(measured(way, guest, given.patience))
        settings(ram_time_budget=f"{given.patience}s")
        found = forecast(guest)
        for name, rows in figures.items():
            pauses = [row.pause for row in rows]
            total = statistics.median(row.total for row in rows)
            cells = f"{statistics.median(pauses):10.0f}{max(pauses):9.0f}{total:9.1f}"
            print(f"{share:5} %  {name:28}{cells}", flush=True)
        rates = f"changes {found['changed_mib']} MiB/s, {found['saved_mib']} MiB/s are saved"
        print(f"{share:5} %  {rates}; forecast: {found['outcome']}", flush=True)
        guest.remove()


if __name__ == "__main__":
    main()
