"""A limit on a rate of bytes. It can be lifted while a thread waits for it.

Which rate applies to RAM is decided by :mod:`snaporch.snapshot.strategies.ram_limits`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_BURST_SECONDS = 0.05
_MIB = 1 << 20


class RateLimit:
    """Limits to ``rate`` MiB per second on average; 0 for no limit.

    Unused time counts for a moment only. So after a pause the stream continues at the rate, and not
    in a burst.
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
        """Whether there is still a limit."""
        return not self._lifted.is_set()

    def spend(self, count: int) -> None:
        """Wait until ``count`` bytes may pass, or until the limit is lifted."""
        delay = self.delay(count)
        if delay > 0:
            self._lifted.wait(delay)

    def delay(self, count: int) -> float:
        """Add ``count`` bytes to the account; the seconds to wait for them."""
        if not self.limits:
            return 0.0
        now = self._clock()
        self._due = max(self._due, now - _BURST_SECONDS) + count / self._bytes_per_second
        return self._due - now

    def lift(self) -> None:
        """Remove the limit. A thread that waits in :meth:`spend` continues at once."""
        self._lifted.set()
