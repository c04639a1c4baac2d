"""The log line of a command, its fields, and where it goes."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context

import pytest
from fakes.log import Records, recorded_commands

from snaporch import command_log
from snaporch.command_log import LoggedCommand, fields, handlers_for, set_fields, shown
from snaporch.systemd_log import JournalHandler


@pytest.fixture
def log():
    with recorded_commands() as records:
        yield records


def found_fields(record):
    names = ("DOMAIN", "SNAPSHOT", "RUN", "STEP")
    return {name: getattr(record, name) for name in names if hasattr(record, name)}


def test_a_command_has_a_line_with_its_result_and_duration(log):
    with LoggedCommand("zfs", "snapshot", "tank/web 1@a"):
        pass
    with LoggedCommand("zfs", "destroy", "tank@a") as command:
        command.exited(1)
    with LoggedCommand("ssh", "nas") as command:
        command.exited(-9)
    first, second, third = log.lines
    assert first.startswith("zfs snapshot 'tank/web 1@a': ok, 0.0")
    assert first.endswith(" s")
    assert second.startswith("zfs destroy tank@a: exit 1, ")
    assert third.startswith("ssh nas: signal 9, ")


def test_a_command_that_raises_is_logged_as_failed(log):
    with pytest.raises(OSError, match="no such"), LoggedCommand("libvirt", "suspend", domain="web"):
        raise OSError("no such\ndomain")
    (line,) = log.lines
    assert line.startswith("web  libvirt suspend: failed (no such\\x0adomain), ")


def test_the_lines_have_the_fields_of_where_they_are(log):
    with fields(DOMAIN="web", RUN="r1"):
        set_fields(SNAPSHOT="s1", STEP="freeze")
        with LoggedCommand("zfs", domain="other"):
            pass
        set_fields(STEP="")
        with LoggedCommand("zfs"):
            pass
    with LoggedCommand("zfs"):
        pass
    whole = {"DOMAIN": "web", "RUN": "r1", "SNAPSHOT": "s1"}
    assert [found_fields(each) for each in log.records] == [{**whole, "STEP": "freeze"}, whole, {}]
    assert log.lines[0].startswith("web  zfs: ")


def test_a_thread_has_its_own_fields_or_those_handed_over(log):
    def work():
        with LoggedCommand("zfs"):
            pass

    with fields(DOMAIN="web"):
        for arguments in ([work], [copy_context().run, work]):
            thread = threading.Thread(target=arguments[0], args=arguments[1:])
            thread.start()
            thread.join()
    assert [found_fields(each) for each in log.records] == [{}, {"DOMAIN": "web"}]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["zfs", "create", "-o", "keylocation=prompt", "a"],
            "zfs create -o 'keylocation=***' a",
        ),
        (["x", "--password=hunter2"], "x '--password=***'"),
        (["x", "--api-key", "hunter2", "y"], "x --api-key '***' y"),
        (["sh", "-c", "PASSWORD=hunter2 run"], "sh -c 'PASSWORD=*** run'"),
        (["curl", "https://me:hunter2@host/x"], "curl 'https://***@host/x'"),
        (["zfs", "get", "receive_resume_token", "a"], "zfs get receive_resume_token a"),
        (["rsync", "root@nas:/b"], "rsync root@nas:/b"),
    ],
)
def test_secrets_are_not_logged(words, line):
    assert shown(words) == line


def test_a_secret_in_an_error_is_not_logged(log):
    with pytest.raises(ValueError, match="hunter2"), LoggedCommand("x"):
        raise ValueError("token=hunter2 is wrong")
    assert "hunter2" not in log.lines[0]


@pytest.mark.parametrize("words", [("zfs", "get"), ("zfs", "list"), ("zpool", "get")])
def test_the_lists_of_properties_in_questions_are_short(words):
    assert shown([*words, "p" * 600]) == f"{' '.join(words)} '{'p' * 80}…'"
    assert len(shown(["zfs", "destroy", "p" * 600])) > 500


def test_arguments_are_bounded_and_have_no_control_characters():
    line = shown(["zfs", "a" * 3000, "\x1b[31m\n\udcff", *["b" * 90] * 100])
    assert len(line) < command_log.MAX_ARGUMENTS + 100
    assert line.isprintable()
    assert f"{'a' * command_log.MAX_ARGUMENT}…" in line
    assert "'\\x1b[31m\\x0a\\xdcff'" in line
    assert line.endswith(" more)")


# -- where the lines go ---------------------------------------------------------------------------


@pytest.fixture
def unit_stderr():
    """The ``JOURNAL_STREAM`` that names standard error."""
    status = os.fstat(2)
    return f"{status.st_dev}:{status.st_ino}"


@pytest.fixture
def kinds():
    """The classes of the handlers that a process has."""

    def kinds(environment, *more, **options):
        found = handlers_for(environment, *more, **options)
        for each in found:
            each.close()
        return [type(each) for each in found]

    return kinds


def test_without_systemd_and_verbose_nothing_is_logged(kinds):
    assert kinds({}) == []


def test_below_a_unit_the_journal_has_the_lines(kinds, unit_stderr):
    assert kinds({"JOURNAL_STREAM": "8:1"}) == [JournalHandler]
    assert kinds({"JOURNAL_STREAM": unit_stderr}) == [JournalHandler]


def test_verbose_is_beside_the_journal_but_not_twice_in_it(kinds, unit_stderr):
    assert kinds({}, Records()) == [Records]
    assert kinds({"JOURNAL_STREAM": "8:1"}, Records()) == [JournalHandler, Records]
    assert kinds({"JOURNAL_STREAM": unit_stderr}, Records()) == [JournalHandler]


def test_a_closed_standard_error_leaves_the_journal(kinds):
    assert kinds({"JOURNAL_STREAM": "8:1"}, Records(), stderr=1 << 20) == [JournalHandler]


def test_a_line_that_cannot_be_logged_does_not_fail_its_command(log):
    def broken(_record):
        log.tried = True
        raise RuntimeError("can't start new thread")

    log.emit = broken
    with LoggedCommand("zfs", "list"):
        pass
    assert log.tried


_PROGRAM = """
import logging, sys, threading
from snaporch import command_log
{handler}
command_log.start({start})
with command_log.fields(DOMAIN="web"), command_log.LoggedCommand("zfs", "list"):
    pass
