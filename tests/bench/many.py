#!/usr/bin/env -S python3 -P
"""Many guests at once: snapshots with RAM, the restore of a group, and clones, by how many at once.

Run it with ``tests/lab/run``; 16 guests want ``--mem 4G``. ``virsh list`` and ``snaporch list`` are
timed meanwhile. What counts are the ratios: the lab has one processor. ``hand`` restores the guests
without snaporch, by ``virsh`` and ``zfs``.

``CPU`` is how the CPU time was shared: emulators that run in the end, libvirtd with its helpers,
and snaporch with its children. The rest is the questions, the kernel and emulators that have ended.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from commands import run
from guests.disks import Disk
from guests.guest import Guest

SETTINGS = Path("/var/tmp/many.toml")
QUESTIONS = (("virsh", "list"), ("snaporch", "list"))


def available() -> int:
    """Bytes of memory that the host could give to new programs."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def cpu_seconds(program: str) -> dict[str, float]:
    """CPU time of each running process of a program, with that of its children that have ended."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            name, _, rest = (directory / "stat").read_text().partition("(")[2].rpartition(")")
            if name.startswith(program):
                ticks = sum(map(int, rest.split()[11:15]))
                found[directory.name] = ticks / os.sysconf("SC_CLK_TCK")
    return found


@dataclass(frozen=True)
class Spent:
    """CPU seconds since the start: of each process, and of the whole lab."""

    emulators: dict[str, float]
    libvirt: dict[str, float]
    busy: float

    @classmethod
    def now(cls) -> "Spent":
        words = Path("/proc/stat").read_text().split()
        busy = sum(int(words[number]) for number in (1, 2, 3, 6, 7, 8))
        return cls(
            cpu_seconds("qemu-system"),
            cpu_seconds("libvirtd"),
            busy / os.sysconf("SC_CLK_TCK"),
        )


def grown(before: dict[str, float], after: dict[str, float]) -> float:
    return sum(now - before.get(process, 0.0) for process, now in after.items())


@dataclass
class Watched:
    """What was seen while something else ran."""

    seconds: float = 0.0
    least: int = 0
    shares: str = ""
    answers: dict[str, list[float]] = field(default_factory=lambda: {q[0]: [] for q in QUESTIONS})

    def answer(self, program: str) -> float:
        return statistics.median(self.answers[program])


@contextmanager
def watching() -> Iterator[Watched]:
    """Time the questions, one after the other, and watch the memory, until the block ends."""
    seen, over = Watched(least=available()), threading.Event()

    def ask() -> None:
        while not over.is_set():
            for words in QUESTIONS:  # each once, even if the block is over
                begun = time.monotonic()
                run(*words)
                seen.answers[words[0]].append(time.monotonic() - begun)

    def look() -> None:
        while not over.wait(0.1):
            seen.least = min(seen.least, available())

    threads = [threading.Thread(target=each) for each in (ask, look)]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        seen.seconds = time.monotonic() - begun
        over.set()
        for thread in threads:
            thread.join()


def idle(seconds: float) -> Watched:
    with watching() as seen:
        time.sleep(seconds)
    return seen


def work(*words: str) -> tuple[str, float]:
    """What a command prints, and the CPU seconds of it and of its children."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(words)}: {process.returncode}: {text}")
    return text, usage.ru_utime + usage.ru_stime


@contextmanager
def shared() -> Iterator[tuple[Watched, list[float]]]:
    """Watch the block, and find the shares of CPU time; the block adds snaporch's to the list."""
    before, own = Spent.now(), list[float]()
    with watching() as seen:
        yield seen, own
    after = Spent.now()
    emulators = grown(before.emulators, after.emulators)
    libvirt = grown(before.libvirt, after.libvirt)
    busy = after.busy - before.busy
    seen.shares = " ".join(f"{part / busy:4.0%}" for part in (emulators, libvirt, sum(own)))


def snapshots(names: list[str], jobs: int) -> tuple[Watched, list[float]]:
    words = ("snaporch", "snapshot", *names, "--jobs", str(jobs), "--json", "--quiet")
    with shared() as (seen, own):
        text, cpu = work(*words, "--config", str(SETTINGS))
        own.append(cpu)
    return seen, [each["pause_ms"] for each in json.loads(text)]


