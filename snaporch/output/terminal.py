"""Progress on standard error, results on standard output."""

from __future__ import annotations

import io
import os
import shutil
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from snaporch.errors import one_line

if TYPE_CHECKING:
    from snaporch.output.progress_bar import ProgressBar


def _render(markup: str) -> str:
    """Render markup for standard error: coloured on a terminal, plain elsewhere, never wrapped."""
    from rich.console import Console

    text = io.StringIO()  # rich writes to its file even while it captures
    seen = True if sys.stderr.isatty() else None
    console = Console(file=text, force_terminal=seen, highlight=False, emoji=False, soft_wrap=True)
    console.print(markup, end="")
    return text.getvalue()


def _escape(text: str) -> str:
    from rich.markup import escape  # most commands print no markup, and start sooner without it

    return escape(text)


class _InPlace:
    """The terminal's last line, which shows a bar."""

    is_open = False
    """Whether the cursor is still in that line, so that the next output replaces it."""


def _write(text: str) -> None:
    """Write to standard error; a closed terminal neither ends a run nor changes its exit code.

    rich is not used, because it ends the process when its stream is closed.
    """
    clear = "\r\x1b[K" if _InPlace.is_open else ""
    _InPlace.is_open = False
    try:
        sys.stderr.write(clear + text)
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end


class TerminalProgress:
    """Prints a line for each step; shows bytes in place by a bar, on a terminal only."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._in_place = sys.stderr.isatty()
        self._bar: ProgressBar | None = None

    def step(self, subject: str, text: str) -> None:
        """Print a step, unless quiet; bytes that are reported later have a bar of their own."""
        self._bar = None
        if not self._quiet:
            self._print(f"[bold]{_escape(one_line(subject))}[/]  {_escape(one_line(text))}")

    def note(self, subject: str, text: str) -> None:
        """Print a note."""
        self._print(
            f"[bold]{_escape(one_line(subject))}[/]  [yellow]note:[/] {_escape(one_line(text))}"
        )

    def amount(self, subject: str, done: int, total: int) -> None:
        """Show ``done`` of ``total`` bytes, their rate and the time left in place, unless quiet."""
        if self._quiet or not self._in_place:
            return
        from snaporch.output.progress_bar import ProgressBar

        if self._bar is None or not self._bar.continues(subject, done):
            self._bar = ProgressBar(subject)
        line = self._bar.line(done, total, shutil.get_terminal_size().columns)
        if line:
            _write(line)
            _InPlace.is_open = True

    def _print(self, markup: str) -> None:
        _write(_render(markup) + "\n")


def print_log(text: str) -> None:
    """Print a line of the log on standard error."""
    _write(text + "\n")


def print_error(text: str) -> None:
    """Print a line on standard error."""
    _write(_render(f"[bold red]snaporch:[/] {_escape(one_line(text))}") + "\n")


class Results:
    """The state of this process's results."""

    lost = False
    """Whether a result could not be written."""


def print_result(text: str) -> None:
    """Print a result on standard output; a reader that closed the pipe is no error.

    A result that cannot be written, such as on a full disk, is reported on standard error; the
    command's work stays done.
    """
    if _InPlace.is_open:
        _write("")
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        _lose(error)


def print_json(document: object) -> None:
    """Print one JSON document on standard output."""
    import json

    print_result(json.dumps(document, indent=2, ensure_ascii=False))


def _lose(error: OSError) -> None:
    with suppress(OSError):  # standard output may be no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):
        Results.lost = True
        print_error(f"standard output: a result could not be written ({error.strerror})")


class _Lasting(io.FileIO):
    """Standard output whose failed writes are reported instead of raised."""

    def write(self, data: Any) -> int:
        """Write ``data``; report a failure."""
        try:
            return super().write(data)
        except OSError as error:
            _lose(error)
            return memoryview(data).nbytes


def report_failed_stdout() -> None:
    """Report failed writes of other code too, such as the parser's help."""
    stream, original = sys.stdout, sys.__stdout__
    if original is None or stream != original:
        return
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Lasting(1, "w", closefd=False)),
        encoding=original.encoding,
        errors=original.errors,
        line_buffering=original.isatty(),
    )
