"""The way back without ZFS: how long a guest is away if libvirt resumes it from each kind of image.

libvirt and QEMU are the lab's, from its root image, and run natively: the host's own may be too old
to read zstd. A copy of the guest's disk stands in for the rollback. The ways take turns.
"""

import argparse
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "lab"))

import host

CHECKOUT = Path(__file__).resolve().parents[3]
NAME = "back"
SIZES = "512,1024,2048,4096"
_REST_MIB = 160
_BOOT_SECONDS = 900
_SETTLE_SECONDS = 2
_POLL = 0.002
_HEADER, _PLAIN, _ZSTD = 92, 0, 5
"""Of a save image of libvirt: the bytes of its header, and the methods in it."""
_OUTSIDE = ("/dev", "/dev/shm", "/proc", "/sys")
_STORE = Path("/var/tmp/way-back")
_INSIDE = "SNAPORCH_BENCH_ROOT"


def enter_root() -> None:
    """Run this program again in a writable copy of the lab's root image, and wait for it."""
    guests = os.environ.get("SNAPORCH_GUESTS")
    if not guests:
        sys.exit("bench: SNAPORCH_GUESTS has to name what tests/lab/guests/build prints")
    built = subprocess.run(
        [CHECKOUT / "tests/lab/build", "--paths"], check=True, stdout=subprocess.PIPE, text=True
    )
    image = built.stdout.splitlines()[1]
    with tempfile.TemporaryDirectory(prefix="snaporch-bench-", dir="/var/tmp") as work:
        top = Path(work)
        for name in ("lower", "upper", "work", "root", "store"):
            (top / name).mkdir()
        over = f"lowerdir={top}/lower,upperdir={top}/upper,workdir={top}/work"
        root = top / "root"
        mount("-o", "loop,ro,noload", image, top / "lower")
        mount("-t", "overlay", "-o", over, "none", root)
        for place in _OUTSIDE:
            mount("--bind", place, f"{root}{place}")
        mount("-t", "tmpfs", "none", root / "run")
        for source, place in ((CHECKOUT, CHECKOUT), (top / "store", _STORE)):
            (root / str(place).lstrip("/")).mkdir(parents=True, exist_ok=True)
            mount("--bind", source, f"{root}{place}")
        (root / guests.lstrip("/")).mkdir(parents=True, exist_ok=True)
        mount("--bind", guests, f"{root}{guests}")
        environment = os.environ | {_INSIDE: "1", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        command = ["chroot", root, "/usr/bin/python3", "-B", "-P", __file__, *sys.argv[1:]]
        done = subprocess.run(command, check=False, env=environment)
        subprocess.run(["umount", "--recursive", root], check=True)
        subprocess.run(["umount", top / "lower"], check=True)
    sys.exit(done.returncode)


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True)


def virsh(*words: str | Path) -> None:
    subprocess.run(["virsh", "-q", *words], check=True, stdout=subprocess.DEVNULL)


def compress(raw: Path, packed: Path) -> None:
    """Make the image that snaporch stores: the same header and XML, the rest as zstd."""
    copy(raw, packed, _ZSTD, "-T0", "-1")


def decompress(packed: Path, raw: Path) -> None:
    """Make the plain image again, as ``snaporch restore`` does before it stops the guest."""
    raw.unlink(missing_ok=True)
    copy(packed, raw, _PLAIN, "-d")
    with raw.open("rb") as written:
        os.fsync(written.fileno())


def copy(image: Path, other: Path, method: int, *options: str) -> None:
    """Copy a save image: its header names the method, and zstd makes the rest with the options."""
    with image.open("rb") as source, other.open("wb") as target:
        header = bytearray(source.read(_HEADER))
        length = struct.unpack_from("<I", header, 20)[0]
        struct.pack_into("<I", header, 28, method)
        target.write(header + source.read(length))
        target.flush()
        os.lseek(source.fileno(), _HEADER + length, os.SEEK_SET)
        subprocess.run(["zstd", "-q", *options, "-c"], stdin=source, stdout=target, check=True)


