"""All contestants on guests of several sizes and dirtying rates, round by round, on this machine.

Prints one JSON object per result to ``--out``; ``report.py`` makes table and plot of it.
"""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "lab"))

import contestants
import host
import measure

SIZES = "512,1024,2048,4096"
RATES = "200,5000,20000"
NOISE_PERCENT = 40
_REST_MIB = 160
"""For the guest's kernel; it needs some for every page, too."""
_BOOT_SECONDS = 900
_SETTLE_SECONDS = 1.0
_NOTABLE_SECONDS = 0.05
"""A longer time without a count is recorded, with its beginning."""


def cases(sizes: list[int], rates: list[int], *, full: bool) -> list[tuple[int, int]]:
    """Size and rate of each guest: every size at the middle rate, every rate at the middle size."""
    if full:
        return list(itertools.product(sizes, rates))
    rate, size = rates[len(rates) // 2], sizes[-2] if len(sizes) > 1 else sizes[0]
    chosen = [(each, rate) for each in sizes] + [(size, each) for each in rates]
    return sorted(dict.fromkeys(chosen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default=SIZES, help="MiB of RAM in use")
    parser.add_argument("--rates", default=RATES, help="pages dirtied a second")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="every size at every rate")
    parser.add_argument("--only", default=",".join(contestants.ALL), help="contestants")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--compressors", default=",".join(contestants.COMPRESSORS), help="for the script"
    )
    parser.add_argument("--nice", type=int, default=0, help="priority on a machine that is shared")
    parser.add_argument("--busy", type=int, default=0, help="other programs that use a core each")
    parser.add_argument("--append", action="store_true", help="to what an earlier one wrote")
    options = parser.parse_args()
    host.ensure_packages()
    host.enter_namespace()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends guest and libvirtd too
    sizes, rates = ([int(n) for n in text.split(",")] for text in (options.sizes, options.rates))
    memory = Path("/dev/shm")  # disks in memory add no noise
    with (
        tempfile.TemporaryDirectory(prefix="snaporch-bench-", dir="/var/tmp") as store,
        tempfile.TemporaryDirectory(prefix="snaporch-bench-", dir=memory) as scratch,
        host.own_libvirtd(Path(store) / "libvirt") as daemon,
        host.room_for_pipes(),
        options.out.open("a" if options.append else "w") as out,
        busy(options.busy),
    ):
        Path(scratch).chmod(0o711)
        contestants.CHOSEN[:] = options.compressors.split(",")
        host.prefer(daemon, options.nice)
        host.prefer(os.getpid(), options.nice)
        measure.start_event_loop()
        json.dump(
            {"versions": host.versions(), "began": time.strftime("%FT%TZ", time.gmtime())}, out
        )
        out.write("\n")
        for size, rate in cases(sizes, rates, full=options.full):
            for result in rounds(size, rate, options, Path(store), Path(scratch), daemon):
                json.dump(result, out)
                out.write("\n")
                out.flush()


@contextlib.contextmanager
def busy(programs):
    """Keep a core busy with each of so many programs meanwhile."""
    running = [
        subprocess.Popen(["sha256sum", "/dev/zero"], stdout=subprocess.DEVNULL)
        for _ in range(programs)
    ]
    try:
        yield
    finally:
        for each in running:
            each.terminate()
            each.wait()


def rounds(size, rate, options, store, scratch, daemon):
    """Every contestant in turn, several times, on one guest."""
    from guests import guest as guests
    from guests.disks import Disk

    guests.LOG_DIRECTORY = scratch / "logs"
    disks = scratch / "disks"
    shutil.rmtree(disks, ignore_errors=True)
    line = f"dirty_mib={size} dirty_rate={rate} noise={NOISE_PERCENT} interval_ms=5"
    guest = guests.Guest.create(
        "bench",
        disks=[Disk("plain", str(disks))],
        kind="linux",
        memory_mib=size + size // 10 + _REST_MIB,
        command_line=line,
    )
    try:
        host.prefer(int(Path("/run/libvirt/qemu/bench.pid").read_text()), options.nice)
        wait_until_filled(guest)
        site = contestants.Site(guest.name, guest.images[0].path, store, scratch, size)
        for number in range(options.rounds):
            for name in options.only.split(","):
                if name in contestants.LAST and number + 1 < options.rounds:
                    continue
                time.sleep(_SETTLE_SECONDS)
                print(f"{size} MiB, {rate} pages/s, round {number}: {name}", file=sys.stderr)
                for result in one(guest, site, name, daemon):
                    yield {"size": size, "rate": rate, "round": number} | result
    finally:
        guest.remove()


def wait_until_filled(guest):
    end = time.monotonic() + _BOOT_SECONDS
    while b"DIRTY " not in (said := guest.machine.serial_log.read_bytes()):
        if b"Kernel panic" in said:
            sys.exit("bench: the guest panicked")
        if time.monotonic() > end:
            sys.exit("bench: the guest did not fill its memory")
        time.sleep(0.2)


def one(guest, site, name, daemon):
    """One contestant's snapshot, measured; several results if it compresses several ways."""
    from guests.guest import connect
    from guests.pauses import watch

    mark = guest.mark()
    before, began = measure.cpu_of(daemon), time.monotonic()
    made = iter(contestants.ALL[name](site))
    with (
        measure.listening(connect()) as events,
        contextlib.suppress(TimeoutError),  # a restored guest may log late
        watch(guest) as seen,
    ):
        first = next(made)  # the guest is left alone from here on
        shared = measure.cpu_of(daemon) - before
    results = [first, *made] if first else list(made)
    assert not guest.bad_since(mark), guest.bad_since(mark)
    for result in results:
        yield {
            "contestant": result.contestant,
            "pause_serial_ms": round(seen.longest_ms(), 1) or None,
            "pause_events_ms": round(events.longest_ms(), 1),
            "pauses": since(began, events.pauses),
            "gaps": since(began, seen.gaps(_NOTABLE_SECONDS)),
            "seconds": round(result.seconds, 3),
            "stored": result.stored,
            "written": result.written,
            "cpu": round(result.cpu + shared, 3),
            "peak_mib": round(result.peak_kib / 1024, 1),
            "rounds_of_ram": events.job.get("memory_iteration"),
            "ram_bytes": events.job.get("memory_processed"),
            "load": round(os.getloadavg()[0], 1),
        } | result.more


def since(began, spans):
    """For each pause: seconds since the beginning, and its length in milliseconds."""
    return [[round(start - began, 3), round(1000 * (end - start), 1)] for start, end in spans]


if __name__ == "__main__":
    main()
