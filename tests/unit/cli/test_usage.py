import errno
import io
import logging
import re
import subprocess
import sys

import pytest

from snaporch import __version__, command_log
from snaporch.errors import ExitCode
from snaporch.output.terminal import Results

COMMANDS = [
    *("snapshot", "list", "restore", "recover", "prune", "status"),
    *("delete", "keep", "unkeep", "note"),
]


def test_help_names_every_command(snaporch):
    answer = snaporch("--help")
    assert answer.code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in answer.out
    assert answer.err == ""


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_of_each_command(snaporch, command, flag, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    answer = snaporch(command, flag)
    assert answer.code == 0
    assert answer.out.startswith(f"Usage: snaporch {command} ")
    assert "--config FILE" in answer.out
    assert max(len(line) for line in answer.out.splitlines()) <= 80


@pytest.mark.parametrize("command", ["check", "replicate", "snapshot", "status"])
def test_help_shows_that_several_domains_or_none_can_be_given(snaporch, command):
    assert f"Usage: snaporch {command} [OPTIONS] [DOMAIN]...\n" in snaporch(command, "--help").out


@pytest.mark.parametrize("command", [*COMMANDS, "hook", "extract", "verify", "render sanoid"])
def test_help_has_names_and_choices_but_no_types(snaporch, command):
    text = snaporch(*command.split(), "--help").out
    assert re.search(r"<[a-z[|]|\{", text) is None
    if command == "recover":
        assert "--take overlay|base" in text


def test_help_has_brackets_as_they_are(snaporch, monkeypatch):
    """typer 0.15 escapes them, because rich would read them as markup."""
    monkeypatch.setattr(
        "typer.core.TyperArgument.get_help_record", lambda *_: ("DOMAIN", r"By name.  \[required]")
    )
    assert "By name.  [required]\n" in snaporch("undo", "--help").out


def test_help_lists_the_exit_codes(snaporch):
    text = " ".join(snaporch("--help").out.split())
    for code in ("2 wrong usage", "5 refused", "9 needs attention"):
        assert code in text


@pytest.mark.parametrize(("words", "handlers"), [(["-v"], 1), (["--verbose"], 1), ([], 0)])
def test_verbose_starts_the_log(host, snaporch, words, handlers):
    logger = logging.getLogger(command_log.LOGGER)
    before = list(logger.handlers)
    try:
        assert snaporch(*words, "list").code == 0
        assert len([each for each in logger.handlers if each not in before]) == handlers
    finally:
        command_log.log_to([])


def test_without_arguments_there_is_help(snaporch):
    answer = snaporch()
    assert answer.code in (0, ExitCode.USAGE)
    assert "Usage: snaporch" in answer.out + answer.err
    assert len((answer.out + answer.err).splitlines()) > 10


def test_the_version(snaporch):
    answer = snaporch("--version")
    assert (answer.code, answer.out, answer.err) == (0, f"snaporch {__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nope"], "--nope"),
        (["nope"], "nope"),
        (["snapshot"], "DOMAIN"),
        (["snapshot", "--nope", "web"], "--nope"),
        (["snapshot", "web", "--wait", "soon"], "--wait"),
        (["snapshot", "web", "--wait", "-1s"], "--wait"),
        (["snapshot", "web", "--wait", "60"], "such as 90s"),
        (["recover", "--wait", "250ms"], "whole seconds"),
        (["snapshot", "web", "--name"], "--name"),
        (["list", "a", "b"], "b"),
        (["restore"], "DOMAIN@SNAPSHOT"),
        (["recover", "a", "b"], "b"),
        (["restore", "web@s1", "--cold=yes"], "--cold"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(snaporch, words, message):
    answer = snaporch(*words)
    assert answer.code == ExitCode.USAGE
    assert answer.out == ""
    (line,) = answer.err.splitlines()
    assert line.startswith("snaporch: ")
    assert message in line
    assert "snaporch" in line.rpartition("see `")[2]


@pytest.mark.parametrize(
    ("words", "end"),
    [
        (["--nope"], "; see `snaporch --help`"),
        (["resto"], "? See `snaporch --help`"),
        (["restore"], "; see `snaporch restore --help`"),
        (["clone", "web@s1"], "; see `snaporch clone --help`"),
        (["render", "sanoid", "--nope"], "; see `snaporch render sanoid --help`"),
    ],
)
def test_wrong_usage_names_the_help_of_its_command(snaporch, words, end):
    line = snaporch(*words).err.rstrip()
    assert line.endswith(end)
    assert line.removesuffix(end)[-1] not in ".?;"


def test_the_usage_of_clone_shows_both_forms(snaporch):
    assert " DOMAIN@SNAPSHOT NEW | --delete CLONE\n" in snaporch("clone", "--help").out


def test_each_summary_is_whole(snaporch):
    for words in ([], ["render"]):
        assert "..." not in snaporch(*words, "--help").out.partition("Commands:")[2]


@pytest.mark.parametrize("words", [["restore", "web"], ["snapshot", "web", "--name", "a@b"]])
def test_wrong_usage_that_the_parser_does_not_find(host, snaporch, words):
    answer = snaporch(*words)
    assert answer.code == ExitCode.USAGE
    assert len(answer.err.splitlines()) == 1


def imports(*words):
    """Return the modules that are imported when a command ends."""
    code = (
        "import sys\n"
        "from snaporch.cli.main import run\n"
        "try:\n    run(sys.argv[1:])\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "print(*sorted(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    return set(done.stderr.split())


HEAVY = {"libvirt", "pydantic", "rich.table", "zstandard", "tenacity", "defusedxml", "libzfs_core"}


@pytest.mark.parametrize("words", [["--version"], ["--help"]])
def test_commands_without_work_import_little(words):
    assert imports(*words) & HEAVY == set()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_is_opened_in_the_place_of_a_closed_stream(closed, tmp_path):
    """The stream's output would go into the file."""
    code = (
        "import os, snaporch.__main__ as main; main._open_missing_streams(); "
        "print(flush=True); main.sys.stderr.write('x'); main.sys.stdin.read(0); "
        f"os._exit(open({str(tmp_path / 'journal')!r}, 'w').fileno())"
    )
    script = f'"$0" -c "$1" {closed}'
    done = subprocess.run(
        ["sh", "-c", script, sys.executable, code], capture_output=True, check=False
    )
    assert done.returncode > 2, done.stderr


class Full(io.StringIO):
    """A standard output on a full disk."""

    def write(self, text):
        if text:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("words", "code"), [(["snapshot", "web"], 0), (["list"], ExitCode.FAILED)])
def test_results_that_cannot_be_written(host, snaporch, monkeypatch, words, code):
    """Work that was done is a success; a command that only prints has failed."""
    host.add_guest()
    assert snaporch("snapshot", "web", "--quiet").code == 0
    monkeypatch.setattr(Results, "lost", False)
    monkeypatch.setattr(sys, "stdout", Full())
    answer = snaporch(*words)
    assert answer.code == code
    assert "a result could not be written (No space left on device)" in answer.err
