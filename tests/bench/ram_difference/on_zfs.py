#!/usr/bin/env -S python3 -P
"""Page files one over the other on ZFS: what each snapshot has written. Runs in the lab."""

import subprocess
from pathlib import Path

from snaporch.bundle.page_file import PageFile

HERE = Path(__file__).resolve().parent
WAYS = [(size, "zstd") for size in ("128K", "64K", "32K", "16K", "8K")] + [("32K", "lz4")]


def zfs(*words: str) -> str:
    return subprocess.run(
        ["zfs", *words], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


def store(source: Path, target: Path) -> None:
    made = PageFile(target, source.stat().st_size, lambda _done: None)
    place = 0
    with source.open("rb", buffering=0) as stream:
        while block := stream.read(1 << 20):
            made.put(place, block)
            place += len(block)
    made.finish()
    made.close()


def main() -> None:
    for size, method in WAYS:
        zfs("create", "-o", f"recordsize={size}", "-o", f"compression={method}", "tank/r")
        for pages in sorted(HERE.glob("p?")):
            store(pages, Path("/tank/r/pages"))
            zfs("snapshot", f"tank/r@{pages.name}")
            written = int(zfs("get", "-Hp", "-o", "value", "written", f"tank/r@{pages.name}"))
            print(f"{size:5} {method:5} {pages.name} {written / (1 << 20):8.1f} MiB", flush=True)
        zfs("destroy", "-r", "tank/r")


if __name__ == "__main__":
    main()
