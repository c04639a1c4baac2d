"""The contestants: each takes one snapshot of a guest, and leaves it as it was."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from measure import Spent, sync_file

HERE = Path(__file__).resolve().parent
# gzip and pigz at their default level, as they are usually called.
COMPRESSORS = {
    "gzip": ["gzip", "-c"],
    "pigz": ["pigz", "-c"],
    "lz4": ["lz4", "-q", "-c"],
    "zstd": ["zstd", "-q", "-T0", "-1", "-c"],
}
CHOSEN = list(COMPRESSORS)
"""Those that the plain script's RAM is compressed with."""
_IDLE_SECONDS = 5.0
_AT_MOST_MIB = {"gzip": 512, "pigz": 1024}
"""They take minutes for more, and say nothing new."""


@dataclass(frozen=True)
class Site:
    """Where a guest is, and where things may be put."""

    domain: str
    disk: Path
    store: Path
    scratch: Path
    """Where overlays go: beside the disk, in memory."""
    size_mib: int
    vcpu_group: Path | None = None
    """The vCPU's control group, for a run that may slow the guest down."""


@dataclass
class Result:
    """One row: the result of a snapshot. Times are in seconds since its beginning."""

    contestant: str
    seconds: float
    stored: int
    written: int
    cpu: float
    peak_kib: int
    more: dict[str, object] = field(default_factory=dict)


Contestant = Callable[[Site], Iterator[Result | None]]
"""Gives ``None`` when it is done with the guest, and has results later."""


def script(*, live: bool) -> Contestant:
    """The usual script: snapshot, commit, compress the files."""
    name = "script --live" if live else "script"

    def take(site: Site) -> Iterator[Result | None]:
        raw, overlay = site.store / "ram.raw", site.scratch / "overlay.qcow2"
        began, spent = time.monotonic(), Spent()
        spent.run(snapshot_create(site, raw, overlay, live=live))
        returned = time.monotonic() - began
        commit(site, spent, overlay)
        yield None
        for compressor in ["zstd"] if live else CHOSEN:
            command = COMPRESSORS[compressor]
            if site.size_mib > _AT_MOST_MIB.get(compressor, site.size_mib):
                continue
            packed, packing, since = site.store / "ram.packed", Spent(), time.monotonic()
            with packed.open("wb") as target:
                packing.run([*command, raw], stdout=target)
            sync_file(packed)
            took = time.monotonic() - since
            size = packed.stat().st_size
            yield Result(
                f"{name}, {compressor}",
                returned + took,
                size,
                size + raw.stat().st_size,
                spent.cpu + packing.cpu,
                max(spent.peak_kib, packing.peak_kib),
            )
            packed.unlink()
        if live:
            yield bound(site, raw)
        raw.unlink()

    return take


def snapshot_create(site: Site, ram: Path, overlay: Path, *, live: bool) -> list[str]:
    return [
        *("virsh", "-q", "snapshot-create-as", site.domain, "bench", "--atomic", "--no-metadata"),
        *(["--live"] if live else []),
        *("--memspec", f"file={ram},snapshot=external"),
        *("--diskspec", f"vda,snapshot=external,file={overlay}"),
    ]


def commit(site: Site, spent: Spent, overlay: Path) -> None:
    spent.run(["virsh", "-q", "blockcommit", site.domain, "vda", "--active", "--pivot"])
    overlay.unlink()


def piped(site: Site) -> Iterator[Result]:
    """The usual script at its best: RAM goes into a pipe that zstd reads.

    The pipe is held open, or zstd might end between libvirt's two openings, and the second hang.
    """
    pipe, overlay = site.store / "ram.pipe", site.scratch / "overlay.qcow2"
    packed = site.store / "ram.packed"
    began, spent = time.monotonic(), Spent()
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDWR)
    with pipe.open("rb") as source, packed.open("wb") as target:
        packing = subprocess.Popen(COMPRESSORS["zstd"], stdin=source, stdout=target)
    spent.run(snapshot_create(site, pipe, overlay, live=True))
    os.close(held)
    commit(site, spent, overlay)
    spent.wait(packing)
    sync_file(packed)
    took = time.monotonic() - began
    size = packed.stat().st_size
    yield Result("script --live, pipe, zstd", took, size, size, spent.cpu, spent.peak_kib)
    packed.unlink()
    pipe.unlink()


