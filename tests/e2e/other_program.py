"""Another program that snapshots a guest's datasets all the time; and a judge of all snapshots."""

import os
import select
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import libvirt
from guests.disks import Image, mountpoint
from guests.guest import Guest
from guests.sector import DiskContentError
from support import must

from snaporch.zfs.snapshot_mount import mounted_snapshot

SLOW_BYTES = 64 << 10
"""A second, while a commit is slowed down: in the lab it would be over between two snapshots."""
ENOUGH = 4
"""Snapshots of each dataset within a commit before it may go on."""
_POLL_SECONDS = 0.05
_PAUSE_SECONDS = 1.0
_IN_BYTES = libvirt.VIR_DOMAIN_BLOCK_JOB_SPEED_BANDWIDTH_BYTES
_FROM_THE_START = libvirt.VIR_DOMAIN_BLOCK_COMMIT_BANDWIDTH_BYTES


_WORK = """
trap over=yes TERM
round=0
while [ -z "$over" ]; do
    for dataset; do zfs snapshot "$dataset@other-$round" || exit; done
    echo $((round += 1))
    sleep 0.1
done
"""


class OtherProgram:
    """Takes snapshots of the guest's datasets, one after the other.

    It waits between them: judging more snapshots would take minutes.
    """

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._over = threading.Event()
        self._rounds = 0

    def work(self) -> None:
        """Take snapshots until :meth:`end` is called."""
        while not self._over.is_set():
            for image in self._guest.images:
                must("zfs", "snapshot", f"{image.dataset}@other-{self._rounds}")
            self._rounds += 1
            self._over.wait(_PAUSE_SECONDS)

    def slow_down(self) -> None:
        """Slow commits down until enough snapshots were taken meanwhile."""
        while not self._over.wait(_POLL_SECONDS):
            if not is_committing(self._guest):
                continue
            set_speed(self._guest, SLOW_BYTES)
            enough = self._rounds + ENOUGH
            self._wait_while(lambda enough=enough: self._rounds < enough)
            set_speed(self._guest, 0)
            self._wait_while(lambda: True)

    def _wait_while(self, goes_on: Callable[[], bool]) -> None:
        while goes_on() and is_committing(self._guest) and not self._over.wait(_POLL_SECONDS):
            pass

    def end(self) -> None:
        """End both loops."""
        self._over.set()


@contextmanager
def other_program(guest: Guest) -> Iterator[None]:
    """Another program snapshots the guest's datasets meanwhile."""
    other = OtherProgram(guest)
    with ThreadPoolExecutor(2) as threads:
        work = [threads.submit(other.work), threads.submit(other.slow_down)]
        try:
            yield
        finally:
            other.end()
    for each in work:
        each.result()


class SnapshotLoop:
    """A process that takes snapshots of the guest's datasets, one after the other, until closed."""

    def __init__(self, guest: Guest) -> None:
        command = ["sh", "-c", _WORK, "other", *guest.datasets()]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()

    def wait(self, rounds: int, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Until so many more snapshots of each dataset are there."""
        while self._may_be_read(0):
            self._read()
        while rounds > 0 and goes_on():
            if self._may_be_read(_POLL_SECONDS):
                rounds -= self._read()

    def _may_be_read(self, seconds: float) -> bool:
        return bool(select.select([self._output], [], [], seconds)[0])

    def _read(self) -> int:
        lines = os.read(self._output, 4096).count(b"\n")
        assert lines, "the other program has ended"
        return lines

    def close(self) -> None:
        """The snapshot under way is the last."""
        self._process.terminate()
        self._process.communicate()
        assert self._process.returncode == 0


@contextmanager
def snapshot_loop(guest: Guest) -> Iterator[SnapshotLoop]:
    """Another process snapshots the guest's datasets meanwhile; no thread runs in this one."""
    loop = SnapshotLoop(guest)
    try:
        yield loop
    finally:
        loop.close()


@contextmanager
def slow_commits(held: Callable[[], None]) -> Iterator[None]:
    """Commits of children that are forked meanwhile copy next to nothing while ``held`` runs.

    They begin slowly: in the lab, a small commit is over before a test could slow it down.
    """
    real = libvirt.virDomain.blockCommit

    def begin(self, disk, base, top, bandwidth=0, flags=0):
        answer = real(self, disk, base, top, bandwidth or SLOW_BYTES, flags | _FROM_THE_START)
        held()
        self.blockJobSetSpeed(disk, bandwidth, _IN_BYTES)
        return answer

    libvirt.virDomain.blockCommit = begin
    try:
        yield
    finally:
        libvirt.virDomain.blockCommit = real


def is_committing(guest: Guest) -> bool:
    """Whether libvirt has a block job on a disk of the guest; no if libvirt does not answer."""
    with suppress(libvirt.libvirtError):
        return guest.state() != "shut off" and "<mirror" in guest.xml()
    return False


def set_speed(guest: Guest, bytes_a_second: int) -> None:
    """Limit the speed of all block jobs of the guest; 0 for no limit."""
    with suppress(libvirt.libvirtError):  # they have ended
        for target in guest.sources():
            guest.domain().blockJobSetSpeed(target, bytes_a_second, _IN_BYTES)


@dataclass(frozen=True)
class Judged:
    """A snapshot of one disk's dataset."""

    name: str
    torn: bool
    """Whether snaporch recorded it as torn."""
    whole: bool
    """Whether it holds what the guest had on the disk at one instant."""


def judge(guest: Guest, *, busy: bool = True) -> list[Judged]:
    """Judge every snapshot of the guest's datasets, also those that other programs took.

    Args:
        busy: its probe writes more than its counts: it is of kind load or busy.
    """
    found = []
    for image in guest.images:
        columns = "name,snaporch:level"
        assert image.dataset is not None
        text = must("zfs", "list", "-Hp", "-t", "snapshot", "-o", columns, image.dataset)
        inside = None if image.is_block else image.path.relative_to(mountpoint(image.dataset))
        for line in text.splitlines():
            name, level = line.split("\t")
            found.append(Judged(name, level == "torn", _is_whole(image, name, inside, busy)))
    return found


def _is_whole(image: Image, name: str, inside: Path | None, busy: bool) -> bool:
    if inside is None:
        return _was_written_so(image, name.partition("@")[2], busy)
    with mounted_snapshot(name) as root:  # a look into .zfs would start a program for each
        return _was_written_so(replace(image, path=root / inside), None, busy)


def _was_written_so(image: Image, snapshot: str | None, busy: bool) -> bool:
    try:
        count = image.count(snapshot)
        if busy:
            image.assert_load_whole(count, snapshot)
    except DiskContentError:
        return False
    return True


def assert_none_is_called_otherwise(judged: list[Judged]) -> None:
    """Each torn snapshot is recorded as torn."""
    bad = [each.name for each in judged if not (each.torn or each.whole)]
    assert not bad, f"torn, and not called so: {bad}"
