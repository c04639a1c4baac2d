#!/usr/bin/env python3
"""Plain zstd, zstd with the previous stream as reference, and page files: bytes, CPU, memory."""

import itertools
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from snaporch.bundle.page_file import PageFile
from snaporch.bundle.qemu_stream import StreamHead, split


def measured(label: str, work: Callable[[], float]) -> None:
    """Print what ``work`` made (MiB), its CPU seconds and its time."""
    before, began = cpu(), time.monotonic()
    made = work()
    used, took = cpu() - before, time.monotonic() - began
    print(f"{label:32} {made:8.1f} MiB  cpu {used:5.1f} s  {took:5.1f} s", flush=True)


def cpu() -> float:
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(r.ru_utime + r.ru_stime for r in map(resource.getrusage, kinds))


def zstd(source: Path, *options: str) -> float:
    target = source.with_suffix(".zst")
    subprocess.run(["zstd", "-qf", "-1", "-T0", *options, source, "-o", target], check=True)
    size = target.stat().st_size
    target.unlink()
    return size / (1 << 20)


def to_pages(stream: Path, pages: Path) -> float:
    """Write the stream's pages to a page file; returns the written MiB."""
    made: list[PageFile] = []

    def prepare(head: StreamHead) -> PageFile:
        made.append(PageFile(pages, head.page_file_bytes, lambda _done: None))
        return made[0]

    with stream.open("rb", buffering=0) as source:
        split(source.read, prepare)
    made[0].finish()
    made[0].close()
    return made[0].written / (1 << 20)


def main() -> None:
    work = Path(sys.argv[1])
    streams = sorted(work.glob("s?.qevm"))
    pages = work / "pages"
    pages.unlink(missing_ok=True)
    for stream in streams:
        measured(f"{stream.stem} in pages: written", lambda s=stream: to_pages(s, pages))
        shutil.copy(pages, work / f"p{stream.stem[1:]}")
    for stream in streams:
        measured(f"{stream.stem} zstd -1", lambda s=stream: zstd(s))
    for old, new in itertools.pairwise(streams):
        options = ("--long=31", f"--patch-from={old}")
        measured(f"{new.stem} zstd -1 --patch-from", lambda s=new, o=options: zstd(s, *o))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    print(f"most memory of a child (zstd)    {peak:8} MiB")
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"most memory of the conversion    {own:8} MiB")


if __name__ == "__main__":
    main()
