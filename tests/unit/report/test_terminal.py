import io
import os
import subprocess
import sys

import pytest

from snaporch.report.terminal import TerminalProgress, print_error, print_result


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def test_steps_go_to_standard_error_one_line_each(capsys):
    TerminalProgress().step("web", "saving\nRAM " + "x" * 300)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "web  saving RAM " + "x" * 300 + "\n"


def test_quiet_keeps_notes_only(capsys):
    progress = TerminalProgress(quiet=True)
    progress.step("web", "a step")
    progress.note("web", "a note")
    progress.amount("web", 1, 2)
    assert capsys.readouterr().err == "web  note: a note\n"


def test_bytes_are_shown_on_a_terminal_only(capsys):
    TerminalProgress().amount("web", 1, 2)
    assert capsys.readouterr().err == ""


def test_names_are_text_and_not_markup(capsys):
    TerminalProgress().step("[red]web[/]", "[/] \x1b[2J")
    assert capsys.readouterr().err == "[red]web[/]  [/] \\x1b[2J\n"


def test_a_terminal_that_went_away_does_not_end_a_run(monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    TerminalProgress().step("web", "a step")
    TerminalProgress().note("web", "a note")
    print_error("an error")


def test_an_error_is_one_line(capsys):
    print_error("web: \nis gone")
    assert capsys.readouterr().err == "snaporch: web: is gone\n"


def test_a_reader_of_results_that_left_early_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    code = "from snaporch.report.terminal import print_result; print_result('x' * 100)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_results_go_to_standard_output(capsys):
    print_result("[bold]web[/]")
    assert capsys.readouterr() == ("[bold]web[/]\n", "")
