"""A bar with bytes, rate and time left, as one line of a terminal.

rich computes and draws it. Its ``Live`` display is not used, since it ends the process when the
terminal is closed, and starts a thread.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from datetime import timedelta

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import Progress
from rich.progress_bar import ProgressBar as Bar

from snaporch.errors import one_line
from snaporch.output.format import size

_INTERVAL_SECONDS = 0.2
"""The least time between two lines: a fast reader reports each block."""
_LEAST_BAR = 8
_LONGEST_BAR = 40


class ProgressBar:
    """The bar of one activity.

    Args:
        subject: the domain or object that the activity is about.
        clock: returns the time in seconds.
    """

    def __init__(self, subject: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._subject = subject
        self._clock = clock
        self._shown: float | None = None
        self._progress = Progress(get_time=clock, auto_refresh=False, console=_console(80))
        self._task = self._progress.add_task("", total=None)
        self._done = 0

    def continues(self, subject: str, done: int) -> bool:
        """Whether so many bytes are of this activity: another one begins at fewer bytes."""
        return subject == self._subject and done >= self._done

    def line(self, done: int, total: int, width: int) -> str:
        """The line for ``done`` of ``total`` bytes.

        Args:
            done: bytes that are done.
            total: bytes that are expected.
            width: of the terminal, in columns.

        Returns:
            The line, no wider than the terminal; empty if the last one is very recent.
        """
        self._progress.update(self._task, completed=done, total=max(total, done))
        self._done = done
        now = self._clock()
        if self._shown is not None and now - self._shown < _INTERVAL_SECONDS and done < total:
            return ""
        self._shown = now
        return self._drawn(done, max(total, done), width - 1)

    def _drawn(self, done: int, total: int, width: int) -> str:
        task = self._progress.tasks[0]
        figures = f"{size(done)} of {size(total)}"
        if task.speed:
            figures += f"  {size(int(task.speed))}/s"
        if task.time_remaining is not None and done < total:
            figures += f"  {timedelta(seconds=round(task.time_remaining))} left"
        name = one_line(self._subject)
        room = width - cell_len(name) - cell_len(figures) - 4
        if room < _LEAST_BAR:
            return set_cell_size(f"{name}  {figures}", width).rstrip()
        console = _console(min(room, _LONGEST_BAR))
        with console.capture() as captured:
            console.print(Bar(total=total, completed=done), end="")
        return f"{name}  {captured.get()}  {figures}"


def _console(width: int) -> Console:
    """A console that only draws; rich would write to the file of another one."""
    return Console(file=io.StringIO(), force_terminal=True, width=width, highlight=False)