class Site:
    """One guest, and the images that it is resumed from."""

    def __init__(self, size: int) -> None:
        from guests import guest as guests
        from guests.disks import Disk

        guests.LOG_DIRECTORY = _STORE / "logs"
        self.guest = guests.Guest.create(
            NAME,
            disks=[Disk("plain", str(_STORE / "disks"))],
            kind="linux",
            memory_mib=size + size // 10 + _REST_MIB,
            command_line=f"dirty_mib={size} dirty_rate=200 noise=40 interval_ms=5",
        )
        self.guest.wait_filled(_BOOT_SECONDS)
        self.raw, self.packed, self.again = (
            _STORE / name for name in ("ram.raw", "ram.zst", "ram.again")
        )
        self._disk = self.guest.images[0].path
        virsh("save", NAME, self.raw, "--image-format", "raw")
        shutil.copyfile(self._disk, _STORE / "disk.saved")
        compress(self.raw, self.packed)
        virsh("restore", self.raw, "--running")

    def away(self, image: Path) -> float:
        """Stop the guest, bring its disk back, resume it; seconds until its first count."""
        time.sleep(_SETTLE_SECONDS)
        mark, began = self.guest.mark(), time.monotonic()
        virsh("destroy", NAME)
        shutil.copyfile(_STORE / "disk.saved", self._disk)
        mark = self.guest.mark()
        virsh("restore", image, "--running")
        while not self.guest.counts_since(mark):
            time.sleep(_POLL)
        return time.monotonic() - began

    def by_raw(self) -> tuple[float, float]:
        """The rival: ``virsh restore`` of a plain image."""
        return 0.0, self.away(self.raw)

    def by_zstd(self) -> tuple[float, float]:
        """The image as it is stored; libvirt starts ``zstd``."""
        return 0.0, self.away(self.packed)

    def by_plain_copy(self) -> tuple[float, float]:
        """The stored image, decompressed before the guest is stopped."""
        began = time.monotonic()
        decompress(self.packed, self.again)
        return time.monotonic() - began, self.away(self.again)


WAYS: dict[str, Callable[[Site], tuple[float, float]]] = {
    "raw image": Site.by_raw,
    "zstd image": Site.by_zstd,
    "zstd, plain first": Site.by_plain_copy,
}


def measure(size: int, rounds: int) -> None:
    """Measure every way in turn, several times, on a guest of ``size`` MiB, and print medians."""
    site = Site(size)
    seen: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, take in WAYS.items():
            seen[way].append(take(site))
    rival = statistics.median(outage for _, outage in seen["raw image"])
    sizes = [site.raw.stat().st_size, site.packed.stat().st_size, site.raw.stat().st_size]
    for (way, times), stored in zip(seen.items(), sizes, strict=True):
        before, outage = (statistics.median(each) for each in zip(*times, strict=True))
        all_seen = " ".join(f"{each:.2f}" for _, each in times)
        print(
            f"{size:5} MiB  {way:20}{stored >> 20:8}{before:9.2f}{outage:9.2f}"
            f"{outage / rival:7.2f}  ({all_seen})",
            flush=True,
        )
    site.guest.remove()
    for path in (site.raw, site.packed, site.again):
        path.unlink()


def main() -> None:
    """Measure each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default=SIZES, help="MiB of RAM in use")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    host.enter_namespace()
    if not os.environ.get(_INSIDE):
        enter_root()
    with host.own_libvirtd(_STORE / "libvirt"):
        print(f"{'':9}  {'way':20}{'MiB':>8}{'before s':>9}{'outage s':>9}{'times':>7}", flush=True)
        for size in given.sizes.split(","):
            measure(int(size), given.rounds)


if __name__ == "__main__":
    main()
