"""Somebody else, who snapshots a guest's datasets all the time; and a judge of all snapshots."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import libvirt
from guests.disks import Image
from guests.guest import Guest
from guests.sector import DiskContentError
from support import must

SLOW_BYTES = 64 << 10
"""A second, while a commit is slowed down: in the lab it would be over between two snapshots."""
ENOUGH = 4
"""Snapshots of each dataset within a commit before it may go on."""
_POLL_SECONDS = 0.05
_PAUSE_SECONDS = 0.2
_IN_BYTES = libvirt.VIR_DOMAIN_BLOCK_JOB_SPEED_BANDWIDTH_BYTES


class Stranger:
    """Takes snapshots of the guest's datasets, one after the other.

    Not as fast as they come: whatever looks at them later would take minutes.
    """

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._over = threading.Event()
        self._rounds = 0

    def work(self) -> None:
        """Take them until it is over."""
        while not self._over.is_set():
            for image in self._guest.images:
                must("zfs", "snapshot", f"{image.dataset}@stranger-{self._rounds}")
            self._rounds += 1
            self._over.wait(_PAUSE_SECONDS)

    def slow_down(self) -> None:
        """Hold commits up until enough were taken meanwhile."""
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
        """It is over."""
        self._over.set()


@contextmanager
def stranger(guest: Guest) -> Iterator[None]:
    """Have somebody else at the guest's datasets."""
    somebody = Stranger(guest)
    with ThreadPoolExecutor(2) as threads:
        work = [threads.submit(somebody.work), threads.submit(somebody.slow_down)]
        try:
            yield
        finally:
            somebody.end()
    for each in work:
        each.result()


def is_committing(guest: Guest) -> bool:
    """Whether a block job of libvirt's is on one of its disks, as far as libvirt is there."""
    with suppress(libvirt.libvirtError):
        return guest.state() != "shut off" and "<mirror" in guest.xml()
    return False


def set_speed(guest: Guest, bytes_a_second: int) -> None:
    """Of all its block jobs; 0 for as fast as they can."""
    with suppress(libvirt.libvirtError):  # they have ended
        for target in guest.sources():
            guest.domain().blockJobSetSpeed(target, bytes_a_second, _IN_BYTES)


@dataclass(frozen=True)
class Judged:
    """A snapshot of one disk's dataset."""

    name: str
    torn: bool
    """What it is called."""
    whole: bool
    """What it is: what the guest had on the disk at one instant."""


def judge(guest: Guest, *, busy: bool = True) -> list[Judged]:
    """Look at every snapshot of the guest's datasets, whoever's it is.

    Args:
        busy: its probe writes more than its counts.
    """
    found = []
    for image in guest.images:
        columns = "name,snaporch:level"
        assert image.dataset is not None
        text = must("zfs", "list", "-Hp", "-t", "snapshot", "-o", columns, image.dataset)
        for line in text.splitlines():
            name, level = line.split("\t")
            whole = _is_whole(image, name.partition("@")[2], busy=busy)
            found.append(Judged(name, level == "torn", whole))
    return found


def _is_whole(image: Image, snapshot: str, *, busy: bool) -> bool:
    try:
        count = image.count(snapshot)
        if busy:
            image.assert_load_whole(count, snapshot)
    except DiskContentError:
        return False
    return True


def assert_none_is_called_otherwise(judged: list[Judged]) -> None:
    """What is torn is called torn."""
    bad = [each.name for each in judged if not (each.torn or each.whole)]
    assert not bad, f"torn, and not called so: {bad}"
