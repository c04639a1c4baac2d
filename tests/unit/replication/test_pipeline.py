import os
import signal
import subprocess
import sys
import time

import pytest

from snaporch.replication.pipeline import Pipeline


@pytest.fixture
def output(tmp_path):
    with (tmp_path / "output").open("w+b") as stream:
        yield stream


def text(output):
    output.seek(0)
    return output.read().decode()


def test_each_command_reads_what_the_one_before_it_writes(output):
    words = "$(touch /nowhere); 'two words'"
    pipeline = Pipeline([["printf", "%s", words], ["cat"], ["tr", "a-z", "A-Z"]], output)
    assert pipeline.wait(60) == pipeline.poll() == 0
    assert text(output) == words.upper()


@pytest.mark.parametrize(
    ("commands", "status"),
    [
        ((["true"], ["true"]), 0),
        ((["false"], ["true"]), 1),
        ((["true"], ["false"]), 1),
        ((["sh", "-c", "exit 2"], ["sh", "-c", "exit 3"]), 3),
    ],
)
def test_a_command_that_fails_fails_all(output, commands, status):
    assert Pipeline(commands, output).wait(60) == status


def test_a_command_whose_reader_has_exited_ends_too(output):
    pipeline = Pipeline([["yes"], ["cat"], ["head", "-n", "1"]], output)
    assert pipeline.wait(60) == -signal.SIGPIPE
    assert text(output) == "y\n"


def test_the_first_one_reads_nothing_and_errors_are_kept(output):
    show = "import os, sys; print(sys.stdin.read(), os.environ['LC_ALL'], file=sys.stderr)"
    assert Pipeline([[sys.executable, "-c", show], ["true"]], output).wait(60) == 0
    assert text(output) == " C\n"


def test_all_are_in_one_group_which_runs_until_the_last_has_ended(output):
    pipeline = Pipeline([["true"], ["sleep", "1000"]], output)
    with pytest.raises(subprocess.TimeoutExpired):
        pipeline.wait(0.2)
    assert pipeline.poll() is None
    assert pipeline.pid != os.getpgrp()
    os.killpg(pipeline.pid, signal.SIGTERM)
    assert pipeline.wait(60) == -signal.SIGTERM


def test_a_command_is_found_with_a_path_like_that_of_cron(output, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert Pipeline([["sh", "-c", "echo $PATH"]], output).wait(60) == 0
    assert text(output).strip().endswith(":/usr/sbin:/sbin")


def test_waiting_ends_with_the_last_command(output):
    begun = time.monotonic()
    Pipeline([["sleep", "0.1"], ["sleep", "0.3"]], output).wait(60)
    assert 0.3 <= time.monotonic() - begun < 30


def test_a_group_that_has_just_ended_needs_no_signal(tmp_path, monkeypatch):
    with (tmp_path / "output").open("wb") as output:
        pipeline = Pipeline([["true"]], output)
    pipeline.wait(60)
    monkeypatch.setattr(pipeline, "poll", lambda: None)
    pipeline.end(0)


@pytest.fixture
def typed():
    """Something is on standard input."""
    saved, (reading, writing) = os.dup(0), os.pipe()
    os.dup2(reading, 0)
    os.write(writing, b"yes\n")
    yield
    os.dup2(saved, 0)
    for descriptor in (saved, reading, writing):
        os.close(descriptor)


def test_the_first_command_reads_nothing_that_is_typed(typed, output):
    assert Pipeline([["readlink", "/proc/self/fd/0"]], output).wait(60) == 0
    assert text(output) == "/dev/null\n"
