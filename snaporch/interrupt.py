"""The signals that stop a command: Ctrl-C (SIGINT), SIGTERM and SIGHUP."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from snaporch.errors import InterruptedRunError, WindowClosedError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Interrupt:
    """The signal that asked the command to stop; checked where stopping is safe."""

    signum: int | None = None

    @contextmanager
    def watching(self) -> Iterator[Interrupt]:
        """Handle SIGINT, SIGTERM and SIGHUP in the block; signals that nohup ignores stay ignored.

        Ctrl-Z is ignored meanwhile, also by child processes: a stopped run leaves its guest frozen,
        or on overlays that grow.
        """
        wanted = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        previous = {number: signal.signal(number, self._take) for number in wanted}
        previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _take(self, signum: int, _frame: FrameType | None) -> None:
        self.signum = signum

    def check(self, thing: str) -> None:
        """Raise if a signal came.

        Args:
            thing: the subject of the error, such as the domain's name.

        Raises:
            InterruptedRunError: a signal came.
        """
        if self.signum is not None:
            name = signal.Signals(self.signum).name
            raise InterruptedRunError(thing, f"stopped by {name}", self.signum)


@dataclass
class WindowInterrupt(Interrupt):
    """Stops what a signal stops, and also at the end of a time of day.

    A replication gets it from :mod:`snaporch.schedule.run_replications`, a pull from
    :mod:`snaporch.pull.pull`.
    """

    outer: Interrupt = field(default_factory=Interrupt)
    """The signals."""
    closed: Callable[[], str] = lambda: ""
    """Why there is no time left; empty while there is."""

    def check(self, thing: str) -> None:
        """Raise if a signal came, or the time has ended.

        Raises:
            WindowClosedError: the time has ended.
            InterruptedRunError: a signal came.
        """
        self.outer.check(thing)
        if reason := self.closed():
            raise WindowClosedError(thing, reason, signal.SIGTERM)


@dataclass
class MemberInterrupt(Interrupt):
    """Stops a member of a group on a signal to the process, and when another member has failed."""

    outer: Interrupt = field(default_factory=Interrupt)
    """The signals."""
    check_others: Callable[[], None] = lambda: None
    """Raises if another member has failed."""

    def check(self, thing: str) -> None:
        """Raise if a signal came or another member has failed.

        Raises:
            InterruptedRunError: one of both.
        """
        self.outer.check(thing)
        self.check_others()