def bound(site: Site, raw: Path) -> Result:
    """The reference of the goal: ``zstd -T0 -1`` of the same bytes, read from memory."""
    memory = Path("/dev/shm") / f"snaporch-bench-{os.getpid()}.raw"
    packed = site.store / "bound.zst"
    try:
        shutil.copyfile(raw, memory)
        began, spent = time.monotonic(), Spent()
        with packed.open("wb") as target:
            spent.run([*COMPRESSORS["zstd"], memory], stdout=target)
        sync_file(packed)
        took = time.monotonic() - began
    finally:
        memory.unlink(missing_ok=True)
    size = packed.stat().st_size
    packed.unlink()
    return Result("zstd -T0 -1 from memory", took, size, size, spent.cpu, spent.peak_kib)


def save_and_restore(site: Site) -> Iterator[Result]:
    """``virsh save``, a moment for the snapshot of the disks, ``virsh restore``."""
    image = site.store / "ram.save"
    began, spent = time.monotonic(), Spent()
    spent.run(["virsh", "-q", "save", site.domain, image])
    sync_file(image)
    saved = time.monotonic() - began
    spent.run(["virsh", "-q", "restore", image])
    size = image.stat().st_size
    yield Result("save/restore", saved, size, size, spent.cpu, spent.peak_kib)
    image.unlink()


def virtnbdbackup(site: Site) -> Iterator[Result]:
    """The disks alone, no RAM."""
    target = site.store / "virtnbdbackup"
    began, spent = time.monotonic(), Spent()
    spent.run(
        ["virtnbdbackup", "-d", site.domain, "-l", "copy", "--raw", "-o", target],
        stdout=subprocess.DEVNULL,
    )
    took = time.monotonic() - began
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    yield Result("virtnbdbackup (no RAM)", took, size, size, spent.cpu, spent.peak_kib)
    subprocess.run(["rm", "-rf", target], check=True)


def snaporch(strategy: str, capture: str, level: str = "1", more: str = "") -> Contestant:
    """A run, with a stand-in for ZFS; level ``auto`` reads the manifest of the previous run.

    Args:
        more: further settings, a line each.
    """

    def take(site: Site) -> Iterator[Result]:
        settings = site.scratch / "snaporch.toml"
        settings.write_text(
            f'[paths]\noverlays = "{site.store}/overlays"\nbundles = "{site.store}/bundles"\n'
            f'journal = "{site.store}/journal"\nruntime = "{site.scratch}/runtime"\n'
            "overlay_reserve_mib = 1\noverlay_floor_mib = 0\n"
            f'[defaults]\nram_strategy = "{strategy}"\nram_capture = "{capture}"\n'
            f'compression = "zstd"\ncompression_level = {level}\n{more}'
        )
        program = [sys.executable, "-P", HERE / "without_zfs.py"]
        began, spent = time.monotonic(), Spent()
        group = [site.vcpu_group] if site.vcpu_group else []
        spent.run([*program, settings, site.domain, "bench", site.disk.parent, *group])
        took = time.monotonic() - began
        result = json.loads(spent.said)
        raw = result["ram_bytes"] if capture == "file" else 0
        yield Result(
            f"snaporch {strategy}, {capture}" + (", auto" if level != "1" else ""),
            took,
            result["stored_bytes"],
            result["stored_bytes"] + raw,
            spent.cpu,
            spent.peak_kib,
            {
                "pause_ms": result["pause_ms"],
                "pause_parts": result["pause_parts"],
                "pace": pace(result),
                "cpu_percent": result["cpu_percent"],
            },
        )
        Path(result["bundle"], "ram.save").unlink()

    return take


def pace(result: dict[str, str]) -> object:
    """The bottleneck, as the manifest records it."""
    parts = json.loads(Path(result["bundle"], "manifest.json").read_text())["parts"]
    return next(part["pace"] for part in parts if part["role"] == "ram")


def nothing(_site: Site) -> Iterator[Result]:
    """The effect of the machine and of the measurement itself on a guest."""
    time.sleep(_IDLE_SECONDS)
    yield Result("nothing", 0.0, 0, 0, 0.0, 0)


ALL: dict[str, Contestant] = {
    "script": script(live=False),
    "script-live": script(live=True),
    "script-pipe": piped,
    "save": save_and_restore,
    "virtnbdbackup": virtnbdbackup,
    "overlay-stream": snaporch("overlay", "stream"),
    "overlay-file": snaporch("overlay", "file"),
    "manual-stream": snaporch("manual", "stream"),
    "manual-file": snaporch("manual", "file"),
    "manual-auto": snaporch("manual", "stream", '"auto"'),
    "nothing": nothing,
}
LAST = {"save"}
"""Only once for each guest, after all others: it is another QEMU process afterwards."""
