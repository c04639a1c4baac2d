"""The daemon as a command; what it does is tested with :class:`snaporch.schedule.daemon.Daemon`."""

import itertools
import os
import signal
import socket
import threading
from functools import partial

import pytest

from snaporch.context import Interrupt
from snaporch.errors import ExitCode
from snaporch.locks import SCHEDULE, domain_lock

PATIENCE = 60


@pytest.fixture
def hear(tmp_path, monkeypatch):
    """Waits for a message to systemd that has this word in it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.settimeout(PATIENCE)
        bound.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))

        def wait(word):
            while word not in (text := bound.recv(4096).decode()):
                pass
            return text

        yield wait


@pytest.fixture
def retried(command_host, host):
    """Is set when a lock was not free, and the daemon tries it again."""
    event, tries = threading.Event(), itertools.count()

    class Counting(Interrupt):
        def check(self, thing):
            if thing == SCHEDULE and next(tries) == 1:
                event.set()
            super().check(thing)

    command_host.make_context = partial(command_host.make_context, interrupt=Counting())
    return event


def test_a_daemon_waits_until_a_run_due_has_ended(host, snaporch, hear, retried):
    """systemd would only start it again and again."""
    heard = []
    held = threading.Event()

    def run_due():
        runtime = host.paths.runtime
        with domain_lock(runtime, SCHEDULE, SCHEDULE, "run-due", wait=0, interrupt=Interrupt()):
            held.set()
            heard.append(hear("STATUS="))
            assert retried.wait(PATIENCE)
        heard.append(hear("READY=1"))
        os.kill(os.getpid(), signal.SIGTERM)

    other = threading.Thread(target=run_due, daemon=True)
    other.start()
    assert held.wait(PATIENCE)
    answer = snaporch("daemon")
    assert answer.code == 0
    other.join(PATIENCE)
    waits = f"waiting until run-due (pid {os.getpid()}) has ended"
    assert heard == [f"STATUS={waits}", "READY=1"]
    assert f"snaporch  note: {waits}" in answer.err


def test_a_reload_reads_the_configuration_first(host, snaporch):
    assert snaporch("daemon", "--check-config").code == 0
    with host.config_file.open("a") as stream:
        stream.write("[policy.broken\n")
    answer = snaporch("daemon", "--check-config")
    assert answer.code == ExitCode.CONFIG
    assert str(host.config_file) in answer.err
    assert len(answer.err.splitlines()) == 1