def restores(jobs: int, name: str) -> Watched:
    words = ("snaporch", "restore", f"many0@{name}", "--group", "--yes", "--quiet")
    with shared() as (seen, own):
        _, cpu = work(*words, "--jobs", str(jobs), "--discard-newer", "--config", str(SETTINGS))
        own.append(cpu)
    return seen


def by_hand(jobs: int, names: list[str]) -> Watched:
    """What one does without snaporch: each guest by three commands, from an image made before."""
    for name in names:
        run("virsh", "save", name, f"/var/tmp/{name}.save", "--image-format", "raw")
        run("zfs", "snapshot", f"tank/{name}@hand")
        run("virsh", "restore", "--running", f"/var/tmp/{name}.save")

    def put_back(name: str) -> float:
        commands = (
            ("virsh", "destroy", name),
            ("zfs", "rollback", f"tank/{name}@hand"),
            ("virsh", "restore", "--running", f"/var/tmp/{name}.save"),
        )
        return sum(work(*words)[1] for words in commands)

    with shared() as (seen, own), ThreadPoolExecutor(jobs) as executor:
        own.extend(executor.map(put_back, names))
    for name in names:
        run("zfs", "destroy", f"tank/{name}@hand")
    return seen


def clones(jobs: int, name: str, count: int) -> Watched:
    """Running clones of one snapshot, each by a command of its own."""
    made = [f"clone{number}" for number in range(count)]

    def clone(new: str) -> float:
        return work("snaporch", "clone", f"many0@{name}", new, "--running", "--quiet")[1]

    with shared() as (seen, own), ThreadPoolExecutor(jobs) as executor:
        own.extend(executor.map(clone, made))
    for new in made:
        run("snaporch", "clone", "--delete", new, "--quiet")
    return seen


def line(label: str, jobs: int, seen: Watched, rest: Watched, most: int) -> str:
    text = f"{label:10}{jobs:5}{seen.seconds:9.1f}{(most - seen.least) >> 20:9}"
    answers = (seen.answer(words[0]) / rest.answer(words[0]) for words in QUESTIONS)
    return text + "".join(f"{each:10.1f}" for each in answers) + f"  {seen.shares}"


def spread(values: list[float]) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return " ".join(f"{each:.0f}" for each in (low, middle, high))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--guests", type=int, default=8)
    parser.add_argument("--jobs", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--only", default="snapshot,restore", help="kinds of work, also hand and clone"
    )
    given = parser.parse_args()
    kinds = given.only.split(",")
    SETTINGS.write_text('[group.many]\ndomains = ["many*"]\n')
    names = [f"many{number}" for number in range(given.guests)]
    guests = [Guest.create(name, [Disk("file", f"tank/{name}")]) for name in names]
    if kinds != ["snapshot"]:
        run("snaporch", "snapshot", "--group", "many", "--name", "s", "--config", str(SETTINGS))
    rest, most = idle(20), available()
    head = ("jobs", "seconds", "MiB", "virsh", "snaporch")
    print(f"{'':10}{head[0]:>5}{head[1]:>9}{head[2]:>9}{head[3]:>10}{head[4]:>10}", end="")
    print("  CPU: QEMU, libvirt, snaporch; pause ms: least, median, most", flush=True)
    others: dict[str, Callable[[int], Watched]] = {
        "restore": lambda jobs: restores(jobs, "s"),
        "hand": lambda jobs: by_hand(jobs, names),
        "clone": lambda jobs: clones(jobs, "s", given.guests),
    }
    for _ in range(given.rounds):
        for jobs in map(int, given.jobs.split(",")):
            if "snapshot" in kinds:
                seen, pauses = snapshots(names, jobs)
                text = line("snapshot", jobs, seen, rest, most)
                print(f"{text}  {spread(pauses)}", flush=True)
            for kind, act in others.items():
                if kind in kinds:
                    print(line(kind, jobs, act(jobs), rest, most), flush=True)
    for guest in guests:
        guest.remove()


if __name__ == "__main__":
    main()
