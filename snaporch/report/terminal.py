"""Progress on standard error, results on standard output."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from snaporch.errors import one_line
from snaporch.report.units import size


def error_console() -> Console:
    """Standard error; plain when it is no terminal, and never wrapped."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


class TerminalProgress:
    """One line per step; bytes are shown in place on a terminal only."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = error_console()
        self._quiet = quiet
        self._open_line = False

    def step(self, subject: str, text: str) -> None:
        """A step, unless quiet."""
        if not self._quiet:
            self._print(f"[bold]{escape(one_line(subject))}[/]  {escape(one_line(text))}")

    def note(self, subject: str, text: str) -> None:
        """A warning, always."""
        self._print(
            f"[bold]{escape(one_line(subject))}[/]  [yellow]note:[/] {escape(one_line(text))}"
        )

    def amount(self, subject: str, done: int, total: int) -> None:
        """Bytes, overwritten in place."""
        if self._quiet or not self._console.is_terminal:
            return
        line = Text(f"{one_line(subject)}  {size(done)} of {size(total)}")
        self._guard(lambda: self._console.print(line, end="\r"))
        self._open_line = True

    def _print(self, markup: str) -> None:
        if self._open_line:
            self._open_line = False
            self._guard(lambda: self._console.file.write("\r\x1b[K"))
        self._guard(lambda: self._console.print(markup))

    def _guard(self, action: Callable[[], object]) -> None:
        """A terminal that went away must not end a run."""
        with suppress(OSError, ValueError):
            action()


def print_error(text: str) -> None:
    """One line on standard error."""
    with suppress(OSError, ValueError):
        console = error_console()
        console.print(f"[bold red]snaporch:[/] {escape(one_line(text))}")


def print_result(text: str) -> None:
    """Something on standard output; a reader that left early is no error of ours."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stderr.close()
