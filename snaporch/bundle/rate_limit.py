"""A limit on how fast bytes are taken, which can be lifted while somebody waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_BURST_SECONDS = 0.05
_MIB = 1 << 20


class RateLimit:
    """``rate`` MiB a second on average; 0 for no limit.

    What was not used is not saved up for more than a moment: a stream that stood still goes on at
    the rate, and not in a rush.
    """

    def __init__(self, rate: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lifted = threading.Event()
        self._bytes_per_second = rate * _MIB
        self._due = clock()
        if not rate:
            self.lift()

    @property
    def limits(self) -> bool:
        """Whether there is a limit still."""
        return not self._lifted.is_set()

    def spend(self, count: int) -> None:
        """Wait until ``count`` bytes may be taken, or the limit is lifted."""
        delay = self.delay(count)
        if delay > 0:
            self._lifted.wait(delay)

    def delay(self, count: int) -> float:
        """Reckon with ``count`` bytes more; how many seconds to wait for them."""
        if not self.limits:
            return 0.0
        now = self._clock()
        self._due = max(self._due, now - _BURST_SECONDS) + count / self._bytes_per_second
        return self._due - now

    def lift(self) -> None:
        """No limit from now on; whoever waits goes on at once."""
        self._lifted.set()