print("end")
"""


def run(handler, start):
    program = _PROGRAM.format(handler=handler, start=start)
    words = [sys.executable, "-c", program]
    environment = {k: v for k, v in os.environ.items() if k != "JOURNAL_STREAM"}
    return subprocess.run(
        words, capture_output=True, text=True, check=True, timeout=60, env=environment
    )


def test_all_lines_are_written_when_the_process_ends():
    done = run("", "logging.StreamHandler()")
    assert done.stderr.startswith("web  zfs list: ok, 0.0")


def test_a_handler_that_does_not_return_holds_no_command_up():
    """Only the end of the process waits for it."""
    handler = (
        "class Slow(logging.Handler):\n"
        "    def emit(self, record):\n"
        "        printed.wait()\n"
        "        sys.stderr.write(self.format(record))\n"
        "printed = threading.Event()\n"
        "write = sys.stdout.write\n"
        "print = lambda text: (write(text), printed.set())\n"
    )
    done = run(handler, "Slow()")
    assert done.stdout == "end"
    assert "zfs list" in done.stderr


def test_a_handler_that_fails_is_not_reported():
    handler = (
        "class Bad(logging.Handler):\n"
        "    def handle(self, record):\n"
        "        try:\n            raise OSError('gone')\n"
        "        except OSError:\n            self.handleError(record)\n"
    )
    assert run(handler, "Bad()").stderr == ""


def test_fields_end_where_they_began_although_a_lock_ends_in_another_thread(log):
    """As a group's locks do: each is released where its member has run."""
    with command_log.fields(), ExitStack() as locks:
        locks.enter_context(command_log.fields(DOMAIN="web"))
        with ThreadPoolExecutor(1) as threads:
            threads.submit(locks.close).result()
    assert command_log.current_fields() == {}
