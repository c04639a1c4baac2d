import os
import subprocess
import sys

import pytest

from snaporch.output.terminal import TerminalProgress, print_error, print_result


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


@pytest.mark.parametrize(
    "after",
    ["print_result('the end')", "print_error('the end')", "TerminalProgress().step('the', 'end')"],
)
def test_the_next_output_replaces_the_bytes(after):
    code = (
        f"from snaporch.output.terminal import *; TerminalProgress().amount('web', 1, 2); {after}"
    )
    shown = in_a_terminal(code)
    assert "1 B of 2 B" in shown.partition("\r\x1b[K")[0]
    assert "end" in shown.partition("\x1b[K")[2]


def in_a_terminal(code):
    """Return the output of Python code on a terminal."""
    ours, theirs = os.openpty()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30, **streams)
    os.close(theirs)
    try:
        return os.read(ours, 4096).decode()
    finally:
        os.close(ours)


def test_names_are_text_and_not_markup(capsys):
    TerminalProgress().step("[red]web[/]", "[/] \x1b[2J")
    assert capsys.readouterr().err == "[red]web[/]  [/] \\x1b[2J\n"


def test_names_of_copies_are_no_emoji(capsys):
    """rich would print :ram: as a picture of a sheep."""
    TerminalProgress().note("backup/kvm/tank:ram:u", "is away")
    print_error("zfs destroy backup/kvm/tank:ram:u")
    assert capsys.readouterr().err.count("tank:ram:u") == 2


def run_with_broken(stream, code):
    """Run Python code in a process of its own; no process reads one of its streams."""
    reading, writing = os.pipe()
    os.close(reading)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {stream: writing}
    try:
        return subprocess.run([sys.executable, "-c", code], check=False, **streams)
    finally:
        os.close(writing)


@pytest.mark.parametrize("call", ["step('web', 'x')", "note('web', 'x')", "amount('web', 1, 2)"])
def test_a_closed_terminal_does_not_end_a_run(call):
    code = f"from snaporch.output.terminal import *; TerminalProgress().{call}; print('went on')"
    done = run_with_broken("stderr", code)
    assert (done.returncode, done.stdout) == (0, b"went on\n")


def test_an_unread_error_keeps_the_exit_code():
    code = "from snaporch.output.terminal import *; print_error('x'); raise SystemExit(7)"
    assert run_with_broken("stderr", code).returncode == 7


def test_an_error_is_one_line(capsys):
    print_error("web: \nis gone")
    assert capsys.readouterr().err == "snaporch: web: is gone\n"


def test_a_closed_pipe_is_no_error():
    code = "from snaporch.output.terminal import print_result; print_result('x' * 100)"
    done = run_with_broken("stdout", code)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_result_on_a_full_disk_is_reported_and_keeps_the_exit_code():
    """Python itself would end with 120."""
    code = "from snaporch.output.terminal import print_result; print_result('x' * 100)"
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 0
    assert done.stderr.startswith(b"snaporch: standard output: a result could not be written (No ")


def test_progress_on_a_full_disk_keeps_the_exit_code():
    code = "from snaporch.output.terminal import print_error; print_error('x'); raise SystemExit(7)"
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", code], stderr=full, check=False)
    assert done.returncode == 7


def test_results_go_to_standard_output(capsys):
    print_result("[bold]web[/]")
    assert capsys.readouterr() == ("[bold]web[/]\n", "")
