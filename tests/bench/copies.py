#!/usr/bin/env -S python3 -P
"""What the copies of a guest cost: the first, one of an idle guest, one after 10 % was rewritten.

Run it with ``tests/lab/run``. Bytes are what ZFS wrote on the replica, and the bundle's; they hold
for other machines too. Seconds are those of the lab, which is slow.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))

from guests.disks import Disk
from guests.guest import Guest

DATASET, ROOT = "tank/cost", "backup/kvm"
DATA_MIB, BLOCK = 128, 128 << 10
ROUNDS = (("first", 0.0), ("idle", 0.0), ("idle", 0.0), ("10 %", 0.1), ("10 %", 0.1))


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, check=True, text=True, env=dict(os.environ))
    return done.stdout


def rewrite(path: Path, share: float) -> None:
    """Rewrite a share of the blocks of a file by data that cannot be compressed."""
    blocks = range(path.stat().st_size // BLOCK)
    with path.open("r+b") as file:
        for block in random.sample(blocks, round(len(blocks) * share)):
            file.seek(block * BLOCK)
            file.write(os.urandom(BLOCK))
        os.fsync(file.fileno())


def measure(guest: Guest, data: Path, bundles: Path, level: str) -> None:
    data.write_bytes(os.urandom(DATA_MIB << 20))
    for label, share in ROUNDS:
        rewrite(data, share)
        taken = json.loads(run("snaporch", "snapshot", guest.name, "--level", level, "--json"))
        began = time.monotonic()
        run("snaporch", "replicate", guest.name, "--to", "nas", "--json")
        seconds = time.monotonic() - began
        copy = f"{ROOT}/{DATASET.replace('/', ':')}@{taken['snapshot']}"
        sent = int(run("zfs", "get", "-Hp", "-o", "value", "written", copy))
        directory = bundles / taken["uuid"] / taken["run"]
        bundle = sum(each.stat().st_size for each in directory.iterdir())
        print(
            f"{level:8}{label:8}{sent / 2**20:10.1f}{bundle / 2**20:10.1f}{seconds:10.1f}",
            flush=True,
        )


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as text:
        place = Path(text)
        with (place / "vdev").open("wb") as stream:
            stream.truncate(2 << 30)
        run("zpool", "create", "-O", "mountpoint=none", "backup", str(place / "vdev"))
        (place / "bundles").mkdir()
        config = place / "snaporch.toml"
        config.write_text(
            f'[replica.nas]\ndataset = "{ROOT}"\nbundles = "{place}/bundles"\n', "utf-8"
        )
        os.environ["SNAPORCH_CONFIG"] = str(config)
        guest = Guest.create("cost", disks=[Disk("file", DATASET)])
        print(f"{'level':8}{'copy':8}{'ZFS MiB':>10}{'bundle':>10}{'seconds':>10}", flush=True)
        try:
            measure(guest, Path("/") / DATASET / "data", place / "bundles", "ram")
        finally:
            guest.remove()
            run("zpool", "destroy", "backup")


if __name__ == "__main__":
    main()
