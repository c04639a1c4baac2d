"""Progress on standard error, results on standard output."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.markup import escape

from snaporch.errors import one_line
from snaporch.output.format import size


def _render(markup: str) -> str:
    """Markup as standard error shows it: coloured on a terminal, plain elsewhere, never wrapped."""
    text = io.StringIO()  # rich writes to its file even while it captures
    seen = True if sys.stderr.isatty() else None
    Console(file=text, force_terminal=seen, highlight=False, soft_wrap=True).print(markup, end="")
    return text.getvalue()


class _InPlace:
    """The line of the terminal in which bytes are shown."""

    is_open = False
    """Whether the cursor is still in it: whatever is printed next takes its place."""


def _write(text: str) -> None:
    """A terminal that went away must not end a run, nor change its exit code.

    Not printed by rich, which ends the process when its stream is closed.
    """
    clear = "\r\x1b[K" if _InPlace.is_open else ""
    _InPlace.is_open = False
    try:
        sys.stderr.write(clear + text)
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end


class TerminalProgress:
    """One line per step; bytes are shown in place on a terminal only."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._in_place = sys.stderr.isatty()

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
        if not self._quiet and self._in_place:
            _write(f"{one_line(subject)}  {size(done)} of {size(total)}")
            _InPlace.is_open = True

    def _print(self, markup: str) -> None:
        _write(_render(markup) + "\n")


def print_log(text: str) -> None:
    """One line of the log on standard error."""
    _write(text + "\n")


def print_error(text: str) -> None:
    """One line on standard error."""
    _write(_render(f"[bold red]snaporch:[/] {escape(one_line(text))}") + "\n")


class Results:
    """What became of the results of this process."""

    lost = False
    """Whether some could not be written."""


def print_result(text: str) -> None:
    """Something on standard output; a reader that left early is no error of ours.

    What cannot be written, on a full disk say, is told, and changes nothing of what was done.
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
    with suppress(OSError):  # one that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):
        Results.lost = True
        print_error(f"standard output: a result could not be written ({error.strerror})")


class _Lasting(io.FileIO):
    """Standard output that can be written to also when it takes nothing any more."""

    def write(self, data: Any) -> int:
        """All of it, or it is told."""
        try:
            return super().write(data)
        except OSError as error:
            _lose(error)
            return memoryview(data).nbytes


def outlast_stdout() -> None:
    """Have what others print, as the parser its help, be no error either."""
    stream, original = sys.stdout, sys.__stdout__
    if original is None or stream != original:
        return
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Lasting(1, "w", closefd=False)),
        encoding=original.encoding,
        errors=original.errors,
        line_buffering=original.isatty(),
    )
