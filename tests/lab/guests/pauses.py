"""How long a guest was paused, seen from outside.

A guest cannot measure it: its clocks are paused with it. So the arrival of its counts in the serial
log is timed on the host.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from guests.guest import Guest

_LOOK_EVERY = 0.0005


@dataclass
class Watch:
    """Times, on the monotonic clock, at which the serial log was seen to have grown."""

    times: list[float] = field(default_factory=list)

    def longest_ms(self) -> float:
        """Give the longest time without a count, in milliseconds, to about one.

        The guest's own time between counts is in it: 55 for the probes, less for the busy ones,
        ``interval_ms=`` for Linux. 0 if there were not two counts.
        """
        return 1000 * max((ended - began for began, ended in self.gaps()), default=0.0)

    def gaps(self, seconds: float = 0.0) -> list[tuple[float, float]]:
        """Give beginning and end of each time without a count longer than so many seconds."""
        pairs = itertools.pairwise(self.times)
        return [(earlier, later) for earlier, later in pairs if later - earlier > seconds]


@contextlib.contextmanager
def watch(guest: Guest, every: float = _LOOK_EVERY) -> Iterator[Watch]:
    """Time the guest's counts while the block runs, and up to the first one after it.

    ``every`` so many seconds the log is looked at. In the lab looking costs much of its one CPU.
    """
    seen, ended = Watch(), threading.Event()

    def look() -> None:
        size = guest.mark()
        while not ended.wait(every):
            now = guest.mark()
            if now != size:
                seen.times.append(time.monotonic())
                size = now

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
        guest.wait_count()
    finally:
        ended.set()
        thread.join()
